"""Files of a run from anyone: a good run in which one node of one line's JSON is
replaced by any other value.

Nothing that reads it may end without an answer, and what is left out is counted.
"""

from __future__ import annotations

import contextlib
import io
import json
import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from kit.viewing import add_policies, get_json, read_whole, sent, trajectory, write_run
from rich.console import Console

import turnwright as tw
from turnwright.cli.main import main
from turnwright.records import to_json, trajectory_row
from turnwright_view.tui import TuiState, _drawn
from turnwright_view.web import ViewerServer
from turnwright_view.web.server import respond
from turnwright_view.web.sessions import Session

VALUES = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(-2, 3)
    | st.sampled_from([2**70, -(10**400), 1e308, float("nan"), float("inf")])
    | st.sampled_from(["", "x", "\ud800\x1b[2J", "model", "image", "train"]),
    lambda inner: (
        st.lists(inner, max_size=2)
        | st.dictionaries(st.sampled_from(["", "ids", "text", "type", "image"]), inner, max_size=2)
    ),
    max_leaves=4,
)


class Look(tw.Env):
    """Two turns with a call of a tool in the first."""

    tools = ()

    def reset(self, task: tw.Task, *, seed: int | None = None) -> str:
        return "go"

    def step(self, action: tw.Action) -> tw.Step:
        return tw.Step("on", reward=1.0, terminated=True)


def recorded() -> dict[str, Any]:
    """A record as this version writes it, with a call, a picture and a failure."""
    call = '<tool_call>{"name": "look", "arguments": {"key": "a"}}</tool_call>'
    (played,) = tw.rollout(Look, [tw.Task("x", answer="7")], engine=tw.ScriptedEngine([call]))
    row: dict[str, Any] = json.loads(to_json(trajectory_row(played, tw.byte_renderer())))
    picture = {"type": "image", "image": "ab" * 32, "width": 8, "height": 8}
    row["turns"][0]["messages"][0]["content"] = [
        {"type": "text", "text": "see"},
        picture,
        {"type": "video", "frames": [picture], "times": [0]},
    ]
    row["turns"][0]["info"] = {"tool_log": [{"tool": "look", "s": 0.1, "error": "E"}], "seen": 1}
    row["failed_turns"] = json.loads(json.dumps(row["turns"]))
    row["failures"] = [{"type": "E", "message": "m", "phase": "step", "traceback": "t", "turn": 0}]
    row["error"] = row["failures"][0]
    row["rewards"], row["metrics"], row["branches"] = {"part": 1.0}, {"a/b": 2.0}, {"rewritten": 1}
    return row


TRAINED = {
    "key": ["train", 0, "x", 0, 0],
    "advantage": 0.5,
    "reason": "",
    "logprobs": {"1": [-0.1]},
    "advantages": {"1": [0.5]},
}
FINDING = {
    "key": ["train", 0, "x", 0, 0],
    "turn": 0,
    "cause": "c",
    "sentence": "s",
    "said": "t",
    "sampled": "a",
    "canonical": "b",
    "sent": "c",
}
METRICS = {
    "phase": "train", "step": 1, "time_s": 1.0, "reward": 0.5, "success": 0.5, "stops": {"done": 2},
    "rewards_spread": {"a": 1.0},
    "untrained": {"no_signal": 3}, "sampled_tokens": 10, "groups": 2, "groups_no_signal": 1, "tokens_by_lag": {"0": 5},  # noqa: E501
    "mismatch_kl_by_lag": {"0": 0.1}, "malformed_calls": {"a": 1}, "tool_calls": {"a": 2}, "reply_tokens": {"mean": 3.0},  # noqa: E501
    "render_mismatch_c": 1, "teacher.x": 1, "lr": 0.1,
}  # fmt: skip


@pytest.fixture(scope="module")
def good(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run in which each file that is read has a line of its own for each of its shapes."""
    run = add_policies(write_run(tmp_path_factory.mktemp("runs") / "good", steps=6))
    rows = [trajectory(random.Random(1)), recorded()]
    metrics = [
        *({"phase": "gate", "step": n, "success": 0.1, "loss": 1.0} for n in (1, 2)),
        *[METRICS | {"step": n} for n in range(12)],
    ]
    files = {
        "trajectories.jsonl": rows,
        "training.jsonl": [TRAINED],
        "sanity.jsonl": [FINDING],
        "metrics.jsonl": metrics,
    }
    for name, lines in files.items():
        (run / name).write_text("".join(json.dumps(line) + "\n" for line in lines))
    return run


def places(node: Any, path: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    """Yield the path of each node below a JSON value, one of equal siblings in a list."""
    if path:
        yield path
    items = (
        node.items()
        if isinstance(node, dict)
        else enumerate(node[:2])
        if isinstance(node, list)
        else ()
    )
    for key, value in items:
        yield from places(value, (*path, key))


def replaced(row: Any, path: tuple[Any, ...], value: Any) -> Any:
    made = json.loads(json.dumps(row))
    inner = made
    for key in path[:-1]:
        inner = inner[key]
    inner[path[-1]] = value
    return made


FILES = ["trajectories.jsonl"] * 4 + [
    "metrics.jsonl",
    "training.jsonl",
    "sanity.jsonl",
    "summary.json",
    "config.json",
]


def answer(session: Session, path: str, **query: str) -> Any:
    """What the viewer answers to a request that it accepts, without a socket."""
    found = respond(session, path, query)
    assert found.status == 200, (path, found.body)
    return json.loads(found.body)


@given(st.data())
@settings(
    max_examples=150, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
def test_any_value_in_any_place_is_shown_or_counted(
    good: Path, tmp_path_factory: pytest.TempPathFactory, data: st.DataObject
) -> None:
    name = data.draw(st.sampled_from(FILES))
    lines = [json.loads(line) for line in (good / name).read_text().splitlines()]
    number = data.draw(st.integers(0, len(lines) - 1))
    where = data.draw(st.sampled_from(list(places(lines[number]))))
    lines[number] = replaced(lines[number], where, data.draw(VALUES))

    run = tmp_path_factory.mktemp("odd")
    for file in good.iterdir():
        (run / file.name).write_bytes(file.read_bytes())
    (run / name).write_text("".join(json.dumps(line) + "\n" for line in lines))
    check(run)


def check(run: Path) -> None:
    """Drive everything that shows a run."""
    count = len((run / "trajectories.jsonl").read_text().splitlines())
    session = Session([run])
    name = run.name
    index = session.index(name, follow=False)
    assert index is not None
    index.update()
    state = index.state()
    assert state.records == count
    assert state.episodes + state.unreadable == count

    # Every page and request of the viewer.
    answer(session, "/api/session")
    answer(session, "/api/runs")
    answer(session, "/api/facets", run=name)
    answer(session, "/api/episodes", run=name, text="a", sort="worst")
    rows = answer(session, "/api/episodes", run=name)["rows"]
    assert len(rows) == state.episodes
    for row in rows:
        answer(session, "/api/episode", run=name, key=row["key"])
    problems = answer(session, "/api/run", run=name)["problems"]
    left_out = [problem for problem in problems if problem.startswith("trajectories.jsonl")]
    assert bool(state.unreadable) == any(
        "skipped 1 unreadable line" in problem for problem in left_out
    )
    assert bool(index.failed) == any(
        "1 record that was opened cannot be read" in problem for problem in left_out
    )

    # The page that is a file, and the terminal.
    assert len(sent([run], run / "all.html").episodes()) == state.episodes
    view, console = TuiState(index), Console(file=io.StringIO(), width=80, height=24)
    for key in ("", "w", "G", "\r", "t", "n", "p", "q"):
        view.key(key)
        assert _drawn(view, "x", [], console)
    session.close()

    # Commands read records that someone trains on, so they refuse what is no record, in one line.
    for words in (
        ["export", "RUN", f"{run}/out.jsonl", "--columns", "trl", "--phase", "all"],
        ["replay", "RUN"],
        ["view", "RUN", "--report"],
    ):
        with (
            contextlib.redirect_stdout(io.StringIO()),
            contextlib.redirect_stderr(io.StringIO()) as said,
        ):
            status = main([word.replace("RUN", str(run)) for word in words])
        assert status in (0, 1, 2)
        assert len(said.getvalue().splitlines()) <= 1, said.getvalue()


@pytest.mark.parametrize("place", [("spans", 1), ("turns", 0)], ids=str)
@pytest.mark.parametrize(
    "words",
    [["replay", "RUN"], ["export", "RUN", "RUN/out.jsonl", "--phase", "all"]],
    ids=lambda words: words[0],
)
def test_a_record_whose_parts_follow_each_other_in_a_circle_is_refused(
    place, words, good: Path, tmp_path: Path, capsys
) -> None:
    row = json.loads((good / "trajectories.jsonl").read_text().splitlines()[1])
    row[place[0]][place[1]]["parent"] = place[1]
    (tmp_path / "trajectories.jsonl").write_text(json.dumps(row) + "\n")
    assert main([word.replace("RUN", str(tmp_path)) for word in words]) == 2
    said = capsys.readouterr().err
    assert (
        f"line 1: an incomplete record (ValueError: {place[0][:-1]} {place[1]} has the parent "
        f"{place[1]})" in said
    )
    assert len(said.splitlines()) == 1


SHAPES = {"spans": 5, "turns": 5, "final": 5, "failures": 5, "failed_turns": {"a": 1}}
SHAPES_INSIDE: dict[str, Any] = {"turns": [{"reply": {"tool_calls": 5}}], "spans": [{"media": 5}]}
OPENED: dict[str, Any] = {"turns": [{"messages": 5}], "failed_turns": [{"spans": 5}]}


@pytest.mark.parametrize("odd", [*SHAPES.items(), *SHAPES_INSIDE.items()], ids=str)
def test_an_odd_line_is_counted_and_those_behind_it_are_read(
    odd: tuple[str, Any], tmp_path: Path
) -> None:
    """By a real server: its index goes on, says how many lines it left out, and answers."""
    problems, rows, _ = served(tmp_path, odd)
    assert [row["sample"] for row in rows] == [0, 2]
    assert problems == ["trajectories.jsonl: skipped 1 unreadable line"]


@pytest.mark.parametrize("odd", OPENED.items(), ids=str)
def test_a_record_that_cannot_be_shown_says_so_in_its_place(
    odd: tuple[str, Any], tmp_path: Path
) -> None:
    problems, rows, opened = served(tmp_path, odd)
    assert [row["sample"] for row in rows] == [0, 1, 2]
    assert opened[1]["error"]["message"].startswith("the record cannot be read: TypeError")
    assert opened[0]["error"] is opened[2]["error"] is None
    assert problems == ["trajectories.jsonl: 1 record that was opened cannot be read"]


def served(run: Path, odd: tuple[str, Any]) -> tuple[list[str], list[Any], list[Any]]:
    """What a server says of a run of three records, of which the second has an odd value: its
    problems, its list, and each of its episodes."""
    rows = [trajectory(random.Random(1)) for _ in range(3)]
    for number, row in enumerate(rows):
        row["key"]["sample"] = number
    rows[1] |= dict([odd])
    (run / "trajectories.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    with ViewerServer([run]) as server:
        read_whole(server)
        found = get_json(server, "/api/episodes", run=run.name, sort="oldest")["rows"]
        opened = [get_json(server, "/api/episode", run=run.name, key=row["key"]) for row in found]
        return get_json(server, "/api/run", run=run.name)["problems"], found, opened
