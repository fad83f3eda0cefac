"""Training: what a trajectory is worth, the loss, the optimizer, checkpoints and models. The room of tensors."""
