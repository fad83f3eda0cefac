"""LoRA adapters on a server: load, list, unload, and detect a restart that lost them."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar
from uuid import uuid4

from turnwright.engines.remote.http import CONTROL_S
from turnwright.engines.remote.remote_engine import DRAIN_S, UPDATE_S, RemoteEngine
from turnwright.engines.remote.response import field_of
from turnwright.engines.remote.weight_sync import suppress_errors
from turnwright.errors import EngineError, StaleWeights, SyncError

NAME = "turnwright-{}-{}-{}"
"""Adapter name: owner, policy version, and number of the load."""
RANKS = (8, 16, 32, 64, 128, 256, 320, 512)
"""Values that vLLM accepts for `--max-lora-rank`."""
NO_ADAPTER: AbstractContextManager[None] = nullcontext()


@dataclass(frozen=True, slots=True)
class LoraApi:
    """LoRA routes of a kind of server, and its error for an unknown adapter."""

    load: str
    unload: str
    needs: str
    """Required server options."""
    status: int
    """HTTP status for an unknown adapter."""
    words: str
    """Text in that response."""
    counts_calls: bool
    """Whether it counts an adapter's calls and unloads only at zero; until then it loads and
    unloads no other. SGLang 0.5.19 loses count of calls that end before they run, so after one its
    adapter stays loaded."""


class LoraServerEngine(RemoteEngine):
    """Client of a server that takes LoRA adapters while it runs."""

    lora_api: ClassVar[LoraApi]

    def __init__(self, url: str, **options: Any) -> None:
        super().__init__(url, **options)
        self.adapter: tuple[str, int] | None = None
        """Name and version of the active LoRA adapter; None for the base model."""
        self.owner = uuid4().hex[:8]
        """Unique part of the names of adapters loaded by `use_adapter`."""
        self._loads = 0
        self._replaced: dict[str, set[str]] = {}
        """Adapters to unload, and the calls in flight when each was replaced."""
        self._miscounted: set[str] = set()
        """Adapters of which the server may have lost count."""

    async def load_adapter(self, name: str, directory: str | Path, version: int) -> None:
        """Load or replace a LoRA adapter and use it from now on; no call may use that name
        meanwhile.

        The server needs `--enable-lora`. Raises `SyncError` when it rejects the adapter or does not
        list it afterwards.
        """
        await self.open()
        # Not vLLM's load_inplace: 0.32.0 then reads the files again in every step of the engine.
        await self._unload_adapter(name)
        await self._load_adapter(name, directory, version)

    async def _load_adapter(self, name: str, directory: str | Path, version: int) -> None:
        who = self.display_name
        body = {"lora_name": name, "lora_path": str(directory)}
        try:
            await self.http.post_status(self.lora_api.load, body, UPDATE_S)
            listed = field_of(await self.http.get("/v1/models", CONTROL_S), "data", self.breach)
        except EngineError as error:
            raise SyncError(
                f"{who} did not load the adapter {name!r}: {error}; adapters need a server started "
                f"with {self.lora_api.needs}"
            ) from error
        if name not in [model.get("id") for model in listed]:
            raise SyncError(
                f"{who} accepted the adapter {name!r} but does not list it: it would answer with "
                "the base model"
            )
        self.adapter = (name, version)
        self.version = version

    async def use_adapter(self, directory: Path, version: int) -> None:
        """Use a policy's adapter, under a name of this load alone; raises as `load_adapter`.

        Servers load between two steps, so calls of other adapters go on, and keep their caches:
        names separate those. Calls of this client's adapter before end as aborted. A restarted
        server rejects the name instead of answering with the base model.
        """
        await self.open()
        previous = self.adapter
        self._loads += 1
        name = NAME.format(self.owner, version, self._loads)

        # A load without a response may have succeeded; then the next update unloads it.
        self._replaced[name] = set()
        await self._load_adapter(name, directory, version)
        del self._replaced[name]

        if previous is not None:
            previous_name, _ = previous
            self._replaced[previous_name] = set(self._calls)
        await self.end_calls(DRAIN_S)
        await self._unload_replaced()

    async def close(self) -> None:
        """Close the connections and unload the adapters of `use_adapter`."""
        if self.adapter is not None:
            name, _ = self.adapter
            if self.owner in name:
                self._replaced[name] = set(self._calls)
        await self._unload_replaced()
        await super().close()

    async def _unload_replaced(self) -> None:
        """Unload adapters whose calls ended; the others' turn comes with a later update."""
        unused = [name for name, calls in self._replaced.items() if not calls & self._calls]
        for name in unused:
            del self._replaced[name]
            if name in self._miscounted:
                self._miscounted.discard(name)
                self.counts["adapters_left"] += 1
            else:
                await self._unload_adapter(name)

    async def _unload_adapter(self, name: str) -> None:
        body = {"lora_name": name}
        await suppress_errors(self.http.post_status(self.lora_api.unload, body, CONTROL_S))

    def _check_adapter_loaded(self) -> AbstractContextManager[None]:
        """Raise `StaleWeights` when a request shows that the server no longer knows the adapter."""
        return NO_ADAPTER if self.adapter is None else self._check_adapter(self.adapter)

    @contextmanager
    def _check_adapter(self, adapter: tuple[str, int]) -> Iterator[None]:
        name, _ = adapter
        try:
            yield
        except EngineError as error:
            if error.status != self.lora_api.status or self.lora_api.words not in str(error):
                self._note_unanswered(name)
                raise
            raise StaleWeights(
                f"{self.display_name} no longer has the adapter {name!r} (it may have "
                f"restarted): {error}"
            ) from error
        except BaseException:
            self._note_unanswered(name)
            raise

    def _note_unanswered(self, name: str) -> None:
        """Note that the server may have lost count of an adapter's calls."""
        if self.lora_api.counts_calls:
            self._miscounted.add(name)
