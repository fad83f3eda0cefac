"""HTTP server for a local engine, in the wire formats of vLLM and SGLang."""

from turnwise.engines.server.http import Call, Endpoint, JsonHttpServer
from turnwise.engines.server.intake import HttpError, IntakeLimits, RawBody
from turnwise.engines.server.routes import EngineService, Formats

__all__ = ["Call", "Endpoint", "EngineService", "Formats", "HttpError", "IntakeLimits", "JsonHttpServer", "RawBody"]
