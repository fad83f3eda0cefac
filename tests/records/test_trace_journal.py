"""Invariant 10 as far as the journal goes: what it replays is what happened,
wherever it was cut off."""

from __future__ import annotations

import asyncio
import json
import os
import re
import subprocess
import sys

import orjson
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from kit.play_functions import best_of_two, edited, planner_and_worker, verbatim
from kit.rollouts import AsyncTalk, Sampler, Talk, check_record, facts, renderer, tasks

import turnwright as tw
from turnwright.cli.main import main
from turnwright.errors import TraceError
from turnwright.records import JsonLines, RunDir, read_json_lines, rebuild_trajectories, to_json
from turnwright.records.run_dir import RECORD_VERSION, check_version
from turnwright.rollouts import Rollout, make_episode_specs
from turnwright.rollouts.resume import EarlierEpisodes
from turnwright.rollouts.rollout_settings import RolloutSettings
from turnwright.types import (
    EpisodeKey,
    Failure,
    ImageRef,
    MediaPlacement,
    Message,
    Origin,
    Span,
    StopReason,
    ToolCall,
    Trajectory,
    Turn,
    VideoRef,
)


class Fails(AsyncTalk):
    """Now and then breaks, or has no reward."""

    async def step(self, action):
        if self.rng.random() < 0.1:
            raise OSError("disk \u00e9 \ud800 gone")
        step = await super().step(action)
        return step._replace(reward=None) if self.rng.random() < 0.1 else step


class Tooled(AsyncTalk):
    """Tells of a tool, so that replies are read for calls."""

    tools = ({"type": "function", "function": {"name": "f", "parameters": {}}},)


def calling(messages, rng):
    """Replies with calls, well and badly formed, and thinking."""
    return rng.choice([
        '<tool_call>{"name": "f", "arguments": {"x": [1, '
        '2.5, null, "\\u00e9"]}}</tool_call>', "<tool_call>{", "<think>",
        "<think></think>x",
        "<think>t</think>y<tool_call>[]</tool_call>", '<tool_call>{"name": "f", "arguments": '
                                                      '3}</tool_call>',
        "plain", '<tool_call>{"name": "f", "arguments": "{\\"x\\": '
                 '1}"}</tool_call>two<tool_call>{"name": 1}</tool_call>',
    ])  # fmt: skip


ENVS = (Talk, AsyncTalk, Fails, Tooled, best_of_two, planner_and_worker, edited, verbatim)


def record(out, env, *, seed=0, count=4, kind="bytes", concurrency=256):
    engine = (
        tw.ScriptedEngine(calling)
        if env is Tooled
        else Sampler(200, aborts=0.2, ends=0.97, delay=1e-4)
    )
    limits = tw.Limits(turns=30, turn_tokens=200)
    rows = tasks(count)
    settings = {
        "seed": seed,
        "limits": limits,
        "renderer": renderer(kind),
        "concurrency": concurrency,
    }
    return rows, tw.rollout(env, rows, engine, out=out, **settings)


def read(out, rows):
    return rebuild_trajectories(
        read_json_lines(out / "journal.jsonl"), {task.id: task for task in rows}.get
    )


@settings(max_examples=24, deadline=None)
@given(
    env=st.sampled_from(ENVS), seed=st.integers(0, 2**32), kind=st.sampled_from(("bytes", "bpe"))
)
def test_the_journal_replays_equal_trajectories_bit_for_bit(tmp_path_factory, env, seed, kind):
    out = tmp_path_factory.mktemp("run")
    rows, played = record(out, env, seed=seed, kind=kind)
    found = read(out, rows)
    assert set(found) == {t.key for t in played}
    for trajectory in played:
        again = found[trajectory.key]
        assert facts(again) == facts(trajectory) or "\\ud800" in again.error.message
        assert (again.wall_s, again.spans) == (trajectory.wall_s, trajectory.spans)
        assert [(t.generate_s, t.env_s) for t in again.turns] == [
            (t.generate_s, t.env_s) for t in trajectory.turns
        ]
        if trajectory.error is None:
            assert again == trajectory


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    out = tmp_path_factory.mktemp("whole")
    rows, played = record(out, AsyncTalk, count=6, concurrency=3)
    return rows, played, (out / "journal.jsonl").read_bytes()


@settings(max_examples=150, deadline=None)
@given(data=st.data())
def test_any_beginning_of_the_journal_replays_a_beginning_of_the_episodes(
    tmp_path_factory, whole, data
):
    rows, played, text = whole
    cut = data.draw(st.integers(0, len(text)))
    path = tmp_path_factory.mktemp("cut") / "journal.jsonl"
    path.write_bytes(text[:cut])
    by_key = {t.key: t for t in played}
    closed = [
        EpisodeKey(*e["k"])
        for line in text.splitlines()
        if (e := json.loads(line))["e"] == "closed"
    ]
    found = read(path.parent, rows)
    assert list(found) == closed[: len(found)]
    complete = sum(1 for line in text[:cut].split(b"\n")[:-1] if json.loads(line)["e"] == "closed")
    assert len(found) == complete
    assert all(found[key] == by_key[key] for key in found)
    # Opened again after the crash: the torn line goes, what follows is whole.
    lines = JsonLines(path)
    lines.append({"e": "trained"})
    lines.close()
    assert path.read_bytes() == text[: text.rfind(b"\n", 0, cut) + 1] + b'{"e":"trained"}\n'
    assert read(path.parent, rows) == found


@pytest.mark.parametrize("size", [0, 1, 65535, 65536, 65537, 200_000])
def test_a_torn_last_line_of_any_length_is_removed(tmp_path, size):
    path = tmp_path / "lines.jsonl"
    path.write_bytes(b'{"a":1}\n' + b"x" * size)
    assert list(read_json_lines(path)) == [{"a": 1}]
    JsonLines(path).close()
    assert path.read_bytes() == b'{"a":1}\n'
    path.write_bytes(b"x" * size)
    JsonLines(path).close()
    assert path.read_bytes() == b""


def test_a_damaged_line_in_the_middle_is_an_error_that_names_it(tmp_path):
    path = tmp_path / "lines.jsonl"
    path.write_bytes(b'{"a":1}\n{"b\n{"c":1}\n')
    with pytest.raises(TraceError, match=r"lines\.jsonl:2: not JSON"):
        list(read_json_lines(path))


def test_a_journal_that_misses_a_turn_is_an_error(whole):
    rows, _, text = whole
    events = [json.loads(line) for line in text.splitlines()]
    number = next(i for i, event in enumerate(events) if event["e"] == "turn" and event["n"] == 3)
    by_id = {task.id: task for task in rows}
    with pytest.raises(TraceError, match="misses turn 3"):
        rebuild_trajectories([*events[:number], *events[number + 1 :]], by_id.get)
    del events[number]["turn"]["reply"]
    with pytest.raises(TraceError, match="does not fit"):
        rebuild_trajectories(events, by_id.get)


def test_an_episode_that_was_begun_again_after_a_crash_replays_its_second_run(whole):
    rows, played, text = whole
    events = [json.loads(line) for line in text.splitlines()]
    torn = events[: len(events) // 2]
    finished = {tuple(event["k"]) for event in torn if event["e"] == "closed"}
    again = [event for event in events if "k" in event and tuple(event["k"]) not in finished]
    found = rebuild_trajectories([*torn, *again], {task.id: task for task in rows}.get)
    assert found == {t.key: t for t in played}


def test_a_run_that_was_stopped_and_goes_on_ends_as_one_that_was_not(tmp_path):
    rows = tasks(8)
    straight = tw.rollout(AsyncTalk, rows, Sampler(), seed=3)

    async def some(run, recorded, patience):
        engine = Sampler(delay=5e-3)
        rollout = Rollout(
            engine,
            tw.byte_renderer(),
            RolloutSettings(seed=3, concurrency=3),
            run=run,
            earlier=EarlierEpisodes(finished=recorded),
        )
        work = asyncio.ensure_future(
            rollout.play(make_episode_specs(AsyncTalk, rows, phase="rollout", step=0))
        )
        while not work.done() and rollout.finished < patience:
            await asyncio.sleep(1e-3)
        work.cancel()
        return (await asyncio.gather(work, return_exceptions=True))[0], engine

    sampled = []
    for patience in (2, 2, 99):
        with RunDir(tmp_path / "run") as run:
            recorded = rebuild_trajectories(run.events(), {task.id: task for task in rows}.get)
            assert not [t for t in recorded.values() if t.stop == "aborted"]
            played, engine = asyncio.run(some(run, recorded, patience))
            sampled.append({call.session for call in engine.calls})
    assert [facts(t) for t in played] == [facts(t) for t in straight]
    assert len(sampled[2]) < 8, "what had finished was played again"


def test_recorded_episodes_are_taken_as_they_are():
    rows = tasks(3)
    first = tw.rollout(AsyncTalk, rows, Sampler(), seed=3)

    async def again():
        engine = Sampler()
        rollout = Rollout(
            engine,
            tw.byte_renderer(),
            RolloutSettings(seed=3),
            earlier=EarlierEpisodes(finished={t.key: t for t in first[:2]}),
        )
        return await rollout.play(
            make_episode_specs(AsyncTalk, rows, phase="rollout", step=0)
        ), engine

    played, engine = asyncio.run(again())
    assert [facts(t) for t in played] == [facts(t) for t in first]
    assert played[0] is first[0]
    assert {call.session for call in engine.calls} == {"rollout/0/t2/0/0"}


def test_every_turn_is_on_disk_before_the_next_begins(tmp_path):
    seen = []

    class Looks(Sampler):
        async def generate(self, request):
            events = list(read_json_lines(tmp_path / "journal.jsonl"))
            seen.append([sum(event["e"] == "turn" for event in events), request.call])
            return await super().generate(request)

    tw.rollout(AsyncTalk, tasks(1), Looks(), out=tmp_path)
    assert seen == [[n, n] for n in range(8)]


# What is written about odd things


def test_images_failures_and_calls_of_every_shape_replay_whole():
    image, small = ImageRef("ab" * 32, 64, 48, alt="a cat"), ImageRef("cd" * 32, 9, 9, 4)
    clip = VideoRef((small, small), (0.0, 0.5))
    said = Message("user", ("look", image, clip), name="n")
    call = ToolCall("f", {"x": {"y": 1}}, "call_0", "cut off")
    reply = Message("assistant", "", (call, ToolCall("g", {})), reasoning="")
    task = tw.Task("x")
    trajectory = Trajectory(task, EpisodeKey("train", 1, task.id, 2))
    trajectory.spans = [
        Span(
            Origin.PROMPT,
            (1, 2),
            media=(MediaPlacement(image, 0, 1, ((1, 2, 2),), (9,)), MediaPlacement(clip, 1, 1)),
        ),
        Span(Origin.MODEL, (3,), 0, 2, (-0.1,), 4, untrained="rewound"),
    ]
    trajectory.turns = [Turn("main", 0, 2, (1,), (said,), reply)]
    trajectory.stop, trajectory.error = StopReason.TIMEOUT, Failure("E", "m", "step", "t")
    trajectory.final = (said, Message("tool", "x", tool_call_id="call_0"))
    from turnwright.records.serialization import (
        failure_row,
        key_row,
        message_row,
        span_row,
        turn_row,
    )

    key = key_row(trajectory.key)
    events = [
        {"e": "opened", "k": key, "template": ""},
        {"e": "turn", "k": key, "n": 0, "spans": [*map(span_row, trajectory.spans)], "turn": turn_row(trajectory.turns[0])},  # noqa: E501
        {
            "e": "closed", "k": key, "spans": [], "answers": [], "stop": trajectory.stop, "reward": None, "rewards": {},  # noqa: E501
            "error": failure_row(trajectory.error), "final": [message_row(m) for m in trajectory.final], "metrics": {},  # noqa: E501
            "branches": {}, "wall_s": 0.0,
        },
    ]  # fmt: skip
    assert rebuild_trajectories(
        [orjson.loads(to_json(event)) for event in events], {task.id: task}.get
    ) == {trajectory.key: trajectory}
    assert [part.alt for part in trajectory.final[0].media] == ["a cat", None]


class Odd:
    def __repr__(self):
        return "odd \ud800 \n line"


class Shy:
    def __repr__(self):
        raise RuntimeError("not now")


circle: list = []
circle.append({"in": circle})
deep: list = []
for _ in range(3000):
    deep = [deep]
HOSTILE = (Odd(), Shy(), "\ud800\udfff", 2**70, -(2**70), float("nan"), float("inf"), circle, deep, {(1, 2): 3}, {Odd(): Shy()},  # noqa: E501
           {1, 2}, b"\xff", {"\ud800": 1}, lambda: 0, EpisodeKey, 10**5000)  # fmt: skip
plain = (
    st.none()
    | st.booleans()
    | st.integers(-(2**63), 2**63 - 1)
    | st.floats(allow_nan=False, allow_infinity=False)
)
plain |= st.text(st.characters(exclude_categories=("Cs",)), max_size=5)
friendly = st.recursive(
    plain,
    lambda x: st.lists(x, max_size=3) | st.dictionaries(st.text("abc", max_size=2), x, max_size=3),
)
# No strategy can show these.
odd = st.integers(0, len(HOSTILE) - 1).map(lambda number: HOSTILE[number])
hostile = st.recursive(
    plain | odd, lambda x: st.lists(x, max_size=3) | st.dictionaries(st.text(), x, max_size=3)
)


@settings(max_examples=150, deadline=None)
@given(value=friendly)
def test_json_says_what_was_given(value):
    assert orjson.loads(to_json(value)) == value


@settings(max_examples=150, deadline=None)
@given(value=hostile)
def test_anything_at_all_is_one_line_of_json_that_any_reader_takes(value):
    line = to_json({"e": "turn", "value": value, "ids": [1, 2, 3], "p": -0.1})
    assert b"\n" not in line
    assert orjson.loads(line) == json.loads(line)
    assert orjson.loads(line)["ids"] == [1, 2, 3]
    assert orjson.loads(line)["p"] == -0.1


def test_hostile_info_harms_neither_the_episode_nor_its_record(tmp_path):
    class Hostile(AsyncTalk):
        turns = len(HOSTILE)

        async def step(self, action):
            step = await super().step(action)
            return step._replace(
                info={"odd": HOSTILE[self.left], "says": "\ud800"}, observation="a \ud800 b"
            )

    rows, engine = tasks(2), Sampler()
    played = tw.rollout(Hostile, rows, engine, out=tmp_path, limits=tw.Limits(turns=99))
    found = read(tmp_path, rows)
    for trajectory in played:
        check_record(trajectory, engine.calls)
        assert (trajectory.stop, len(trajectory.turns)) == ("done", len(HOSTILE))
        assert found[trajectory.key].spans == trajectory.spans


# Directories and disks


def test_two_writers_of_one_run_are_told_apart(tmp_path):
    with RunDir(tmp_path) as run:
        with pytest.raises(TraceError, match="another process writes this run"):
            RunDir(tmp_path)
        code = f"from turnwright.records import RunDir; RunDir({str(tmp_path)!r})"
        other = subprocess.run(
            [sys.executable, "-c", code], capture_output=True, text=True, check=False
        )
        assert "another process writes this run" in other.stderr.splitlines()[-1]
        run.journal.append({"e": "x"})
    with RunDir(tmp_path) as run:
        assert list(run.events()) == [{"e": "x"}]
        run.close()


def test_a_second_writer_is_refused_after_the_lock_file_was_deleted(tmp_path):
    with RunDir(tmp_path) as run:
        run.journal.append({"e": "x"})
        (tmp_path / ".lock").unlink()
        with (tmp_path / "journal.jsonl").open("ab") as file:
            file.write(b"a line that is being wri")  # which the refused one leaves alone
        code = f"from turnwright.records import RunDir; RunDir({str(tmp_path)!r})"
        other = subprocess.run(
            [sys.executable, "-c", code], capture_output=True, text=True, check=False
        )
        assert "another process writes this run" in other.stderr.splitlines()[-1]
        with pytest.raises(TraceError, match="another process writes this run"):
            RunDir(tmp_path)
        assert (tmp_path / "journal.jsonl").read_bytes().endswith(b"wri")
    RunDir(tmp_path).close()  # the lock ends with its process


@pytest.mark.parametrize("change", ["deleted", "moved", "replaced"])
def test_a_journal_that_is_no_longer_in_its_place_stops_its_writer(tmp_path, change):
    journal = tmp_path / "journal.jsonl"
    with RunDir(tmp_path) as run:
        run.journal.append({"e": "x"})
        run.sync()
        if change == "deleted":
            journal.unlink()
        elif change == "moved":
            journal.rename(tmp_path / "elsewhere.jsonl")
        else:
            (tmp_path / "copy").write_bytes(journal.read_bytes())
            (tmp_path / "copy").replace(journal)
        for use in (lambda: run.journal.append({"e": "y"}), run.sync, run.journal.mark):
            with pytest.raises(
                TraceError, match="deleted, moved or replaced while this process was writing it"
            ):
                use()
    assert "y" not in (journal.read_text() if journal.exists() else "")


def test_a_journal_is_in_its_place_after_user_code_changed_the_directory(tmp_path, monkeypatch):
    (tmp_path / "other").mkdir()
    monkeypatch.chdir(tmp_path)
    with RunDir("run") as run:
        monkeypatch.chdir(tmp_path / "other")
        run.journal.append({"e": "x"})
        run.sync()


def test_a_named_pipe_in_place_of_a_file_is_told_and_does_not_wait(tmp_path):
    os.mkfifo(tmp_path / "metrics.jsonl")
    with pytest.raises(TraceError, match=r"metrics\.jsonl: not a regular file"):
        RunDir(tmp_path)
    (tmp_path / "metrics.jsonl").unlink()
    RunDir(tmp_path).close()  # the lock was let go


@pytest.mark.parametrize("spoil", ["file", "journal_is_a_directory", "inside_a_file"])
def test_a_directory_that_cannot_be_used_is_told_in_one_line(tmp_path, spoil):
    out = tmp_path / "run"
    if spoil == "journal_is_a_directory":
        (out / "journal.jsonl").mkdir(parents=True)
    else:
        out.write_text("")
        out = out / "deeper" if spoil == "inside_a_file" else out
    with pytest.raises(TraceError) as caught:
        tw.rollout(AsyncTalk, tasks(1), Sampler(), out=out)
    assert "\n" not in str(caught.value)
    assert "--out" in str(caught.value)
    if spoil == "journal_is_a_directory":
        (out / "journal.jsonl").rmdir()
        RunDir(out).close()  # the lock was let go


FULL = """
import resource, signal, sys
sys.path[:0] = {path!r}
from kit.rollouts import *
from turnwright.cli.main import main
from turnwright.errors import TraceError
signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
sys.dont_write_bytecode = True  # else modules would be cut off too
closed = []
class Closes(AsyncTalk):
    async def close(self):
        closed.append(self)
        resource.setrlimit(resource.RLIMIT_FSIZE, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))  # there is room again
resource.setrlimit(resource.RLIMIT_FSIZE, ({size}, resource.RLIM_INFINITY))
try:
    tw.rollout(Closes, tasks(6), Sampler(), out={out!r}, concurrency=4)
except TraceError as error:
    print(error)
print(len(closed))
"""  # noqa: E501


@pytest.mark.parametrize("size", [3_000, 10_000, 10_007])
def test_a_full_disk_stops_the_run_in_one_line_and_what_was_written_before_it_stays(tmp_path, size):
    code = FULL.format(path=[p for p in sys.path if p], out=str(tmp_path), size=size)
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    told, closed = done.stdout.splitlines()
    assert (
        "journal.jsonl: cannot be written (File too large); free some space, then use --resume"
        in told
    )
    assert int(closed) >= 1
    text = (tmp_path / "journal.jsonl").read_bytes()
    assert len(text) <= size, "something was written behind an event that is missing"
    assert text.endswith(b"\n")
    rows = tasks(6)
    found = read(tmp_path, rows)
    straight = {t.key: t for t in tw.rollout(AsyncTalk, rows, Sampler())}
    assert {key: facts(t) for key, t in found.items()} == {
        key: facts(straight[key]) for key in found
    }


def test_a_broken_file_takes_nothing_more(tmp_path):
    lines = JsonLines(tmp_path / "x.jsonl")
    lines.append({"a": 1})
    file = lines._file
    lines._file = os.open(tmp_path / "x.jsonl", os.O_RDONLY)
    with pytest.raises(TraceError, match="cannot be written"):
        lines.append({"b": 1})
    os.close(lines._file)
    lines._file = file
    with pytest.raises(TraceError, match="cannot be written"):
        lines.append({"c": 1})
    lines.close()
    assert list(read_json_lines(tmp_path / "x.jsonl")) == [{"a": 1}]


@pytest.mark.beside("view")
def test_a_run_of_an_earlier_version_is_refused_in_one_line(tmp_path, capsys):
    with RunDir(tmp_path / "old") as run:
        run.journal.append_definition("settings", {"v": RECORD_VERSION - 1})
    (tmp_path / "old" / "config.json").write_text("{}")
    line = (
        f"{tmp_path / 'old'}: recorded by an earlier version of turnwright, whose runs this "
        "one does not read"
    )
    with pytest.raises(TraceError, match=re.escape(line)):
        RunDir(tmp_path / "old")
    assert main(["view", str(tmp_path / "old")]) == 2
    assert line in capsys.readouterr().err


DAMAGED = [
    b"not JSON",
    b"[1, 2]",
    b"7",
    b'"settings"',
    b'{"e": "settings"}',
    b'{"e": "settings", "value": [2]}',
    b"[" * 5000,
]


@pytest.mark.parametrize("line", DAMAGED, ids=range(len(DAMAGED)))
def test_the_version_of_a_run_is_found_beside_damaged_lines(tmp_path, line):
    """What is damaged is told by what reads all of the journal; the version is that of the first
    settings that can be read."""
    journal = tmp_path / "journal.jsonl"
    journal.write_bytes(line + b"\n")
    check_version(tmp_path)
    old = to_json({"e": "settings", "name": "x", "value": {"v": RECORD_VERSION - 1}})
    journal.write_bytes(line + b"\n" + to_json({"e": "opened", "k": []}) + b"\n" + old + b"\n")
    check_version(tmp_path)
    journal.write_bytes(b"not JSON\n" + old + b"\n")
    with pytest.raises(TraceError, match="recorded by an earlier version"):
        check_version(tmp_path)
