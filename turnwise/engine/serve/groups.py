"""The routes by which weights come by process group, or in requests, as SGLang and vLLM have them."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Any, Protocol

from turnwise.engine.serve.bodies import Bucket, BucketInfo, Finish, Group, Init, Meeting, Tensors, Update
from turnwise.engine.serve.http import MOST_WEIGHTS, Call, Endpoint, HttpError, Table

GROUP = "weight_update_group"
"""What SGLang calls a group that is given no name."""


class WeightReceiver(Protocol):
    """Takes weights that a trainer sends; it lives where torch does. They take effect whole or not at all."""

    async def join(self, address: str, port: int, rank: int, world: int, name: str, backend: str) -> None:
        """Meet a trainer, which is rank 0.

        Raises:
            SyncError: when nobody comes, or the group cannot be.
        """

    async def receive(self, group: str | None, names: Sequence[str], dtypes: Sequence[str], shapes: Sequence[Any]) -> None:
        """Receive a bucket.

        Args:
            group: its name; None is the one there is.

        Raises:
            SyncError: for weights that the model has not, an unknown group, or a trainer that is gone.
        """

    async def decode_request(self, text: str) -> None:
        """Read weights that stand in a request.

        Raises:
            SyncError: for weights that the model has not, or what is none.
        """

    @property
    def complete(self) -> bool:
        """Whether all weights of the model have come."""

    async def apply(self) -> None:
        """Make what has come the engine's weights.

        Raises:
            SyncError: when some are missing.
        """

    def leave(self, group: str | None) -> bool:
        """Leave a group, None all; what came and was not taken is forgotten. False where there is none of that name."""


class NamedWeights(Protocol):
    """Has a name for its weights, and lets one change of them be done at a time."""

    name: str
    changing: asyncio.Lock


def sglang_groups(served: NamedWeights, receiver: WeightReceiver) -> Table:
    """SGLang's. It has no word for the end of an update: weights take effect when all have come."""

    async def join(call: Call) -> Any:
        told: Meeting = call.body
        name, backend = told.group_name or GROUP, told.backend or "nccl"
        await receiver.join(told.master_address, told.master_port, told.rank_offset, told.world_size, name, backend)
        return {"success": True, "message": ""}

    async def update(call: Call) -> Any:
        told: Bucket = call.body
        await receiver.receive(told.group_name or GROUP, told.names, told.dtypes, told.shapes)
        return await took(told.weight_version)

    async def read(call: Call) -> Any:
        await receiver.decode_request(call.body.serialized_named_tensors[0])
        return await took(call.body.weight_version)

    async def took(version: Any) -> Any:
        async with served.changing:
            if version is not None or receiver.complete:
                await receiver.apply()
            served.name = str(version) if version is not None else served.name
        return {"success": True, "message": ""}

    async def leave(call: Call) -> Any:
        left = receiver.leave(call.body.group_name or GROUP)
        return {"success": left, "message": "" if left else "there is no such group"}

    return {
        ("POST", "/init_weights_update_group"): Endpoint(join, Meeting, changes=True),
        ("POST", "/update_weights_from_distributed"): Endpoint(update, Bucket, changes=True),
        ("POST", "/destroy_weights_update_group"): Endpoint(leave, Group, changes=True),
        ("POST", "/update_weights_from_tensor"): Endpoint(read, Tensors, changes=True, most=MOST_WEIGHTS),
    }


def vllm_groups(served: NamedWeights, receiver: WeightReceiver) -> Table:
    """vLLM's, with what Turnwise's own way into vLLM takes: a name and a backend of torch for the group."""

    async def world(call: Call) -> Any:
        return {"world_size": 1}

    async def join(call: Call) -> Any:
        told: Meeting = call.body.init_info
        if not told.group_name or not told.backend:
            raise HttpError(400, "init_info: group_name and backend are missing")
        await receiver.join(
            told.master_address, told.master_port, told.rank_offset, told.world_size, told.group_name, told.backend
        )
        return {"message": "Weight transfer initialized"}

    async def begin(call: Call) -> Any:
        return {"message": "Weight update started"}

    async def update(call: Call) -> Any:
        told: BucketInfo = call.body.update_info
        await receiver.receive(None, told.names, told.dtype_names, told.shapes)
        return {"message": "Weights updated"}

    async def finish(call: Call) -> Any:
        async with served.changing:
            await receiver.apply()
            served.name = str(call.body.weight_version or served.name)
        return {"message": "Weight update finished"}

    async def leave(call: Call) -> Any:
        receiver.leave(None)
        return {"message": "Weight transfer shut down"}

    return {
        ("GET", "/get_world_size"): Endpoint(world),
        ("POST", "/init_weight_transfer_engine"): Endpoint(join, Init, changes=True),
        ("POST", "/start_weight_update"): Endpoint(begin, changes=True),
        ("POST", "/update_weights"): Endpoint(update, Update, changes=True),
        ("POST", "/finish_weight_update"): Endpoint(finish, Finish, changes=True),
        ("POST", "/shutdown_weight_transfer_engine"): Endpoint(leave, changes=True),
    }
