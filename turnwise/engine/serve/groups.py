"""The routes by which weights come by process group, or in requests, as SGLang and vLLM have them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Protocol

from turnwise.engine.serve.http import Handler

Table = dict[tuple[str, str], Handler]


class Receiver(Protocol):
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

    async def open(self, text: str) -> None:
        """Read weights that stand in a request.

        Raises:
            SyncError: for weights that the model has not, or what is none.
        """

    @property
    def whole(self) -> bool:
        """Whether all weights of the model have come."""

    async def take(self) -> None:
        """Make what has come the engine's weights.

        Raises:
            SyncError: when some are missing.
        """

    def leave(self, group: str | None) -> bool:
        """Leave a group, None all; what came and was not taken is forgotten. False where there is none of that name."""


class Named(Protocol):
    """Has a name for its weights."""

    name: str


def sglang_groups(served: Named, receiver: Receiver) -> Table:
    """SGLang's. It has no word for the end of an update: weights take effect when all have come."""

    async def join(path: str, body: Any, more: Mapping[str, str]) -> Any:
        address, port = str(body["master_address"]), int(body["master_port"])
        group, backend = str(body.get("group_name") or "weight_update_group"), str(body.get("backend") or "nccl")
        await receiver.join(address, port, int(body["rank_offset"]), int(body["world_size"]), group, backend)
        return {"success": True, "message": ""}

    async def update(path: str, body: Any, more: Mapping[str, str]) -> Any:
        group = str(body.get("group_name") or "weight_update_group")
        await receiver.receive(group, body["names"], body["dtypes"], body["shapes"])
        return await took(body.get("weight_version"))

    async def read(path: str, body: Any, more: Mapping[str, str]) -> Any:
        (text,) = body["serialized_named_tensors"]  # one for each rank
        await receiver.open(text)
        return await took(body.get("weight_version"))

    async def took(version: Any) -> Any:
        if version is not None or receiver.whole:
            await receiver.take()
        served.name = str(version) if version is not None else served.name
        return {"success": True, "message": ""}

    async def leave(path: str, body: Any, more: Mapping[str, str]) -> Any:
        left = receiver.leave(str(body.get("group_name") or "weight_update_group"))
        return {"success": left, "message": "" if left else "there is no such group"}

    return {
        ("POST", "/init_weights_update_group"): join,
        ("POST", "/update_weights_from_distributed"): update,
        ("POST", "/destroy_weights_update_group"): leave,
        ("POST", "/update_weights_from_tensor"): read,
    }


def vllm_groups(served: Named, receiver: Receiver) -> Table:
    """vLLM's, with what Turnwise's own way into vLLM takes: a name and a backend of torch for the group."""

    async def world(path: str, body: Any, more: Mapping[str, str]) -> Any:
        return {"world_size": 1}

    async def join(path: str, body: Any, more: Mapping[str, str]) -> Any:
        told = body["init_info"]
        await receiver.join(
            str(told["master_address"]),
            int(told["master_port"]),
            int(told["rank_offset"]),
            int(told["world_size"]),
            str(told["group_name"]),
            str(told["backend"]),
        )
        return {"message": "Weight transfer initialized"}

    async def begin(path: str, body: Any, more: Mapping[str, str]) -> Any:
        return {"message": "Weight update started"}

    async def update(path: str, body: Any, more: Mapping[str, str]) -> Any:
        told = body["update_info"]
        await receiver.receive(None, told["names"], told["dtype_names"], told["shapes"])
        return {"message": "Weights updated"}

    async def finish(path: str, body: Any, more: Mapping[str, str]) -> Any:
        await receiver.take()
        served.name = str((body or {}).get("weight_version") or served.name)
        return {"message": "Weight update finished"}

    async def leave(path: str, body: Any, more: Mapping[str, str]) -> Any:
        receiver.leave(None)
        return {"message": "Weight transfer shut down"}

    return {
        ("GET", "/get_world_size"): world,
        ("POST", "/init_weight_transfer_engine"): join,
        ("POST", "/start_weight_update"): begin,
        ("POST", "/update_weights"): update,
        ("POST", "/finish_weight_update"): finish,
        ("POST", "/shutdown_weight_transfer_engine"): leave,
    }
