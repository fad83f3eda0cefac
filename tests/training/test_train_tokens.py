"""What training.jsonl says of each id is what the trainer computed for that id,
however a batch orders them."""

import dataclasses
import json

import pytest
import torch
from kit.training import ANY, branched, random_groups, with_logprobs

from turnwright.config import TrainConfig
from turnwright.training import Trainer
from turnwright.training.metrics import FILE, mismatch_by_turn, scored_ids, write_token_records
from turnwright.types import Group, Message, Turn


def with_turns(trajectory):
    """One turn for each sampled span."""
    for index, span in enumerate(trajectory.spans):
        if span.sampled:
            trajectory.turns.append(
                Turn("main", span.parent, span.start, (index,), (), Message("assistant", "x"), -1)
            )
    return trajectory


def made(model):
    """Groups of chains and of branches, whose logprobs are those of the model."""
    found = with_logprobs(model, random_groups(3, low=1, high=7))
    mixed = [
        Group(
            g.task, [with_turns(branched(t) if n % 2 else t) for n, t in enumerate(g.trajectories)]
        )
        for g in found
    ]
    mixed[0].trajectories[0].spans[1].untrained = "rewound"
    return mixed


@pytest.mark.parametrize("minibatches", [1, 3])
def test_each_id_has_its_own_logprob(tiny_model, tmp_path, minibatches):
    groups = made(tiny_model)
    trainer = Trainer(
        tiny_model, TrainConfig(lr=0.0, schedule="constant", minibatches=minibatches, **ANY)
    )
    records = trainer.step(groups, step=0, steps=1).token_records
    assert set(write_token_records(tmp_path, 4, *records)["mismatch_by_turn"]) <= {"1", "2", "3"}
    rows = {
        tuple(row["key"]): row
        for row in map(json.loads, (tmp_path / FILE).read_text().splitlines())
    }
    trained = 0
    for trajectory in (t for g in groups for t in g.trajectories):
        row = rows[
            trajectory.key.phase, trajectory.key.step, trajectory.key.task, trajectory.key.sample, 0
        ]
        assert row["step"] == 4
        assert (row["advantage"] is None) == (row["reason"] is not None)
        if row["reason"] is not None:
            assert row["logprobs"] == {}
            continue
        for index, span in enumerate(trajectory.spans):
            given = row["logprobs"].get(str(index))
            if not span.sampled or span.untrained:
                assert given is None
                continue
            assert given == pytest.approx(span.logprobs, abs=1e-4)
            trained += len(given)
    assert trained == sum(batch.size for batch in records[1])


def test_the_order_in_which_a_batch_holds_its_ids_plays_no_part(tiny_model):
    trainer = Trainer(tiny_model, TrainConfig(lr=0.0, schedule="constant", **ANY))
    [batch] = trainer.step(made(tiny_model), step=0, steps=1).token_records[1]
    order = torch.randperm(batch.size, generator=torch.Generator().manual_seed(0))
    shuffled = dataclasses.replace(
        batch,
        trajectory_n=batch.trajectory_n[order],
        engine_n=batch.engine_n[order],
        start_n=batch.start_n[order],
        slots=[batch.slots[i] for i in order.tolist()],
    )
    ids, mixed = scored_ids([batch]), scored_ids([shuffled])
    assert {one: sorted(found) for one, found in ids.items()} == {
        one: sorted(found) for one, found in mixed.items()
    }
    assert set(ids) == set(map(id, batch.trajectories))
    assert all(ids.values())
    assert mismatch_by_turn([shuffled]) == pytest.approx(mismatch_by_turn([batch]))


def test_advantages_that_differ_within_a_trajectory_are_told_per_id(tiny_model, tmp_path):
    groups = made(tiny_model)
    for number, trajectory in enumerate(t for g in groups for t in g.trajectories):
        for turn in trajectory.turns:
            turn.reward = float(number % 3)
        trajectory.reward = sum(turn.reward for turn in trajectory.turns)
    trainer = Trainer(tiny_model, TrainConfig(lr=0.0, schedule="constant", credit="turn", **ANY))
    records = trainer.step(groups, step=0, steps=1).token_records
    write_token_records(tmp_path, 0, *records)
    rows = list(map(json.loads, (tmp_path / FILE).read_text().splitlines()))
    credits = records[0]
    assert any("advantages" in row for row in rows)
    for row, credit in zip(rows, credits, strict=True):
        for span, values in row.get("advantages", {}).items():
            assert values == pytest.approx(
                credit.advantages_of([(int(span), n) for n in range(len(values))]), rel=1e-5
            )
