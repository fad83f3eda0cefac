"""The judge of converted trees: scripts in the form of theirs, a class each, and
faults that it must find."""

import json
import sys
from dataclasses import replace

import convert_trees
import pytest

from turnwright_compat.launch_scripts import SYSTEMS

SLIME = """#!/bin/bash
N=${N:-8}
ROLLOUT_ARGS=(
   --prompt-data /data/train.jsonl
   --input-key prompt
   --num-rollout 30
   --rollout-batch-size 32
   --n-samples-per-prompt $N
   --rollout-max-response-len 4096
   --global-batch-size 128
   --custom-generate-function-path loop.generate
)
ray job submit --address="http://127.0.0.1:8265" -- python3 train.py --hf-checkpoint /models/m \\
   --advantage-estimator grpo --eps-clip 0.1 --lr 2e-6 --weight-decay 0.1 --tensor-model-parallel-size 2 "${ROLLOUT_ARGS[@]}"
"""  # noqa: E501
SFT = SLIME.replace(
    "--custom-generate-function-path loop.generate",
    "--rollout-function-path slime.rollout.sft_rollout.generate_rollout",
)
STEP = SLIME.replace(
    "--custom-generate-function-path loop.generate", "--rollout-function-path mine.generate_rollout"
)
MILES = """
from dataclasses import dataclass


@dataclass
class Args:
    steps: int = 30
    small: bool = False


def execute(args: Args):
    flags = f"--hf-checkpoint /m --prompt-data /d.jsonl --num-rollout {args.steps} --rollout-batch-size 8 "
    agent = "--n-samples-per-prompt 4 --fully-async "
    if args.small:
        agent += "--rollout-temperature 0.5 "
    U.execute_train(train_args=f"{flags} {agent}", train_script="train_async.py")


def main(args: Args):
    execute(args)
"""  # noqa: E501
SKYRL = """
uv run --isolated --extra fsdp -m skyrl.train.entrypoints.main_base \\
  data.train_data="['/d/train.parquet']" trainer.policy.model.path=/m trainer.train_batch_size=64 \\
  trainer.policy_mini_batch_size=16 trainer.algorithm.advantage_estimator=grpo generator.max_turns=4 \\
  generator.n_samples_per_prompt=5 environment.env_class=search
"""  # noqa: E501
OWN = SKYRL.replace("skyrl.train.entrypoints.main_base", "examples.train.search.main_mine").replace(
    "environment.env_class=search", ""
)
VERL = """
python3 -m verl.trainer.main_ppo algorithm.adv_estimator=grpo data.train_files=/d.parquet data.train_batch_size=64 \\
  data.max_prompt_length=100 data.max_response_length=400 actor_rollout_ref.model.path=/m \\
  actor_rollout_ref.actor.ppo_mini_batch_size=16 actor_rollout_ref.rollout.n=4 \\
  actor_rollout_ref.rollout.multi_turn.enable=True actor_rollout_ref.rollout.multi_turn.max_assistant_turns=5
"""  # noqa: E501
SWIFT = """
NPROC_PER_NODE=2 \\
swift rlhf --rlhf_type grpo --model /m --dataset /d.jsonl --multi_turn_scheduler tips --max_turns 3 --reward_funcs accuracy \\
  --num_generations 4 --per_device_train_batch_size 4 --max_completion_length 256 --temperature 1.0 --learning_rate 1e-6
"""  # noqa: E501
GKD = SWIFT.replace("grpo", "gkd") + "\n"
TRL = """
from trl import GRPOConfig, GRPOTrainer


class Maze:
    def reset(self, **kwargs):
        return ""


def score(environments, **kwargs):
    return []


trainer = GRPOTrainer(
    model="m",
    reward_funcs=score,
    train_dataset="rows.jsonl",
    args=GRPOConfig(
        num_generations=4,
        learning_rate=1e-6,
    ),
    environment_factory=Maze,
)
"""
FILES = {
    "slime/examples/a/run.sh": (SLIME, "complete"),
    "slime/examples/a/sft.sh": (SFT, "refused_said"),
    "slime/examples/a/step.sh": (STEP, "incomplete_said"),
    "miles/scripts/run_m.py": (MILES, "complete"),
    "skyrl/examples/train/search/run.sh": (SKYRL, "complete"),
    "skyrl/examples/train/search/own.sh": (OWN, "incomplete_said"),
    "verl/examples/run.sh": (VERL, "complete"),
    "swift/examples/run.sh": (SWIFT, "complete"),
    "swift/examples/gkd.sh": (GKD, "refused_said"),
    "trl/examples/scripts/maze.py": (TRL, "complete"),
}


@pytest.fixture
def trees(tmp_path):
    for name, (text, _) in FILES.items():
        path = tmp_path / "trees" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    (tmp_path / "trees/slime/examples/a/loop.py").write_text("")
    return tmp_path / "trees"


def judged(trees):
    found = [
        (path, convert_trees.judge(system, path, text))
        for system, path, text in convert_trees.scripts(trees)
    ]
    return {str(path.relative_to(trees)): one for path, one in found}


def test_each_class_of_scripts(trees):
    assert {name: one.kind for name, one in judged(trees).items()} == {
        name: kind for name, (_, kind) in FILES.items()
    }


def test_the_counts_are_printed(trees, capsys, monkeypatch):
    monkeypatch.setattr(sys, "argv", ["convert_trees.py", str(trees)])
    assert convert_trees.main() == 0
    counts = {
        "scripts": 10,
        "complete": 6,
        "incomplete_said": 2,
        "refused_said": 2,
        "silently_wrong": 0,
    }
    assert json.loads(capsys.readouterr().out) == counts


FAULTS = [
    ("slime", "rollout-batch-size", lambda draft, value: draft.put("rollout.groups", 2 * value)),
    ("slime", "eps-clip", lambda draft, value: draft.put("train.clip_low", 0.3)),
    ("slime", "num-rollout", lambda draft, value: None),
    (
        "slime",
        "custom-generate-function-path",
        lambda draft, value: draft.put("env.use", "other.py:play"),
    ),
    ("skyrl", "generator.max_turns", lambda draft, value: draft.put("limits.turns", 1)),
    ("skyrl", "environment.env_class", lambda draft, value: draft.put("env.use", "skyrl:gsm8k")),
    ("verl", "data.max_prompt_length", lambda draft, value: None),
    (
        "verl",
        "actor_rollout_ref.actor.ppo_mini_batch_size",
        lambda draft, value: draft.settings.pop("data.train_batch_size"),
    ),
    (
        "swift",
        "multi_turn_scheduler",
        lambda draft, value: draft.put("env.use", "swift:single_turn"),
    ),
    ("swift", "max_turns", lambda draft, value: None),
    ("trl", "num_generations", lambda draft, value: draft.put("rollout.group_size", 1)),
    ("trl", "environment_factory", lambda draft, value: draft.put("env.use", "x.py:Other")),
]


@pytest.mark.parametrize(
    ("system", "key", "rule"), FAULTS, ids=[f"{system} {key}" for system, key, _ in FAULTS]
)
def test_a_fault_of_the_converter_is_found(trees, monkeypatch, system, key, rule):
    table = SYSTEMS[system]
    monkeypatch.setitem(SYSTEMS, system, replace(table, rules={**table.rules, key: rule}))
    assert "silently_wrong" in {one.kind for one in judged(trees).values()}


def test_a_teacher_that_is_lost_is_found(trees, monkeypatch):
    table = SYSTEMS["swift"]
    monkeypatch.setitem(SYSTEMS, "swift", replace(table, finish=lambda draft: None))
    assert "gkd without a teacher" in judged(trees)["swift/examples/gkd.sh"].faults
