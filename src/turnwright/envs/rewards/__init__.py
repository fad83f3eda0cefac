"""Reward functions, judges, and worker processes for rewards."""
