"""A package of Miles."""
