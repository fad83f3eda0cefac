"""Worlds of other libraries."""
