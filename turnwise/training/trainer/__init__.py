"""One training step: groups in, weights out."""
