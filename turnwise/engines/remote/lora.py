"""LoRA adapters on a server: load, list, unload, and detect a restart that lost them."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractAsyncContextManager, AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar
from uuid import uuid4

from turnwise.engines.remote.base import UPDATE_S, RemoteEngine
from turnwise.engines.remote.http import CONTROL_S
from turnwise.engines.remote.response import field_of
from turnwise.engines.remote.weight_sync import suppress_errors
from turnwise.errors import EngineError, StaleWeights, SyncError

NAME = "turnwise-{}-{}"
"""Adapter name: owner and policy version."""
RANKS = (8, 16, 32, 64, 128, 256, 320, 512)
"""Values that vLLM accepts for `--max-lora-rank`."""
NO_ADAPTER: AbstractContextManager[None] = nullcontext()


@dataclass(frozen=True, slots=True)
class LoraApi:
    """LoRA routes of a kind of server, and its error for an unknown adapter."""

    load: str
    unload: str
    in_place: bool
    """Whether an adapter may be loaded over another of the same name."""
    needs: str
    """Required server options."""
    status: int
    """HTTP status for an unknown adapter."""
    words: str
    """Text in that response."""


class LoraServerEngine(RemoteEngine):
    """Client of a server that takes LoRA adapters while it runs."""

    lora_api: ClassVar[LoraApi]

    def __init__(self, url: str, **options: Any) -> None:
        super().__init__(url, **options)
        self.adapter: tuple[str, int] | None = None
        """Name and version of the active LoRA adapter; None for the base model."""
        self.owner = uuid4().hex[:8]
        """Unique part of the names of adapters loaded by `use_adapter`."""

    def _paused(self) -> AbstractAsyncContextManager[None]:
        """Pause sampling for an update; calls in flight end first where the server can end them."""
        raise NotImplementedError

    async def load_adapter(self, name: str, directory: str | Path, version: int) -> None:
        """Load or replace a LoRA adapter and use it from now on; the server needs `--enable-lora`.

        Raises `SyncError` when the server rejects it or does not list it afterwards.
        """
        await self.open()
        who = self.display_name
        if not self.lora_api.in_place:  # an earlier load may have succeeded without a response
            await self._unload_adapter(name)
        body: dict[str, Any] = {"lora_name": name, "lora_path": str(directory)}
        body |= {"load_inplace": True} if self.lora_api.in_place else {}
        try:
            await self.http.post_status(self.lora_api.load, body, UPDATE_S)
            listed = field_of(await self.http.get("/v1/models", CONTROL_S), "data", self.breach)
        except EngineError as error:
            raise SyncError(
                f"{who} did not load the adapter {name!r}: {error}; adapters need a server started with {self.lora_api.needs}"
            ) from error
        if name not in [row.get("id") for row in listed]:
            raise SyncError(f"{who} accepted the adapter {name!r} but does not list it: it would answer with the base model")
        self.adapter, self.version = (name, version), version

    async def use_adapter(self, directory: Path, version: int) -> None:
        """Use a policy's adapter, under a name that is unique across policies and runs; raises as `load_adapter`.

        So the server's caches for that name belong to this adapter, and a restarted server rejects the name instead of
        answering with the base model.
        """
        await self.open()
        async with self._paused():
            before = self.adapter
            await self.load_adapter(NAME.format(self.owner, version), directory, version)
            if before is not None and before != self.adapter:
                await self._unload_adapter(before[0])

    async def close(self) -> None:
        """Close the connections and unload the adapter of `use_adapter`."""
        if self.adapter is not None and self.owner in self.adapter[0]:
            await self._unload_adapter(self.adapter[0])
        await super().close()

    async def _unload_adapter(self, name: str) -> None:
        await suppress_errors(self.http.post_status(self.lora_api.unload, {"lora_name": name}, CONTROL_S))

    def _check_adapter_loaded(self) -> AbstractContextManager[None]:
        """Raise StaleWeights when a request shows that the server no longer knows the adapter."""
        return NO_ADAPTER if self.adapter is None else self._check_adapter(self.adapter)

    @contextmanager
    def _check_adapter(self, adapter: tuple[str, int]) -> Iterator[None]:
        try:
            yield
        except EngineError as error:
            if error.status != self.lora_api.status or self.lora_api.words not in str(error):
                raise
            raise StaleWeights(
                f"{self.display_name} no longer has the adapter {adapter[0]!r} (it may have restarted): {error}"
            ) from error
