"""Replaying the experts that the engine chose in the training forward (R3, arXiv 2510.11370).

A token whose router is near a tie goes to other experts in the trainer than it did in the engine: other weights, another
function. With the engine's choice given, what differs is rounding alone. The scores are the trainer's own all the same,

    p_e = softmax(logits)_e for the recorded experts e, divided by their sum where the router does that (norm_topk_prob)

so gradients reach the trainer's router.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from turnwise.engines.local.model import MoERouter, find_routers, probe_router
from turnwise.errors import ConfigError, RoutesMissing, TurnwiseError
from turnwise.types import ExpertRoutes, Sample

Score = Callable[[Tensor, Tensor], Tensor]
"""The scores of experts: logits (N, experts) and the experts (N, k) give float32 (N, k)."""


@dataclass(frozen=True, slots=True)
class PassRoutes:
    """The experts of the P positions of one forward pass, flattened."""

    experts_pn: Tensor
    """n numbers a position, layer by layer."""
    known_p: Tensor
    """False where a position has none: the router chooses there (padding)."""
    highest: int


def pack_routes(parts: Iterable[tuple[ExpertRoutes | None, Any]], size: int, device: torch.device | str) -> PassRoutes | None:
    """The experts of a pass, from the routes of its rows.

    Args:
        parts: each row's routes, and where in the flattened pass its positions stand (int array, as long as its routes).
        size: positions of the pass, P.

    Returns:
        None where no row has routes.
    """
    given = [(routes, places) for routes, places in parts if routes is not None]
    if not given:
        return None
    wide = any(routes.width == 2 for routes, _ in given)
    numbers = {routes.layers * routes.k for routes, _ in given}
    if len(numbers) > 1:
        raise TurnwiseError(f"trajectories tell of {sorted(numbers)} experts a position: they were sampled by unlike models")
    experts = np.zeros((size, numbers.pop()), dtype=np.int32 if wide else np.uint8)
    known = np.zeros(size, dtype=bool)
    for routes, places in given:
        experts[places] = np.asarray(routes).reshape(len(routes), -1)
        known[places] = True
    return PassRoutes(torch.from_numpy(experts).to(device), torch.from_numpy(known).to(device), int(experts.max(initial=0)))


def keys_with_routes(keys: Sequence[Sequence[int]], routes: Sequence[ExpertRoutes | None]) -> Sequence[Sequence[int]]:
    """Keys of rows' positions, told apart by their experts too: engines may route the same prefix in two ways (other rows
    beside it, another server), and each trajectory is trained on its own."""
    if all(each is None for each in routes):
        return keys
    told = []
    for row, mine in zip(keys, routes, strict=True):
        each, data = (mine.bytes_per_position, mine.data) if mine is not None else (0, b"")
        told.append([(key % 2**64, data[at * each : (at + 1) * each]) for at, key in enumerate(row)])
    # By rank, so that rows whose experts agree are in the order of their ids, and laid out as they would be without.
    ranks = {key: rank for rank, key in enumerate(sorted({key for row in told for key in row}))}
    return [[ranks[key] for key in row] for row in told]


def routes_of(sample: Sample, end: int) -> ExpertRoutes:
    """The routes of a row's first `end` positions, all of which are fed.

    Raises:
        RoutesMissing: when one is not known; the error names trajectory and position.
    """
    if sample.routes is not None and all(sample.routes_mask[:end]):
        return sample.routes.slice(0, end)
    first = 0 if sample.routes is None else sample.routes_mask.index(0)
    raise RoutesMissing(
        f"{sample.trajectory.key}: the experts of position {first} are not known, and ids behind it are to be trained: the "
        "engine did not tell them. LocalEngine tells them of models with routers, vLLM and SGLang where they were started with "
        '--enable-return-routed-experts; else set train.routes = "off"'
    )


def softmax(logits: Tensor, experts: Tensor) -> Tensor:
    """Their probabilities."""
    return torch.softmax(logits, dim=-1, dtype=torch.float32).gather(-1, experts)


def normalised(logits: Tensor, experts: Tensor) -> Tensor:
    """Their probabilities among themselves."""
    chosen = softmax(logits, experts)
    return chosen / chosen.sum(dim=-1, keepdim=True)


SCORES: Sequence[Score] = (normalised, softmax)


class RoutingReplay:
    """Has the routers of a model take the experts that they are told, where they are told some.

    It stays in place between passes, so that layers that are computed again in the backward pass meet the same experts.

    Args:
        model: its routers get hooks; a copy of it chooses its own experts.

    Raises:
        ConfigError: for a model without routers, or whose routers make scores in a way that is not known.
    """

    def __init__(self, model: nn.Module) -> None:
        for module in model.modules():  # those of an earlier trainer of the same model
            for key in [key for key, hook in module._forward_hooks.items() if isinstance(hook, _Hook)]:
                del module._forward_hooks[key]
        self.routers = find_routers(model)
        if not self.routers:
            raise ConfigError(
                f'train.routes = "replay", but {type(model).__name__} has no router that gives logits, scores and indices; '
                'set train.routes = "off"'
            )
        self._fed: PassRoutes | None = None
        self._chosen: list[Tensor] = []
        for number, router in enumerate(self.routers):
            router.module.register_forward_hook(_Hook(self, number, _score_of(router)))

    def set_routes(self, told: PassRoutes | None) -> None:
        """The experts of the pass that comes; None leaves the choice to the routers.

        Raises:
            TurnwiseError: when they are of another model.
        """
        self._fed = told
        if told is None:
            return
        numbers, k = told.experts_pn.shape[1], self.routers[0].k
        layers = list(range(len(self.routers)))
        if numbers != len(self.routers) * k:
            # Servers tell of every layer of the decoder, dense ones too.
            layers = [router.layer for router in self.routers]
            if numbers % k or not 0 <= min(layers) <= max(layers) < numbers // k:
                raise TurnwiseError(
                    f"the engine tells of {numbers} experts a position, the trainer's model has {len(self.routers)} routers "
                    f"that choose {k}: they are unlike models"
                )
        if told.highest >= min(router.experts for router in self.routers):
            raise TurnwiseError(
                f"the engine tells of expert {told.highest}, the trainer's model has {self.routers[0].experts}: unlike models"
            )
        self._chosen = [told.experts_pn[:, layer * k : (layer + 1) * k].long() for layer in layers]

    def replayed_output(
        self, number: int, score: Score, output: tuple[Tensor, Tensor, Tensor]
    ) -> tuple[Tensor, Tensor, Tensor] | None:
        """What a router gives instead; None for what it gave."""
        if self._fed is None:
            return None
        logits, scores, own = output
        chosen, known = self._chosen[number], self._fed.known_p[:, None]
        if len(chosen) != len(logits):
            raise TurnwiseError(
                f"router {self.routers[number].name} sees {len(logits)} positions, and the experts of {len(chosen)} are told"
            )
        # The same experts in another order would change the last bits for nothing.
        same = (chosen.sort(dim=-1).values == own.sort(dim=-1).values).all(dim=-1, keepdim=True)
        experts = torch.where(known & ~same, chosen, own)
        return logits, score(logits, experts).to(scores.dtype), experts


class _Hook:
    """A router's forward hook; a copy of the model has one that does nothing."""

    def __init__(self, replay: RoutingReplay | None, number: int = 0, score: Score = softmax) -> None:
        self._replay, self._number, self._score = replay, number, score

    def __call__(self, module: nn.Module, given: Any, output: tuple[Tensor, Tensor, Tensor]) -> Any:
        return None if self._replay is None else self._replay.replayed_output(self._number, self._score, output)

    def __deepcopy__(self, memo: Any) -> _Hook:
        return _Hook(None)


def _score_of(router: MoERouter) -> Score:
    """How a router makes its scores: the way that gives its own to the last bit."""
    given = probe_router(router.module)
    if given is not None:
        logits, scores, indices = given
        for score in SCORES:
            if torch.equal(score(logits, indices).to(scores.dtype), scores):
                return score
    raise ConfigError(
        f'train.routes = "replay", but the scores of router {router.name} ({type(router.module).__name__}) are neither a '
        'softmax over all experts nor one over those chosen; set train.routes = "off"'
    )
