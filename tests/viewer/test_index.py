"""The index of episodes: its filters and orders are those of a plain loop, and however it came to
be (at once, in pieces, after a crash, beside another viewer), it is the same."""

from __future__ import annotations

import errno
import json
import os
import random
import shutil
import signal
import sqlite3
import subprocess
import sys
import threading
import time
import tracemalloc
from pathlib import Path
from typing import Any

import orjson
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from kit.viewing import trajectory

from turnwright_view.web import cache, index_tables
from turnwright_view.web.episode_rows import EpisodeAddress, EpisodeColumns, key_of_address
from turnwright_view.web.index import RunIndex
from turnwright_view.web.index_tables import IndexState
from turnwright_view.web.search import ORDERS, EpisodeFilter, Words, filter_of, folded


@pytest.fixture(autouse=True)
def own_cache(tmp_path_factory, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path_factory.mktemp("cache")))


def write(run: Path, rows: list[dict[str, Any]], name: str = "trajectories.jsonl") -> Path:
    run.mkdir(exist_ok=True)
    (run / name).write_bytes(b"".join(orjson.dumps(row) + b"\n" for row in rows))
    return run


def indexed(run: Path) -> RunIndex:
    index = RunIndex(run)
    while index.update(2**16):
        pass
    return index


def record(rng: random.Random, number: int) -> dict[str, Any]:
    """A record as this version writes it, of few different values, so that filters find some."""
    failed = rng.random() < 0.2
    row = trajectory(
        rng,
        phase=rng.choice(["train", "train", "train", "eval-before-sampled", "gate"]),
        step=rng.randrange(4),
        turns=rng.randrange(1, 4),
        reward=rng.choice([None, 0.0, 0.5, 1.0]),
        stop="env_error" if failed else rng.choice(["done", "max_turns"]),
        wall_s=rng.choice([0.1, 0.2, 0.3]),
    )
    row["key"] |= {"task": f"t/{rng.randrange(5)}", "sample": rng.randrange(3), "attempt": 0}
    if failed:
        row["error"] = {"type": rng.choice(["OSError", "KeyError"]), "phase": "step"}
    for turn in row["turns"]:
        turn["agent"] = rng.choice(["main", "helper"])
        if rng.random() < 0.5:
            function = {"name": rng.choice(["search", "open"]), "arguments": "{}"}
            turn["reply"]["tool_calls"] = [{"type": "function", "function": function}]
    return row


def training(rng: random.Random, rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    made = []
    for row in rows:
        key = row["key"]
        if key["phase"] != "train" or rng.random() < 0.3:
            continue
        advantage = rng.choice([None, 0.5, -0.5])
        reason = "no_signal" if advantage is None else None
        recorded = [key[name] for name in ("phase", "step", "task", "sample", "attempt")]
        made.append({"key": recorded, "advantage": advantage, "reason": reason})
    return made


def described(rows: list[dict[str, Any]], learned: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """What a plain loop says of each episode: of several records with one key the last."""
    by_key: dict[tuple[Any, ...], dict[str, Any]] = {}
    for number, row in enumerate(rows):
        by_key[tuple(row["key"].values())] = {"row": row, "number": number}
    of_training = {tuple(one["key"]): one for one in learned}

    rewards: dict[tuple[Any, ...], list[float]] = {}
    for key, one in by_key.items():
        if one["row"]["reward"] is not None:
            rewards.setdefault(key[:3], []).append(one["row"]["reward"])

    episodes = []
    for key, one in by_key.items():
        row = one["row"]
        known = rewards.get(key[:3], [])
        calls = [
            call["function"]["name"]
            for turn in row["turns"]
            for call in turn["reply"].get("tool_calls", ())
        ]
        made = of_training.get(key, {})
        step = key[1] + (key[0] == "train")
        episodes.append(
            {
                "number": one["number"],
                "key": EpisodeAddress(key[0], step, *key[2:]),
                "phase": key[0],
                "step": step,
                "task": key[2],
                "reward": row["reward"],
                "stop": row["stop"],
                "error": f"step/{row['error']['type']}" if row["error"] else "",
                "turns": len(row["turns"]),
                "tokens": sum(len(s["ids"]) for s in row["spans"] if s["origin"] == "model"),
                "tools": set(calls),
                "agents": {turn["agent"] for turn in row["turns"]},
                "wall_s": row["wall_s"],
                "tie": len(known) > 1 and len(set(known)) == 1,
                "trained": made.get("advantage") is not None,
                "advantage": made.get("advantage"),
                "text": "\n".join(span["text"] for span in row["spans"]) + "\n" + key[2],
            }
        )
    return episodes


def matches(one: dict[str, Any], query: dict[str, str]) -> bool:
    for name in ("phase", "stop", "task"):
        if query.get(name) and one[name] != query[name]:
            return False
    if query.get("group") and "/".join(one["key"].address.split("/")[:3]) != query["group"]:
        return False
    error = query.get("error")
    if error and not (one["error"] if error == "*" else one["error"] == error):
        return False
    if query.get("tool") and query["tool"] not in one["tools"]:
        return False
    if query.get("agent") and query["agent"] not in one["agents"]:
        return False
    for name in ("trained", "tie"):
        if query.get(name) and one[name] != (query[name] == "yes"):
            return False
    for name in ("step", "reward", "turns", "tokens"):
        low, high = query.get(f"{name}_min"), query.get(f"{name}_max")
        if (low or high) and one[name] is None:
            return False
        if (low and one[name] < float(low)) or (high and one[name] > float(high)):
            return False
    return all(word in one["text"].lower() for word in query.get("text", "").lower().split())


def reward_of(one: dict[str, Any]) -> float:
    return -1e9 if one["reward"] is None else one["reward"]


PLACES = {"train": 0, "eval-before-sampled": 1, "gate": 2}
PLAIN_ORDERS = {
    "notable": lambda one: (
        PLACES[one["phase"]],
        -one["step"],
        not one["error"],
        reward_of(one),
        not one["tie"],
        one["number"],
    ),
    "newest": lambda one: -one["number"],
    "oldest": lambda one: one["number"],
    "worst": lambda one: (reward_of(one), one["number"]),
    "best": lambda one: (-reward_of(one), one["number"]),
    "longest": lambda one: (-one["tokens"], one["number"]),
    "slowest": lambda one: (-one["wall_s"], one["number"]),
}

QUERIES = st.fixed_dictionaries(
    {},
    optional={
        "phase": st.sampled_from(["train", "gate", "none"]),
        "stop": st.sampled_from(["done", "max_turns", "env_error"]),
        "error": st.sampled_from(["*", "step/OSError"]),
        "tool": st.sampled_from(["search", "open", "sea"]),
        "agent": st.sampled_from(["main", "helper"]),
        "task": st.sampled_from(["t/0", "t/1"]),
        "group": st.sampled_from(["train/1/t%2F0", "gate/0/t%2F1"]),
        "trained": st.sampled_from(["yes", "no"]),
        "tie": st.sampled_from(["yes", "no"]),
        "step_min": st.sampled_from(["1", "2"]),
        "step_max": st.sampled_from(["2", "3"]),
        "reward_min": st.sampled_from(["0", "0.5"]),
        "reward_max": st.sampled_from(["0", "0.5"]),
        "turns_min": st.sampled_from(["1", "2"]),
        "tokens_max": st.sampled_from(["6", "9"]),
        "text": st.sampled_from(["amber", "lookup cedar", "see BIRCH", "t/0", "answer 7", "zzz"]),
    },
)


@given(
    st.integers(0, 10**6),
    st.integers(1, 60),
    st.lists(st.tuples(QUERIES, st.sampled_from(sorted(ORDERS))), min_size=1, max_size=6),
    st.integers(1, 7),
)
@settings(
    max_examples=40, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
def test_filters_and_orders_are_those_of_a_plain_loop(tmp_path_factory, seed, count, queries, most):
    rng = random.Random(seed)
    rows = [record(rng, number) for number in range(count)]
    learned = training(rng, rows)
    run = write(tmp_path_factory.mktemp("run"), rows)
    write(run, learned, "training.jsonl")
    index = indexed(run)
    episodes = described(rows, learned)

    for query, order in queries:
        wanted = sorted((e for e in episodes if matches(e, query)), key=PLAIN_ORDERS[order])
        found: list[dict[str, Any]] = []
        start: int | None = 0
        while start is not None:  # page by page
            page = index.find(filter_of(query), order, start, most)
            assert page.total == (None if query.get("text") else len(wanted))
            found += page.rows
            start = page.next
        assert [row["number"] for row in found] == [one["number"] for one in wanted], query
        for row, one in zip(found, wanted, strict=True):
            for name in ("reward", "advantage", "trained", "tie", "error", "turns", "tokens"):
                assert row[name] == one[name], name
            assert set(row["tools"]) == one["tools"]
            assert index.episode(key_of_address(row["key"])).number == one["number"]
    index.close()


def whole(index: RunIndex) -> dict[str, Any]:
    """All that an index answers."""
    state = index.state()
    columns = [index.at(number) for number in index.numbers(EpisodeFilter(), "oldest")]
    return {
        "columns": columns,
        "facets": index.facets(),
        "state": (state.read, state.records, state.episodes, state.unreadable, state.trained_read),
        "texts": [row["number"] for row in index.find(EpisodeFilter(text="lookup"), "oldest").rows],
    }


@given(st.integers(0, 10**6), st.lists(st.floats(0, 1), min_size=1, max_size=4), st.booleans())
@settings(
    max_examples=30, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
def test_an_index_resumed_at_any_byte_is_that_made_at_once(
    tmp_path_factory, seed, shares, is_reopened
):
    """Whatever had been written of both files when it was read; another process may go on."""
    rng = random.Random(seed)
    rows = [record(rng, number) for number in range(30)]
    once = write(tmp_path_factory.mktemp("once"), rows)
    write(once, training(rng, rows), "training.jsonl")
    with (once / "trajectories.jsonl").open("ab") as file:
        file.write(b"not a record\n" + orjson.dumps(rows[0])[:40])

    grown = tmp_path_factory.mktemp("grown")
    index = RunIndex(grown)
    for share in (*sorted(shares), 1.0):
        for name in ("trajectories.jsonl", "training.jsonl"):
            content = (once / name).read_bytes()
            known = (grown / name).stat().st_size if (grown / name).exists() else 0
            with (grown / name).open("ab") as file:
                file.write(content[known : max(known, int(share * len(content)))])
        if is_reopened:
            index.close()
            index = RunIndex(grown)
        while index.update(2**12):
            pass
    at_once = indexed(once)
    assert whole(index) == whole(at_once)
    index.close()
    at_once.close()


CRASHING = """
import os, sys
from pathlib import Path
from turnwright_view.web import index_tables
from turnwright_view.web.index import RunIndex
left = int(sys.argv[2])
insert = index_tables._add_facets
def crash(sql, columns):
    global left
    insert(sql, columns)
    left -= 1
    if left < 0:
        os.kill(os.getpid(), 9)
index_tables._add_facets = crash
index_tables.BATCH_ROWS = 1
index = RunIndex(Path(sys.argv[1]))
while index.update(1000):
    pass
"""


@pytest.mark.parametrize("batches", [0, 1, 5])
def test_a_process_killed_in_the_middle_of_a_batch_leaves_a_whole_index(tmp_path, batches):
    rng = random.Random(7)
    rows = [record(rng, number) for number in range(20)]
    for number, row in enumerate(rows):
        row["key"]["sample"] = number
    run = write(tmp_path / "run", rows)
    words = [sys.executable, "-c", CRASHING, str(run), str(batches)]
    died = subprocess.run(words, env=os.environ | {"PYTHONPATH": "src"}, check=False)
    assert died.returncode == -signal.SIGKILL
    index = RunIndex(run)
    assert 0 <= index.state().records < 20
    counted = sum(count for _, count in index.facets()["phase"])
    assert counted == index.state().episodes, "no half of a batch"
    while index.update():
        pass
    again = indexed(write(tmp_path / "again", rows))
    assert whole(index) == whole(again)


def test_two_viewers_of_one_run_write_one_after_another_and_both_read(tmp_path):
    rng = random.Random(3)
    rows = [record(rng, number) for number in range(200)]
    for number, row in enumerate(rows):
        row["key"]["sample"] = number
    run = write(tmp_path / "run", rows[:50])
    first, second = RunIndex(run), RunIndex(run)
    first.start()
    second.start()
    try:
        for row in rows[50:]:
            with (run / "trajectories.jsonl").open("ab") as file:
                file.write(orjson.dumps(row) + b"\n")
        until = time.monotonic() + 30
        while time.monotonic() < until and not (
            first.state().episodes == second.state().episodes == 200
        ):
            time.sleep(0.02)
        assert whole(first) == whole(second)
        assert first.state().records == 200
        assert not first.error
        assert not second.error
    finally:
        first.close()
        second.close()


def test_while_another_writes_an_index_is_read_and_not_written(tmp_path):
    run = write(tmp_path / "run", [record(random.Random(1), 0)])
    index = RunIndex(run)
    with cache.exclusive(index.file) as is_mine:
        assert is_mine
        assert index.update(), "it is left to the other, and there is more"
        assert index.state() == IndexState()
    index.update()
    assert index.state().episodes == 1


@pytest.mark.parametrize("damage", [b"", b"not a database", None])
def test_a_damaged_index_is_thrown_away_and_made_anew(tmp_path, damage):
    rng = random.Random(1)
    rows = [record(rng, number) for number in range(30)]
    run = write(tmp_path / "run", rows)
    index = indexed(run)
    known = whole(index)
    index.close()
    if damage is None:  # its middle is overwritten
        content = bytearray(index.file.read_bytes())
        content[4096 : len(content) // 2] = os.urandom(len(content) // 2 - 4096)
        damage = bytes(content)
    cache.remove_index(index.file)
    index.file.write_bytes(damage)
    again = RunIndex(run)
    until = time.monotonic() + 20
    while time.monotonic() < until:
        try:
            again.update()
            if whole(again) == known:
                break
        except sqlite3.DatabaseError:
            continue
    assert whole(again) == known


def test_a_database_that_is_deleted_while_it_is_open_is_made_anew(tmp_path):
    run = write(tmp_path / "run", [record(random.Random(n), n) for n in range(5)])
    index = indexed(run)
    known = whole(index)
    cache.remove_index(index.file)
    assert index.state().episodes == 0
    index.update()
    assert whole(index) == known


def test_a_run_that_was_replaced_or_has_shrunk_is_indexed_anew(tmp_path):
    rng = random.Random(5)
    rows = [record(rng, number) for number in range(9)]
    run = write(tmp_path / "run", rows)
    index = indexed(run)
    (run / "trajectories.jsonl").write_bytes(orjson.dumps(rows[3]) + b"\n")  # in place, shorter
    index.update()
    assert index.state().episodes == 1
    other = [record(rng, number) for number in range(20)]
    (run / "trajectories.jsonl").write_bytes(b"".join(orjson.dumps(r) + b"\n" for r in other))
    index.update()  # in place, longer, with another first line
    assert index.find(EpisodeFilter(), "oldest").rows[0]["number"] >= 0
    assert index.state().records == 20
    (run / "trajectories.jsonl").unlink()
    index.update()
    assert index.state().episodes == 0
    assert index.find(EpisodeFilter()).rows == []


def test_rows_of_an_index_that_was_emptied_meanwhile_have_no_texts(tmp_path):
    index = indexed(write(tmp_path / "run", [trajectory(random.Random(1))]))
    columns = index.at(0)
    assert index.row(columns)["reply"]
    (index.path / "trajectories.jsonl").unlink()
    index.update()
    row = index.row(columns)
    assert (row["key"], row["reply"]) == (columns.key.address, "")


def test_half_a_line_that_a_killed_run_leaves_is_not_waited_for(tmp_path):
    rng = random.Random(2)
    row = record(rng, 0)
    run = write(tmp_path / "run", [row])
    write(run, [{"key": [*row["key"].values()], "advantage": 1.0}], "training.jsonl")
    index = RunIndex(run)
    for name in ("trajectories.jsonl", "training.jsonl"):
        with (run / name).open("ab") as file:
            file.write(b'{"key": {"phase"')
    progress = index.progress()
    assert progress["read"] == 0 < progress["size"], "there are lines to read"
    index.update()
    progress = index.progress()
    assert progress["read"] == progress["size"] > 0
    with (run / "training.jsonl").open("ab") as file:
        file.write(b": 3}}\n")
    progress = index.progress()
    assert progress["read"] < progress["size"], "the line has its end now"
    index.update()
    progress = index.progress()
    assert progress["read"] == progress["size"]


def test_training_that_was_done_again_counts_once(tmp_path):
    row = trajectory(random.Random(1))
    key = [*row["key"].values()]
    run = write(tmp_path / "run", [row])
    write(run, [{"key": key, "advantage": 1.0, "reason": None}], "training.jsonl")
    index = indexed(run)
    assert index.find(EpisodeFilter()).rows[0]["advantage"] == 1.0
    with (run / "training.jsonl").open("a") as file:
        file.write(json.dumps({"key": key, "advantage": None, "reason": "no_signal"}) + "\n")
        file.write("[]\n" + json.dumps({"key": 3}) + "\n" + json.dumps({"key": [1, 2]}) + "\n")
    with (run / "trajectories.jsonl").open("ab") as file:
        file.write(orjson.dumps(row) + b"\n")  # played again after a resume
    index.update()
    (found,) = index.find(EpisodeFilter()).rows
    assert (found["advantage"], found["reason"], found["trained"]) == (None, "no_signal", False)
    assert index.trained(index.at(1))["reason"] == "no_signal"
    (run / "training.jsonl").unlink()
    index.update()
    assert index.find(EpisodeFilter()).rows[0]["reason"] == ""


def test_the_index_is_in_the_cache_of_the_user_and_a_temporary_folder_where_that_is_read_only(
    tmp_path, monkeypatch
):
    run = write(tmp_path / "run", [trajectory(random.Random(1))])
    before = sorted(run.iterdir())
    index = indexed(run)
    assert index.file.parent == Path(os.environ["XDG_CACHE_HOME"]) / "turnwright" / "view"
    assert sorted(run.iterdir()) == before, "nothing is written beside the run"
    index.close()
    (tmp_path / "file").write_text("no folder")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "file"))
    index = indexed(run)
    assert index.state().episodes == 1
    assert index.file.parent.name.startswith("turnwright-view-")
    index.close()
    assert not index.file.parent.exists()


def test_a_cache_without_locks_is_not_used(tmp_path, monkeypatch):
    flock = cache.fcntl.flock

    def without_locks(file, operation):
        if Path(os.readlink(f"/proc/self/fd/{file.fileno()}")).is_relative_to(cache.cache_folder()):
            raise OSError(errno.ENOSYS, os.strerror(errno.ENOSYS))
        flock(file, operation)

    monkeypatch.setattr(cache.fcntl, "flock", without_locks)
    file = cache.index_file(tmp_path, 1)
    assert file.parent.name.startswith("turnwright-view-")
    shutil.rmtree(file.parent)


def test_a_cache_that_is_emptied_meanwhile_is_filled_again(tmp_path):
    index = indexed(write(tmp_path / "run", [trajectory(random.Random(1))]))
    shutil.rmtree(index.file.parent)
    assert index.state().episodes == 0
    assert not index.update(), "nobody else writes it"
    assert index.state().episodes == 1


def test_a_lock_that_cannot_be_had_is_an_error_and_not_waited_for(tmp_path):
    index = indexed(write(tmp_path / "run", [trajectory(random.Random(1))]))
    lock = index.file.with_name(index.file.name + ".lock")
    lock.unlink()
    lock.mkdir()
    with pytest.raises(IsADirectoryError):
        index.update()


def test_another_cache_folder_meanwhile_costs_no_index(tmp_path, monkeypatch):
    index = indexed(write(tmp_path / "run", [trajectory(random.Random(1))]))
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "elsewhere"))
    index.close()
    assert index.file.exists(), "only a temporary folder is removed"


def test_a_question_that_outlives_its_index_leaves_no_connection(tmp_path):
    index = indexed(write(tmp_path / "run", [trajectory(random.Random(1))]))

    def ask(sql):
        index.close()
        asked.append(sql)

    asked = []
    index._asked(ask)
    with pytest.raises(sqlite3.ProgrammingError, match="closed"):
        asked[0].execute("SELECT 1")


def test_indexes_that_nobody_used_for_thirty_days_go(tmp_path):
    old = indexed(write(tmp_path / "old", [trajectory(random.Random(1))]))
    new = indexed(write(tmp_path / "new", [trajectory(random.Random(1))]))
    held = indexed(write(tmp_path / "held", [trajectory(random.Random(1))]))
    for index in (old, held):
        os.utime(index.file, (0, time.time() - 31 * 86400))
    with cache.exclusive(held.file):
        assert cache.remove_unused() == [old.file]
    assert not old.file.exists()
    assert new.file.exists()
    assert held.file.exists(), "somebody writes it now"


SAID = {
    "chinese": "\u5317\u4eac\u5929\u6c14\u5f88\u597d, it is fine",
    "japanese": "\u30ab\u30bf\u30ab\u30ca\u3068\u3072\u3089\u304c\u306a",
    "korean": "\uc548\ub155\ud558\uc138\uc694 \uc138\uacc4",
    "accents": "Caf\u00e9 \u00c5ngstr\u00f6m STRASSE",
    "code": "lookup(\"a.b\", key='x_1') -> None",
    "emoji": "done \U0001f642 \U0001f600!",
    "thai": "\u0e2a\u0e27\u0e31\u0e2a\u0e14\u0e35",
}
HITS = [
    ("\u5929\u6c14", "chinese"),
    ("\u5317\u4eac fine", "chinese"),
    ("\u30bf\u30ab\u30ca", "japanese"),
    ("\uff76\uff80\uff76\uff85", "japanese"),
    ("\uc548\ub155", "korean"),
    ("cafe", "accents"),
    ("CAF\u00c9 ang", "accents"),
    ("stra\u00dfe", "accents"),
    ('lookup("a.b"', "code"),
    ("key='x_1'", "code"),
    ("look", "code"),
    ("\U0001f642", "emoji"),
    ("\u0e27\u0e31\u0e2a", "thai"),
]


@pytest.mark.parametrize(("text", "name"), HITS)
def test_a_search_finds_words_of_every_script_and_shows_them(tmp_path, text, name):
    rows = []
    for number, said in enumerate(SAID.values()):
        row = trajectory(random.Random(number), said=said)
        row["key"]["task"] = f"t{number}"
        rows.append(row)
    index = indexed(write(tmp_path / "run", rows))
    found = index.find(EpisodeFilter(text=text), "oldest").rows
    assert [row["number"] for row in found] == [list(SAID).index(name)]
    first = folded(text).split()[0]
    assert first in folded(found[0]["snippet"])


@pytest.mark.parametrize("text", ["\u6c14\u5929", "loo up", "ookup(", "caf\u00e9x", "\u3042"])
def test_a_search_finds_no_more_than_the_text_has(tmp_path, text):
    """Characters of a word in another order, a word cut off before its first letter."""
    rows = [trajectory(random.Random(1), said=said) for said in SAID.values()]
    for number, row in enumerate(rows):
        row["key"]["task"] = f"t{number}"
    index = indexed(write(tmp_path / "run", rows))
    assert index.find(EpisodeFilter(text=text)).rows == []


@pytest.mark.parametrize("text", ["amber", "answer 7", "lookup ce", "t/1"])
def test_common_words_are_found_in_another_way_with_the_same_result(tmp_path, monkeypatch, text):
    rng = random.Random(2)
    index = indexed(write(tmp_path / "run", [record(rng, number) for number in range(80)]))
    found = []
    for common in (10**9, 1):
        monkeypatch.setattr(index_tables, "COMMON", common)
        rows: list[dict[str, Any]] = []
        start: int | None = 0
        while start is not None:
            page = index.find(EpisodeFilter(text=text), "notable", start, 5)
            rows += page.rows
            start = page.next
        found.append(rows)
    assert found[0] == found[1] != []


@given(st.text(max_size=30), st.text(max_size=10))
@settings(deadline=None)
def test_any_text_can_be_searched_for(said, text):
    """What a user types never becomes syntax of the query, and a snippet has what was sought."""
    words = Words.of(text)
    snippet = words.snippet(said)
    assert (snippet is not None) == all(piece in folded(said) for piece in words.pieces)
    database = sqlite3.connect(":memory:")
    database.execute("CREATE VIRTUAL TABLE words USING fts5 (text, detail = none)")
    if words.match:
        database.execute("SELECT rowid FROM words WHERE words MATCH ?", (words.match,)).fetchall()


def test_a_large_run_is_indexed_in_little_memory_and_its_list_is_there_before(make_run, tmp_path):
    run = make_run(tmp_path / "hop", steps=1)
    line = json.loads((run / "trajectories.jsonl").read_bytes().splitlines()[2])
    line["spans"][0]["text"] = "x" * 20_000
    with (run / "trajectories.jsonl").open("wb") as file:
        for number in range(1000):
            line["key"] |= {"task": f"t{number // 8}", "sample": number % 8}
            file.write(orjson.dumps(line) + b"\n")
    size = (run / "trajectories.jsonl").stat().st_size
    tracemalloc.start()
    index = RunIndex(run)
    assert index.update(2**20), "there is more"
    assert 0 < index.state().episodes < 200
    assert len(index.find(EpisodeFilter()).rows) > 20, "the list is there before the file was read"
    assert index.progress()["read"] < index.progress()["size"] == size
    while index.update(2**20):
        pass
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert index.state().episodes == 1000
    assert peak < 8e6, f"{peak} bytes for {size}"
    some = index.at(random.Random(0).randrange(1000))
    assert index.record(some)["key"]["sample"] == some.sample
    assert len(index.siblings(some.key)) == 8


def test_a_request_goes_before_the_reading(make_run, tmp_path):
    index = RunIndex(make_run(tmp_path / "hop", steps=6))
    with index.paused():
        reading = threading.Thread(target=index.update)
        reading.start()
        time.sleep(0.3)
        assert index.state().records == 0
    reading.join(20)
    assert index.state().records == 27


def test_keys_in_addresses_read_back():
    for key in (
        EpisodeAddress("train", 12, "hop/17", 3, 0),
        EpisodeAddress("", -1, "", -1, -1),
        EpisodeAddress("eval-after-sampled", 0, "%2F \u5317?&#<\x1b", 2**62, 1),
    ):
        assert key_of_address(key.address) == key
        assert "/" not in key.address.split("/")[2]
    for address in ("", "a/b", "train/x/t/0/0", "train/1/t/0/0/0"):
        assert key_of_address(address) is None
    assert EpisodeAddress("train", 12, "t", 0, 0).recorded == ["train", 11, "t", 0, 0]


def test_columns_of_the_table_and_of_the_row_are_one_list(tmp_path):
    index = indexed(write(tmp_path / "run", [trajectory(random.Random(1))]))
    with sqlite3.connect(index.file) as sql:
        names = [row[1] for row in sql.execute("PRAGMA table_info(episode)")]
    assert tuple(names) == EpisodeColumns._fields
