"""A trajectory prepared for a page, with images.

The images that a model saw, for a page: read from the run's media, proven by their hash, drawn anew, inside the page.

Nothing of a file goes into the page as it is: its pixels are decoded within limits, held to the hash that is its name, and
written as a small PNG. So a file that somebody put there in place of an image is told of and not shown.
"""

from __future__ import annotations

import json
import os
from base64 import b64encode
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from io import BytesIO
from pathlib import Path
from typing import Any

from turnwise.errors import MediaError
from turnwise.media import MediaLimits, MediaStore
from turnwise.records.serialization import read_media
from turnwise.types import ImageRef, StopReason, VideoRef
from turnwise.viewer.run_data import Row, integer, number

MOST_PICTURES = 300
"""Images of one page; those behind are named only."""
MOST_BYTES = 6_000_000
"""Characters of all images of a page."""
MOST_SIDE = 256
"""Pixels of an image in the page along its longer side."""
MOST_FRAMES = 8
"""Frames of a clip that are shown."""
LEAST_SHOWN = 96
"""Smaller images are shown enlarged to this width, pixel for pixel."""


@dataclass(frozen=True, slots=True)
class Picture:
    """An image for a page, or why there is none."""

    caption: str
    source: str = ""
    """A data URI; empty where it cannot be shown."""
    width: int = 0
    """That it is shown with."""
    alt: str = ""
    small: bool = False
    """Enlarged, with its pixels as squares."""


class Gallery:
    """The images of one run, as long as the page has room.

    Args:
        run_dir: with a directory `media`.
    """

    def __init__(self, run_dir: Path) -> None:
        self._run_dir = run_dir
        self._store = MediaStore(run_dir / "media", limits=MediaLimits(pixels=20_000_000))
        self._known: dict[str, tuple[str, int]] = {}
        self._left = MOST_PICTURES
        self._room = MOST_BYTES

    @property
    def used(self) -> bool:
        """Whether an image was shown."""
        return bool(self._known)

    def pictures(self, part: Row) -> Iterator[Picture]:
        """The image of a content part, or the first frames of its clip; nothing for other parts."""
        if part.get("type") not in ("image", "video"):
            return
        try:
            media = read_media(part)
        except (KeyError, TypeError, ValueError, AttributeError) as error:
            yield Picture(f"an image that cannot be read: {type(error).__name__}")
            return
        if isinstance(media, VideoRef):
            for frame, at in zip(media.frames[:MOST_FRAMES], media.times, strict=False):
                yield self._picture(frame, f"{at:g} s, ", media.alt)
            if len(media.frames) > MOST_FRAMES:
                yield Picture(f"{len(media.frames) - MOST_FRAMES} more frames")
        else:
            yield self._picture(media, "", media.alt)

    def _picture(self, ref: ImageRef, before: str, alt: str | None) -> Picture:
        caption = f"{before}{ref.width} × {ref.height}"
        caption += f", shown with at most {ref.max_pixels} pixels" if ref.max_pixels else ""
        if not _is_name(ref.sha256):
            return Picture(f"{caption}: no image is called so")
        try:
            source, side = self._source(ref)
        except (MediaError, ImportError, OSError, ValueError, TypeError) as error:
            told = str(error).replace(f"{self._run_dir}{os.sep}", "")
            return Picture(f"{caption}: not shown ({type(error).__name__}: {told})")
        if not source:
            return Picture(f"{caption}: image {ref.sha256[:12]}, not shown for want of room")
        return Picture(caption, source, max(side, LEAST_SHOWN), str(alt or ""), side < LEAST_SHOWN)

    def _source(self, ref: ImageRef) -> tuple[str, int]:
        """A data URI and the width of an image; empty when the page is full."""
        if self._left <= 0 or self._room <= 0:
            return "", 0
        if ref.key not in self._known:
            from PIL import Image as Pillow

            picture = Pillow.fromarray(self._store.pixels(ref))
            picture.thumbnail((MOST_SIDE, MOST_SIDE))
            out = BytesIO()
            picture.save(out, "PNG", optimize=True)
            self._known[ref.key] = f"data:image/png;base64,{b64encode(out.getvalue()).decode()}", picture.width
        source, width = self._known[ref.key]
        self._left -= 1
        self._room -= len(source)
        return source, width


def of_message(message: Row, gallery: Gallery | None) -> list[Picture]:
    """All images of a message, in order."""
    content: Any = message.get("content")
    if gallery is None or not isinstance(content, Sequence) or isinstance(content, str):
        return []
    return [picture for part in content if isinstance(part, Mapping) for picture in gallery.pictures(part)]


def _is_name(name: Any) -> bool:
    return isinstance(name, str) and len(name) == 64 and all(char in "0123456789abcdef" for char in name)


MOST_TEXT = 8_000
"""Characters of one message that are shown."""
MOST_TOKENS = 3_000
"""Tokens of one trajectory that are shown one by one."""


@dataclass(frozen=True, slots=True)
class TokenView:
    """A sampled token: what is shown, a level of surprise from 0 (likely) to 4, and what hovering tells."""

    text: str
    level: int
    title: str


@dataclass(frozen=True, slots=True)
class MessageView:
    """One message, or the reply of a turn."""

    role: str
    text: str
    calls: Sequence[str] = ()
    tokens: Sequence[TokenView] = ()
    reasoning: str = ""
    facts: str = ""
    """Figures of the turn: tokens, seconds, reward."""
    number: int = 0
    """Of the turn, from 1; 0 for what the model did not write."""
    pictures: Sequence[Picture] = ()


@dataclass(frozen=True, slots=True)
class SpanView:
    """A span as it lay in the ids."""

    origin: str
    text: str
    facts: str
    on_path: bool


@dataclass(frozen=True, slots=True)
class ConversationView:
    """A trajectory as the report shows it."""

    why: str
    facts: Sequence[str]
    reward: str
    stop: str
    stop_sentence: str
    said: Sequence[MessageView]
    runs: Sequence[SpanView]
    answer: str = ""
    error: str = ""
    traceback: str = ""
    components: Sequence[tuple[str, str]] = ()
    notes: Sequence[str] = field(default_factory=list)


def prepare(row: Row, why: str, gallery: Gallery | None = None) -> ConversationView:
    """Read one line of trajectories.jsonl, tolerating what is missing; images come from the gallery."""
    spans = [span for span in row.get("spans") or () if isinstance(span, Mapping)]
    turns = [turn for turn in row.get("turns") or () if isinstance(turn, Mapping)]
    key, task, error = _map(row.get("key")), _map(row.get("task")), _map(row.get("error"))
    sampled = sum(len(span.get("ids") or ()) for span in spans if span.get("origin") == "model")
    observed = sum(len(span.get("ids") or ()) for span in spans if span.get("origin") in ("env", "template"))
    wall = number(row.get("wall_s"))
    facts = [f"task {key.get('task', '?')}", f"{len(turns)} turns", f"{sampled} tokens sampled", f"{observed} observed"]
    facts += [f"{wall:.2f} s"] if wall is not None else []
    path = _path(spans)
    notes = []
    aside = sum(path.get(index, 0) < len(span.get("ids") or ()) for index, span in enumerate(spans))
    if aside:
        notes.append(f"History was rewritten: {aside} of {len(spans)} spans lie on other branches, in whole or in part.")
    if sampled > MOST_TOKENS:
        notes.append(f"Only the first {MOST_TOKENS} of {sampled} sampled tokens are shown one by one.")
    stop = str(row.get("stop") or "running")
    rewards = _map(row.get("rewards"))
    return ConversationView(
        why=why,
        facts=facts,
        reward=_reward(row.get("reward")),
        stop=stop,
        stop_sentence=_sentence(stop),
        said=list(_conversation(row, spans, turns, gallery)),
        runs=[_run(span, path.get(index, 0)) for index, span in enumerate(spans)],
        answer="" if task.get("answer") is None else _cut(_text(task["answer"])),
        error=_cut(f"{error.get('type', 'error')} in {error.get('phase', '?')}: {error.get('message', '')}") if error else "",
        traceback=_cut(str(error.get("traceback") or "")),
        components=[(str(name), _reward(value)) for name, value in rewards.items()],
        notes=notes,
    )


def _conversation(row: Row, spans: Sequence[Row], turns: Sequence[Row], gallery: Gallery | None) -> Iterator[MessageView]:
    def heard(messages: Any) -> Iterator[MessageView]:
        return (_message(message, gallery) for message in messages or ())

    if not turns:
        yield from heard(_map(row.get("task")).get("messages"))
    left = MOST_TOKENS
    for index, turn in enumerate(turns, 1):
        yield from heard(turn.get("messages"))
        own = _own(turn, spans)
        if turn.get("inserted") is not None:
            before = integer(turn.get("parent"))
            had = sum(len(span.get("ids") or ()) for span in _own(turns[before], spans)) if 0 <= before < len(turns) else 0
            kept = f", behind {integer(turn.get('kept'))} of the {had} tokens before" if had else ""
            yield MessageView("environment", _cut(_text(turn["inserted"])), facts=f"inside the model's message{kept}")
        tokens = [token for span in own for token in _tokens(span)]
        reply = _message(turn.get("reply") or {"role": "assistant"})
        text = "" if tokens else "".join(str(span.get("text") or "") for span in own) or reply.text
        yield MessageView(
            role=str(turn.get("agent") or "main"),
            text=_cut(text),
            calls=reply.calls,
            tokens=tokens[:left],
            reasoning="" if tokens else reply.reasoning,
            facts=_turn_facts(turn, own),
            number=index,
        )
        left = max(0, left - len(tokens))
    if row.get("final"):
        yield from heard(row["final"])
    elif spans and turns and spans[-1].get("origin") == "env":
        last = str(spans[-1].get("text") or "")
        if last.strip():
            yield MessageView("environment", _cut(last))


def _own(turn: Row, spans: Sequence[Row]) -> list[Row]:
    return [spans[i] for i in turn.get("spans") or () if isinstance(i, int) and 0 <= i < len(spans)]


def _tokens(span: Row) -> list[TokenView]:
    texts, ids, logprobs = span.get("tokens"), span.get("ids") or (), span.get("logprobs") or ()
    if not isinstance(texts, list) or len(texts) != len(ids):
        return []
    tokens = []
    for i, (text, token_id) in enumerate(zip(texts, ids, strict=True)):
        logprob = number(logprobs[i]) if i < len(logprobs) else None
        told = "no logprob" if logprob is None else f"logprob {logprob:.4f}, probability {_probability(logprob)}"
        tokens.append(TokenView(str(text).replace("\n", "⏎\n"), _level(logprob), f"id {token_id}, {told}"))
    return tokens


def _level(logprob: float | None) -> int:
    """How surprising a token was: 0 over 90%, 1 over 50%, 2 over 10%, 3 over 1%, 4 under."""
    if logprob is None:
        return 0
    return sum(logprob < bound for bound in (-0.10536, -0.69315, -2.30259, -4.60517))


def _probability(logprob: float) -> str:
    share = 2.718281828459045 ** min(0.0, logprob)
    return f"{100 * share:.1f}%" if share >= 0.001 else f"{share:.1e}"


def _message(message: Any, gallery: Gallery | None = None) -> MessageView:
    if not isinstance(message, Mapping):
        return MessageView("?", _cut(_text(message)))
    content = message.get("content")
    pictures = of_message(message, gallery)
    if isinstance(content, Sequence) and not isinstance(content, str):
        alone = len(content) == 1 and bool(pictures)
        content = "" if alone else "".join(_part(part) for part in content)
    calls = [_call(call) for call in message.get("tool_calls") or () if isinstance(call, Mapping)]
    reasoning = message.get("reasoning_content") or message.get("reasoning") or ""
    role = str(message.get("role") or "?")
    name = message.get("name")
    said = f"{role} {name}" if name else role
    return MessageView(said, _cut(_text(content)), calls, reasoning=_cut(_text(reasoning)), pictures=pictures)


def _part(part: Any) -> str:
    if isinstance(part, str):
        return part
    part = _map(part)
    if part.get("type") == "text":
        return str(part.get("text") or "")
    if part.get("type") == "video":
        return "[video]"
    return f"[image {str(part.get('image') or '')[:12]}]" if part.get("type") == "image" else "[?]"


def _call(call: Row) -> str:
    function = _map(call.get("function", call))
    arguments = function.get("arguments")
    return _cut(f"{function.get('name', '?')}({_text(arguments) if arguments else ''})")


def _turn_facts(turn: Row, spans: Sequence[Row]) -> str:
    facts = [f"{sum(len(span.get('ids') or ()) for span in spans)} tokens"]
    versions = sorted({str(span["version"]) for span in spans if span.get("version") is not None})
    facts += [f"policy version {', '.join(versions)}"] if versions else []
    facts += [f"ended by {turn['finish']}"] if turn.get("finish") not in (None, "stop") else []
    facts += [f"reward {_reward(turn['reward'])}"] if number(turn.get("reward")) else []
    facts += [f"{turn['retries']} retries"] if turn.get("retries") else []
    for key, name in (("generate_s", "generating"), ("env_s", "in the environment")):
        seconds = number(turn.get(key))
        if seconds is not None and seconds >= 5e-4:
            facts.append(f"{seconds:.1f} s {name}" if seconds >= 1 else f"{1000 * seconds:.0f} ms {name}")
    return ", ".join(facts)


def _run(span: Row, used: int) -> SpanView:
    ids = span.get("ids") or ()
    start = max(0, integer(span.get("start")))
    facts = [f"{start}–{start + len(ids)}", "sampled" if span.get("origin") == "model" else "not sampled"]
    since = max(0, integer(span.get("untrained_from")))
    facts += [f"untrained{f' from {start + since}' if since else ''}: {span['untrained']}"] if span.get("untrained") else []
    facts += [f"from {start + used} on another branch"] if 0 < used < len(ids) else []
    text = span.get("text")
    shown = _cut(text).replace("\n", "⏎\n") if isinstance(text, str) else _cut("ids " + " ".join(map(str, ids[:400])))
    return SpanView(str(span.get("origin") or "?"), shown, ", ".join(facts), used > 0 or not ids)


def _path(spans: Sequence[Row]) -> dict[int, int]:
    """The spans on the path to the end of the record, and how many ids of each are on it."""
    used: dict[int, int] = {}
    index = len(spans) - 1
    end = max(0, integer(spans[index].get("start"))) + len(spans[index].get("ids") or ()) if spans else 0
    while 0 <= index < len(spans) and index not in used:
        start = max(0, integer(spans[index].get("start")))
        used[index] = max(0, end - start)
        end = min(end, start)
        index = integer(spans[index].get("parent"))
    return used


def _sentence(stop: str) -> str:
    return StopReason(stop).sentence if stop in set(StopReason) else ""


def _reward(value: Any) -> str:
    shown = number(value)
    return "not computed" if shown is None else f"{shown:g}"


def _text(value: Any) -> str:
    if value is None:
        return ""
    return value if isinstance(value, str) else json.dumps(value, ensure_ascii=False, default=repr)


def _cut(text: str) -> str:
    if len(text) <= MOST_TEXT:
        return text
    return f"{text[:MOST_TEXT]}\n… {len(text) - MOST_TEXT:,} more characters are not shown; they are in trajectories.jsonl"


def _map(value: Any) -> Row:
    return value if isinstance(value, Mapping) else {}
