"""Requests of user code, as slime's."""

from slime.utils.http_utils import get, post

__all__ = ["get", "post"]
