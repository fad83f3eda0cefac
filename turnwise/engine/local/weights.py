"""New weights for the engine's copy: all of them fit, or none is taken."""

from __future__ import annotations

from collections.abc import Iterable

import torch

from turnwise.engine.local.fingerprint import fingerprint
from turnwise.errors import SyncError

Weights = list[tuple[str, torch.Tensor]]


def check_weights(module: torch.nn.Module, weights: Iterable[tuple[str, torch.Tensor]]) -> Weights:
    """The weights as a list, held against the module's names and shapes.

    A tied weight may come under one of its names or under all of them.

    Raises:
        SyncError: a name is unknown, missing or given twice, or a shape or tied value differs.
    """
    own = module.state_dict()
    given: dict[str, torch.Tensor] = {}
    for name, tensor in weights:
        if name in given:
            raise SyncError(f"weight {name!r} came twice; each name is sent once")
        if name not in own:
            raise SyncError(
                f"weight {name!r} is unknown to {type(module).__name__}; send Hugging Face names, as in state_dict()"
            )
        if tensor.shape != own[name].shape:
            raise SyncError(f"weight {name!r} has shape {tuple(tensor.shape)}, the engine's has {tuple(own[name].shape)}")
        given[name] = tensor
    places: dict[tuple[int, torch.Size], list[str]] = {}
    for name, tensor in own.items():
        places.setdefault((tensor.data_ptr(), tensor.shape), []).append(name)
    missing = [names[0] for names in places.values() if not any(name in given for name in names)]
    if missing:
        raise SyncError(f"{len(missing)} weights did not come, the first is {missing[0]!r}; an update brings all of them")
    for names in places.values():
        first, *rest = [given[name] for name in names if name in given]
        if not all(torch.equal(first, other.to(first.device)) for other in rest):
            raise SyncError(f"{' and '.join(names)} are one weight in the engine, and came with unlike values")
    return list(given.items())


def copy_weights(module: torch.nn.Module, weights: Weights) -> str:
    """Copy checked weights into the module.

    Returns:
        Their fingerprint: of what the module holds now where the type is the same, so that a copy that failed shows.
    """
    own = module.state_dict()
    with torch.no_grad():
        for name, tensor in weights:
            own[name].copy_(tensor)
    return fingerprint((name, own[name] if own[name].dtype == tensor.dtype else tensor) for name, tensor in weights)
