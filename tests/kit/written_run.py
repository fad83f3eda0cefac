"""A run written by hand, in which every figure is known: a group whose siblings part ways, partly
trained replies, weights, calls of tools, a rewritten history, and hostile records."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

TASK = "hop/17 ü"
"""A name with what addresses have to encode."""

HOSTILE = (
    "<script>window.owned=1</script><img src=x onerror='window.owned=1'>"
    "</pre></script><a href='javascript:window.owned=1'>x</a>\u202etxt.exe\x1b[2J&amp;"
)
LONG_WORD = "x" * 4000


def message(role: str, content: Any, **more: Any) -> dict[str, Any]:
    """Return a message in OpenAI's format."""
    return {"role": role, "content": content, **more}


@dataclass
class WrittenEpisode:
    """An episode that grows by what is asked and what is replied."""

    sample: int
    reward: float | None
    phase: str = "train"
    step: int = 0
    """As in the record: in training from 0."""
    task: str = TASK
    spans: list[dict[str, Any]] = field(default_factory=list)
    turns: list[dict[str, Any]] = field(default_factory=list)
    scored: dict[str, list[float | None]] = field(default_factory=dict)
    """The trainer's logprobs."""

    def span(self, origin: str, tokens: Sequence[str], parent: int, start: int | None) -> int:
        """Add a span behind another one; where it starts earlier than the other ends, it replaces
        what the other says from there on."""
        end = 0
        if parent >= 0:
            end = self.spans[parent]["start"] + len(self.spans[parent]["ids"])
        row: dict[str, Any] = {
            "origin": origin,
            "parent": parent,
            "start": end if start is None else start,
            "ids": [id_of(text) for text in tokens],
            "text": "".join(tokens),
            "agent": "main",
        }
        if origin == "model":
            row["tokens"] = list(tokens)
            row["logprobs"] = [-0.01 * (number + 1) for number in range(len(tokens))]
            row["version"] = 5
        self.spans.append(row)
        return len(self.spans) - 1

    def turn(
        self,
        asked: list[dict[str, Any]],
        reply: Sequence[str],
        *,
        parent: int | None = None,
        start: int | None = None,
        said: dict[str, Any] | None = None,
        **more: Any,
    ) -> dict[str, Any]:
        """Add a turn; by default it continues the one before. Return its sampled span."""
        before = len(self.turns) - 1 if parent is None else parent
        last = self.turns[before]["spans"][-1] if before >= 0 else -1
        text = "".join(str(one["content"]) for one in asked)
        given = self.span("env" if last >= 0 else "prompt", [text, "|"], last, start)
        sampled = self.span("model", reply, given, None)
        self.scored[str(sampled)] = [value - 0.002 for value in self.spans[sampled]["logprobs"]]
        self.turns.append(
            {
                "agent": "main",
                "prompt": given,
                "context": self.spans[sampled]["start"],
                "cached": 1 if last >= 0 else 0,
                "spans": [sampled],
                "parent": before,
                "messages": asked,
                "reply": said or message("assistant", "".join(reply[:-1])),
                "finish": "stop",
                "reward": 0.0,
                "info": {},
                "retries": 0,
                "generate_s": 0.2,
                "env_s": 0.1,
                **more,
            }
        )
        return self.spans[sampled]

    @property
    def key(self) -> list[Any]:
        """The key as records of training have it."""
        return [self.phase, self.step, self.task, self.sample, 0]

    def record(self, **more: Any) -> dict[str, Any]:
        """Return the line of trajectories.jsonl."""
        names = ("phase", "step", "task", "sample", "attempt")
        opening = self.turns[0]["messages"] if self.turns else []
        return {
            "schema": 1,
            "key": dict(zip(names, self.key, strict=True)),
            "task": {"id": self.task, "messages": opening, "answer": "7", "info": {}},
            "stop": "done",
            "reward": self.reward,
            "rewards": {},
            "error": None,
            "final": [],
            "metrics": {},
            "branches": {},
            "wall_s": 0.3 * len(self.turns) + 0.1,
            "reward_s": 0.02,
            "spans": self.spans,
            "turns": self.turns,
            **more,
        }

    def training(self, advantage: float | None, reason: str | None = None) -> dict[str, Any]:
        """Return the line of training.jsonl."""
        logprobs = self.scored if reason is None else {}
        return {
            "key": self.key,
            "step": self.step,
            "advantage": advantage,
            "reason": reason,
            "logprobs": logprobs,
        }


def id_of(text: str) -> int:
    """Return the id of a text: the same for the same text."""
    return 100 + sum(ord(letter) * (place + 1) for place, letter in enumerate(text)) % 4000


END = "<|im_end|>"
ASKED = message("user", "code of amber")
HEARD = message("user", "see birch")


def group() -> Iterator[tuple[dict[str, Any], dict[str, Any]]]:
    """Yield record and training of four siblings: they part ways in turn 2, where two look up
    another word and one answers at once."""
    rows: list[tuple[float, float, list[list[str]]]] = [
        (1.0, 1.5, [["look", "up", " birch", END], ["answer", " ", "7", END]]),
        (1.0, 1.5, [["look", "up", " birch", END], ["answer", " ", "7", END]]),
        (0.0, -0.5, [["look", "up", " heron", END], ["answer", " ", "0", END]]),
        (0.0, -2.5, [["answer", " ", "3", END]]),
    ]
    for sample, (reward, advantage, replies) in enumerate(rows):
        episode = WrittenEpisode(sample, reward)
        episode.turn([ASKED], ["look", "up", " amber", END])
        for reply in replies:
            episode.turn([HEARD], reply)
        if sample == 2:
            # The tail of its first reply is left out.
            first = episode.spans[episode.turns[0]["spans"][0]]
            first |= {"untrained": "rewound", "untrained_from": 2}
            episode.scored["1"][2:] = [None, None]
        yield episode.record(final=[message("user", "right")]), episode.training(advantage)


def tie() -> Iterator[tuple[dict[str, Any], dict[str, Any]]]:
    """Yield record and training of two siblings with the same reward, of which nothing is
    trained."""
    for sample in range(2):
        episode = WrittenEpisode(sample, 0.0, task="tie", step=1)
        episode.turn([ASKED], ["answer", " ", "3", END])
        yield episode.record(), episode.training(None, "no_signal")


def with_tools() -> tuple[dict[str, Any], dict[str, Any]]:
    """Return record and training of an episode with everything out of the ordinary: reasoning,
    calls of tools, a branch, weights, retries, a failure that was recovered from."""
    episode = WrittenEpisode(0, 0.5, task="tools", step=1)
    call = {"function": {"name": "search", "arguments": '{"query": "amber", "most": 3}'}}
    broken = {"function": {"name": "search", "arguments": '{"query": '}, "error": "not JSON"}
    asked = [message("system", "Use tools."), message("user", "Where is amber?")]
    episode.turn(
        asked,
        ["<think>", "Hm", "</think>", "call", END],
        said=message("assistant", "", reasoning_content="Hm", tool_calls=[call, broken]),
        info={
            "tool_log": [
                {"tool": "search", "s": 0.05, "error": ""},
                {"tool": "search", "s": 0.01, "error": "BadArguments"},
            ],
            "right": False,
        },
        retries=2,
        weights=[1.0, 0.5, 0.0, 1.0, 1.0],
    )
    episode.turn([message("tool", "amber is in drawer 7", name="search")], ["drawer", " 7", END])
    # The history after the first turn is written anew.
    episode.turn(
        [message("user", "Summary: amber was looked for.")],
        ["7", END],
        parent=0,
        start=4,
        finish="length",
    )
    failure = {
        "type": "Timeout",
        "message": "no answer in 5 s",
        "phase": "step",
        "traceback": "Traceback\n  line 3",
        "turn": 1,
        "recovery": "retried",
    }
    record = episode.record(
        rewards={"right": 1.0, "short": -0.5},
        metrics={"searches": 2},
        branches={"compaction": 1},
        failures=[failure],
    )
    return record, episode.training(0.25)


def hostile() -> Iterator[dict[str, Any]]:
    """Yield records that somebody else wrote: markup in every text, words without end, other types,
    and spans in a circle."""
    episode = WrittenEpisode(0, None, task=HOSTILE, step=2)
    call = {"function": {"name": HOSTILE, "arguments": HOSTILE}, "error": HOSTILE}
    picture = {"type": "image", "image": "../../../etc/passwd", "width": 8, "height": 8}
    asked = [message(HOSTILE[:60], HOSTILE), message("user", [picture, LONG_WORD])]
    episode.turn(
        asked,
        [HOSTILE, LONG_WORD, "\u202e", END],
        said=message("assistant", HOSTILE, reasoning_content=HOSTILE, tool_calls=[call]),
        info={HOSTILE: HOSTILE, "tool_log": [{"tool": HOSTILE, "s": "soon", "error": HOSTILE}]},
        agent=HOSTILE,
        finish=HOSTILE,
    )
    error = {"type": HOSTILE, "message": HOSTILE, "phase": HOSTILE, "traceback": LONG_WORD}
    yield episode.record(
        error=error,
        stop="env_error",
        rewards={HOSTILE: 1.0, LONG_WORD: 2.0},
        metrics={HOSTILE: 1.0},
        final=[message("user", LONG_WORD)],
        task={"id": HOSTILE, "messages": asked, "answer": LONG_WORD},
    )

    odd = WrittenEpisode(1, 0.0, task=HOSTILE, step=2)
    record = odd.record()
    record["spans"] = [
        {"origin": "model", "parent": 1, "ids": [1, 2], "text": "a circle"},
        {"origin": "model", "parent": 0, "start": -5, "ids": ["x"], "tokens": ["y"]},
        {"origin": 5, "parent": 99, "ids": "none"},
        None,
    ]
    record["turns"] = [{}, {"spans": [0, 7, "x"], "parent": 9, "messages": ["text"], "reply": 3}]
    for name in ("wall_s", "reward_s", "task", "rewards", "branches", "final", "stop"):
        del record[name]
    yield record
    # Nothing but a key.
    yield {"key": {"phase": "train", "step": 2, "task": HOSTILE, "sample": 2, "attempt": 0}}


def long_reply(count: int) -> dict[str, Any]:
    """Return a record with one reply of many ids."""
    episode = WrittenEpisode(0, 1.0, task="long", step=3)
    words = [f" word{number % 97}" for number in range(count - 1)]
    episode.turn([message("user", "Write a book.")], [*words, END])
    return episode.record()


def write_run(folder: Path, *, long: int = 0) -> Path:
    """Write the run; with `long`, also a reply of so many ids."""
    folder.mkdir(parents=True, exist_ok=True)
    records, training = [], []
    for record, row in (*group(), with_tools(), *tie()):
        records.append(record)
        training.append(row)
    records += hostile()
    if long:
        records.append(long_reply(long))

    config = {"config": {"name": "written"}, "versions": {}}
    (folder / "config.json").write_text(json.dumps(config))
    for name, rows in (("trajectories.jsonl", records), ("training.jsonl", training)):
        (folder / name).write_text("".join(json.dumps(row) + "\n" for row in rows))
    metrics = [{"phase": "train", "step": step, "reward": 0.5} for step in range(3)]
    (folder / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in metrics))
    return folder
