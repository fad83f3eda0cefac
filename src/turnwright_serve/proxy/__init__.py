"""Recording proxy: programs that call a chat API are played as episodes, and what the model sampled
for them is recorded."""

from typing import TYPE_CHECKING

from turnwright._lazy import lazy_names

if TYPE_CHECKING:
    from turnwright_serve.proxy.programs import ProgramResult as ProgramResult
    from turnwright_serve.proxy.programs import program as program
    from turnwright_serve.proxy.server import ProxyServer as ProxyServer
    from turnwright_serve.proxy.session import ProxySession as ProxySession
    from turnwright_serve.proxy.session import ProxySettings as ProxySettings

if not TYPE_CHECKING:
    __all__, __getattr__ = lazy_names(__name__, __file__)
