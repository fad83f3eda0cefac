"""Weight updates and fingerprints."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from functools import lru_cache
from hashlib import blake2b

import numpy as np
import torch

from turnwright.errors import SyncError

_BLOCK = 1 << 15
"""Elements hashed at a time: the block and its product stay in a core's cache."""
_INTEGERS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


def fingerprint(weights: Iterable[tuple[str, torch.Tensor]]) -> str:
    """Hash named tensors: sensitive to every bit, to names, types and shapes, but not to their
    order.

    Each tensor's bits are integers x_i, hashed as the sum of k_i * x_i modulo 2**64 with random
    keys k_i (multilinear hashing: Carter and Wegman, 1979); blocks and tensors are combined by a
    cryptographic hash. It detects lost, stale, swapped and damaged weights, not forgery. Tensors
    may be on any device; a million fp32 weights take about 1 ms. Return 32 hexadecimal digits.
    """
    # A separate header per tensor makes boundaries between names and shapes unambiguous.
    hashes: list[tuple[str, torch.Tensor]] = []
    for name, tensor in weights:
        dtype = str(tensor.dtype).removeprefix("torch.")
        hashes.append((f"{name}|{dtype}|{tuple(tensor.shape)}", _block_hashes(tensor)))

    digest = blake2b(digest_size=16)
    for header, blocks in sorted(hashes, key=lambda pair: pair[0]):
        digest.update(header.encode() + b"\0" + blocks.cpu().numpy().astype("<i8").tobytes())
    return digest.hexdigest()


def _block_hashes(tensor: torch.Tensor) -> torch.Tensor:
    with torch.no_grad():
        flat = tensor.detach().contiguous().reshape(-1)
        if flat.is_complex():
            flat = torch.view_as_real(flat).reshape(-1)
        bits = flat.view(_INTEGERS[flat.element_size()])
        keys = _keys(bits.device)
        # One block at a time stays in a CPU's cache and is faster than one call for all.
        sums = [(part.to(torch.int64) * keys[: part.numel()]).sum() for part in bits.split(_BLOCK)]
        return torch.stack(sums) if sums else torch.zeros(0, dtype=torch.int64)


@lru_cache(maxsize=8)
def _keys(device: torch.device) -> torch.Tensor:
    generator = np.random.Generator(np.random.PCG64(0x7475726E77697365))
    # Odd keys have inverses modulo 2**64: a change of one number always changes the sum.
    keys = generator.integers(-(2**63), 2**63 - 1, size=_BLOCK, dtype=np.int64) | 1
    return torch.from_numpy(keys).to(device)


Weights = Iterable[tuple[str, torch.Tensor]]
"""Named tensors that can be iterated over more than once."""


def check_weights(module: torch.nn.Module, weights: Weights) -> Weights:
    """Return the weights, as a list if they are an iterator.

    Raises `SyncError` where names, shapes or tied values do not match the module's. A tied weight
    may come under one of its names or all of them.
    """
    if isinstance(weights, Iterator):
        weights = list(weights)
    current = module.state_dict()

    # Names of the same memory are tied.
    names_of_place: dict[tuple[int, torch.Size], list[str]] = {}
    for name, tensor in current.items():
        names_of_place.setdefault((tensor.data_ptr(), tensor.shape), []).append(name)
    tied: set[str] = set()
    for names in names_of_place.values():
        if len(names) > 1:
            tied.update(names)

    # Only tied weights are kept, since weights may be made one at a time.
    received: set[str] = set()
    received_tied: dict[str, torch.Tensor] = {}
    for name, tensor in weights:
        if name in received:
            raise SyncError(f"weight {name!r} was given twice; send each name once")
        if name not in current:
            raise SyncError(
                f"weight {name!r} is unknown to {type(module).__name__}; send Hugging Face names, "
                "as in state_dict()"
            )
        if tensor.shape != current[name].shape:
            raise SyncError(
                f"weight {name!r} has shape {tuple(tensor.shape)}, the engine's has "
                f"{tuple(current[name].shape)}"
            )
        received.add(name)
        if name in tied:
            received_tied[name] = tensor

    missing = [names[0] for names in names_of_place.values() if received.isdisjoint(names)]
    if missing:
        raise SyncError(
            f"{len(missing)} weights are missing, first {missing[0]!r}; an update must contain all "
            "of them"
        )
    _check_tied_values(names_of_place.values(), received_tied)
    return weights


def _check_tied_values(
    tied_names: Iterable[Sequence[str]], received: Mapping[str, torch.Tensor]
) -> None:
    """Raise `SyncError` if names of one weight came with different values."""
    for names in tied_names:
        values = [received[name] for name in names if name in received]
        if not all(torch.equal(values[0], other.to(values[0].device)) for other in values[1:]):
            raise SyncError(
                f"{' and '.join(names)} are one weight in the engine but were given different "
                "values"
            )


Take = Callable[[str, torch.Tensor], None]


def copy_weights(
    module: torch.nn.Module,
    weights: Weights,
    packed: Collection[str] = (),
    pack: Take | None = None,
) -> str:
    """Copy checked weights, but give those named in `packed` to `pack`.

    Return the fingerprint of the copies where the types match, so that a failed copy is detected.
    """
    current = module.state_dict()

    def copied() -> Iterator[tuple[str, torch.Tensor]]:
        for name, tensor in weights:
            if name in packed:
                assert pack is not None
                pack(name, tensor)
                yield name, tensor
                continue
            place = current[name]
            place.copy_(tensor)
            yield name, place if place.dtype == tensor.dtype else tensor

    with torch.no_grad():
        return fingerprint(copied())
