"""Training: credit assignment, loss, optimizer, checkpoints and models. The package with the tensors."""
