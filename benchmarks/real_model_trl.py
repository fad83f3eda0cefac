"""TRL's side of `real_model.py`: `GRPOTrainer` on `hop`, as its users write it, in a
Python that has TRL and torch.

    python benchmarks/real_model_trl.py DIRECTORY KIND DEVICE STEPS SEED OUT DESCRIPTOR

TRL's `environment_factory` plays by tool calls, and SmolLM2's template has none, so the
episodes are played by a `rollout_func`: all episodes that still go on are one batch of
`generate` in each turn, contexts are kept as ids, and what the environment says is masked.
Logprobs are left out, for TRL reads them with vLLM alone. A step of 64 episodes is one batch of
sampling, and on a CPU eight of training.

KIND is `float32`; `autocast`, weights in float32 under `bf16=True`; or `bfloat16`, weights too.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Coroutine, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from real_model_common import RECIPE, ROOT, OwnTurns

sys.path.insert(0, str(ROOT / "src"))
os.environ["TRL_EXPERIMENTAL_SILENCE"] = "1"

import torch
from datasets import Dataset
from transformers import AutoModelForCausalLM, AutoTokenizer
from trl import GRPOConfig, GRPOTrainer

from turnwright.config import load as load_recipe
from turnwright.envs.builtin.hop import Hop
from turnwright.envs.env import Action
from turnwright.types import Message, Task

TURN_END = "<|im_end|>"
"""Not the tokenizer's end of a text, which need not be that of a turn."""
ROWS = {"cpu": 8, "cuda": 64}
"""Episodes of one forward and backward pass: TRL's default, which took less CPU than
16; on a GPU all of a step."""


@dataclass
class Episode:
    """One episode as TRL wants it: a prompt, and all ids after it with a mask of those
    that the model sampled."""

    env: Hop
    prompt: list[int]
    completion: list[int] = field(default_factory=list)
    sampled: list[int] = field(default_factory=list)
    reward: float = 0.0
    done: bool = False

    def add(self, ids: Sequence[int], *, sampled: bool) -> None:
        """Append ids."""
        self.completion += ids
        self.sampled += [int(sampled)] * len(ids)


@dataclass
class Progress:
    """What is known of the running step."""

    success: float = 0.0
    sampled: int = 0
    rollout_s: float = 0.0
    began: float = 0.0


def drive(coroutine: Coroutine[Any, Any, Any]) -> Any:
    """Return the result of a coroutine that awaits nothing."""
    try:
        coroutine.send(None)
    except StopIteration as ended:
        return ended.value
    raise RuntimeError("it waits for something")


class Player:
    """Plays a batch of episodes by `generate`."""

    def __init__(self, tokenizer: Any, turns: int, turn_tokens: int, rules: bool) -> None:
        self.tokenizer, self.turns, self.turn_tokens, self.rules = (
            tokenizer,
            turns,
            turn_tokens,
            rules,
        )
        self.end = tokenizer.convert_tokens_to_ids(TURN_END)

    def play(self, model: Any, tasks: Sequence[Task]) -> list[Episode]:
        """Play an episode of each task."""
        episodes = [self._begin(task) for task in tasks]
        for turn in range(self.turns):
            playing = [episode for episode in episodes if not episode.done]
            if not playing:
                break
            replies = self._sample(
                model, [episode.prompt + episode.completion for episode in playing]
            )
            for episode, reply in zip(playing, replies, strict=True):
                self._take_turn(episode, reply, last=turn + 1 == self.turns)
        return episodes

    def _begin(self, task: Task) -> Episode:
        env = Hop(rules=self.rules)
        opening = [
            {"role": message.role, "content": message.text} for message in drive(env.reset(task))
        ]
        return Episode(
            env,
            self.tokenizer.apply_chat_template(opening, add_generation_prompt=True)["input_ids"],
        )

    def _sample(self, model: Any, contexts: Sequence[Sequence[int]]) -> list[list[int]]:
        batch = self.tokenizer.pad(
            [{"input_ids": context} for context in contexts], return_tensors="pt"
        ).to(model.device)
        with torch.inference_mode():
            sequences = model.generate(
                **batch,
                max_new_tokens=self.turn_tokens,
                do_sample=True,
                temperature=1.0,
                top_k=0,
                eos_token_id=self.end,
                pad_token_id=self.tokenizer.pad_token_id,
            )
        replies = sequences[:, batch["input_ids"].shape[1] :].tolist()
        return [
            reply[: reply.index(self.end) + 1] if self.end in reply else reply for reply in replies
        ]

    def _take_turn(self, episode: Episode, reply: list[int], *, last: bool) -> None:
        """Append a reply and the environment's answer; one that was cut is closed, as ours is."""
        episode.add(reply, sampled=True)
        text = self.tokenizer.decode(reply, skip_special_tokens=True)
        step = drive(episode.env.step(Action(text, Message("assistant", text))))
        episode.reward = step.reward or 0.0
        episode.done = step.terminated or last
        if episode.done:
            return

        closing = "" if reply[-1] == self.end else TURN_END
        following = (
            f"{closing}\n<|im_start|>user\n{step.observation}{TURN_END}\n<|im_start|>assistant\n"
        )
        episode.add(self.tokenizer.encode(following, add_special_tokens=False), sampled=False)


def train(directory: Path, kind: str, steps: int, seed: int, out: Path, turns: OwnTurns) -> None:
    """Train with TRL, a step at each turn."""
    torch.set_num_threads(1)
    recipe = load_recipe(RECIPE).config
    limits, groups, group_size = recipe.limits, recipe.rollout.groups, recipe.rollout.group_size
    tasks = Hop.tasks("train", steps * groups, seed)

    tokenizer = AutoTokenizer.from_pretrained(directory, padding_side="left")
    dtype = torch.bfloat16 if kind == "bfloat16" else torch.float32
    model = AutoModelForCausalLM.from_pretrained(directory, dtype=dtype)
    player = Player(tokenizer, limits.turns, limits.turn_tokens, rules=True)
    progress = Progress()

    def begin_step() -> None:
        turns.wait()
        progress.began = turns.seconds()

    def end_step() -> None:
        turns.report(
            total_s=turns.seconds() - progress.began,
            rollout_s=progress.rollout_s,
            success=progress.success,
            sampled=progress.sampled,
        )

    def play(prompts: Sequence[Any], trainer: Any) -> dict[str, Any]:
        # TRL samples once a step, so a step ends where the next one's sampling begins.
        if progress.began:
            end_step()
        begin_step()
        unwrapped = trainer.accelerator.unwrap_model(trainer.model)
        with trainer.accelerator.autocast():
            episodes = player.play(
                unwrapped, [tasks[int(prompt[-1]["number"])] for prompt in prompts]
            )
        progress.rollout_s = turns.seconds() - progress.began
        progress.success = sum(episode.reward for episode in episodes) / len(episodes)
        progress.sampled = sum(sum(episode.sampled) for episode in episodes)
        return {
            "prompt_ids": [episode.prompt for episode in episodes],
            "completion_ids": [episode.completion for episode in episodes],
            "env_mask": [episode.sampled for episode in episodes],
            "logprobs": None,
            "reward": [episode.reward for episode in episodes],
        }

    config = GRPOConfig(
        output_dir=str(out),
        per_device_train_batch_size=ROWS[turns.device],
        gradient_accumulation_steps=groups * group_size // ROWS[turns.device],
        num_generations=group_size,
        max_steps=steps,
        learning_rate=recipe.train.lr,
        lr_scheduler_type="constant",
        temperature=1.0,
        beta=0.0,
        bf16=kind == "autocast",
        use_cpu=turns.device == "cpu",
        # it would cost time, and it turns off the cache of `generate`
        gradient_checkpointing=False,
        report_to=[],
        save_strategy="no",
        logging_strategy="no",
        disable_tqdm=True,
        shuffle_dataset=False,
        seed=seed,
    )
    rows = [
        {"prompt": [{"role": "user", "content": task.messages[0].text, "number": number}]}
        for number, task in enumerate(tasks)
    ]
    trainer = GRPOTrainer(
        model,
        lambda reward, **_: reward,
        config,
        train_dataset=Dataset.from_list(rows),
        processing_class=tokenizer,
        rollout_func=play,
    )
    trainer.train()
    end_step()


if __name__ == "__main__":
    directory, kind, device, steps, seed, out, descriptor = sys.argv[1:]
    turns = OwnTurns(int(descriptor), device)
    train(Path(directory), kind, int(steps), int(seed), Path(out), turns)
