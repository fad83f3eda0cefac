"""Environments of Gymnasium, Reasoning Gym, TextArena and TextWorld, by their registered ids."""
