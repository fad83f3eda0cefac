"""Environments and their registry."""

from .registration import deregister, register

__all__ = ["deregister", "register"]
