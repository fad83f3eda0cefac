"""Weights in the bodies of requests: for servers that share no disk with the trainer, and cannot reach it."""

from __future__ import annotations

import pickle
from base64 import b64decode, b64encode
from collections.abc import Callable, Iterable
from io import BytesIO
from pathlib import Path
from typing import Any

import torch

from turnwise.engine.remote.ways import WeightReceiverClient
from turnwise.errors import SyncError
from turnwise.train.groups.send import Rows, clone_weights, split_buckets

MAX_BODY_BYTES = 64 * 2**20
"""Bytes of weights in a request; base64 makes a third more of them, and a server of many ranks gets them for each."""
OPENS = ("torch.storage", "_load_from_bytes")


class RequestWeightPacker:
    """Cuts new weights into the bodies of requests.

    A copy is kept in this process's memory (not the GPU's) until the next policy comes, for servers that come back.

    Args:
        seconds: deadline of one request.
        letter: bytes of weights in a request; one tensor at least.
        source: as of `Courier`.
    """

    def __init__(self, *, seconds: float = 600.0, letter: int = MAX_BODY_BYTES, source: Path | None = None) -> None:
        self.seconds, self.letter, self.source = seconds, letter, source

    def pack(self, weights: Iterable[tuple[str, torch.Tensor]], version: int) -> tuple[RequestWeights, str]:
        """New weights in parts, in their own order, and their fingerprint."""
        rows, told = clone_weights(weights, self.source)
        return RequestWeights(split_buckets(rows, self.letter), version, self.seconds), told


class RequestWeights:
    """The weights of one policy."""

    def __init__(self, cuts: list[Rows], version: int, seconds: float) -> None:
        self.version, self.seconds, self._cuts = version, seconds, cuts

    @property
    def request_count(self) -> int:
        """How many requests they take."""
        return len(self._cuts)

    def encode_body(self, index: int) -> str:
        """What stands in one of them: see `encode_tensors`."""
        return encode_tensors(self._cuts[index])

    async def send_to(self, engine: WeightReceiverClient) -> None:
        """Have a server take them.

        Raises:
            SyncError: when it does not.
        """
        await engine.load_from_requests(self)


class _Saved:
    """Pickled, it is a call of `OPENS`: nothing but names of torch, which is what SGLang lets in."""

    def __init__(self, raw: bytes) -> None:
        self.raw = raw

    def __reduce__(self) -> tuple[Callable[[bytes], Any], tuple[bytes]]:
        return torch.storage._load_from_bytes, (self.raw,)


def encode_tensors(rows: Rows) -> str:
    """Named tensors as SGLang's `/update_weights_from_tensor` reads them, in base64: by value, so from any machine."""
    file = BytesIO()
    torch.save(rows, file)
    return b64encode(pickle.dumps(_Saved(file.getvalue()), protocol=4)).decode()


def decode_tensors(text: str) -> Rows:
    """What `encode_tensors` wrote, read without running anything that it says.

    Raises:
        SyncError: for anything else.
    """
    try:
        rows = _Reader(BytesIO(b64decode(text, validate=True))).load()
    except Exception as error:  # what a text of others makes of a pickle's reader has no bounds
        raise SyncError(f"these are no tensors that Turnwise packed: {error}") from error
    if not isinstance(rows, list) or not all(_named(row) for row in rows):
        raise SyncError("these are no named tensors")
    return rows


def _named(row: Any) -> bool:
    return isinstance(row, tuple) and len(row) == 2 and isinstance(row[0], str) and isinstance(row[1], torch.Tensor)


class _Reader(pickle.Unpickler):
    """Knows one name, and reads what stands behind it as weights alone."""

    def find_class(self, module: str, name: str) -> Any:
        if (module, name) != OPENS:
            raise pickle.UnpicklingError(f"{module}.{name} is not read here")
        return lambda raw: torch.load(BytesIO(raw), map_location="cpu", weights_only=True)
