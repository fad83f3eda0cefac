"""The viewer of a run: a page on loopback, or one file that can be sent."""

from turnwright_view.web.pages import self_contained
from turnwright_view.web.server import ViewerServer

__all__ = ["ViewerServer", "self_contained"]
