"""An engine of this process behind HTTP, in the wire formats of vLLM and SGLang."""

from turnwise.engine.serve.http import Call, Endpoint, Refused, Server
from turnwise.engine.serve.wire import Formats, Served

__all__ = ["Call", "Endpoint", "Formats", "Refused", "Served", "Server"]
