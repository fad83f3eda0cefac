"""Rewards by name."""

from .orm import ORM, AsyncORM, orms
from .prm import PRM, prms
from .rm_plugin import rm_plugins

__all__ = ["ORM", "PRM", "AsyncORM", "orms", "prms", "rm_plugins"]
