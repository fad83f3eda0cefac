"""Servers of rollouts."""
