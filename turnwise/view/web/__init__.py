"""The viewer of a run: a page on loopback, or one file that can be sent."""

from turnwise.view.web.page import self_contained
from turnwise.view.web.server import ViewerServer

__all__ = ["ViewerServer", "self_contained"]
