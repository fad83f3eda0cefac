"""The viewer of a run: a page on loopback, or one file that can be sent."""

from turnwright.viewer.web.pages import self_contained
from turnwright.viewer.web.server import ViewerServer

__all__ = ["ViewerServer", "self_contained"]
