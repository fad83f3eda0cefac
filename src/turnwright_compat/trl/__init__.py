"""TRL: its environments, rewards and training scripts, rollouts for its trainer,
and its launch scripts."""
