"""Groups that share much, and a float64 model whose attention is looked up by name, for the
tests of token trees."""

from __future__ import annotations

from types import SimpleNamespace

import torch
from hypothesis import strategies as st
from transformers import Qwen3Config, Qwen3ForCausalLM
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from kit.double_precision import Block, Body, Model64, _norm
from kit.training import E, M, P
from turnwright.training import build_prefix_tree
from turnwright.training.forward.prefix_tree import SortedRows
from turnwright.types import EpisodeKey, Group, Span, StopReason, Task, Trajectory


@st.composite
def families(draw, *, vocabulary=50, max_groups=2, max_size=4):
    """Groups as they come: a prompt that siblings share (tasks now and then begin alike), replies
    that are equal for a while, thinking that is stripped from the next turn's context, replies cut
    off by a rewind, and plain appends."""
    ids = st.lists(st.integers(0, vocabulary - 1), min_size=1, max_size=6)
    system = draw(ids)
    made = []
    for g in range(draw(st.integers(1, max_groups))):
        task = f"task-{g}"
        prompt = system + draw(ids)
        # few, so that siblings say the same now and then.
        replies = draw(st.lists(ids, min_size=1, max_size=3))
        rows = []
        for sample in range(draw(st.integers(2, max_size))):
            spans = [Span(P, tuple(prompt))]
            for _ in range(draw(st.integers(1, 3))):
                here = len(spans) - 1
                said = tuple(
                    draw(st.sampled_from(replies))
                    + draw(st.lists(st.integers(0, vocabulary - 1), max_size=3))
                )
                logprobs = tuple(draw(st.floats(-5.0, -2.0)) for _ in said)
                spans.append(Span(M, said, here, spans[here].end, logprobs, 0))
                seen = tuple(draw(ids))
                if draw(st.booleans()):
                    # Thinking stripped: only the reply's tail stays, as context of the next turn.
                    spans.append(Span(P, said[len(said) // 2 :] + seen, here, spans[here].end))
                else:
                    spans.append(Span(E, seen, len(spans) - 1, spans[-1].end))
            t = Trajectory(
                Task(task, id=task),
                EpisodeKey("train", 0, task, sample),
                spans,
                reward=float(draw(st.integers(0, 2))),
            )
            t.stop = StopReason.DONE
            rows.append(t)
        made.append(Group(rows[0].task, rows))
    return made


def laid(rows):
    """The trie over all rows."""
    return build_prefix_tree(SortedRows.of(rows), 0, len(rows))


def ancestors(made):
    """[T, T] booleans: whether the row's token sees the column's, from the rows' paths alone."""
    sees = torch.zeros(made.tree.size, made.tree.size, dtype=torch.bool)
    for places in made.places.values():
        path = torch.from_numpy(places)
        for depth, at in enumerate(places.tolist()):
            sees[at, path[: depth + 1]] = True
    return sees


class NamedBlock(Block):
    """The block of `Model64`, whose attention transformers' table names."""

    is_causal = True

    def forward(self, x_btd, **more):
        q, k, v = (
            part.unflatten(-1, (2, -1)).transpose(1, 2)
            for part in self.qkv(_norm(x_btd)).chunk(3, -1)
        )
        attend = ALL_ATTENTION_FUNCTIONS[self.config._attn_implementation]
        mixed, _ = attend(self, q, k, v, None, scaling=q.shape[-1] ** -0.5, **more)
        x_btd = x_btd + self.out(mixed.flatten(-2))
        return x_btd + self.down(torch.tanh(self.up(_norm(x_btd))))


class NamedBody(Body):
    """The body of `Model64`, of such blocks."""

    def forward(self, input_ids, position_ids, attention_mask=None, use_cache=False, **more):
        x_btd = self.ids(input_ids) + self.positions(position_ids)
        for block in self.blocks:
            x_btd = block(x_btd, **more)
        return SimpleNamespace(last_hidden_state=x_btd)


class Tree64(Model64):
    """`Model64` with the same weights, whose attention can be led along a tree."""

    def __init__(self, **settings):
        super().__init__(**settings)
        self.model.__class__ = NamedBody
        size = self.model.ids.embedding_dim
        config = SimpleNamespace(
            _attn_implementation="sdpa",
            num_hidden_layers=2,
            hidden_size=size,
            num_attention_heads=2,
            head_dim=size // 2,
        )
        self.model.config = config
        for block in self.model.blocks:
            block.__class__ = NamedBlock
            block.config = config


def small(**more):
    sizes = {
        "vocab_size": 50,
        "hidden_size": 32,
        "intermediate_size": 48,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
    }
    torch.manual_seed(0)
    config = Qwen3Config(
        **sizes,
        num_key_value_heads=2,
        head_dim=8,
        initializer_range=0.2,
        max_position_embeddings=256,
        **more,
    )
    return Qwen3ForCausalLM(config).eval()
