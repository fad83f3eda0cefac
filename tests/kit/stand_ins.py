"""User files of the tests of other frameworks' code."""

from pathlib import Path

USERS = Path(__file__).parents[1] / "compat/users"
