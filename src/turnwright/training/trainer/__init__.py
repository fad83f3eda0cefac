"""Training steps: trajectory groups in, updated weights out."""
