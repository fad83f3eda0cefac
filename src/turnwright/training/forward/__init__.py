"""Batches, prefix trees, the forward pass and the sampling distribution."""
