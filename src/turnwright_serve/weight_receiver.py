"""The server's end of weights that arrive over a process group or in requests.

The trainer's end is `turnwright.training.weight_transfer`.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from turnwright.errors import SyncError
from turnwright.training.weight_transfer import (
    Rows,
    broadcast,
    decode_tensors,
    join_process_group,
    release_groups,
    run_detached,
)

SECONDS = 600.0
"""Deadline for a trainer to connect, and for each bucket."""


@dataclass(frozen=True, slots=True)
class _JoinedGroup:
    store: Any
    """The `TCPStore` by which the ranks met."""
    members: Any
    """The process group."""
    device: torch.device
    """Where its backend receives."""


class WeightReceiver:
    """Collects the weights of an update and applies them completely or not at all.

    They are complete with those that `needed` names, of tied ones one. `take` loads them into the
    engine.
    """

    def __init__(
        self,
        shapes: Mapping[str, torch.Size],
        needed: frozenset[str],
        take: Callable[[Rows], Awaitable[None]],
        device: torch.device,
        seconds: float = SECONDS,
    ) -> None:
        self._shapes = shapes
        self._needed = needed
        self._take = take
        self._seconds = seconds
        self._device = device
        self._groups: dict[str, _JoinedGroup] = {}
        self._received: dict[str, torch.Tensor] = {}

    @property
    def complete(self) -> bool:
        """Whether all weights of the model have arrived."""
        return self._needed <= self._received.keys()

    async def join(
        self, address: str, port: int, rank: int, world: int, name: str, backend: str
    ) -> None:
        """Connect to a trainer, which is rank 0; raise `SyncError` when none connects, or the
        group cannot be created."""
        if name in self._groups:
            raise SyncError(f"the group {name!r} exists already")

        limit = timedelta(seconds=self._seconds)

        def connect() -> tuple[Any, Any]:
            store = dist.TCPStore(address, port, world, False, limit, wait_for_workers=False)
            return store, join_process_group(store, name, rank, world, backend, self._seconds)

        try:
            store, members = await run_detached(connect)
        except (RuntimeError, ValueError) as error:
            raise SyncError(f"no process group with {address}:{port}: {error}") from error
        self._received.clear()
        device = self._device if backend == "nccl" else torch.device("cpu")
        self._groups[name] = _JoinedGroup(store, members, device)

    async def receive(
        self, group: str | None, names: Sequence[str], dtypes: Sequence[str], shapes: Sequence[Any]
    ) -> None:
        """Receive a bucket.

        Raises `SyncError` for weights that do not fit the model, an unknown group, or a lost
        trainer.
        """
        name = group if group is not None else next(iter(self._groups), "")
        if name not in self._groups:
            raise SyncError(f"there is no group {name!r}")
        joined = self._groups[name]

        rows: Rows = []
        for weight, dtype, shape in zip(names, dtypes, shapes, strict=True):
            kind = getattr(torch, dtype, None)
            if self._shapes.get(weight) != torch.Size(shape) or not isinstance(kind, torch.dtype):
                raise SyncError(f"{weight} {dtype} {list(shape)} does not fit the served model")
            empty = torch.empty(self._shapes[weight], dtype=kind, device=joined.device)
            rows.append((weight, empty))

        def fill() -> None:
            broadcast(joined.members, [tensor for _, tensor in rows], self._seconds)

        try:
            await run_detached(fill)
        except RuntimeError as error:
            raise SyncError(f"the trainer did not send the announced weights: {error}") from error
        self._received |= dict(rows)

    async def decode_request(self, text: str) -> None:
        """Decode the weights of a request.

        Raises `SyncError` for weights that do not fit the model, or an invalid body.
        """
        rows = await asyncio.to_thread(decode_tensors, text)
        for weight, tensor in rows:
            if self._shapes.get(weight) != tensor.shape:
                raise SyncError(f"{weight} {list(tensor.shape)} does not fit the served model")
        self._received |= dict(rows)

    async def apply(self) -> None:
        """Load the received weights into the engine. Raises `SyncError` when some are missing."""
        received = self._received
        self._received = {}
        missing = sorted(self._needed - received.keys())
        if missing:
            raise SyncError(
                f"{len(missing)} weights are missing, the first is {missing[0]!r}; nothing was "
                "changed"
            )
        await self._take(list(received.items()))

    def leave(self, group: str | None) -> bool:
        """Leave a group, or all if None; discard received weights that were not applied."""
        names = list(self._groups) if group is None else [group]
        joined_names = [name for name in names if name in self._groups]
        for name in joined_names:
            joined = self._groups.pop(name)
            release_groups(joined.members, joined.store)
        self._received.clear()
        return bool(joined_names)
