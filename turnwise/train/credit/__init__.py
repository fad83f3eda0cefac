"""What trajectories are worth, and which sampled ids share it. No tensors here."""
