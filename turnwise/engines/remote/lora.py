"""LoRA adapters of a server: loaded, listed, taken out again, and missed where the server was started anew."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar
from uuid import uuid4

from turnwise.engines.remote.base import CONTROL_S, UPDATE_S, RemoteEngine, ResponseErrors, field_of
from turnwise.engines.remote.weight_sync import suppress_errors
from turnwise.errors import EngineError, StaleWeights, SyncError

NAME = "turnwise-{}-{}"
"""Of an adapter: whose it is, and its policy's version."""
RANKS = (8, 16, 32, 64, 128, 256, 320, 512)
"""What vLLM takes for `--max-lora-rank`."""


@dataclass(frozen=True, slots=True)
class LoraApi:
    """How a kind of server is told of adapters, and says that it does not know one."""

    load: str
    unload: str
    in_place: bool
    """Whether one is loaded over another of its name."""
    needs: str
    """What a server has to be started with."""
    status: int
    """Of the answer to a request for an adapter that it does not know."""
    words: str
    """Which stand in that answer."""


class LoraServerEngine(RemoteEngine):
    """A server that takes LoRA adapters while it runs."""

    dialect: ClassVar[LoraApi]

    def __init__(self, url: str, **options: Any) -> None:
        """
        Args:
            options: as of `RemoteEngine`.

        Raises:
            ConfigError: for a setting that cannot be.
        """
        super().__init__(url, **options)
        self.adapter: tuple[str, int] | None = None
        """The LoRA adapter that answers, and its version; None for the model itself."""
        self.owner = uuid4().hex[:8]
        """In the names of adapters that it is given by `use_adapter`."""

    async def _while_paused(self, work: Callable[[], Awaitable[None]]) -> None:
        """Do something while nothing is sampled; calls in flight end first where the server can end them."""
        raise NotImplementedError

    async def load_adapter(self, name: str, directory: str | Path, version: int) -> None:
        """Load or replace a LoRA adapter, which answers from now on; the server runs with `--enable-lora`.

        Raises:
            SyncError: when the server does not take it, or does not list it afterwards.
        """
        await self.open()
        await self._load_adapter(name, directory)
        self.adapter, self.version = (name, version), version

    async def use_adapter(self, directory: Path, version: int) -> None:
        """Have the server answer by a policy's adapter, under a name that no other policy's ever has, of this run or another.

        So whatever it knows or has cached by that name is this one, and of a server that was started anew nobody takes the
        model's own answers for the policy's.

        Raises:
            SyncError: as `load_adapter`.
        """
        await self.open()
        await self._while_paused(lambda: self._adopt(directory, version))

    async def close(self) -> None:
        """As `RemoteEngine.close`; an adapter that came by `use_adapter` is taken out."""
        if self.adapter is not None and self.owner in self.adapter[0]:
            await self._unload_adapter(self.adapter[0])
        await super().close()

    async def _adopt(self, directory: Path, version: int) -> None:
        before, name = self.adapter, NAME.format(self.owner, version)
        await self._load_adapter(name, directory)
        self.adapter, self.version = (name, version), version
        if before is not None and before[0] != name:
            await self._unload_adapter(before[0])

    async def _load_adapter(self, name: str, directory: str | Path) -> None:
        if not self.dialect.in_place:  # it may have it of a call whose answer was lost
            await self._unload_adapter(name)
        body: dict[str, Any] = {"lora_name": name, "lora_path": str(directory)}
        body |= {"load_inplace": True} if self.dialect.in_place else {}
        try:
            await self.http.post_status(self.dialect.load, body, UPDATE_S)
            listed = field_of(await self.http.get("/v1/models", CONTROL_S), "data", ResponseErrors(self.display_name))
        except EngineError as error:
            raise SyncError(
                f"{self.display_name} did not take the adapter {name!r}: {error}; adapters are for servers with "
                f"{self.dialect.needs}"
            ) from error
        if name not in [row.get("id") for row in listed]:
            raise SyncError(
                f"{self.display_name} said yes to the adapter {name!r} and does not list it: it would answer with the "
                f"model alone"
            )

    async def _unload_adapter(self, name: str) -> None:
        """Have the server forget an adapter; what goes wrong with that holds nobody up."""
        await suppress_errors(self.http.post_status(self.dialect.unload, {"lora_name": name}, CONTROL_S))

    @contextmanager
    def _check_adapter_loaded(self) -> Iterator[None]:
        """Ask for an adapter's answer.

        Raises:
            StaleWeights: where the server does not know the adapter any more.
        """
        try:
            yield
        except EngineError as error:
            if self.adapter is None or error.status != self.dialect.status or self.dialect.words not in str(error):
                raise
            name = self.adapter[0]
            raise StaleWeights(
                f"{self.display_name} has no adapter {name!r} any more (was it started again?): {error}"
            ) from error
