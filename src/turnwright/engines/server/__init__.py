"""HTTP server for a local engine, in the wire formats of vLLM and SGLang."""

from turnwright.engines.server.http import Call, Endpoint, JsonHttpServer
from turnwright.engines.server.intake import HttpError, IntakeLimits, RawBody
from turnwright.engines.server.routes import EngineService, Formats

__all__ = ["Call", "Endpoint", "EngineService", "Formats", "HttpError", "IntakeLimits", "JsonHttpServer", "RawBody"]
