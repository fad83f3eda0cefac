"""The viewer of runs: a page on loopback, or one file that can be sent."""

from turnwright_view.web.one_file import write_page, write_report
from turnwright_view.web.server import ViewerServer

__all__ = ["ViewerServer", "write_page", "write_report"]
