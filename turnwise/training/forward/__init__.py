"""From trajectories to what a model says of their ids: batches, trees, the law of sampling, the forward pass."""
