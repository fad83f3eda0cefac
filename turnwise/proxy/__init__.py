"""Recording proxy: programs that call a chat API are played as episodes, and what the model sampled for them is recorded."""

from typing import TYPE_CHECKING

from turnwise._lazy import lazy_names

if TYPE_CHECKING:
    from turnwise.proxy.programs import ProgramResult as ProgramResult
    from turnwise.proxy.programs import program as program
    from turnwise.proxy.server import ProxyServer as ProxyServer
    from turnwise.proxy.session import ProxySession as ProxySession
    from turnwise.proxy.session import ProxySettings as ProxySettings

# `program` must be importable without the server's packages, since it is a name of `turnwise`.
__all__, __getattr__ = lazy_names(
    __name__, {"programs": "ProgramResult program", "server": "ProxyServer", "session": "ProxySession ProxySettings"}
)
