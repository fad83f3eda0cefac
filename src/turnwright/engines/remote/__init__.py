"""HTTP engines: clients for vLLM, SGLang, llama.cpp and chat endpoints, and a fleet of servers."""

from turnwright.engines.remote.capabilities import ServerCapabilities, connect, probe_server
from turnwright.engines.remote.chat import ChatEngine
from turnwright.engines.remote.fleet import Fleet
from turnwright.engines.remote.fleet_settings import FleetSettings, ListedServers, WeightDelivery
from turnwright.engines.remote.llamacpp import LlamaCppEngine
from turnwright.engines.remote.remote_engine import RemoteEngine
from turnwright.engines.remote.sglang import SglangEngine
from turnwright.engines.remote.vllm import VllmEngine

__all__ = [
    "ChatEngine",
    "Fleet",
    "FleetSettings",
    "ListedServers",
    "LlamaCppEngine",
    "RemoteEngine",
    "ServerCapabilities",
    "SglangEngine",
    "VllmEngine",
    "WeightDelivery",
    "connect",
    "probe_server",
]
