"""Routing replay: the training forward pass uses the experts that the engine chose (R3, arXiv
2510.11370).

A token whose router is near a tie may go to other experts in the trainer than in the engine: other
weights, another function. With the engine's choice replayed, only rounding differs. The scores
remain the trainer's own,

    p_e = softmax(logits)_e for the recorded experts e,
          divided by their sum if the router does that (norm_topk_prob)

so gradients reach the trainer's router.

`routes_of` finds the recorded experts of a row, `pack_routes` those of a pass, and `RoutingReplay`
hooks the routers. Suffixes: `_p` flattened positions of a pass, `_n` numbers of each.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from turnwright.engines.local.model import MoERouter, find_routers, probe_router
from turnwright.errors import ConfigError, RoutesMissing, TurnwrightError
from turnwright.types import ExpertRoutes, Sample

Score = Callable[[Tensor, Tensor], Tensor]
"""Compute expert scores: logits (N, experts) and expert indices (N, k) to float32 (N, k)."""


@dataclass(frozen=True, slots=True)
class PassRoutes:
    """Experts of the P flattened positions of one forward pass."""

    experts_pn: Tensor
    """n numbers per position, layer by layer."""
    known_p: Tensor
    """False where the router chooses, such as padding."""
    highest: int


def pack_routes(
    rows: Sequence[tuple[ExpertRoutes, Any]], size: int, device: torch.device | str
) -> PassRoutes:
    """Combine the routes of a pass's rows, each with the flattened positions of its ids, to those
    of its `size` positions."""
    is_wide = any(routes.width == 2 for routes, _ in rows)
    numbers = {routes.layers * routes.k for routes, _ in rows}
    if len(numbers) > 1:
        raise TurnwrightError(
            f"trajectories have {sorted(numbers)} experts per position: they come from different "
            "models"
        )

    experts_pn = np.zeros((size, numbers.pop()), dtype=np.int32 if is_wide else np.uint8)
    known_p = np.zeros(size, dtype=bool)
    for routes, places in rows:
        experts_pn[places] = np.asarray(routes).reshape(len(routes), -1)
        known_p[places] = True
    return PassRoutes(
        torch.from_numpy(experts_pn).to(device),
        torch.from_numpy(known_p).to(device),
        int(experts_pn.max(initial=0)),
    )


def keys_with_routes(
    keys: Sequence[Sequence[int]], routes: Sequence[ExpertRoutes | None]
) -> Sequence[Sequence[int]]:
    """Extend the keys of rows' positions by their experts: engines may route the same prefix in two
    ways (other rows in the batch, another server), and each trajectory trains on its own."""
    pairs: list[list[tuple[int, bytes]]] = []
    for row, row_routes in zip(keys, routes, strict=True):
        size = 0 if row_routes is None else row_routes.bytes_per_position
        data = b"" if row_routes is None else row_routes.data
        pairs.append(
            [
                (key % 2**64, data[position * size : (position + 1) * size])
                for position, key in enumerate(row)
            ]
        )

    # By rank, so that rows with equal experts keep the order of their ids, and the layout they have
    # without routes.
    distinct = {pair for row in pairs for pair in row}
    ranks = {pair: rank for rank, pair in enumerate(sorted(distinct))}
    return [[ranks[pair] for pair in row] for row in pairs]


def routes_of(sample: Sample, end: int) -> ExpertRoutes:
    """Return the routes of a row's first `end` positions, its input ids; raise `RoutesMissing` with
    the first unknown one."""
    if sample.routes is not None and all(sample.routes_mask[:end]):
        return sample.routes.slice(0, end)

    first = 0 if sample.routes is None else sample.routes_mask.index(0)
    raise RoutesMissing(
        f"{sample.trajectory.key}: the experts of position {first} are unknown, but later ids are "
        "trained: the engine did not report them. LocalEngine reports them for models with "
        "routers, vLLM and SGLang if started with --enable-return-routed-experts; else set "
        'train.routing_replay = "off"'
    )


def softmax(logits: Tensor, experts: Tensor) -> Tensor:
    """Compute the experts' probabilities."""
    return torch.softmax(logits, dim=-1, dtype=torch.float32).gather(-1, experts)


def normalized(logits: Tensor, experts: Tensor) -> Tensor:
    """Compute the experts' probabilities, normalized over the chosen ones."""
    chosen = softmax(logits, experts)
    return chosen / chosen.sum(dim=-1, keepdim=True)


SCORES: Sequence[Score] = (normalized, softmax)


class RoutingReplay:
    """Hooks that make a model's routers use recorded experts, where there are any.

    A copy of the model chooses its own. The hooks stay set between passes, so layers recomputed in
    the backward pass use the same experts.
    """

    def __init__(self, model: nn.Module) -> None:
        """Raise `ConfigError` for a model without routers, or whose routers compute scores in an
        unknown way."""
        _remove_hooks(model)
        self.routers = find_routers(model)
        if not self.routers:
            raise ConfigError(
                f'train.routing_replay = "replay", but {type(model).__name__} has no router that '
                'returns logits, scores and indices; set train.routing_replay = "off"'
            )

        self._routes: PassRoutes | None = None
        self._chosen: list[Tensor] = []
        for number, router in enumerate(self.routers):
            router.module.register_forward_hook(_Hook(self, number, _score_of(router)))

    def set_routes(self, routes: PassRoutes | None) -> None:
        """Set the experts of the next pass, None: the routers choose; raise `TurnwrightError` for
        those of another model."""
        self._routes = routes
        if routes is None:
            return
        numbers = routes.experts_pn.shape[1]
        k = self.routers[0].k
        layers = list(range(len(self.routers)))
        if numbers != len(self.routers) * k:
            # Servers report every layer of the decoder, dense ones too.
            layers = [router.layer for router in self.routers]
            if numbers % k or not 0 <= min(layers) <= max(layers) < numbers // k:
                raise TurnwrightError(
                    f"the engine reports {numbers} experts per position, but the trainer's model "
                    f"has {len(self.routers)} routers that choose {k}: the models differ"
                )
        if routes.highest >= min(router.experts for router in self.routers):
            raise TurnwrightError(
                f"the engine reports expert {routes.highest}, but the trainer's model has "
                f"{self.routers[0].experts}: the models differ"
            )

        self._chosen = [
            routes.experts_pn[:, layer * k : (layer + 1) * k].long() for layer in layers
        ]

    def replayed_output(
        self, number: int, score: Score, output: tuple[Tensor, Tensor, Tensor]
    ) -> tuple[Tensor, Tensor, Tensor] | None:
        """Return a router's output with the recorded experts; None to keep its own."""
        if self._routes is None:
            return None
        logits, scores, own_experts = output
        recorded = self._chosen[number]
        is_known = self._routes.known_p[:, None]
        if len(recorded) != len(logits):
            raise TurnwrightError(
                f"router {self.routers[number].name} has {len(logits)} positions, but experts are "
                f"set for {len(recorded)}"
            )

        # The same experts in another order would change the last bits.
        in_order = recorded.sort(dim=-1).values == own_experts.sort(dim=-1).values
        same = in_order.all(dim=-1, keepdim=True)
        experts = torch.where(is_known & ~same, recorded, own_experts)
        return logits, score(logits, experts).to(scores.dtype), experts


class _Hook:
    """Forward hook of a router; does nothing in a copy of the model."""

    def __init__(
        self, replay: RoutingReplay | None, number: int = 0, score: Score = softmax
    ) -> None:
        self._replay = replay
        self._number = number
        self._score = score

    def __call__(self, module: nn.Module, given: Any, output: tuple[Tensor, Tensor, Tensor]) -> Any:
        if self._replay is None:
            return None
        return self._replay.replayed_output(self._number, self._score, output)

    def __deepcopy__(self, memo: Any) -> _Hook:
        return _Hook(None)


def _remove_hooks(model: nn.Module) -> None:
    """Remove the hooks of an earlier trainer of the same model."""
    for module in model.modules():
        hooks = module._forward_hooks
        for key in [key for key, hook in hooks.items() if isinstance(hook, _Hook)]:
            del hooks[key]


def _score_of(router: MoERouter) -> Score:
    """Find how a router computes its scores, by exact comparison with its own."""
    example = probe_router(router.module)
    if example is not None:
        logits, scores, indices = example
        for score in SCORES:
            if torch.equal(score(logits, indices).to(scores.dtype), scores):
                return score
    raise ConfigError(
        f'train.routing_replay = "replay", but the scores of router {router.name} '
        f"({type(router.module).__name__}) are neither a softmax over all experts nor one over the "
        'chosen; set train.routing_replay = "off"'
    )
