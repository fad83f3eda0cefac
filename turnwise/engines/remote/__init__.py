"""HTTP engines: clients for vLLM, SGLang, llama.cpp and chat endpoints, and a fleet of servers."""

from turnwise.engines.remote.base import RemoteEngine
from turnwise.engines.remote.capabilities import ServerCapabilities, connect, probe_server
from turnwise.engines.remote.chat import ChatEngine
from turnwise.engines.remote.fleet import Fleet
from turnwise.engines.remote.llamacpp import LlamaCppEngine
from turnwise.engines.remote.sglang import SglangEngine
from turnwise.engines.remote.vllm import VllmEngine

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
