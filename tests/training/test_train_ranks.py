"""Two processes that train one model with FSDP2, against one process.

`run/test_ranks_run.py` starts them by torchrun.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import ranks_worker
import torch
from hypothesis import given
from hypothesis import strategies as st
from kit.forks import rank_environments, run_ranks
from ranks_worker import CASES, HALF, IDS, LONE, NONE, STEPS, steps_of

from turnwright.config import TrainConfig
from turnwright.training import Ranks, Trainer
from turnwright.training.distributed import balance_costs
from turnwright.training.model import models
from turnwright.training.model.lora import load_adapter

HERE = Path(__file__).parent
ROUGH = ("bfloat16", "fp8")
"""bfloat16 rounds each rank's part of a gradient before they are added; fp8's
activations cross boundaries."""
ROOT = HERE.parents[1]


@pytest.fixture(scope="module")
def both(tiny_dir, tmp_path_factory):
    """What two ranks and one came to, for every case."""
    pytest.importorskip("peft")
    two, one = tmp_path_factory.mktemp("two"), tmp_path_factory.mktemp("one")
    run_ranks(ranks_worker.play_all, 2, tiny_dir, two, list(CASES))
    for case in CASES:
        ranks_worker.play(case, tiny_dir, one, Ranks())
    return two, one


def close(a, b, tolerance, floor=1e-3):
    return abs(a - b) <= tolerance * max(abs(a), abs(b), floor)


def apart(sent, expected):
    """The L2 norm of the difference of all weights, relative to theirs. One by one they may be
    further apart: Adam's step is as large where a gradient is rounding alone."""
    assert sent.keys() == expected.keys()
    both = [
        torch.cat([one[name].float().flatten() for name in expected]) for one in (sent, expected)
    ]
    return float((both[0] - both[1]).norm() / both[1].norm())


@pytest.mark.parametrize("case", CASES)
def test_two_ranks_come_to_what_one_process_comes_to(both, case):
    two, one = (json.loads((path / f"{case}.json").read_text()) for path in both)
    tolerance = 2e-2 if case in ROUGH else 1e-5
    for mine, theirs in zip(
        [*two["warm"], *two["steps"]], [*one["warm"], *one["steps"]], strict=True
    ):
        assert mine.keys() == theirs.keys()
        # Terms of a policy loss are of the size of the advantages and cancel; relative to
        # them, not to what is left.
        assert close(mine["loss"], theirs["loss"], tolerance, floor=1e-2), (
            mine["loss"],
            theirs["loss"],
        )
        # Two ranks cut it into more passes.
        tree = {name for name in mine if name.startswith("tree_")}
        rough = {
            "train_s",
            "tokens_per_s",
            "gradient_agreement",
            "gradient_agreement_scaled",
            "lr",
            "loss",
        }
        for name in mine.keys() - tree - rough:
            assert close(mine[name], theirs[name], 5 * tolerance), (name, mine[name], theirs[name])
    # For one rank alone; a single trajectory is the mean of its batch, and so without signal where
    # advantages are whitened.
    whitened = case.startswith("reinforce_pp") or case == "turn_ppo"
    assert two["steps"][LONE]["tokens_trained"] == (0 if whitened else 3)
    assert two["steps"][NONE]["tokens_trained"] == 0
    assert apart(*(torch.load(path / f"{case}.pt") for path in both)) < (
        2e-2 if case in ROUGH else 1e-5
    )


def resumed(case, source, path, ranks=None):
    """A single process that goes on from a checkpoint."""
    trainer = ranks_worker.make(case, source, ranks or Ranks())
    if case.startswith("lora"):
        model = models.load(source)[0]
        load_adapter(model, path)
    else:
        model = models.load(path, dtype=trainer.dtype)[0]
    trainer = ranks_worker.trainer_of(case, model, trainer.config, Ranks())
    trainer.load(path)
    return trainer


@pytest.mark.parametrize("case", [case for case in CASES if case not in ROUGH])
def test_one_process_goes_on_from_what_two_ranks_saved(both, tiny_dir, case):
    two, one = both
    trainer = resumed(case, tiny_dir, two / case / f"step-{HALF}")
    for step in range(HALF, STEPS):
        trainer.step(steps_of(step), step=step, steps=STEPS)
    assert apart(dict(trainer.weights()), torch.load(one / f"{case}.pt")) < 1e-5


def test_a_checkpoint_of_two_ranks_is_that_of_one(both):
    for case in ("grpo", "lora"):
        two, one = ({p.name for p in (path / case / f"step-{STEPS}").iterdir()} for path in both)
        assert two == one


def test_what_rank_0_calls_all_do(both, tiny_dir):
    before, after, said, loss = json.loads((both[0] / "lead.json").read_text())
    assert "none of 0 demonstrations has an id to train" in said
    trainer = Trainer(models.load(tiny_dir)[0], TrainConfig(max_mismatch=1e9))
    ids = torch.tensor([IDS])
    for known in (before, after):
        with torch.no_grad():
            logp = trainer.model(input_ids=ids).logits[0].log_softmax(-1)
        ours = [float(logp[place, i]) for place, i in enumerate(IDS[1:])]
        assert max(abs(a - b) for a, b in zip(ours, known, strict=True)) < 1e-4
        if known is before:
            assert trainer.step(steps_of(0), step=0, steps=9).metrics["loss"] == pytest.approx(
                loss, rel=1e-5, abs=1e-7
            )


def test_ranks_that_part_end_their_group_before_python_ends(tmp_path):
    """torch's threads would end a busy machine's processes by a signal, in most runs."""
    command = [
        sys.executable,
        str(HERE / "parting_worker.py"),
        str(tmp_path),
        json.dumps(rank_environments(2)),
    ]
    environment = os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": f"{ROOT / 'src'}:{HERE}"}
    assert subprocess.run(command, env=environment, timeout=280).returncode == 0
    assert {path.name: path.read_text() for path in tmp_path.iterdir()} == {
        "0": "ended",
        "1": "ended",
    }


@given(costs=st.lists(st.integers(1, 100), max_size=40), size=st.integers(1, 8))
def test_work_is_shared_out_once_and_evenly(costs, size):
    shares = balance_costs(costs, size)
    assert sorted(index for share in shares for index in share) == list(range(len(costs)))
    loads = [sum(costs[index] for index in share) for share in shares]
    assert max(loads, default=0) - min(loads, default=0) <= max(costs, default=0)
    assert (
        max(loads, default=0)
        <= 4 / 3 * max(sum(costs) / size, max(costs, default=0)) + max(costs, default=0) / 3
    )
