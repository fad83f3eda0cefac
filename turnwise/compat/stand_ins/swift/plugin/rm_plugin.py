"""Names of release 3.6."""

from swift.rewards.rm_plugin import DefaultRMPlugin, rm_plugins

__all__ = ["DefaultRMPlugin", "rm_plugins"]
