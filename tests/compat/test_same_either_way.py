"""What two settings of the other frameworks choose between is the same here: batched generation,
and when images are read."""

import asyncio
import json
import time

import pytest
import torch
from kit.stand_ins import USERS
from kit.vision import tiny_vlm_directory
from transformers import AutoModelForCausalLM

import turnwright as tw
from turnwright.config import Limits, ModelConfig, TrainConfig
from turnwright.config.schema import EnvConfig
from turnwright.engines.local import LocalEngine
from turnwright.envs import load_tasks
from turnwright.envs.resolve import resolve_env
from turnwright.rollouts import Rollout, make_episode_specs
from turnwright.rollouts.rollout_settings import RolloutSettings
from turnwright.training import Trainer, create_tiny_model, load_model_and_renderer

WORDS = ["Guess a number. alpha kilo tango zulu 1 2 3 4 5 6 7 8 9 higher lower"] * 20


class Counted(LocalEngine):
    """Counts calls, and those in flight at once; answers none before `first` have come, however
    late their episodes begin."""

    calls = flying = most = 0

    def __init__(self, model, *, first, **options):
        super().__init__(model, **options)
        self.first, self.all_came = first, asyncio.Event()

    async def generate(self, request):
        self.calls += 1
        self.flying += 1
        self.most = max(self.most, self.flying)
        if self.calls == self.first:
            self.all_came.set()
        try:
            await self.all_came.wait()
            return await super().generate(request)
        finally:
            self.flying -= 1


@pytest.mark.parametrize("use", ["skyrl/guess.py:GuessEnv", "trl/guess.py:Guess"])
def test_batched_generation_equals_one_at_a_time(use, tmp_path, capsys):
    """SkyRL's `generator.batched`: the engine batches calls in flight, whose draws depend on
    their own seeds alone."""
    path = create_tiny_model(ModelConfig(hidden=64, layers=2), WORDS, tmp_path / "m")
    spec = resolve_env(EnvConfig(use=use), base=USERS)
    info = {"secret": 4, "reward_spec": {"ground_truth": 4}, "extra_info": {"max_turns": 2}}
    tasks = [tw.Task(f"Guess {number}.", "4", id=str(number), info=info) for number in range(32)]
    rows, costs = {}, {}
    for concurrency in (32, 1):
        engine = Counted(AutoModelForCausalLM.from_pretrained(path), first=concurrency, slots=32)
        limits = Limits(turns=2, turn_tokens=24, on_turn_length="continue")
        began = time.perf_counter()
        found = tw.rollout(
            spec.factory,
            tasks,
            engine,
            renderer=tw.load_renderer(path),
            limits=limits,
            seed=3,
            concurrency=concurrency,
        )
        costs[concurrency] = 1000 * (time.perf_counter() - began) / engine.calls
        assert [one.error for one in found] == [None] * 32
        assert engine.most == concurrency
        rows[concurrency] = {
            one.task.id: [(row.ids, row.mask, row.logprobs) for row in one.samples()]
            for one in found
        }
    assert rows[1] == rows[32]
    with capsys.disabled():
        print(f"\n{use}: {costs[32]:.2f} ms a call batched, {costs[1]:.2f} ms one at a time")


def leaves(value):
    """Yield the tensors of nested arguments."""
    if isinstance(value, torch.Tensor):
        yield value
    elif isinstance(value, (list, tuple, dict)):
        for inner in value.values() if isinstance(value, dict) else value:
            yield from leaves(inner)


class Sees(tw.Env):
    """One turn on the row."""

    def reset(self, task, *, seed=None):
        return None

    def step(self, action):
        return tw.Step(reward=1.0, terminated=True)


def run(rollout, tasks):
    async def play():
        return await rollout.play(make_episode_specs(Sees, tasks, phase="train", step=0))

    return asyncio.run(play())


def test_images_read_with_their_rows_or_later_are_the_same_inputs(tmp_path):
    """verl's `data.return_multi_modal_inputs`."""
    from PIL import Image

    for number in range(4):
        Image.effect_noise((64 + 32 * number, 64), 80).convert("RGB").save(
            tmp_path / f"{number}.png"
        )
    asked = [
        {"prompt": f"<image> What is {n}?", "images": [f"{n}.png"], "answer": str(n)}
        for n in range(4)
    ]
    (tmp_path / "rows.jsonl").write_text("\n".join(map(json.dumps, asked)))
    directory = tiny_vlm_directory(tmp_path / "vlm")
    kept = {}
    for read in (True, False):
        tasks = load_tasks(tmp_path / "rows.jsonl", return_multi_modal_inputs=read)
        model, renderer = load_model_and_renderer(directory, directory, ModelConfig())
        rollout = Rollout(
            LocalEngine(model, renderer=renderer),
            renderer,
            RolloutSettings(limits=Limits(turn_tokens=12, on_turn_length="continue")),
        )
        found = run(rollout, tasks)
        trainer = Trainer(
            model, TrainConfig(), banned_ids=renderer.banned_ids, pixels=rollout.pixels
        )
        inputs = []
        sees = next(module for name, module in model.named_modules() if name.endswith("visual"))
        hook = sees.register_forward_pre_hook(
            lambda _, args, given, kept=inputs: kept.append((args, given)), with_kwargs=True
        )
        scored = trainer.logprobs(found)
        hook.remove()
        kept[read] = (
            [[(row.ids, row.mask, row.logprobs) for row in one.samples()] for one in found],
            scored,
            inputs,
        )
    (ids, scored, inputs), (other_ids, other_scored, other_inputs) = kept[True], kept[False]
    assert ids == other_ids
    assert all(map(torch.equal, *(map(torch.as_tensor, some) for some in (scored, other_scored))))
    assert inputs
    tensors = [list(leaves(one)) for one in inputs]
    others = [list(leaves(one)) for one in other_inputs]
    # The pixel values.
    assert any(one.is_floating_point() and one.numel() > 1000 for row in tensors for one in row)
    assert all(
        torch.equal(one, two)
        for row, same in zip(tensors, others, strict=True)
        for one, two in zip(row, same, strict=True)
    )


def test_a_tool_of_a_user_sees_the_same_images_either_way(tmp_path):
    from PIL import Image

    Image.effect_noise((96, 64), 80).convert("RGB").save(tmp_path / "0.png")
    (tmp_path / "rows.jsonl").write_text(
        json.dumps({"prompt": "<image> What?", "images": ["0.png"]})
    )
    sees = tw.load_renderer(tiny_vlm_directory(tmp_path / "vlm", "qwen3_vl", weights=False))
    spec = resolve_env(
        EnvConfig(use="verl:tools", args={"tool_config_path": "zoom.yaml"}), base=USERS / "verl"
    )
    rows = []
    for read in (True, False):
        tasks = load_tasks(tmp_path / "rows.jsonl", return_multi_modal_inputs=read)
        replies = ['<tool_call>{"name": "zoom", "arguments": {}}</tool_call>', "blue"]
        limits = Limits(turns=3, turn_tokens=200)
        (found,) = tw.rollout(
            spec.factory, tasks, tw.ScriptedEngine(replies), renderer=sees, limits=limits
        )
        assert found.error is None, found.error
        (row,) = found.samples()
        rows.append((row.ids, row.mask, [block.media.key for block in row.media]))
    assert rows[0] == rows[1]
    assert len(rows[0][2]) == 4  # of the row, of create (a video too), of execute
