"""SkyRL: its environments and generators, rollouts for its trainer, and its launch scripts."""
