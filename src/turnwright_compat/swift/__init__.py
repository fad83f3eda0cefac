"""ms-swift: its schedulers, environments and rewards, rollouts for its trainer,
and its launch scripts."""
