"""The Chrome trace of a run: whole JSON, nothing that overlaps on a track, and no
run that it could hurt."""

from __future__ import annotations

import json
from itertools import pairwise

from turnwright.cli.main import main
from turnwright.display.progress import ProfileListener
from turnwright.records import NullListener


class Clock:
    now = 100.0

    def __call__(self):
        return self.now


def spans(events, track):
    return [
        (e["name"], e["ts"], e["ts"] + e["dur"])
        for e in events
        if e["ph"] == "X" and e["tid"] == track
    ]


def nested(events):
    """The phases of each episode, in order; held to spans that close inside out."""
    found, open_spans = {}, {}
    for event in events:
        if event["ph"] not in ("b", "e"):
            continue
        assert event["cat"] == "episode"
        stack = open_spans.setdefault(event["id"], [])
        if event["ph"] == "b":
            assert not stack or stack[-1][1] <= event["ts"]
            if not stack:
                assert event["id"] not in found, "an episode stands there twice"
                assert event["name"] == f"episode {event['id']}"
                found[event["id"]] = []
            else:
                found[event["id"]].append(event["name"])
            stack.append((event["name"], event["ts"]))
        else:
            name, began = stack.pop()
            assert (name, began <= event["ts"]) == (event["name"], True)
            if stack:
                stack[-1] = (stack[-1][0], event["ts"])  # the next phase begins no earlier
    assert not any(open_spans.values()), "a span was never closed"
    return found


def test_episodes_lie_beside_one_another_with_their_phases_inside(tmp_path):
    clock = Clock()
    profile = ProfileListener(NullListener(), tmp_path, clock)
    profile.episode("train/0/a/0/0", [("reset", 100.0)], 101.0)  # before the run began
    profile.phase("train", 1, "steps")
    phases = [
        ("reset", 100.0),
        ("render", 100.5),
        ("generate", 100.5001),
        ("step", 102.0),
        ("reward", 103.0),
    ]
    profile.episode("train/0/a/0/0", phases, 104.0)
    profile.episode("train/0/b/0/0", [("reset", 100.2)], 100.2)
    profile.close()
    events = json.loads((tmp_path / "profile.json").read_text())
    assert nested(events) == {
        "train/0/a/0/0": ["reset", "generate", "step", "reward"],
        "train/0/b/0/0": ["reset"],
    }
    mine = [
        (event["ph"], event["name"], event["ts"])
        for event in events
        if event.get("id") == "train/0/a/0/0"
    ]
    assert mine[0] == ("b", "episode train/0/a/0/0", 0)
    assert mine[3:5] == [("b", "generate", 500_100), ("e", "generate", 2_000_000)]
    assert mine[-1] == ("e", "episode train/0/a/0/0", 4_000_000)


def test_phases_steps_and_waits_lie_where_they_were(tmp_path):
    clock = Clock()
    profile = ProfileListener(NullListener(), tmp_path, clock)
    profile.phase("train", 2, "steps")
    for step in (1, 2):
        profile.waiting("3/8 episodes; 5 in step")
        clock.now += 2.0
        profile.waiting("7/8 episodes; 1 in step")
        clock.now += 1.0
        profile.waiting("optimizer step")
        clock.now += 0.5
        profile.waiting("")
        figures = {
            "phase": "train",
            "rollout_s": 3.0,
            "train_s": 0.5,
            "seconds": {"tool": {"sum": 9.0}},
            "odd": object(),
        }
        profile.progress(step, figures)
        assert json.loads((tmp_path / "profile.json").read_text() + "]"), (
            "readable while it is written"
        )
    clock.now += 1.0
    profile.progress(3, {"seconds": 5, "rollout_s": "x"})
    profile.close()
    profile.close()
    events = json.loads((tmp_path / "profile.json").read_text())
    assert spans(events, 1) == [("train", 0, 8_000_000)]
    expected = [("rollout 1", 0, 3_000_000), ("train 1", 3_000_000, 3_500_000)]
    expected += [("rollout 2", 3_500_000, 6_500_000), ("train 2", 6_500_000, 7_000_000)]
    assert spans(events, 2) == expected
    assert spans(events, 3)[:2] == [
        ("episodes", 0, 3_000_000),
        ("optimizer step", 3_000_000, 3_500_000),
    ]
    assert [e["args"] for e in events if e["ph"] == "C"] == [{"tool": 9.0}] * 2


def test_a_run_that_was_refused_or_cannot_be_written_to_is_left_alone(tmp_path):
    profile = ProfileListener(NullListener(), tmp_path)
    profile.note("no")
    profile.close()
    assert list(tmp_path.iterdir()) == []
    gone = ProfileListener(NullListener(), tmp_path / "gone")
    gone.phase("train", 1, "steps")
    gone.progress(1, {"rollout_s": 1.0, "train_s": 1.0})
    gone.close()
    assert list(tmp_path.iterdir()) == []


def test_a_real_run_is_profiled(tmp_path):
    tiny = ["hidden=16", "heads=1", "kv-heads=1", "layers=1"]
    words = [
        "--env.use",
        "hop",
        "--warmup.demos",
        "0",
        "--train.steps",
        "1",
        "--eval.tasks",
        "2",
        "--rollout.groups",
        "1",
    ]
    words += [f"--model.{word}" for word in tiny]
    assert (
        main(["train", "--out", str(tmp_path / "run"), "--profile", "--display", "none", *words])
        == 0
    )
    events = json.loads((tmp_path / "run" / "profile.json").read_text())
    names = [event["name"] for event in events]
    assert {"train", "rollout 1", "train 1"} <= set(names)
    episodes = nested(events)
    rows = [
        json.loads(line)
        for line in (tmp_path / "run" / "trajectories.jsonl").read_text().splitlines()
    ]
    assert set(episodes) == {"/".join(str(part) for part in row["key"].values()) for row in rows}
    for row in rows:
        phases = episodes["/".join(str(part) for part in row["key"].values())]
        assert [name for name in phases if name == "generate"] == ["generate"] * len(row["turns"])
        assert set(phases) <= {"reset", "render", "generate", "step", "reward", "close"}
    for track in (1, 3):
        lying = sorted(spans(events, track), key=lambda row: row[1])
        assert all(a[2] <= b[1] for a, b in pairwise(lying))
