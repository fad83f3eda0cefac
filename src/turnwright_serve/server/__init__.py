"""HTTP server for a local engine, in the wire formats of vLLM and SGLang."""

from turnwright_serve.server.http import Call, Endpoint, JsonHttpServer
from turnwright_serve.server.intake import HttpError, IntakeLimits, RawBody
from turnwright_serve.server.routes import EngineService, Formats

__all__ = [
    "Call",
    "Endpoint",
    "EngineService",
    "Formats",
    "HttpError",
    "IntakeLimits",
    "JsonHttpServer",
    "RawBody",
]
