"""A trajectory prepared for a page, with its images.

Images are read from the run's media, verified by hash, and embedded as re-encoded thumbnails. No
file is embedded as it is: its pixels are decoded within limits, compared with the hash in its name,
and written as a small PNG. A file substituted for an image is reported and not rendered.
"""

from __future__ import annotations

import os
import re
from base64 import b64encode
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from io import BytesIO
from pathlib import Path
from typing import Any

from turnwright.display.run_data import (
    PolicyNames,
    Row,
    TrajectoryEntry,
    choose,
    integer,
    load_at,
    mapping,
    number,
    sentence_of,
)
from turnwright.display.text import text_of
from turnwright.errors import MediaError
from turnwright.media import MediaLimits, MediaStore
from turnwright.records.serialization import read_media
from turnwright.types import ImageRef, VideoRef

MAX_PICTURES = 300  # maximum images per page; further ones are only named
MAX_BYTES = 6_000_000  # maximum characters of all images of a page
MAX_SIDE = 256  # maximum side of an embedded image, in pixels
MAX_FRAMES = 8  # maximum frames rendered per clip
MIN_WIDTH = 96  # width in pixels to which smaller images are enlarged, without interpolation


@dataclass(frozen=True, slots=True)
class Picture:
    """Image for a page, or the reason for having none."""

    caption: str
    source: str = ""  # data URI; empty if the image cannot be rendered
    width: int = 0  # rendered width in pixels
    alt: str = ""
    small: bool = False  # whether it is enlarged without interpolation


class Gallery:
    """Images of one run, within the limits of a page."""

    def __init__(self, run_dir: Path) -> None:
        self._run_dir = run_dir
        self._store = MediaStore(run_dir / "media", limits=MediaLimits(pixels=20_000_000))
        self._known: dict[str, tuple[str, int]] = {}
        self._left = MAX_PICTURES
        self._room = MAX_BYTES

    @property
    def used(self) -> bool:
        """Whether an image was rendered."""
        return bool(self._known)

    def pictures(self, part: Row) -> Iterator[Picture]:
        """Yield the image of a content part, or the first frames of its clip;
        nothing for other parts."""
        if part.get("type") not in ("image", "video"):
            return
        try:
            media = read_media(part)
        except (KeyError, TypeError, ValueError, AttributeError) as error:
            yield Picture(f"unreadable image: {type(error).__name__}")
            return
        if isinstance(media, VideoRef):
            for frame, at in zip(media.frames[:MAX_FRAMES], media.times, strict=False):
                yield self._picture(frame, f"{at:g} s, ", media.alt)
            if len(media.frames) > MAX_FRAMES:
                yield Picture(f"{len(media.frames) - MAX_FRAMES} more frames")
        else:
            yield self._picture(media, "", media.alt)

    def _picture(self, ref: ImageRef, before: str, alt: str | None) -> Picture:
        caption = f"{before}{ref.width} × {ref.height}"
        caption += f", sent with at most {ref.max_pixels} pixels" if ref.max_pixels else ""
        if not (isinstance(ref.sha256, str) and re.fullmatch("[0-9a-f]{64}", ref.sha256)):
            return Picture(f"{caption}: invalid image name")
        try:
            source, side = self._source(ref)
        except (MediaError, ImportError, OSError, ValueError, TypeError) as error:
            reason = str(error).replace(f"{self._run_dir}{os.sep}", "")
            return Picture(f"{caption}: not rendered ({type(error).__name__}: {reason})")
        if not source:
            return Picture(f"{caption}: image {ref.sha256[:12]}, not rendered: the page is full")
        return Picture(caption, source, max(side, MIN_WIDTH), str(alt or ""), side < MIN_WIDTH)

    def _source(self, ref: ImageRef) -> tuple[str, int]:
        """Return a data URI and the width of an image; empty if the page is full."""
        if self._left <= 0 or self._room <= 0:
            return "", 0
        if ref.key not in self._known:
            from PIL import Image as Pillow

            picture = Pillow.fromarray(self._store.pixels(ref))
            picture.thumbnail((MAX_SIDE, MAX_SIDE))
            out = BytesIO()
            picture.save(out, "PNG", optimize=True)
            self._known[ref.key] = (
                f"data:image/png;base64,{b64encode(out.getvalue()).decode()}",
                picture.width,
            )
        source, width = self._known[ref.key]
        self._left -= 1
        self._room -= len(source)
        return source, width


MAX_TEXT = 8_000  # maximum characters per message
MAX_TOKENS = 3_000  # maximum tokens of a trajectory rendered one by one
LEVELS = (-0.10536, -0.69315, -2.30259, -4.60517)
"""Logprobs (90%, 50%, 10%, 1%) below each of which a token is one level more surprising."""


@dataclass(frozen=True, slots=True)
class TokenView:
    """A sampled token: text, level of surprise from 0 (likely) to 4, and tooltip."""

    text: str
    level: int
    title: str


@dataclass(frozen=True, slots=True)
class MessageView:
    """A message, or the reply of a turn."""

    role: str
    text: str
    calls: Sequence[str] = ()
    tokens: Sequence[TokenView] = ()
    reasoning: str = ""
    facts: str = ""  # metrics of the turn: tokens, seconds, reward
    number: int = 0  # number of the turn, from 1; 0 for messages not written by the model
    pictures: Sequence[Picture] = ()


@dataclass(frozen=True, slots=True)
class SpanView:
    """A span of the ids."""

    origin: str
    text: str
    facts: str
    on_path: bool


@dataclass(frozen=True, slots=True)
class ConversationView:
    """A trajectory as rendered in the report."""

    why: str
    facts: Sequence[str]
    reward: str
    stop: str
    stop_sentence: str
    messages: Sequence[MessageView]
    spans: Sequence[SpanView]
    answer: str = ""
    error: str = ""
    traceback: str = ""
    components: Sequence[tuple[str, str]] = ()
    notes: Sequence[str] = field(default_factory=list)


def conversations(
    path: Path,
    entries: Sequence[TrajectoryEntry],
    problems: list[str],
    gallery: Gallery,
    policies: PolicyNames,
) -> Iterator[ConversationView]:
    """Yield the examples that a report displays; unreadable ones become problems."""
    for entry, why in choose(entries):
        try:
            yield prepare(load_at(path, entry.offset), why, gallery, policies)
        except Exception as error:  # records may have any shape
            problems.append(
                f"trajectories.jsonl: cannot render byte {entry.offset}: {type(error).__name__}: "
                f"{error}"
            )


def prepare(
    row: Row, why: str, gallery: Gallery | None = None, policies: PolicyNames | None = None
) -> ConversationView:
    """Convert one row of trajectories.jsonl, tolerating missing fields; images
    come from the gallery."""
    policies = policies or PolicyNames({}, 0)
    spans = [span for span in row.get("spans") or () if isinstance(span, Mapping)]
    turns = [turn for turn in row.get("turns") or () if isinstance(turn, Mapping)]
    key, task, error = mapping(row.get("key")), mapping(row.get("task")), mapping(row.get("error"))
    sampled = _count(span for span in spans if span.get("origin") == "model")
    observed = _count(span for span in spans if span.get("origin") in ("env", "template"))
    wall = number(row.get("wall_s"))
    facts = [
        f"task {key.get('task', '?')}",
        f"{len(turns)} turns",
        f"{sampled} tokens sampled",
        f"{observed} observed",
    ]
    facts += [f"{wall:.2f} s"] if wall is not None else []
    path = _path(spans)
    notes = []
    branched = sum(
        path.get(index, 0) < len(span.get("ids") or ()) for index, span in enumerate(spans)
    )
    if branched:
        notes.append(
            f"History was rewritten: {branched} of {len(spans)} spans are fully or partly on other "
            "branches."
        )
    if sampled > MAX_TOKENS:
        notes.append(
            f"Only the first {MAX_TOKENS} of {sampled} sampled tokens are rendered one by one."
        )
    stop = str(row.get("stop") or "running")
    return ConversationView(
        why=why,
        facts=facts,
        reward=_reward(row.get("reward")),
        stop=stop,
        stop_sentence=sentence_of(stop),
        messages=list(_conversation(row, spans, turns, gallery, policies)),
        spans=[_span(span, path.get(index, 0)) for index, span in enumerate(spans)],
        answer="" if task.get("answer") is None else _cut(text_of(task["answer"])),
        error=_cut(
            f"{error.get('type', 'error')} in {error.get('phase', '?')}: {error.get('message', '')}"
        )
        if error
        else "",
        traceback=_cut(str(error.get("traceback") or "")),
        components=[
            (str(name), _reward(value)) for name, value in mapping(row.get("rewards")).items()
        ],
        notes=notes,
    )


def _conversation(
    row: Row,
    spans: Sequence[Row],
    turns: Sequence[Row],
    gallery: Gallery | None,
    policies: PolicyNames,
) -> Iterator[MessageView]:
    def views(messages: Any) -> Iterator[MessageView]:
        return (_message(message, gallery) for message in messages or ())

    if not turns:
        yield from views(mapping(row.get("task")).get("messages"))
    left = MAX_TOKENS
    for index, turn in enumerate(turns, 1):
        yield from views(turn.get("messages"))
        own = _own(turn, spans)
        if turn.get("inserted") is not None:
            before = integer(turn.get("parent"))
            total = _count(_own(turns[before], spans)) if 0 <= before < len(turns) else 0
            position = (
                f", after {integer(turn.get('kept'))} of the {total} tokens before" if total else ""
            )
            yield MessageView(
                "environment",
                _cut(text_of(turn["inserted"])),
                facts=f"inside the model's message{position}",
            )
        tokens = [token for span in own for token in _tokens(span)]
        reply = _message(turn.get("reply") or {"role": "assistant"})
        text = "" if tokens else "".join(str(span.get("text") or "") for span in own) or reply.text
        yield MessageView(
            role=str(turn.get("agent") or "main"),
            text=_cut(text),
            calls=reply.calls,
            tokens=tokens[:left],
            reasoning="" if tokens else reply.reasoning,
            facts=_turn_facts(turn, own, policies),
            number=index,
        )
        left = max(0, left - len(tokens))
    if row.get("final"):
        yield from views(row["final"])
    elif (
        turns
        and spans
        and spans[-1].get("origin") == "env"
        and (last := str(spans[-1].get("text") or "")).strip()
    ):
        yield MessageView("environment", _cut(last))


def _count(spans: Iterable[Row]) -> int:
    return sum(len(span.get("ids") or ()) for span in spans)


def _own(turn: Row, spans: Sequence[Row]) -> list[Row]:
    return [spans[i] for i in turn.get("spans") or () if isinstance(i, int) and 0 <= i < len(spans)]


def _tokens(span: Row) -> list[TokenView]:
    texts, ids, logprobs = span.get("tokens"), span.get("ids") or (), span.get("logprobs") or ()
    if not isinstance(texts, list) or len(texts) != len(ids):
        return []
    tokens = []
    for i, (text, token_id) in enumerate(zip(texts, ids, strict=True)):
        logprob = number(logprobs[i]) if i < len(logprobs) else None
        title, level = "no logprob", 0
        if logprob is not None:
            share = 2.718281828459045 ** min(0.0, logprob)
            title = (
                f"logprob {logprob:.4f}, probability "
                f"{f'{share:.1%}' if share >= 0.001 else f'{share:.1e}'}"
            )
            level = sum(logprob < bound for bound in LEVELS)
        tokens.append(TokenView(str(text).replace("\n", "⏎\n"), level, f"id {token_id}, {title}"))
    return tokens


def _message(message: Any, gallery: Gallery | None = None) -> MessageView:
    if not isinstance(message, Mapping):
        return MessageView("?", _cut(text_of(message)))
    content = message.get("content")
    pictures: list[Picture] = []
    if isinstance(content, Sequence) and not isinstance(content, str):
        if gallery is not None:
            pictures = [
                picture
                for part in content
                if isinstance(part, Mapping)
                for picture in gallery.pictures(part)
            ]
        only_media = len(content) == 1 and bool(pictures)
        content = "" if only_media else "".join(_part(part) for part in content)
    functions = [
        mapping(c.get("function", c))
        for c in message.get("tool_calls") or ()
        if isinstance(c, Mapping)
    ]
    calls = [
        _cut(f"{one.get('name', '?')}({text_of(one.get('arguments') or '')})") for one in functions
    ]
    reasoning = message.get("reasoning_content") or message.get("reasoning") or ""
    role = str(message.get("role") or "?")
    name = message.get("name")
    author = f"{role} {name}" if name else role
    return MessageView(
        author, _cut(text_of(content)), calls, reasoning=_cut(text_of(reasoning)), pictures=pictures
    )


def _part(part: Any) -> str:
    if isinstance(part, str):
        return part
    part = mapping(part)
    if part.get("type") == "text":
        return str(part.get("text") or "")
    if part.get("type") == "video":
        return "[video]"
    return f"[image {str(part.get('image') or '')[:12]}]" if part.get("type") == "image" else "[?]"


def _turn_facts(turn: Row, spans: Sequence[Row], policies: PolicyNames) -> str:
    facts = [f"{_count(spans)} tokens"]
    sampled = sorted(
        (span for span in spans if span.get("version") is not None),
        key=lambda span: integer(span["version"]),
    )
    versions = dict.fromkeys(map(policies.label, sampled))
    facts += [f"policy {', '.join(versions)}"] if versions else []
    facts += [f"ended by {turn['finish']}"] if turn.get("finish") not in (None, "stop") else []
    facts += [f"reward {_reward(turn['reward'])}"] if number(turn.get("reward")) else []
    facts += [f"{turn['retries']} retries"] if turn.get("retries") else []
    for key, name in (("generate_s", "generating"), ("env_s", "in the environment")):
        seconds = number(turn.get(key))
        if seconds is not None and seconds >= 5e-4:
            facts.append(
                f"{seconds:.1f} s {name}" if seconds >= 1 else f"{1000 * seconds:.0f} ms {name}"
            )
    return ", ".join(facts)


def _span(span: Row, used: int) -> SpanView:
    ids = span.get("ids") or ()
    start = max(0, integer(span.get("start")))
    facts = [
        f"{start}–{start + len(ids)}",
        "sampled" if span.get("origin") == "model" else "not sampled",
    ]
    since = max(0, integer(span.get("untrained_from")))
    facts += (
        [f"untrained{f' from {start + since}' if since else ''}: {span['untrained']}"]
        if span.get("untrained")
        else []
    )
    facts += [f"from {start + used} on another branch"] if 0 < used < len(ids) else []
    text = span.get("text")
    body = (
        _cut(text).replace("\n", "⏎\n")
        if isinstance(text, str)
        else _cut("ids " + " ".join(map(str, ids[:400])))
    )
    return SpanView(str(span.get("origin") or "?"), body, ", ".join(facts), used > 0 or not ids)


def _path(spans: Sequence[Row]) -> dict[int, int]:
    """Return the number of ids of each span on the path to the end of the record."""
    used: dict[int, int] = {}
    index = len(spans) - 1
    end = max(0, integer(spans[index].get("start"))) + _count(spans[-1:]) if spans else 0
    while 0 <= index < len(spans) and index not in used:
        start = max(0, integer(spans[index].get("start")))
        used[index] = max(0, end - start)
        end = min(end, start)
        index = integer(spans[index].get("parent"))
    return used


def _reward(value: Any) -> str:
    reward = number(value)
    return "not computed" if reward is None else f"{reward:g}"


def _cut(text: str) -> str:
    if len(text) <= MAX_TEXT:
        return text
    return f"{text[:MAX_TEXT]}\n… {len(text) - MAX_TEXT:,} more characters in trajectories.jsonl"
