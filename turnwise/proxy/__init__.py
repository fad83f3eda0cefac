"""Recording proxy: programs that call a chat API are played as episodes, and what the model sampled for them is recorded."""

from turnwise.proxy.programs import ProgramResult, program
from turnwise.proxy.server import ProxyServer
from turnwise.proxy.session import ProxySession, ProxySettings

__all__ = ["ProgramResult", "ProxyServer", "ProxySession", "ProxySettings", "program"]
