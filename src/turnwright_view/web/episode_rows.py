"""What the index keeps of an episode: one row of columns, its text for searches, and how the page
sees the row.

A record may come from anyone: a value of another type counts as missing. What makes a line
unreadable is in `turnwright.display.run_data.episode_record`.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import dataclass
from hashlib import blake2b
from typing import Any, NamedTuple
from urllib.parse import quote, unquote

from turnwright.display.run_data import Row, episode_record, integer, number, read_line
from turnwright.display.text import text_of
from turnwright_view.web.texts import one_line, truncate

MAX_SHOWN = 160
"""Maximum characters of a prompt, a reply or a snippet in a list."""

MAX_NAME = 400
"""Maximum characters of a task's or another name in a list."""

MAX_TOOLS = 8
"""Maximum tools, and agents, of an episode by which it can be found."""

NO_TRAINING = "not of a training step"
"""Why the ids of gates, evaluations and rollouts are not trained."""

SEPARATOR = "\x1f"
"""Stands around each name of a column with several."""

MAX_KEY = 1000
"""Maximum characters of a task's name in a key; of longer ones the rest is hashed."""

MAX_INTEGER = 2**63 - 1
"""Largest integer of the database."""


class EpisodeAddress(NamedTuple):
    """What finds an episode; `step` is what metrics count, in training from 1."""

    phase: str
    step: int
    task: str
    sample: int
    attempt: int

    @property
    def address(self) -> str:
        """The key in addresses: five parts, each percent-encoded by itself."""
        return "/".join(quote(str(part), safe="", errors="surrogatepass") for part in self)

    @property
    def recorded(self) -> list[Any]:
        """The key as records have it, whose training steps count from 0."""
        step = self.step - (self.phase == "train")
        return [self.phase, step, self.task, self.sample, self.attempt]


def key_of_address(address: str) -> EpisodeAddress | None:
    """Return the key in an address; None for anything else."""
    parts = [unquote(part, errors="surrogatepass") for part in address.split("/")]
    if len(parts) != 5:
        return None
    phase, step, task, sample, attempt = parts
    try:
        return EpisodeAddress(phase, int(step), task, int(sample), int(attempt))
    except ValueError:
        return None


class EpisodeColumns(NamedTuple):
    """Columns of the table `episode`, in its order."""

    number: int
    """Position in the file, from 0."""
    at: int
    """Byte offset of its line."""
    length: int
    """Bytes of its line."""
    phase: str
    step: int
    task: str
    sample: int
    attempt: int
    place: int
    """Of its phase in the list: training, then evaluations, then the rest."""
    failed: int
    reward: float | None
    tie: int
    stop: str
    error: str
    turns: int
    tokens: int
    """Sampled ids."""
    images: int
    branches: int
    tools: str
    agents: str
    wall_s: float | None
    advantage: float | None = None
    reason: str | None = None
    trained: int = 0
    trained_at: int | None = None
    """Byte offset of its line in training.jsonl."""

    @property
    def key(self) -> EpisodeAddress:
        """What finds the episode."""
        return EpisodeAddress(self.phase, self.step, self.task, self.sample, self.attempt)

    @property
    def untrained(self) -> str:
        """Why nothing of it was trained; empty if something was, or where that is not known."""
        if self.phase != "train":
            return NO_TRAINING
        return self.reason or ""


@dataclass(frozen=True, slots=True)
class ReadEpisode:
    """An episode as its line was read."""

    columns: EpisodeColumns
    prompt: str
    """First line of the task's text."""
    reply: str
    """Text of the last reply."""
    text: str
    """All that was said, for searches."""


def read_episode(number_: int, at: int, line: bytes) -> ReadEpisode | None:
    """Read a line of trajectories.jsonl; None if it is no record that can be read."""
    return read_line(line, lambda row: _read(number_, at, len(line), episode_record(row)))


def _read(number_: int, at: int, length: int, row: Row) -> ReadEpisode:
    key = _table(row.get("key"))
    error = _table(row.get("error"))
    spans = _tables(row.get("spans"))
    turns = _tables(row.get("turns"))

    phase, step, task, sample, attempt = key_of(key)
    tokens = 0
    images = 0
    for span in spans:
        if span.get("origin") == "model":
            tokens += len(span.get("ids") or ())
        if span.get("media"):
            images += len(span["media"])
    branches = sum(integer(count) for count in _table(row.get("branches")).values())

    columns = EpisodeColumns(
        number=number_,
        at=at,
        length=length,
        phase=phase,
        step=step,
        task=task,
        # Records without a key are all different episodes.
        sample=sample if key else number_,
        attempt=attempt,
        place=place_of(phase),
        failed=int(bool(error)),
        reward=number(row.get("reward")),
        tie=0,
        stop=_name(row.get("stop") or ""),
        error=_storable(_error_name(error)),
        turns=len(turns),
        tokens=tokens,
        images=images,
        branches=min(MAX_INTEGER, branches),
        tools=_joined(_tools(turns)),
        agents=_joined([turn.get("agent") or "main" for turn in turns]),
        wall_s=number(row.get("wall_s")),
    )
    return ReadEpisode(
        columns=columns,
        prompt=_storable(prompt_of(row, turns)),
        reply=_storable(reply_of(turns, spans)),
        text=_storable(searched_text(row, spans)),
    )


# Lines are read by the hundred thousand. What JSON was read from has no other mappings than dicts,
# and asking for a dict takes a tenth of the time of asking for a mapping.
_EMPTY: dict[str, Any] = {}


def _table(value: Any) -> dict[str, Any]:
    """Return an object of JSON, or an empty one for anything else."""
    return value if isinstance(value, dict) else _EMPTY


def _tables(values: Any) -> list[dict[str, Any]]:
    """Return the objects of a list."""
    return [value for value in values or () if isinstance(value, dict)]


def key_of(key: Row) -> EpisodeAddress:
    """Return the key of a record, whose training steps count from 0."""
    phase = sys.intern(_name(key.get("phase", "")))
    step = integer(key.get("step"))
    if phase == "train":
        step = min(MAX_INTEGER, step + 1)
    task = _name(key.get("task", ""))
    return EpisodeAddress(
        phase, step, task, integer(key.get("sample")), integer(key.get("attempt"))
    )


def key_of_values(values: Sequence[Any]) -> EpisodeAddress:
    """Return a record's key whose values stand in a list; raise `ValueError` unless it has five."""
    return key_of(dict(zip(EpisodeAddress._fields, values, strict=True)))


def _name(value: Any) -> str:
    """Return a name that is neither too long for a key nor the same as another's."""
    name = _storable(str(value))
    if len(name) <= MAX_KEY:
        return name
    return name[:MAX_KEY] + blake2b(name.encode(), digest_size=8).hexdigest()


def place_of(phase: str) -> int:
    """Return the place of a phase in the list: training, then evaluations, then gates."""
    if phase == "train":
        return 0
    return 2 if phase.startswith("gate") else 1


def _error_name(error: Row) -> str:
    if not error:
        return ""
    return f"{error.get('phase', '?')}/{error.get('type', '?')}"[:80]


def _tools(turns: Sequence[Row]) -> list[Any]:
    """Return the name of each call of a tool."""
    names = []
    for turn in turns:
        for call in _table(turn.get("reply")).get("tool_calls") or ():
            names.append(_table(_table(call).get("function")).get("name"))
    return names


def _joined(names: Sequence[Any]) -> str:
    """Return different names as one text, with a separator around each."""
    if not names:
        return ""
    different = list(dict.fromkeys(map(str, names)))[:MAX_TOOLS]
    texts = [_storable(name[:80]).replace(SEPARATOR, " ") for name in different]
    return SEPARATOR + SEPARATOR.join(texts) + SEPARATOR


def names_in(joined: str) -> list[str]:
    """Return the names of a column with several."""
    return [name for name in joined.split(SEPARATOR) if name]


def _storable(text: str) -> str:
    """Return a text that UTF-8 can encode; lone surrogates are named instead."""
    if text.isascii():
        return text
    return text.encode("utf-8", "backslashreplace").decode()


def prompt_of(row: Row, turns: Sequence[Row]) -> str:
    """Return the first line of the task's text, or of what the environment said first."""
    text = _first_line_of_user(_table(row.get("task")).get("messages"))
    if not text and turns:
        text = _first_line_of_user(turns[0].get("messages"))
    return text


def _first_line_of_user(messages: Any) -> str:
    """Return the first line that is no system message's; that of one where there is no other."""
    of_system = ""
    for message in _tables(messages if isinstance(messages, list) else ()):
        text = content_text(message.get("content")).lstrip()
        if text and message.get("role") != "system":
            return one_line(text.partition("\n")[0], MAX_SHOWN)
        of_system = of_system or text
    return one_line(of_system.partition("\n")[0], MAX_SHOWN)


def reply_of(turns: Sequence[Row], spans: Sequence[Row]) -> str:
    """Return the text of the last reply; its calls where it has no text."""
    if not turns:
        return ""
    reply = _table(turns[-1].get("reply"))
    text = one_line(content_text(reply.get("content")), MAX_SHOWN)
    if text:
        return text

    calls = reply.get("tool_calls")
    if isinstance(calls, list) and calls:
        function = _table(_table(calls[0]).get("function"))
        called = f"{function.get('name')} {text_of(function.get('arguments'))}"
        return one_line(called, MAX_SHOWN)

    own = turns[-1].get("spans")
    texts = []
    for index in own if isinstance(own, list) else ():
        if isinstance(index, int) and 0 <= index < len(spans):
            texts.append(str(spans[index].get("text") or ""))
    return one_line("".join(texts), MAX_SHOWN)


def content_text(content: Any) -> str:
    """Return the text of a message's content, whose other parts are left out."""
    if isinstance(content, str):
        return content
    if not isinstance(content, list):
        return text_of(content)
    return "".join(str(_table(part).get("text") or "") for part in content)


def searched_text(row: Row, spans: Sequence[Row]) -> str:
    """Return all that was said in an episode."""
    texts = [span.get("text") for span in spans]
    error = _table(row.get("error"))
    if error:
        texts += [error.get("message"), error.get("traceback")]
    for message in row.get("final") or ():
        texts.append(content_text(_table(message).get("content")))

    task = _table(row.get("task"))
    texts += [text_of(task.get("answer")), _table(row.get("key")).get("task")]
    if not spans:
        opening = task.get("messages")
        for message in opening if isinstance(opening, list) else ():
            texts.append(content_text(_table(message).get("content")))
    return "\n".join([text if isinstance(text, str) else str(text or "") for text in texts])


def row_of(columns: EpisodeColumns, prompt: str, reply: str, snippet: str = "") -> dict[str, Any]:
    """Return an episode's row of a list."""
    return {
        "key": columns.key.address,
        "phase": truncate(columns.phase, MAX_NAME),
        "step": columns.step,
        "task": truncate(columns.task, MAX_NAME),
        "sample": columns.sample,
        "attempt": columns.attempt,
        "number": columns.number,
        "reward": columns.reward,
        "advantage": columns.advantage,
        "stop": truncate(columns.stop, MAX_NAME),
        "error": columns.error,
        "turns": columns.turns,
        "tokens": columns.tokens,
        "images": columns.images,
        "branches": columns.branches,
        "tools": names_in(columns.tools),
        "agents": names_in(columns.agents),
        "wall_s": columns.wall_s,
        "trained": bool(columns.trained),
        "reason": truncate(columns.untrained, MAX_NAME),
        "tie": bool(columns.tie),
        "prompt": prompt,
        "reply": reply,
        "snippet": snippet,
    }
