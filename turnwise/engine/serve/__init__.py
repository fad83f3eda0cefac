"""An engine of this process behind HTTP, in the wire formats of vLLM and SGLang."""

from turnwise.engine.serve.http import Call, Endpoint, HttpError, JsonHttpServer
from turnwise.engine.serve.wire import EngineService, Formats

__all__ = ["Call", "Endpoint", "EngineService", "Formats", "HttpError", "JsonHttpServer"]
