"""What a run wrote is enough to compute it anew, and to train on it elsewhere."""

from __future__ import annotations

import json

import pytest

import turnwright as tw
from turnwright.cli.main import main
from turnwright.errors import TraceError
from turnwright.records import rollout_metrics, to_json, trajectory_row
from turnwright.records.serialization import read_trajectories, read_trajectory
from turnwright_view.export import IMAGE, ColumnLayout, rows_of, write
from turnwright_view.recompute import recompute


class Renderer:
    """Text of ids, for records."""

    def decode(self, ids):
        return "".join(self.token_texts(ids))

    def token_texts(self, ids):
        return [chr(33 + i % 90) for i in ids]


class Grows(tw.Env):
    """Three turns; what it shows in the first is a picture."""

    def reset(self, task, *, seed=None):
        self.left = 3
        return [
            {"role": "system", "content": "Play."},
            {"role": "user", "content": f"begin {task.id}"},
        ]

    def step(self, action):
        self.left -= 1
        return tw.Step("more\x00<|im_end|>", reward=0.25, terminated=self.left == 0)

    def reward(self, trajectory):
        return float(trajectory.key.sample)


def play(history="append"):
    tasks = [tw.Task("", id=name, answer={"n": 1}, info={"level": 2}) for name in ("a", "b")]
    words = ["x", "y y", "z"]
    return tw.rollout(Grows, tasks, engine=tw.ScriptedEngine(words), samples=2, history=history)


@pytest.fixture(params=["append", "template"])
def run(request, tmp_path):
    path = tmp_path / "run"
    path.mkdir()
    played = play(request.param)
    for trajectory in played:
        trajectory.key = type(trajectory.key)(
            "train", 0, trajectory.key.task, trajectory.key.sample, 0
        )
    (path / "trajectories.jsonl").write_bytes(
        b"".join(to_json(trajectory_row(t, Renderer())) + b"\n" for t in played)
    )
    row = {"phase": "train", "step": 1} | rollout_metrics(played)
    (path / "metrics.jsonl").write_bytes(to_json(row) + b"\n")
    (path / "config.json").write_text(json.dumps({"config": {"eval": {"success": 1.0}}}))
    return path, played


def test_what_is_read_back_is_what_was_written(run):
    path, played = run
    for one, other in zip(played, read_trajectories(path), strict=True):
        assert to_json(trajectory_row(one, Renderer())) == to_json(
            trajectory_row(other, Renderer())
        )
        assert one.messages == other.messages
        assert [s.ids for s in one.samples()] == [list(s.ids) for s in other.samples()]


def test_a_run_computed_anew_is_the_same_and_what_was_touched_is_named(run, capsys):
    path, played = run
    found = recompute(path)
    assert found.ok, found.wrong
    assert found.sampled == sum(t.sampled_tokens for t in played)
    assert main(["replay", str(path)]) == 0
    row = json.loads((path / "metrics.jsonl").read_text())
    (path / "metrics.jsonl").write_text(json.dumps(row | {"truncated_share": 0.5}) + "\n")
    assert main(["replay", str(path)]) == 1
    assert "truncated_share is 0 recomputed, 0.5 in metrics.jsonl" in capsys.readouterr().out
    lines = (path / "trajectories.jsonl").read_text().splitlines()
    spoilt = json.loads(lines[0])
    next(span for span in spoilt["spans"] if span["logprobs"])["logprobs"].pop()
    (path / "trajectories.jsonl").write_text("\n".join([json.dumps(spoilt), *lines[1:]]) + "\n")
    assert any("other logprobs" in one for one in recompute(path).wrong)


def test_another_reward_is_tried_on_all_episodes(run, tmp_path, capsys):
    path, _ = run
    (tmp_path / "mine.py").write_text(
        "def same(t):\n    return float(t.key.sample)\n\nasync def none(t):\n    return "
        "0.0\n\nvalue = 3\n"
    )
    assert main(["replay", str(path), "--reward", f"{tmp_path / 'mine.py'}:same"]) == 0
    assert "4 rewards recomputed, 0 differ; mean 1.25, now 1.25" in capsys.readouterr().out
    assert main(["replay", str(path), "--reward", f"{tmp_path / 'mine.py'}:none"]) == 0
    assert "4 rewards recomputed, 2 differ; mean 1.25, now 0.75" in capsys.readouterr().out
    assert main(["replay", str(path), "--reward", f"{tmp_path / 'mine.py'}:value"]) == 2


def test_a_line_that_is_no_record_is_named(tmp_path):
    with pytest.raises(TraceError, match="schema 7"):
        read_trajectory({"schema": 7})
    with pytest.raises(TraceError, match="an incomplete record"):
        read_trajectory({"schema": 1, "task": {}})
    (tmp_path / "trajectories.jsonl").write_text('{"schema": 1}\n')
    with pytest.raises(TraceError, match="line 1"):
        list(read_trajectories(tmp_path))


@pytest.mark.parametrize("columns", ["samples", "sft", "trl", "verl"])
def test_tables_hold_every_sampled_id_once_with_its_logprob(run, tmp_path, columns, capsys):
    parquet = pytest.importorskip("pyarrow.parquet")
    path, played = run
    out = tmp_path / "table.parquet"
    assert main(["export", str(path), str(out), "--columns", columns]) == 0
    assert capsys.readouterr().out.startswith(f"{out}: ")
    rows = parquet.read_table(out).to_pylist()
    shape = ColumnLayout.of(read_trajectories(path))
    assert rows == [
        json.loads(to_json(row))
        for t in read_trajectories(path)
        for row in rows_of(t, columns, shape=shape)
    ]
    assert sum(sum(row["weights"]) for row in rows) == sum(t.sampled_tokens for t in played)
    assert not {"images", "messages_images"} & set(rows[0]), (
        "a trainer would take this for a run that sees"
    )
    names = {
        "samples": ("mask", "logprobs"),
        "trl": ("completion_mask", "logprobs"),
        "verl": ("response_mask", "rollout_log_probs"),
    }
    for row in rows:
        if columns == "sft":
            kept = [
                one if weight else -100
                for one, weight in zip(row["input_ids"], row["weights"], strict=True)
            ]
            assert row["labels"] == kept
            assert [message["role"] for message in row["messages"]][:3] == [
                "system",
                "user",
                "assistant",
            ]
            continue
        mask, logprobs = (row[name] for name in names[columns])
        assert [value is not None for value in logprobs] == [bool(one) for one in mask]
    if columns in ("trl", "verl"):
        # No null for a template to trip over.
        assert all(set(message) == {"role", "content"} for message in rows[0]["prompt"])
        talk = (
            rows[0]["prompt"] + rows[0]["completion"] if columns == "trl" else rows[0]["messages"]
        )
        assert [message["role"] for message in rows[0]["prompt"]] == ["system", "user"]
        assert talk[2]["role"] == "assistant"
    if columns == "verl":
        assert rows[0]["reward_model"] == {"style": "rule", "ground_truth": '{"n":1}'}


def test_pairs_of_a_task_for_preference_training(run, tmp_path, capsys):
    parquet = pytest.importorskip("pyarrow.parquet")
    path, played = run
    assert main(["export", str(path), str(tmp_path / "pairs.parquet"), "--format", "dpo"]) == 0
    assert main(["export", str(path), str(tmp_path / "pairs.jsonl"), "--columns", "dpo"]) == 0
    rows = parquet.read_table(tmp_path / "pairs.parquet").to_pylist()
    assert rows == [
        json.loads(line) for line in (tmp_path / "pairs.jsonl").read_text().splitlines()
    ]
    by_task = {}
    for t in played:
        by_task.setdefault(t.key.task, []).append(t)
    for row in rows:
        rewards = {t.reward for t in by_task[row["task"]]}
        assert (row["chosen_reward"], row["rejected_reward"]) == (max(rewards), min(rewards))
        assert row["chosen_reward"] > row["rejected_reward"]
        assert [message["role"] for message in row["prompt"]] == ["system", "user"]
        for side in ("chosen", "rejected"):
            (found,) = (t for t in by_task[row["task"]] if t.reward == row[f"{side}_reward"])
            assert row[side][0]["role"] == "assistant"
            assert row["prompt_ids"] + row[f"{side}_ids"] == list(found.samples())[-1].ids
            assert sum(row[f"{side}_mask"]) == sum(list(found.samples())[-1].mask)
    assert len(rows) == sum(len({t.reward for t in group}) > 1 for group in by_task.values()) > 0


def test_json_lines_and_filters_and_mistakes(run, tmp_path, capsys):
    path, _ = run
    out = tmp_path / "table.jsonl"
    assert main(["export", str(path), str(out), "--least-reward", "1.5"]) == 0
    rows = [json.loads(line) for line in out.read_text().splitlines()]
    assert {row["sample"] for row in rows} == {1}
    assert main(["export", str(path), str(out), "--phase", "eval"]) == 0
    assert "no episode of phase eval" in capsys.readouterr().out
    assert main(["export", str(path), str(tmp_path / "table.csv")]) == 2
    assert main(["export", str(path), str(tmp_path / "gone" / "x.jsonl")]) == 2
    assert main(["export", str(tmp_path), str(out)]) == 2
    assert not list(tmp_path.glob(".*.writing"))


def test_images_come_along_as_bytes(tmp_path):
    from turnwright.types import ImageRef, Message, ToolCall

    trajectory = play()[0]
    rendered = Message("user", (ImageRef("ab" * 32, 2, 2), "what is it?"))
    trajectory.turns[0].messages = (rendered,)
    trajectory.turns[0].reply = Message("assistant", "", (ToolCall("f", {"q": 1}, "c1"),))
    (tmp_path / f"{'ab' * 32}.png").write_bytes(b"PNG")
    later = Message("user", ("and this: ", ImageRef("cd" * 32, 2, 2)))
    trajectory.turns[1].messages = (later,)
    [row] = rows_of(trajectory, "trl", tmp_path)
    first, second = (
        {"bytes": b"PNG", "path": f"{'ab' * 32}.png"},
        {"bytes": None, "path": f"{'cd' * 32}.png"},
    )
    assert (row["images"], row["messages_images"]) == ([first], [first, second])
    assert row["messages"] == row["prompt"] + row["completion"]
    assert row["prompt"][0]["content"] == [
        {"type": "image", "text": None},
        {"type": "text", "text": "what is it?"},
    ]
    function = {"name": "f", "arguments": '{"q":1}'}
    assert row["completion"][0]["tool_calls"] == [
        {"id": "c1", "type": "function", "function": function}
    ]
    assert all("tool_calls" in message and "name" not in message for message in row["messages"])
    [row] = rows_of(trajectory, "verl", tmp_path)
    assert row["prompt"][0]["content"] == f"{IMAGE}what is it?"
    for column, of in (("images", "prompt"), ("messages_images", "messages")):
        assert sum(message["content"].count(IMAGE) for message in row[of]) == len(row[column])

    parquet = pytest.importorskip("pyarrow.parquet")
    shape = ColumnLayout.of([trajectory])
    for columns in ("trl", "verl"):
        rows = list(rows_of(trajectory, columns, tmp_path, shape))
        write(rows, columns, tmp_path / "table.parquet", shape)
        assert parquet.read_table(tmp_path / "table.parquet").to_pylist() == rows
