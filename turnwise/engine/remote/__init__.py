"""Engines behind HTTP: vLLM, SGLang, llama.cpp and chat endpoints, one server each, and a fleet of them."""

from turnwise.engine.remote.base import RemoteEngine
from turnwise.engine.remote.chat import ChatEngine
from turnwise.engine.remote.fleet import Fleet
from turnwise.engine.remote.llamacpp import LlamaCppEngine
from turnwise.engine.remote.probe import ServerCapabilities, connect, probe_server
from turnwise.engine.remote.sglang import SglangEngine
from turnwise.engine.remote.vllm import VllmEngine

__all__ = [
    "ChatEngine",
    "Fleet",
    "LlamaCppEngine",
    "RemoteEngine",
    "ServerCapabilities",
    "SglangEngine",
    "VllmEngine",
    "connect",
    "probe_server",
]
