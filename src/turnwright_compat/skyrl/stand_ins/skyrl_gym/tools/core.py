"""Groups of tools that environments call themselves."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any


class tool:
    """Decorator of the methods of a `ToolGroup` that are tools."""

    def __init__(self, func: Callable[..., Any]) -> None:
        self.func = func
        self.name = func.__name__

    def __get__(self, instance: Any, owner: type) -> Any:
        return self if instance is None else partial(self.func, instance)


class ToolGroup:
    """Tools with a common state."""

    def __init__(self, name: str) -> None:
        self.name = name
        found = ((key, getattr(type(self), key, None)) for key in dir(self))
        self._tool_registry = {made.name: getattr(self, key) for key, made in found if isinstance(made, tool)}

    def get_name(self) -> str:
        """Return the name of the group."""
        return self.name

    def get_tool(self, name: str) -> Callable[..., Any] | None:
        """Return a tool; None for an unknown one."""
        return self._tool_registry.get(name)

    def get_tool_names(self) -> list[str]:
        """Return the names of the tools."""
        return list(self._tool_registry)

    def execute_tool(self, name: str, *args: Any, **kwargs: Any) -> Any:
        """Call a tool."""
        found = self.get_tool(name)
        if found is None:
            raise ValueError(f"Tool '{name}' not found in group '{self.name}'.")
        return found(*args, **kwargs)

    def get_tool_to_group_mapping(self) -> dict[str, str]:
        """Return the name of the group by tool."""
        return dict.fromkeys(self._tool_registry, self.name)
