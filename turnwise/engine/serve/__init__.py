"""An engine of this process behind HTTP, in the wire formats of vLLM and SGLang."""

from turnwise.engine.serve.http import Refused, Server
from turnwise.engine.serve.wire import Formats, Served

__all__ = ["Formats", "Refused", "Served", "Server"]
