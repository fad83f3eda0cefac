"""CPU of reinforcement against TRL: the quickstart's step, and its way to 90%, from the same
warmed weights on one thread.

    python benchmarks/against_trl.py [--seeds 0 1 2] [--steps 60]

TRL 1.16.0 plays the same tasks in groups of the same sizes by a `rollout_func` over `generate`, as
its users write one: a batch of all episodes, a call for each turn, contexts kept as ids. It is
installed as for `make test-compat`. A run has reached 90% when its last three steps sampled that
mean success; CPU counts from the first step on, without imports and evaluations. Ratios are TRL's
CPU over ours, means over seeds; those of rollout and training take each side's split of a step by
wall time. Last line JSON.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT / "src"), str(ROOT / "benchmarks"), str(ROOT / "tests" / "compat")]
RECIPE = ROOT / "recipes" / "quickstart.toml"
GOAL, MEAN_OVER = 0.9, 3
WARM = 2
"""Steps that are left out of the cost of one: the first ones compile and fill caches."""


def ours(warmed: Path, seed: int, steps: int, out: Path) -> list[dict[str, float]]:
    """Train the quickstart's recipe from warmed weights in this process."""
    from turnwright.cli.main import main

    words = [
        "train",
        RECIPE,
        "--seed",
        seed,
        "--out",
        out,
        "--display",
        "none",
        "--model.path",
        warmed,
        "--warmup.demos",
        0,
    ]
    words += ["--train.steps", steps, "--eval.every", steps, "--eval.tasks", 1]
    if main([str(word) for word in words]):
        raise SystemExit("turnwright train failed")
    rows = [json.loads(line) for line in (out / "metrics.jsonl").read_text().splitlines()]
    before = max(
        (row["cpu_s"] for row in rows if row["phase"] != "train" and row.get("step", 0) == 0),
        default=0.0,
    )
    found = []
    for row in (row for row in rows if row["phase"] == "train"):
        spent = row["cpu_s"] - before
        before = row["cpu_s"]
        rollout = row["rollout_s"] / (row["rollout_s"] + row["train_s"]) * spent
        found.append({"success": row["success"], "rollout": rollout, "train": spent - rollout})
    return found


def theirs(warmed: Path, seed: int, steps: int, out: Path) -> list[dict[str, float]]:
    """Train with TRL from the same weights in this process."""
    from kit import originals

    originals.use()
    os.environ["TRL_EXPERIMENTAL_SILENCE"] = "1"
    import torch
    import trl
    from datasets import Dataset
    from transformers import AutoModelForCausalLM, AutoTokenizer

    from turnwright.config import load
    from turnwright.envs.builtin.hop import Hop

    torch.manual_seed(seed)
    config = load(RECIPE).config
    episodes = config.rollout.groups * config.rollout.group_size
    tasks = Hop.tasks("train", steps * config.rollout.groups, seed)
    model = AutoModelForCausalLM.from_pretrained(warmed)
    tokenizer = AutoTokenizer.from_pretrained(warmed, padding_side="left")
    found: list[dict[str, float]] = []
    played = Player(tokenizer, config.limits.turns, config.limits.turn_tokens)

    def rollout(prompts: Sequence[Any], trainer: Any) -> dict[str, list[Any]]:
        began, now = time.process_time(), time.monotonic()
        rows = played.play([tasks[int(prompt[-1]["number"])] for prompt in prompts], trainer)
        found.append(
            {
                "success": sum(rows["success"]) / len(prompts),
                "rollout": time.process_time() - began,
                "began": began,
            }
        )
        found[-1]["wall"] = time.monotonic() - now
        return rows

    args = trl.GRPOConfig(
        output_dir=str(out),
        per_device_train_batch_size=episodes,
        num_generations=config.rollout.group_size,
        max_steps=steps,
        learning_rate=config.train.lr,
        lr_scheduler_type="constant",
        temperature=1.0,
        beta=0.0,
        report_to=[],
        save_strategy="no",
        logging_strategy="no",
        seed=seed,
        use_cpu=True,
        bf16=False,
        # it would cost TRL time, and it turns off the cache of `generate`
        gradient_checkpointing=False,
        disable_tqdm=True,
        shuffle_dataset=False,
    )
    rows = [
        {"prompt": [{"role": "user", "content": task.messages[0].text, "number": n}]}
        for n, task in enumerate(tasks)
    ]
    trainer = trl.GRPOTrainer(
        model,
        lambda completions, success, **_: success,
        args,
        train_dataset=Dataset.from_list(rows),
        processing_class=tokenizer,
        rollout_func=rollout,
    )
    trainer.train()
    ends = [*(step["began"] for step in found[1:]), time.process_time()]
    return [
        {
            "success": step["success"],
            "rollout": step["rollout"],
            "train": end - step["began"] - step["rollout"],
        }
        for step, end in zip(found, ends, strict=True)
    ]


class Player:
    """A `rollout_func` over `generate`: all episodes in a batch, one call a turn."""

    def __init__(self, tokenizer: Any, turns: int, turn_tokens: int) -> None:
        self.tokenizer, self.turns, self.turn_tokens = tokenizer, turns, turn_tokens
        (self.end,) = tokenizer.encode("<|im_end|>", add_special_tokens=False)

    def play(self, tasks: Sequence[Any], trainer: Any) -> dict[str, list[Any]]:
        """Play an episode for each task."""
        import torch

        from turnwright.envs.builtin.hop import Hop
        from turnwright.envs.env import Action
        from turnwright.types import Message

        model = trainer.accelerator.unwrap_model(trainer.model)
        worlds = [Hop() for _ in tasks]
        rows: dict[str, list[Any]] = {
            name: [] for name in ("prompt_ids", "completion_ids", "logprobs", "env_mask", "success")
        }
        for world, task in zip(worlds, tasks, strict=True):
            messages = [{"role": m.role, "content": m.text} for m in drive(world.reset(task))]
            rows["prompt_ids"].append(
                self.tokenizer.apply_chat_template(messages, add_generation_prompt=True)[
                    "input_ids"
                ]
            )
            for name in ("completion_ids", "logprobs", "env_mask"):
                rows[name].append([])
            rows["success"].append(0.0)
        playing = list(range(len(tasks)))
        for turn in range(self.turns):
            contexts = [
                {"input_ids": rows["prompt_ids"][i] + rows["completion_ids"][i]} for i in playing
            ]
            batch = self.tokenizer.pad(contexts, return_tensors="pt")
            with torch.no_grad():
                out = model.generate(
                    **batch,
                    max_new_tokens=self.turn_tokens,
                    do_sample=True,
                    temperature=1.0,
                    top_k=0,
                    eos_token_id=self.end,
                    pad_token_id=self.tokenizer.pad_token_id or self.end,
                    return_dict_in_generate=True,
                    output_logits=True,
                )
            sampled = out.sequences[:, batch["input_ids"].shape[1] :]
            logps = torch.log_softmax(torch.stack(out.logits, 1).float(), -1).gather(
                2, sampled[..., None]
            )[..., 0]
            going = []
            for i, ids, logp in zip(playing, sampled.tolist(), logps.tolist(), strict=True):
                ended = self.end in ids
                reply = ids[: ids.index(self.end) + 1] if ended else ids
                rows["completion_ids"][i] += reply
                rows["logprobs"][i] += logp[: len(reply)]
                rows["env_mask"][i] += [1] * len(reply)
                if not ended:
                    continue
                step = drive(
                    worlds[i].step(
                        Action(
                            text := self.tokenizer.decode(reply[:-1]), Message("assistant", text)
                        )
                    )
                )
                rows["success"][i] = step.reward or 0.0
                if step.terminated or turn + 1 == self.turns:
                    continue
                text = f"\n<|im_start|>user\n{step.observation}<|im_end|>\n<|im_start|>assistant\n"
                added = self.tokenizer.encode(text, add_special_tokens=False)
                rows["completion_ids"][i] += added
                rows["logprobs"][i] += [0.0] * len(added)
                rows["env_mask"][i] += [0] * len(added)
                going.append(i)
            if not (playing := going):
                break
        return rows


def drive(coroutine: Any) -> Any:
    """Return the result of a coroutine that awaits nothing."""
    try:
        coroutine.send(None)
    except StopIteration as ended:
        return ended.value
    raise RuntimeError("it waits for something")


SIDES = {"ours": ours, "theirs": theirs}


def summarize(steps: Sequence[dict[str, float]]) -> dict[str, Any]:
    """Return the CPU of a step, and that to the goal (None if it was not reached)."""
    costs = [step["rollout"] + step["train"] for step in steps]
    means = [
        sum(s["success"] for s in steps[n - MEAN_OVER : n]) / MEAN_OVER
        for n in range(MEAN_OVER, len(steps) + 1)
    ]
    reached = next((n for n, mean in enumerate(means, MEAN_OVER) if mean >= GOAL), None)
    kept = steps[WARM:]
    return {
        "step": sum(costs[WARM:]) / len(kept),
        "rollout": sum(s["rollout"] for s in kept) / len(kept),
        "train": sum(s["train"] for s in kept) / len(kept),
        "steps_to_90": reached,
        "to_90": sum(costs[:reached]) if reached else None,
        "first": steps[0]["success"],
        "last": means[-1],
    }


def main() -> None:
    """Measure both sides for each seed and print the ratios."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--seeds", nargs="*", type=int, default=[0, 1, 2])
    parser.add_argument("--steps", type=int, default=60)
    parser.add_argument("--child", nargs=5, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.child:
        side, warmed, seed, steps, out = args.child
        print(json.dumps(SIDES[side](Path(warmed), int(seed), int(steps), Path(out))))
        return
    from kit import originals

    if not (originals.folder() / "ready").is_file():
        originals.install(originals.folder())
    env = os.environ | {
        "OMP_NUM_THREADS": "1",
        "PYTHONPATH": str(ROOT / "src"),
        "HF_HUB_OFFLINE": "1",
    }
    found: dict[str, list[dict[str, Any]]] = {side: [] for side in SIDES}
    print(
        "| seed | | CPU s a step | rollout | training | steps to 90% | CPU s to 90% | success, "
        "first and last steps |"
    )
    print("|---|---|---|---|---|---|---|---|")
    for seed in args.seeds:
        with tempfile.TemporaryDirectory() as name:
            folder = Path(name)
            words = [
                sys.executable,
                "-m",
                "turnwright",
                "train",
                RECIPE,
                "--seed",
                seed,
                "--out",
                folder / "warm",
            ]
            words += ["--train.steps", 1, "--checkpoint.keep", 99, "--display", "none"]
            subprocess.run(
                [str(word) for word in words], env=env, check=True, stdout=subprocess.DEVNULL
            )
            for side in SIDES:
                child = [
                    "--child",
                    side,
                    folder / "warm" / "checkpoints" / "warmed",
                    seed,
                    args.steps,
                    folder / side,
                ]
                done = subprocess.run(
                    [sys.executable, __file__, *map(str, child)],
                    env=env,
                    check=True,
                    stdout=subprocess.PIPE,
                    text=True,
                )
                row = summarize(json.loads(done.stdout.splitlines()[-1]))
                found[side].append(row)
                cells = [f"{row[key]:.3f}" for key in ("step", "rollout", "train")]
                cells += [str(row["steps_to_90"]), f"{row['to_90']:.1f}" if row["to_90"] else "-"]
                print(
                    f"| {seed} | {side} | {' | '.join(cells)} | {row['first']:.2f}, "
                    f"{row['last']:.2f} |",
                    flush=True,
                )

    def ratio(key: str) -> float | None:
        both = [[row[key] for row in found[side]] for side in ("theirs", "ours")]
        if any(value is None for values in both for value in values):
            return None
        return round(sum(both[0]) / sum(both[1]), 2)

    names = {
        "cpu_per_step_ratio": "step",
        "cpu_to_90_ratio": "to_90",
        "rollout_ratio": "rollout",
        "train_ratio": "train",
    }
    print(json.dumps({name: ratio(key) for name, key in names.items()}))


if __name__ == "__main__":
    main()
