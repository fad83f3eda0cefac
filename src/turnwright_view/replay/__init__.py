"""Replay of the episode loop against a recorded run."""
