"""HTTP in front of an engine, in the formats of vLLM and SGLang, and the recording proxy of
programs that call a chat API."""

from typing import TYPE_CHECKING

from turnwright._lazy import lazy_names

if TYPE_CHECKING:
    # Importable without the server's packages, since an environment may be
    # named without being played.
    from turnwright_serve.proxy.programs import ProgramResult as ProgramResult
    from turnwright_serve.proxy.programs import program as program
    from turnwright_serve.serve import make_service as make_service

if not TYPE_CHECKING:
    __all__, __getattr__ = lazy_names(__name__, __file__)
