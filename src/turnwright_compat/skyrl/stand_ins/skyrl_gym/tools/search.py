"""Group with a tool that asks a retrieval service."""

from __future__ import annotations

import json
import urllib.request
from typing import Any

from .core import ToolGroup, tool


class SearchToolGroup(ToolGroup):
    """Asks a service for passages; a failure of the service is its answer."""

    def __init__(
        self,
        search_url: str = "http://127.0.0.1:8000/retrieve",
        topk: int = 3,
        timeout: int = 30,
        log_requests: bool = True,
    ) -> None:
        self.search_url, self.topk, self.timeout, self.log_requests = search_url, topk, timeout, log_requests
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
                found = json.load(response).get("result") or []
        except (OSError, ValueError, AttributeError) as error:
            return json.dumps({"result": f"Search error: {error}"})
        text = "\n---\n".join(_passages(one) for one in found) if found else "No search results found."
        return json.dumps({"result": text})


def _passages(documents: list[Any]) -> str:
    texts = (document["document"]["contents"].strip() for document in documents)
    return "".join(f"Doc {number}: {text}\n" for number, text in enumerate(texts, 1))
