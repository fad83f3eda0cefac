"""Isolated processes for environments, rewards and model-written code."""
