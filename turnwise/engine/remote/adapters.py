"""LoRA adapters of a vLLM server: loaded, listed, taken out again, and missed where the server was started anew."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Protocol

from turnwise.engine.remote.answer import Breach
from turnwise.engine.remote.base import CONTROL_S, UPDATE_S, field_of
from turnwise.engine.remote.http import Http
from turnwise.engine.remote.ways import quietly
from turnwise.errors import EngineError, StaleWeights, SyncError

NAME = "turnwise-{}-{}"
"""Of an adapter: whose it is, and its policy's version."""
RANKS = (8, 16, 32, 64, 128, 256, 320, 512)
"""What vLLM takes for `--max-lora-rank`."""
NOT_FOUND = 404
"""What it answers for a model or an adapter that it does not know."""


class Adapted(Protocol):
    """The client of a server that takes adapters."""

    http: Http
    version: int
    adapter: tuple[str, int] | None
    """What answers, and its version; None for the model itself."""
    owner: str
    """In the names of adapters that it is given by `adopt`."""

    @property
    def who(self) -> str:
        """What errors call it."""


async def load(engine: Adapted, name: str, directory: str | Path) -> None:
    """Have a server load or replace an adapter.

    Raises:
        SyncError: when it does not take it, or does not list it afterwards.
    """
    body = {"lora_name": name, "lora_path": str(directory), "load_inplace": True}
    try:
        await engine.http.tell("/v1/load_lora_adapter", body, UPDATE_S)  # it answers with a sentence
        listed = field_of(await engine.http.get("/v1/models", CONTROL_S), "data", Breach(engine.who))
    except EngineError as error:
        raise SyncError(
            f"{engine.who} did not take the adapter {name!r}: {error}; adapters are for servers with --enable-lora and "
            "VLLM_ALLOW_RUNTIME_LORA_UPDATING=1 (turnwise engines start vllm --lora)"
        ) from error
    if name not in [row.get("id") for row in listed]:
        raise SyncError(
            f"{engine.who} said yes to the adapter {name!r} and does not list it: it would answer with the model alone"
        )


async def adopt(engine: Adapted, directory: Path, version: int) -> None:
    """Have a server answer by a policy's adapter, under a name that no other policy's ever has, of this run or another.

    So whatever it knows or has cached by that name is this one, and of a server that was started anew nobody takes the model's
    own answers for the policy's.

    Raises:
        SyncError: as `load`.
    """
    before, name = engine.adapter, NAME.format(engine.owner, version)
    await load(engine, name, directory)
    engine.adapter, engine.version = (name, version), version
    if before is not None and before[0] != name:
        await take_out(engine, before[0])


async def take_out(engine: Adapted, name: str) -> None:
    """Have a server forget an adapter; what goes wrong with that holds nobody up."""
    await quietly(engine.http.tell("/v1/unload_lora_adapter", {"lora_name": name}, CONTROL_S))


@contextmanager
def still_there(engine: Adapted) -> Iterator[None]:
    """Ask for an adapter's answer.

    Raises:
        StaleWeights: where the server does not know the adapter any more.
    """
    try:
        yield
    except EngineError as error:
        if engine.adapter is None or error.status != NOT_FOUND:
            raise
        name = engine.adapter[0]
        raise StaleWeights(f"{engine.who} has no adapter {name!r} any more (was it started again?): {error}") from error
