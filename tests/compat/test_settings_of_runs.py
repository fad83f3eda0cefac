"""User files in runs with the settings that a row of docs/compat.md is about: the trainer's
logprobs are the engine's."""

import json
from pathlib import Path

import pytest
from kit.outbound import make_model
from kit.stand_ins import USERS

from turnwright.cli.main import main

RUN = """\
[limits]
turns = 2
turn_tokens = 6
on_turn_length = "continue"
[rollout]
groups = 2
group_size = 3
{rollout}
[warmup]
demos = 0
[train]
steps = {steps}
lr = 1e-3
advantage = "spread.py:spread"
{train}
[checkpoint]
every = {steps}
[eval]
tasks = 2
"""
SPREAD = (
    "def spread(trajectories, returns):\n    return [1.0 - 2 * (number % 2) for number in "
    "range(len(trajectories))]\n"
)
"""Advantages for replies at random, which are all wrong."""
ROWS = {
    "slime": {"prompt": "Guess {n}.", "label": "7"},
    "skyrl": {
        "prompt": "Guess {n}.",
        "env_class": "guess",
        "reward_spec": {"ground_truth": 4},
        "extra_info": {"max_turns": 2},
    },
    "verl": {"prompt": "Add {n}.", "reward_model": {"ground_truth": "7"}, "data_source": "x"},
}
USES = {
    "slime": ("{users}/slime/guess_env.py:build_env", 'rm_type = "math"\n'),
    "skyrl": ("{users}/skyrl/guess.py:GuessEnv", ""),
    "verl": (
        "verl:tools",
        'function_tool_path = "{users}/verl/functions.py"\nreward = '
        '"{users}/verl/score.py:compute_score"\n',
    ),
}


def run(folder, system, *, model, rollout="", train="", steps=1, sections=""):
    """Train and return the metrics of the steps."""
    use, args = USES[system]
    rows = [
        {**ROWS[system], "prompt": ROWS[system]["prompt"].format(n=number)} for number in range(16)
    ]
    (folder / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    text = f'[[env]]\nuse = "{use}"\ntasks = "rows.jsonl"\n[env.args]\n{args}'.replace(
        "{users}", str(USERS)
    )
    text += RUN.format(rollout=rollout, train=train, steps=steps) + sections
    (folder / "run.toml").write_text(text)
    (folder / "spread.py").write_text(SPREAD)
    out = folder / "run"
    options = ["--out", str(out), "--model.path", str(model), "--display", "none"]
    assert main(["train", str(folder / "run.toml"), *options]) == 0
    return out, [
        row for row in map(json.loads, (out / "metrics.jsonl").open()) if row["phase"] == "train"
    ]


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return make_model(tmp_path_factory.mktemp("model") / "m")


ASYNC = '[schedule]\nmode = "async"\nstaleness = 1\n'
LOOSE = {"slime, updates during rollouts": 1.0, "slime, 8-bit floating point": 0.5}
"""Bounds of the largest difference where policies differ, or activations are
rounded; 1e-4 elsewhere."""
SETTINGS = {
    "slime, updates during rollouts": (
        "slime",
        {"steps": 3, "train": 'correction = "tis"', "sections": ASYNC},
    ),
    "slime, 8-bit floating point": ("slime", {"sections": '[quant]\nkind = "fp8"\nblock = 16\n'}),
    "slime, 4-bit integers": ("slime", {"sections": '[quant]\nkind = "int4"\ngroup = 16\n'}),
    "slime, drafts": ("slime", {"sections": "[engine]\nspeculate = 3\n"}),
    "skyrl, rendered again in each turn": ("skyrl", {"rollout": 'history = "template"'}),
    "skyrl, as a tree": (
        "skyrl",
        {"rollout": 'history = "template"', "train": 'batching = "tree"'},
    ),
    "skyrl, one message": ("skyrl", {"rollout": 'history = "inline"'}),
    "verl, checked in each turn": ("verl", {"rollout": 'sanity_share = "turns"'}),
    "verl, as in production": ("verl", {"rollout": 'history = "template"'}),
}


@pytest.mark.filterwarnings("ignore::UserWarning")
@pytest.mark.parametrize("name", SETTINGS)
def test_a_user_file_is_trained_as_it_was_sampled(name, model, tmp_path, capsys):
    system, settings = SETTINGS[name]
    _, rows = run(tmp_path, system, model=model, **settings)
    assert len(rows) == settings.get("steps", 1), capsys.readouterr().err
    # A step of stale tokens alone has none.
    differ = [row["mismatch_max"] for row in rows if "mismatch_max" in row]
    assert len(differ) > 0
    assert max(differ) < LOOSE.get(name, 1e-4)


@pytest.mark.filterwarnings("ignore::UserWarning")
def test_a_mixture_of_experts_replays_the_routes_of_a_user_file(tmp_path):
    from transformers import Qwen3MoeConfig, Qwen3MoeForCausalLM

    path = make_model(tmp_path / "m")
    size = json.loads((Path(path) / "config.json").read_text())["vocab_size"]
    small = {
        "hidden_size": 32,
        "intermediate_size": 32,
        "moe_intermediate_size": 16,
        "num_hidden_layers": 2,
    }
    heads = {
        "num_attention_heads": 2,
        "num_key_value_heads": 2,
        "num_experts": 4,
        "num_experts_per_tok": 2,
        "head_dim": 16,
    }
    Qwen3MoeForCausalLM(Qwen3MoeConfig(vocab_size=size, **small, **heads)).save_pretrained(path)
    out, rows = run(tmp_path, "slime", model=path, train='routing_replay = "replay"')
    turns = [
        event
        for line in (out / "journal.jsonl").open()
        if (event := json.loads(line))["e"] == "turn"
    ]
    assert all("routes" in event["turn"] for event in turns if event["k"][0] == "train")
    assert rows[0]["mismatch_max"] < 1e-4
