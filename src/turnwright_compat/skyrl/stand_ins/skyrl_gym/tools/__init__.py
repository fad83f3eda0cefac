"""Groups of tools."""

from .core import ToolGroup, tool
from .python import PythonCodeExecutorToolGroup
from .search import SearchToolGroup

__all__ = ["PythonCodeExecutorToolGroup", "SearchToolGroup", "ToolGroup", "tool"]
