"""The forward pass of a plain decoder in few calls: matrix products by torch, all between them by `kernels`.

For models built like Llama, Qwen2 and Qwen3, and decoders of that build in models that see, on a CPU in fp32. They are taken by
their structure, never by their name, and only after this pass came to the same logits as the module itself.
"""

from __future__ import annotations

import logging
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import numpy as np
import torch

from turnwise.engines.local.batch import RowMedia
from turnwise.engines.local.kv_cache import KVCache
from turnwise.engines.local.sampling import round_up_rows
from turnwise.engines.local.vision import ImageFeatures, SplitVLM

_log = logging.getLogger(__name__)

PROOF = 48
"""Ids on which the pass is held against the module: more than one block of keys."""
TOLERANCE = 1e-4
"""Greatest difference of a logit, in units of the greatest one where that is above 1."""


@dataclass(frozen=True, slots=True)
class FusedLayer:
    """Weights of a layer, as matrices for torch and as flat arrays for the kernels."""

    qkv: torch.Tensor
    bias: np.ndarray
    """Of `qkv`; empty where there is none, as are the norms of heads."""
    q_norm: np.ndarray
    k_norm: np.ndarray
    output: torch.Tensor
    both: torch.Tensor
    """Gate and value of the MLP."""
    down: torch.Tensor
    first: np.ndarray
    """Weights of the norm before attention; `second` before the MLP."""
    second: np.ndarray
    eps: float
    head_eps: float
    scale: float


class FusedDecoder:
    """A decoder whose weights are those of a module: the module's own become views of the joined ones, so updates arrive.

    Args:
        module: a causal model that `is_supported` said yes to.
        cache: keys and values; they are kept in blocks of `kernels.BLOCK` positions.
        tower: of a model that sees.
    """

    def __init__(self, module: Any, cache: KVCache, tower: SplitVLM | None = None) -> None:
        from turnwise.engines.local import numba_kernels

        self.kernels: Any = numba_kernels
        self.cache = cache
        cache.unit = numba_kernels.BLOCK
        body = module.model if tower is None else tower.text
        attention = body.layers[0].self_attn
        self.turned = tower is not None and tower.turns
        self.size: int = attention.head_dim
        self.heads = attention.q_proj.out_features // self.size
        self.kv = attention.k_proj.out_features // self.size
        self.table, self.head = body.embed_tokens.weight, module.lm_head.weight
        self.rotary = body.rotary_emb
        self.last, self.last_eps = _flat(body.norm.weight), float(body.norm.variance_epsilon)
        self.layers = [_layer(layer) for layer in body.layers]
        self.cos = self.sin = np.zeros(0, dtype=np.float32)
        self._angles = 0
        """Positions that these are of; 0 where they are of single rows."""
        self._room: dict[str, torch.Tensor] = {}

    @torch.inference_mode()  # type: ignore[untyped-decorator]
    def forward(
        self, tokens: list[int], positions: list[int], slots: list[int], keep: list[int], look: RowMedia | None = None
    ) -> torch.Tensor:
        """One pass over rows of one token each; rows of one slot in the order of their positions.

        Args:
            look: what the rows see.

        Returns:
            [padded number of `keep`, vocabulary] logits, which the next pass overwrites; rows behind the number of `keep`
            are padding.
        """
        if not keep:
            keep = [0]
        many, hidden = round_up_rows(len(tokens)), self.table.shape[1]
        stream = self._get("stream", many, hidden)
        index = torch.tensor(tokens + [0] * (many - len(tokens)))
        torch.index_select(self.table, 0, index, out=stream)
        rows, place, slot = np.arange(many), np.array(positions), np.array(slots)
        seen = look if look is not None and look.feature_rows else None
        if seen is not None:
            spots, features = torch.tensor(seen.feature_rows), ImageFeatures.join(seen.features)
            stream.index_copy_(0, spots, features.rows)
        turn = self._rotate(place, look)
        change = np.zeros(0, dtype=np.float32)
        for number, layer in enumerate(self.layers):
            change = self._layer(number, layer, stream, change, rows, turn, place, slot)
            if seen is not None and number < len(features.deep):
                torch.from_numpy(change).view(many, hidden).index_add_(0, spots, features.deep[number])
        wanted, normed = np.array(keep), self._get("kept", round_up_rows(len(keep)), hidden)
        self.kernels.add_and_norm(_flat(stream), change, wanted, self.last, self.last_eps, _flat(normed))
        return torch.mm(normed, self.head.T, out=self._get("logits", len(normed), self.head.shape[0]))

    def _layer(
        self,
        number: int,
        layer: FusedLayer,
        stream: torch.Tensor,
        change: np.ndarray,
        rows: np.ndarray,
        turn: np.ndarray,
        place: np.ndarray,
        slot: np.ndarray,
    ) -> np.ndarray:
        """What the MLP of a layer adds to the stream, which the next one is to add; of the attention it is added here."""
        call, many, flat = self.kernels, len(rows), _flat(stream)
        normed = self._get("normed", *stream.shape)
        call.add_and_norm(flat, change, rows, layer.first, layer.eps, _flat(normed))
        qkv = torch.mm(normed, layer.qkv.T, out=self._get("qkv", many, layer.qkv.shape[0]))
        keys, values = self.cache.blocks(number, self.kv, self.size)
        mixed = self._get("mixed", many, self.heads * self.size)
        scores = self._get("scores", self.heads // self.kv, self.cache.capacity)
        call.attend(
            _flat(qkv),
            layer.bias,
            layer.q_norm,
            layer.k_norm,
            layer.head_eps,
            self.cos,
            self.sin,
            turn,
            place,
            slot,
            _flat(keys),
            _flat(values),
            self.cache.capacity,
            self.heads,
            self.kv,
            self.size,
            layer.scale,
            _flat(scores),
            _flat(mixed),
        )
        added = self._get("added", *stream.shape)
        torch.mm(mixed, layer.output.T, out=added)
        call.add_and_norm(flat, _flat(added), rows, layer.second, layer.eps, _flat(normed))
        both = torch.mm(normed, layer.both.T, out=self._get("both", many, layer.both.shape[0]))
        gated = self._get("gated", many, layer.down.shape[1])
        call.swiglu(_flat(both), many, layer.down.shape[1], _flat(gated))
        return _flat(torch.mm(gated, layer.down.T, out=added))

    def _get(self, name: str, rows: int, size: int) -> torch.Tensor:
        """Room for an intermediate result, which grows and is used again."""
        found = self._room.get(name)
        if found is None or found.shape[0] < rows or found.shape[1] != size:
            found = self._room[name] = torch.zeros(rows, size)
        return found[:rows]

    def _rotate(self, place: np.ndarray, look: RowMedia | None) -> np.ndarray:
        """Let the module compute its rotary embedding: for as many positions as the cache holds, once; or for these rows.

        Returns:
            Which angle each row takes.
        """
        if self.turned and look is not None:
            at = torch.zeros(3, 1, round_up_rows(len(place)), dtype=torch.long)
            at[:, 0, : len(place)] = torch.tensor(look.rotary_positions)
            cos, sin = self.rotary(self.table, at)
            self.cos, self.sin, self._angles = _flat(cos.contiguous()), _flat(sin.contiguous()), 0
            return np.arange(len(place))
        if self._angles < self.cache.capacity:
            self._angles = self.cache.capacity
            cos, sin = self.rotary(self.table, torch.arange(self._angles)[None])
            self.cos, self.sin = _flat(cos.contiguous()), _flat(sin.contiguous())
        return place


def make_fused_decoder(module: Any, context: int, cache: KVCache, tower: SplitVLM | None = None) -> FusedDecoder | None:
    """The fused pass of a module that still attends on its own, or None where it is not for it.

    It is for modules that are built of its parts, whose logits on random ids it has, where numba is installed.
    """
    if not is_supported(module, tower):
        return None
    try:
        made = FusedDecoder(module, cache, tower)
    except ImportError:
        _log.info("local engine: numba is not installed, so the model runs module by module, which is slower")
        return None
    except Exception as error:  # a compiler that is newer than this code must not keep a model from running
        _log.warning("local engine: numba cannot compile here, so the model runs module by module, which is slower: %r", error)
        return None
    if matches_module(module, made, min(PROOF, context), tower):
        return made
    cache.unit = 1
    return None


def is_supported(module: Any, tower: SplitVLM | None = None) -> bool:
    """Whether a module is built of what the pass computes, in sizes that the kernels take.

    That says nothing of the order in which it uses its parts, or of factors in between: `matches_module` does.
    """
    try:
        body = module.model if tower is None else tower.text
        layers, names = body.layers, {"embed_tokens.weight", "norm.weight"}
        for number, layer in enumerate(layers):
            names |= {f"layers.{number}.{name}" for name in _names(layer)}
        # What else a model that sees has is its tower's: that decoder and head are all of the rest is proven there.
        whole = tower is not None or set(module.state_dict()) == {"lm_head.weight", *(f"model.{name}" for name in names)}
        attention = [layer.self_attn for layer in layers]
        size, queries, keys = attention[0].head_dim, attention[0].q_proj.out_features, attention[0].k_proj.out_features
        widths = [size, body.embed_tokens.embedding_dim, *(layer.mlp.down_proj.in_features for layer in layers)]
        config = module.config.get_text_config()
        rope = (getattr(config, "rope_parameters", None) or {}).get("rope_type", "default")
        capped = [getattr(config, f"{where}_logit_softcapping", None) for where in ("attn", "final")]  # unseen on small logits
        return (
            whole
            and set(body.state_dict()) == names
            and set(module.lm_head.state_dict()) == {"weight"}
            and all(p.dtype == torch.float32 and p.device.type == "cpu" for p in module.parameters())
            and not any(width % 16 for width in widths)
            and queries % keys == 0
            and all((a.head_dim, a.q_proj.out_features, a.k_proj.out_features) == (size, queries, keys) for a in attention)
            and all(getattr(a, "sliding_window", None) is None for a in attention)
            and rope not in ("dynamic", "longrope")
            and capped == [None, None]
        )
    except (AttributeError, IndexError, TypeError):
        return False


def _names(layer: Any) -> set[str]:
    """Names of the weights that a layer of this structure has."""
    attention = [f"self_attn.{letter}_proj.weight" for letter in "qkvo"]
    biases = [f"self_attn.{letter}_proj.bias" for letter in "qkv"] if layer.self_attn.q_proj.bias is not None else []
    norms = ["self_attn.q_norm.weight", "self_attn.k_norm.weight"] if hasattr(layer.self_attn, "q_norm") else []
    mlp = [f"mlp.{name}_proj.weight" for name in ("gate", "up", "down")]
    return {"input_layernorm.weight", "post_attention_layernorm.weight", *attention, *biases, *norms, *mlp}


@torch.inference_mode()  # type: ignore[untyped-decorator]
def matches_module(module: Any, made: FusedDecoder, count: int, tower: SplitVLM | None = None) -> bool:
    """Whether the pass comes to the logits of the module, on random ids of which some are fed at once, some one by one.

    A model that sees is also shown features of noise, at positions that differ in time, height and width.

    Rows without a distribution are left out, on both sides alike; there has to be one that has it.
    """
    chance = torch.Generator().manual_seed(0)
    ids = torch.randint(made.table.shape[0], (count,), generator=chance)
    look = None if tower is None else _noise(tower, made, count, chance)
    if tower is None or look is None:
        expected = module(ids[None], use_cache=False).logits[0]
    else:
        turns = torch.tensor(look.rotary_positions)[:, None] if tower.turns else torch.arange(count)[None]
        hidden = tower.decode(ids[None], turns, torch.tensor(look.feature_rows), look.features[0])
        expected = tower.head(hidden)[0]
    made.cache.resize(2, -(-count // made.cache.unit) * made.cache.unit)
    cuts, logits = sorted({0, 2 * count // 3, 2 * count // 3 + 1, count - 1, count}), []
    for start, end in pairwise(cuts):
        rows = list(range(end - start))
        part = None if look is None else _part(look, start, end)
        piece = made.forward(ids[start:end].tolist(), list(range(start, end)), [1] * len(rows), rows, part)
        logits.append(piece[: len(rows)].clone())
    made.cache.clear()
    got = torch.cat(logits)
    sound = expected.isfinite().all(1)
    if not sound.any() or expected.shape != got.shape:
        return False
    largest = max(1.0, float(expected[sound].abs().max()))
    return bool((got[sound] - expected[sound]).abs().max() <= TOLERANCE * largest)


def _noise(tower: SplitVLM, made: FusedDecoder, count: int, chance: torch.Generator) -> RowMedia:
    """Something to be seen among so many ids."""
    places = list(range(count // 6, count // 3)) + list(range(count // 2, count // 2 + 2))
    width = made.table.shape[1]

    def rows() -> torch.Tensor:
        return torch.randn(len(places), width, generator=chance) * made.table.std()

    turns = torch.randint(0, 3, (3, count), generator=chance).cumsum(1)
    deep = tuple(rows() for _ in range(min(2, len(made.layers)))) if tower.deep else ()
    return RowMedia((turns[0].tolist(), turns[1].tolist(), turns[2].tolist()), places, [ImageFeatures(rows(), deep)])


def _part(look: RowMedia, start: int, end: int) -> RowMedia:
    """What of it the rows from `start` to `end` see."""
    inside = [number for number, place in enumerate(look.feature_rows) if start <= place < end]
    features = [look.features[0].take(torch.tensor(inside))] if inside else []
    time, high, wide = (row[start:end] for row in look.rotary_positions)
    return RowMedia((time, high, wide), [look.feature_rows[number] - start for number in inside], features)


@torch.no_grad()  # type: ignore[untyped-decorator]
def _joined(*linear: Any) -> torch.Tensor:
    """The weights of linear modules one below the other; the modules' own become views of it."""
    whole = torch.cat([module.weight for module in linear])
    for module, part in zip(linear, whole.split([module.weight.shape[0] for module in linear]), strict=True):
        module.weight.data = part
    return whole


@torch.no_grad()  # type: ignore[untyped-decorator]
def _layer(layer: Any) -> FusedLayer:
    attention, mlp = layer.self_attn, layer.mlp
    projections = (attention.q_proj, attention.k_proj, attention.v_proj)
    nothing = np.zeros(0, dtype=np.float32)
    bias, q_norm, k_norm, head_eps = nothing, nothing, nothing, 0.0
    if attention.q_proj.bias is not None:
        whole = torch.cat([module.bias for module in projections])
        for module, part in zip(projections, whole.split([module.bias.shape[0] for module in projections]), strict=True):
            module.bias.data = part
        bias = _flat(whole)
    if hasattr(attention, "q_norm"):
        q_norm, k_norm = _flat(attention.q_norm.weight), _flat(attention.k_norm.weight)
        head_eps = float(attention.q_norm.variance_epsilon)
    return FusedLayer(
        qkv=_joined(*projections),
        bias=bias,
        q_norm=q_norm,
        k_norm=k_norm,
        output=attention.o_proj.weight,
        both=_joined(mlp.gate_proj, mlp.up_proj),
        down=mlp.down_proj.weight,
        first=_flat(layer.input_layernorm.weight),
        second=_flat(layer.post_attention_layernorm.weight),
        eps=float(layer.input_layernorm.variance_epsilon),
        head_eps=head_eps,
        scale=float(attention.scaling),
    )


def _flat(tensor: torch.Tensor) -> np.ndarray:
    """The numbers of a tensor as numpy sees them, in the same memory."""
    flat: np.ndarray = tensor.detach().view(-1).numpy()
    return flat
