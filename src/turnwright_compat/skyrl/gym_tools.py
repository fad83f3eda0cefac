"""Groups of tools that environments of skyrl-gym call themselves."""

from __future__ import annotations

import json
import subprocess
import urllib.request
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
        self._tool_registry: dict[str, Callable[..., Any]] = {}
        for key in dir(self):
            decorated = getattr(type(self), key, None)
            if isinstance(decorated, tool):
                self._tool_registry[decorated.name] = getattr(self, key)

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
        function = self.get_tool(name)
        if function is None:
            raise ValueError(f"Tool '{name}' not found in group '{self.name}'.")
        return function(*args, **kwargs)

    def get_tool_to_group_mapping(self) -> dict[str, str]:
        """Return the name of the group by tool."""
        return dict.fromkeys(self._tool_registry, self.name)


class PythonCodeExecutorToolGroup(ToolGroup):
    """Runs code in a process of its own."""

    def __init__(self, timeout: float = 10.0) -> None:
        self.timeout = timeout
        super().__init__(name="PythonCodeExecutorToolGroup")

    @tool
    def python(self, code: str) -> str:
        """Return what the code writes, or its error."""
        failed = "Error executing Python code: "
        try:
            process = subprocess.run(
                ["python", "-c", code],
                capture_output=True,
                text=True,
                timeout=self.timeout,
                check=False,
            )
        except subprocess.TimeoutExpired:
            return f"{failed}Execution timed out after {self.timeout} seconds."
        if process.stderr:
            return f"{failed}{process.stderr.strip()}"
        return process.stdout.strip()


class SearchToolGroup(ToolGroup):
    """Asks a service for passages; a failure of the service is its answer."""

    def __init__(
        self,
        search_url: str = "http://127.0.0.1:8000/retrieve",
        topk: int = 3,
        timeout: int = 30,
        log_requests: bool = True,
    ) -> None:
        self.search_url = search_url
        self.topk = topk
        self.timeout = timeout
        self.log_requests = log_requests
        super().__init__(name="SearchToolGroup")

    @tool
    def search(self, query: str | None) -> str:
        """Return the passages as JSON of one key, `result`."""
        if query is None:
            return ""

        payload = {"query": query.strip(), "topk": self.topk, "return_scores": True}
        headers = {"Content-Type": "application/json", "Accept": "application/json"}
        request = urllib.request.Request(self.search_url, json.dumps(payload).encode(), headers)
        try:
            with urllib.request.urlopen(request, timeout=self.timeout) as response:
                results = json.load(response).get("result") or []
        except (OSError, ValueError, AttributeError) as error:
            return json.dumps({"result": f"Search error: {error}"})

        text = "No search results found."
        if results:
            text = "\n---\n".join(_passages(documents) for documents in results)
        return json.dumps({"result": text})


def _passages(documents: list[Any]) -> str:
    texts = (document["document"]["contents"].strip() for document in documents)
    return "".join(f"Doc {number}: {text}\n" for number, text in enumerate(texts, 1))
