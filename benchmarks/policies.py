"""Two policies on one base, each for an agent of its own: what they learn, and what
one can know of the other.

    python benchmarks/policies.py              # three seeds; 7 minutes on two busy cores
    python benchmarks/policies.py --seeds 1
    python benchmarks/policies.py --gpu        # a base of 0.5 B numbers in bfloat16 on a CUDA device

Two agents read the same prompts, and each is rewarded for a digit of its own
(recipes/two_policies.toml), so no single policy can succeed in more than half. A base is warmed up
to say random digits; the arms add LoRA adapters: one for each agent (`separate`), one for both
(`shared`), one for each with rewards dealt anew among episodes and agents (`shuffled`). `success_*`
is the mean over agents of 1,000 held-out episodes.

The last line is JSON. `gradient_other`: largest gradient of an adapter in a step on the other's ids
alone; `gradient_same_bits`: whether an adapter's gradient keeps its bits when the other's ids and
rewards are replaced; `base_changed`: whether training moved the base; `mismatch_max`: largest
|logprob of trainer - of engine| in nats, and `mismatch_swapped` that of the other policy's trainer;
`bits_alone`: whether a policy samples the same ids with the same logprobs when it plays alone;
`adapters_cost`: sampled tokens per second of two adapters over one, at equal calls.

With `--gpu` the base is a Qwen2 with the sizes of Qwen2.5-0.5B (24 layers, vocabulary 151,936) and
random weights; one seed, `separate` alone. `steps`: medians over the updates of `separate`.
"""  # noqa: E501

from __future__ import annotations

import argparse
import asyncio
import json
import random
import shutil
import statistics
import sys
import tempfile
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT / "src"))
sys.path.insert(0, str(ROOT / "benchmarks"))

import torch  # noqa: E402
from honesty import Shuffled  # noqa: E402
from transformers import AutoConfig, AutoModelForCausalLM, Qwen2Config  # noqa: E402

from turnwright.config import PolicyConfig, load  # noqa: E402
from turnwright.engines import Generation, PolicyEngine, Request  # noqa: E402
from turnwright.engines.local import LocalEngine  # noqa: E402
from turnwright.records import NullListener, RunDir  # noqa: E402
from turnwright.rollouts import Rollout  # noqa: E402
from turnwright.rollouts.rollout_settings import RolloutSettings  # noqa: E402
from turnwright.training import TrainingRun  # noqa: E402
from turnwright.training.policies import Policies  # noqa: E402
from turnwright.training.task_plan import make_env_specs  # noqa: E402
from turnwright.types import Trajectory  # noqa: E402

RECIPE = ROOT / "recipes" / "two_policies.toml"
AGENTS = ("left", "right")
ARMS = ("separate", "shared", "shuffled")
HALF_BILLION = {
    "hidden_size": 896,
    "intermediate_size": 4864,
    "num_hidden_layers": 24,
    "vocab_size": 151_936,
}
HALF_BILLION |= {
    "num_attention_heads": 14,
    "num_key_value_heads": 2,
    "max_position_embeddings": 512,
}
ON_GPU = ["--model.device", "cuda", "--train.lr", "1e-3"]
HELD_OUT = ["--eval.tasks", "200", "--eval.samples", "5", "--eval.greedy", "false"]


def open_run(
    words: Sequence[str], out: Path, policies: tuple[PolicyConfig, ...] | None = None
) -> tuple[TrainingRun, RunDir]:
    """Return a run in this process, and its directory to be closed."""
    config = load(RECIPE, words).config
    config = config if policies is None else replace(config, policy=policies)
    directory = RunDir(out)
    directory.__enter__()
    return TrainingRun(config, make_env_specs(config), directory, NullListener()), directory


def warmed_base(seed: int, folder: Path, *words: str) -> Path:
    """Return a model that says random digits."""
    words = ("--seed", str(seed), "--train.steps", "0", "--eval.tasks", "1", *words)
    run, directory = open_run(words, folder / "base", one_policy())
    asyncio.run(run.play())
    directory.__exit__(None, None, None)
    found = Path(tempfile.mkdtemp(dir=folder)) / "warmed"
    shutil.move(folder / "base" / "checkpoints" / "warmed" / "both", found)
    shutil.rmtree(folder / "base")
    return found


def half_billion(tiny: Path, folder: Path) -> Path:
    """Return a Qwen2 of 0.5 B random numbers with the tokenizer and the
    template of a tiny model."""
    small = AutoConfig.from_pretrained(tiny)
    special = {
        name: getattr(small, name) for name in ("eos_token_id", "pad_token_id", "bos_token_id")
    }
    torch.manual_seed(0)
    config = Qwen2Config(**HALF_BILLION, **special, tie_word_embeddings=True)
    directory = shutil.copytree(
        tiny, folder / "large", ignore=shutil.ignore_patterns("*.safetensors", "config.json")
    )
    with torch.device("cuda" if torch.cuda.is_available() else "cpu"):
        model = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
    model.save_pretrained(directory)
    return Path(directory)


def one_policy() -> tuple[PolicyConfig, ...]:
    """Return one policy for both agents."""
    return (PolicyConfig(name="both", agents=AGENTS),)


def words_for(seed: int, base: Path) -> list[str]:
    """Return the overrides of an arm that starts from a base."""
    return [
        "--seed",
        str(seed),
        "--model.path",
        str(base),
        "--warmup.dataset",
        "none",
        "--lora.rank",
        "8",
    ]


def arm(name: str, seed: int, base: Path, folder: Path, more: Sequence[str]) -> float:
    """Train an arm; return its success."""
    words = [*words_for(seed, base), *HELD_OUT, *more]
    run, directory = open_run(words, folder / name, one_policy() if name == "shared" else None)
    if name == "shuffled":
        run.policies = Shuffled(run.policies, seed)  # type: ignore[assignment]
    asyncio.run(run.play())
    directory.__exit__(None, None, None)
    rows = [json.loads(line) for line in (folder / name / "metrics.jsonl").read_text().splitlines()]
    (found,) = (
        row
        for row in rows
        if row["phase"] == "eval" and row["name"] == "after" and row["mode"] == "sampled"
    )
    assert found["n"] + found["failed"] == 1000, found
    return float(found["reward"] * found["n"] / 1000)  # an episode without a reward is no success


def medians(folder: Path) -> dict[str, float]:
    """Return medians of a run's updates after the first: seconds, sampled and trained ids
    per second, mismatch."""
    rows = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    steps = [row for row in rows if row["phase"] == "train" and "mismatch_max" in row][1:]
    names = (
        "rollout_s",
        "train_s",
        "update_s",
        "tokens_per_s",
        "trained_tokens_per_s",
        "peak_gpu_memory_mib",
    )
    names += ("mismatch", "mismatch_max", "mismatch_kl")
    return {
        name: statistics.median(row[name] for row in steps if name in row)
        for name in names
        if name in steps[-1]
    }


def gradients(policies: Policies, trajectories: Sequence[Trajectory]) -> list[torch.Tensor]:
    """Return the gradient of each policy's adapter in a step on episodes; 0 where it has none."""
    for policy in policies:
        policy.trainer.optimizer.zero_grad()
    policies.step(trajectories, step=0, steps=1, version=None)
    return [
        torch.cat(
            [
                (torch.zeros_like(p) if p.grad is None else p.grad).flatten()
                for p in policy.trainer.model.parameters()
                if p.requires_grad
            ]
        )
        for policy in policies
    ]


def replaced(trajectory: Trajectory, agent: str, rng: random.Random) -> Trajectory:
    """Return an episode with other sampled ids and another reward of an agent."""
    spans = [
        replace(span, ids=tuple(rng.sample(range(100, 200), len(span.ids))))
        if span.agent == agent and span.sampled
        else span
        for span in trajectory.spans
    ]
    return replace(
        trajectory, spans=spans, agent_rewards=trajectory.agent_rewards | {agent: rng.random()}
    )


def only(trajectory: Trajectory, agent: str) -> Trajectory:
    """Return the part of an episode that an agent played."""
    from turnwright.training.agent_views import view_of

    view = view_of(trajectory, agent.__eq__, agent)
    assert view is not None
    return view


class Heard:
    """An engine that keeps its requests and what it answered, and stays
    open at the end of a run."""

    def __init__(self, engine: Any) -> None:
        self._engine = engine
        self.calls: list[tuple[Request, Generation]] = []

    def __getattr__(self, name: str) -> Any:
        return getattr(self._engine, name)

    async def generate(self, request: Request) -> Generation:
        """Sample a reply."""
        copied = replace(request, ids=list(request.ids))
        self.calls.append((copied, await self._engine.generate(request)))
        return self.calls[-1][1]

    async def close(self) -> None:
        """Keep it open."""


async def same_alone(engine: Any, calls: Sequence[tuple[Request, Generation]]) -> bool:
    """Return whether the calls of each agent, asked again without the other's, give the
    same ids and logprobs."""
    for agent in AGENTS:
        own = [(request, found) for request, found in calls if request.agent == agent]
        asked = [replace(request, session=f"{request.session}/again") for request, _ in own]
        again = await asyncio.gather(*map(engine.generate, asked))
        if any(
            (a.ids, list(a.logprobs)) != (b.ids, list(b.logprobs))
            for a, (_, b) in zip(again, own, strict=True)
        ):
            return False
    return True


async def probes(seed: int, base: Path, folder: Path, more: Sequence[str]) -> dict[str, Any]:
    """Measure what two adapters know of each other after some steps of training."""
    words = [*words_for(seed, base), *more, "--train.steps", "20", "--eval.tasks", "1"]
    run, directory = open_run(words, folder / "probes")
    frozen = {
        n: p.detach().clone()
        for n, p in run.policies.trained[0].trainer.model.named_parameters()
        if not p.requires_grad
    }
    engine = run.parts.engine
    run.parts.engine = Heard(engine)
    await run.play()
    try:
        heard = Heard(engine)
        rollout = Rollout(
            heard,
            run.parts.renderer,
            RolloutSettings(limits=run.config.limits, seed=run.config.seed),
        )
        both = await rollout.play(
            [episode for choice in run.plan.train[:8] for episode in choice.episodes("probe", 0, 8)]
        )
        both = [t for t in both if {span.agent for span in t.spans if span.sampled} == set(AGENTS)]
        bits = await same_alone(engine, heard.calls)
        mismatch, swapped = [], []
        for number, agent in enumerate(AGENTS):
            views = [only(t, agent) for t in both]
            for policy, found in (
                (run.policies.trained[number], mismatch),
                (run.policies.trained[1 - number], swapped),
            ):
                for view, row in zip(views, policy.trainer.logprobs(views), strict=True):
                    known = [p for span in view.spans if span.sampled for p in span.logprobs or ()]
                    found += [
                        abs(own - engine)
                        for own, engine in zip(row, known, strict=True)
                        if engine is not None
                    ]
        still = Policies(run.policies.trained, engine.policies)  # type: ignore[attr-defined]
        for policy in still:
            policy.trainer.config = replace(
                policy.trainer.config, lr=0.0, weight_decay=0.0, max_mismatch=1e9
            )
        first = gradients(still, both)
        rng, same = random.Random(seed), []
        for number, agent in enumerate(AGENTS):
            other = [replaced(t, agent, rng) for t in both]
            same.append(torch.equal(gradients(still, other)[1 - number], first[1 - number]))
        for policy in still:
            policy.trainer.optimizer.zero_grad()
        left_alone = gradients(still, [only(t, "left") for t in both])[1]
        moved = any(
            not torch.equal(p, frozen[n])
            for policy in still
            for n, p in policy.trainer.model.named_parameters()
            if not p.requires_grad
        )
        speeds = await sampled_per_s(run, engine)
        return {
            "gradient_other": float(left_alone.abs().max()),
            "gradient_same_bits": all(same),
            "base_changed": moved,
            "mismatch_max": max(mismatch),
            "mismatch_swapped": max(swapped),
            "bits_alone": bits,
            "adapters_cost": speeds["two"] / speeds["one"],
            "sampled_per_s": speeds,
        }
    finally:
        await engine.close()
        directory.__exit__(None, None, None)


async def sampled_per_s(run: TrainingRun, two: Any) -> dict[str, float]:
    """Return the sampled tokens per second of two adapters, and of one merged model that plays both
    agents; the best of 3 each."""
    trainer = run.policies.trained[0].trainer
    weight = next(trainer.model.parameters())
    options = {"context": run.config.limits.context, "device": weight.device, "dtype": weight.dtype}
    left = LocalEngine(trainer.model.config, renderer=run.parts.renderer, **options)
    await left.update(trainer.weights(), 0)
    one = PolicyEngine({"left": left}, agents={"left": AGENTS}, fixed=["left"])
    speeds: dict[str, float] = {}
    limits = replace(run.config.limits, turn_tokens=48)
    for _ in range(3):
        for name, engine in (("two", two), ("one", one)):
            rollout = Rollout(engine, run.parts.renderer, RolloutSettings(limits=limits, seed=0))
            spec = replace(run.env_specs[0], agent_function=long_replies)
            episodes = [
                replace(episode, play=spec.agent_function)
                for c in run.plan.train[:32]
                for episode in c.episodes("cost", 0, 8)
            ]
            began = time.perf_counter()
            found = await rollout.play(episodes)
            speed = sum(t.sampled_tokens for t in found) / (time.perf_counter() - began)
            speeds[name] = max(speeds.get(name, 0.0), speed)
    await left.close()
    return speeds


async def long_replies(task: Any, model: Any) -> float:
    """Sample replies of 48 tokens, which no end token ends, from both agents at once."""
    from turnwright import LimitReached

    async def reply(agent: str) -> None:
        with suppress(LimitReached):
            await model.generate(task.messages, agent=agent, temperature=4.0)

    await asyncio.gather(*(reply(agent) for agent in AGENTS))
    return 0.0


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument(
        "--gpu", action="store_true", help="a base of 0.5 B numbers on a CUDA device; one seed"
    )
    args, more = parser.parse_known_args()  # further words override keys of the arms
    more = [*(ON_GPU if args.gpu else ()), *more]
    torch.set_num_threads(1)
    arms = ARMS[:1] if args.gpu else ARMS
    success: dict[str, list[float]] = {name: [] for name in arms}
    seconds: list[float] = []
    found: dict[str, Any] = {}
    for seed in range(1 if args.gpu else args.seeds):
        with tempfile.TemporaryDirectory() as name:
            folder = Path(name)
            base = warmed_base(
                seed,
                folder,
                *(["--warmup.steps", "1", "--model.device", "cpu"] if args.gpu else []),
            )
            if args.gpu:
                base = warmed_base(
                    seed,
                    folder,
                    "--model.path",
                    str(half_billion(base, folder)),
                    "--warmup.lr",
                    "3e-4",
                    *ON_GPU,
                )
            for one in arms:
                began = time.monotonic()
                reward = arm(one, seed, base, folder, more)
                seconds.append(time.monotonic() - began)
                success[one].append(reward)
                print(f"seed {seed} {one}: {reward:.3f} ({seconds[-1]:.0f} s)", flush=True)
            if seed == 0:
                found = asyncio.run(probes(seed, base, folder, more))
                found |= {"steps": medians(folder / "separate")}
                print(found, flush=True)
    means = {f"success_{name}": statistics.mean(values) for name, values in success.items()}
    print(json.dumps(means | found | {"seconds_max": max(seconds), "by_seed": success}))


if __name__ == "__main__":
    main()
