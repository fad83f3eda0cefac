"""What replaying the engine's experts is worth (R3): |dlogp| of trainer and
engine with it and without.

    python benchmarks/r3.py [--episodes 48]

The model is a mixture of experts of 8 layers, 32 experts of which 4 are taken, width 64, random
weights of deviation 0.1: with smaller ones routers hardly differ. It plays episodes of three turns
in LocalEngine, with weights that differ from the trainer's by up to 1% of noise, or in bfloat16, or
with equal weights in float32; one history goes on, one is rewritten, so it branches. Told is the
mean over tokens behind a position at which some layer of the trainer would take other experts than
the engine took: with no replay, with it, and with each position's experts given to the next one,
which must be worse. Last line JSON.
"""

from __future__ import annotations

import argparse
import copy
import json
import sys
import time
import warnings
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "src"))

import torch

import turnwright as tw
from turnwright.engines.local import LocalEngine
from turnwright.training import (
    Credit,
    LogitDistribution,
    LossDenominator,
    make_batch,
    trainable_tokens,
)
from turnwright.training.forward.forward import ForwardPass
from turnwright.training.forward.passes import MicroBatch

LIMITS = tw.Limits(turns=3, turn_tokens=24, on_turn_length="continue")
WORDS = ("lamp", "river", "stone", "cloud", "ember", "moss")


def mixture(layers: int = 8, experts: int = 32, seed: int = 0) -> Any:
    """A Qwen3-MoE with random weights."""
    from transformers import Qwen3MoeConfig, Qwen3MoeForCausalLM

    torch.manual_seed(seed)
    sizes = {
        "hidden_size": 64,
        "intermediate_size": 128,
        "moe_intermediate_size": 64,
        "head_dim": 16,
        "num_attention_heads": 4,
    }
    config = Qwen3MoeConfig(
        vocab_size=260, num_hidden_layers=layers, num_experts=experts, num_experts_per_tok=4, num_key_value_heads=2,  # noqa: E501
        norm_topk_prob=True, initializer_range=0.1, max_position_embeddings=1024, tie_word_embeddings=True, **sizes,  # noqa: E501
    )  # fmt: skip
    return Qwen3MoeForCausalLM(config).eval()


def noisy(model: Any, share: float, seed: int = 1) -> Any:
    """A copy whose weights are multiplied with 1 + share * noise, even between -1 and 1."""
    made, chance = copy.deepcopy(model), torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in made.parameters():
            parameter.mul_(1 + share * (2 * torch.rand(parameter.shape, generator=chance) - 1))
    return made


class Chat(tw.Env):
    """Three turns of a talk about nothing."""

    def reset(self, task: tw.Task, *, seed: int | None = None) -> str:
        """A first word."""
        self.said = 0
        return f"Tell me of {WORDS[int(task.id) % len(WORDS)]} {task.id}."

    def step(self, action: Any) -> tw.Step:
        """And another."""
        self.said += 1
        return tw.Step(f"And of {WORDS[self.said]}?", reward=1.0, terminated=self.said == 3)


def rewritten(conversation: Sequence[tw.Message], replies: Sequence[int]) -> list[tw.Message]:
    """A history that shows earlier replies as a word, so that each turn is a branch."""
    earlier = set(replies[:-1])
    return [
        replace(m, content="...") if number in earlier else m
        for number, m in enumerate(conversation)
    ]


def played(
    model: Any, *, episodes: int, history: Any = "append", **options: Any
) -> list[tw.Trajectory]:
    """Episodes with routes."""
    renderer = tw.byte_renderer()
    # A model that has learned nothing would end episodes with them.
    renderer.banned_ids |= frozenset((256, 257))
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "local engine: on this machine")
        engine = LocalEngine(model, renderer=renderer, **options)
    tasks = [tw.Task("", id=str(number)) for number in range(-(-episodes // 4))]
    return tw.rollout(
        Chat, tasks, engine, samples=4, limits=LIMITS, history=history, want=["routes"]
    )


@dataclass
class Compared:
    """Of N tokens that carry loss."""

    off: torch.Tensor
    """|dlogp| of trainer and engine, N, without replay."""
    on: torch.Tensor
    shifted: torch.Tensor
    """With the experts of the position before."""
    flipped: torch.Tensor
    """Whether some layer of the trainer takes other experts at the position
    that predicts the token."""
    pairs: float
    """Share of (position, layer) whose experts differ."""
    rows: int

    def means(self, what: torch.Tensor) -> tuple[float, float, float]:
        """Mean |dlogp| without, with, and with shifted replay over some tokens."""
        return (
            float(self.off[what].mean()),
            float(self.on[what].mean()),
            float(self.shifted[what].mean()),
        )


@torch.no_grad()
def compare(model: Any, trajectories: Sequence[tw.Trajectory]) -> Compared:
    """What a trainer makes of episodes, each way."""
    forward, law = (
        ForwardPass(model, replay=True),
        LogitDistribution(1.0, frozenset((256, 257, 259))),
    )
    assert forward.replay is not None
    credits = [Credit(t, 1.0, None, trainable_tokens(t)) for t in trajectories]
    batch = make_batch(
        credits, LossDenominator.of(credits, "token"), micro_tokens=4096, routes=True
    )
    own: list[torch.Tensor] = []
    hooks = [
        r.module.register_forward_hook(lambda m, a, out: own.append(out[2]))
        for r in forward.replay.routers
    ]

    def logprobs(micro: MicroBatch) -> torch.Tensor:
        return forward.stats(micro, None, law, entropy=False).logprobs_m.double()

    found = [torch.empty_like(batch.engine_n) for _ in range(3)]
    flipped, differ, count = torch.zeros(batch.size, dtype=torch.bool), 0, 0
    for micro in batch.micros:
        n, told = micro.tokens_m, micro.routes
        assert told is not None
        own.clear()
        found[0][n] = logprobs(replace(micro, routes=None))
        mine = torch.stack(own, 1).sort(-1).values
        theirs = told.experts_pn.long().view(mine.shape).sort(-1).values
        unlike = (mine != theirs).any(-1) & told.known_p[:, None]
        differ, count = (
            differ + int(unlike.sum()),
            count + int(told.known_p.sum()) * unlike.shape[1],
        )
        flipped[n] = unlike.any(1)[micro.before_m]
        found[1][n] = logprobs(micro)
        found[2][n] = logprobs(
            replace(micro, routes=replace(told, experts_pn=told.experts_pn.roll(1, 0)))
        )
    for hook in hooks:
        hook.remove()
    off, on, shifted = [(each - batch.engine_n).abs() for each in found]
    return Compared(
        off,
        on,
        shifted,
        flipped,
        differ / count,
        len([s for t in trajectories for s in t.samples()]),
    )


SETTINGS = {
    "noise 1%": ("append", 0.01, None),
    "noise 1%, branches": (rewritten, 0.01, None),
    "bf16 -> fp32": ("append", 0.0, torch.bfloat16),
    "fp32 -> fp32": ("append", 0.0, None),
}


def cost(model: Any) -> dict[str, float]:
    """CPU seconds of the engine's share of recording, and bytes of routes per token in
    memory and in the journal."""
    import tempfile

    from turnwright.engines.local.model import RouteRecorder

    seconds = {}
    for name in ("recorded", "not recorded"):
        keep = RouteRecorder.__bool__
        if name == "not recorded":
            RouteRecorder.__bool__ = lambda self: False  # type: ignore[method-assign]
        try:
            played(model, episodes=4)
            began = time.process_time()
            played(model, episodes=32)
            seconds[name] = time.process_time() - began
        finally:
            RouteRecorder.__bool__ = keep  # type: ignore[method-assign]
    with tempfile.TemporaryDirectory() as place:
        sizes = []
        for want in ([], ["routes"]):
            out = Path(place, str(len(want)))
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                engine = LocalEngine(model, renderer=tw.byte_renderer())
            tasks = [tw.Task("", id=str(number)) for number in range(8)]
            rows = tw.rollout(Chat, tasks, engine, limits=LIMITS, want=want, out=out)
            sizes.append((out / "journal.jsonl").stat().st_size)
        tokens = sum(len(s.ids) for t in rows for s in t.samples())
    return seconds | {"bytes": 8 * 4, "journal_bytes": (sizes[1] - sizes[0]) / tokens}


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--episodes", type=int, default=48)
    args = parser.parse_args()
    torch.set_num_threads(1)
    model, summary = mixture(), {}
    print(f"{sum(p.numel() for p in model.parameters()):,} parameters, {args.episodes} episodes\n")
    titles = ("off", "replay", "shifted", "all off", "replay")
    print(
        f"{'':20} {'rows':>5} {'tokens':>7} {'pairs':>7} {'flipped':>8} "
        + " ".join(f"{title:>9}" for title in titles)
    )
    for name, (history, noise, dtype) in SETTINGS.items():
        engine = noisy(model, noise) if noise else model
        found = compare(model, played(engine, episodes=args.episodes, history=history, dtype=dtype))
        every = torch.ones_like(found.flipped)
        share = float(found.flipped.double().mean())
        flipped, whole = (
            found.means(found.flipped if found.flipped.any() else every),
            found.means(every),
        )
        print(
            f"{name:20} {found.rows:5} {found.off.numel():7} {found.pairs:7.2%} {share:8.1%} "
            + " ".join(f"{value:9.2e}" for value in (*flipped, *whole[:2]))
        )
        summary[name] = dict(zip(("off", "replay", "shifted"), flipped, strict=True)) | {
            "flipped": share
        }
        summary[name]["no_op"] = bool((found.on == found.off).all())
    summary["cost"] = cost(model)
    print(
        "\n(off, replay, shifted: mean |dlogp| of flipped tokens, of all where none "
        f"is)\n{summary['cost']}"
    )
    print(json.dumps(summary))


if __name__ == "__main__":
    main()
