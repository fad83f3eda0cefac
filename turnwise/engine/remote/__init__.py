"""Engines behind HTTP: vLLM, SGLang, llama.cpp and chat endpoints, one server each, and a fleet of them."""

from turnwise.engine.remote.base import RemoteEngine
from turnwise.engine.remote.chat import ChatEngine
from turnwise.engine.remote.fleet import Fleet
from turnwise.engine.remote.llamacpp import LlamaCppEngine
from turnwise.engine.remote.probe import Capabilities, connect, probe
from turnwise.engine.remote.sglang import SglangEngine
from turnwise.engine.remote.vllm import VllmEngine

__all__ = [
    "Capabilities",
    "ChatEngine",
    "Fleet",
    "LlamaCppEngine",
    "RemoteEngine",
    "SglangEngine",
    "VllmEngine",
    "connect",
    "probe",
]
