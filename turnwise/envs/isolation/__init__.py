"""Processes of their own, for worlds, rewards and code of a model."""
