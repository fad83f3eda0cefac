"""The other end of a process group: a server of this house that a trainer sends weights to."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Mapping, Sequence
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from turnwise.errors import SyncError
from turnwise.train.groups.mail import decode_tensors
from turnwise.train.groups.send import Rows, broadcast, join_process_group, release_groups, run_detached

SECONDS = 600.0
"""For a trainer to come, and for each of its buckets."""


class GroupWeightReceiver:
    """Collects weights until all have come.

    Args:
        shapes: of every weight that the model knows, by name.
        needed: those that have to come; of tied ones, one.
        take: makes a whole set the engine's.
        device: of the model, where `nccl` brings weights to.
        seconds: for a trainer to come, and for each of its buckets.
    """

    def __init__(
        self,
        shapes: Mapping[str, torch.Size],
        needed: frozenset[str],
        take: Callable[[Rows], Awaitable[None]],
        device: torch.device,
        seconds: float = SECONDS,
    ) -> None:
        self._shapes, self._needed, self._take, self._seconds = shapes, needed, take, seconds
        self._device = device
        self._groups: dict[str, tuple[Any, Any, torch.device]] = {}
        self._came: dict[str, torch.Tensor] = {}

    @property
    def complete(self) -> bool:
        """Whether all weights of the model have come."""
        return self._needed <= self._came.keys()

    async def join(self, address: str, port: int, rank: int, world: int, name: str, backend: str) -> None:
        """Meet a trainer, which is rank 0.

        Raises:
            SyncError: when nobody comes, or the group cannot be.
        """
        if name in self._groups:
            raise SyncError(f"there is a group {name!r} already")
        limit = timedelta(seconds=self._seconds)

        def meet() -> tuple[Any, Any]:
            store = dist.TCPStore(address, port, world, False, limit, wait_for_workers=False)
            return store, join_process_group(store, name, rank, world, backend, self._seconds)

        try:
            store, group = await run_detached(meet)
        except (RuntimeError, ValueError) as error:
            raise SyncError(f"no process group with {address}:{port}: {error}") from error
        self._came.clear()
        self._groups[name] = store, group, self._device if backend == "nccl" else torch.device("cpu")

    async def receive(self, group: str | None, names: Sequence[str], dtypes: Sequence[str], shapes: Sequence[Any]) -> None:
        """Receive a bucket.

        Raises:
            SyncError: for weights that the model has not, an unknown group, or a trainer that is gone.
        """
        name = group if group is not None else next(iter(self._groups), "")
        if name not in self._groups:
            raise SyncError(f"there is no group {name!r}")
        _, members, device = self._groups[name]
        rows: Rows = []
        for weight, dtype, shape in zip(names, dtypes, shapes, strict=True):
            kind = getattr(torch, dtype, None)
            if self._shapes.get(weight) != torch.Size(shape) or not isinstance(kind, torch.dtype):
                raise SyncError(f"{weight} {dtype} {list(shape)} does not fit the model that is served")
            rows.append((weight, torch.empty(self._shapes[weight], dtype=kind, device=device)))
        try:
            await run_detached(lambda: broadcast(members, [tensor for _, tensor in rows], self._seconds))
        except RuntimeError as error:
            raise SyncError(f"the trainer did not send what it said: {error}") from error
        self._came |= dict(rows)

    async def decode_request(self, text: str) -> None:
        """Read weights that stand in a request.

        Raises:
            SyncError: for weights that the model has not, or what is none.
        """
        rows = await asyncio.to_thread(decode_tensors, text)
        for weight, tensor in rows:
            if self._shapes.get(weight) != tensor.shape:
                raise SyncError(f"{weight} {list(tensor.shape)} does not fit the model that is served")
        self._came |= dict(rows)

    async def apply(self) -> None:
        """Make what has come the engine's weights.

        Raises:
            SyncError: when some are missing.
        """
        came, self._came = self._came, {}
        if missing := sorted(self._needed - came.keys()):
            raise SyncError(f"{len(missing)} weights did not come, the first is {missing[0]!r}; nothing was changed")
        await self._take(list(came.items()))

    def leave(self, group: str | None) -> bool:
        """Leave a group, None all; what came and was not taken is forgotten."""
        names = list(self._groups) if group is None else [group] if group in self._groups else []
        for name in names:
            store, members, _ = self._groups.pop(name)
            release_groups(members, store)
        self._came.clear()
        return bool(names)
