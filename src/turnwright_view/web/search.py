"""What a list can be asked for: filters and orders as SQL, and words of all text.

A search finds candidates in the index of words and then looks at the record's own text, so that
what is shown has the words in it. Scripts without spaces between words (Chinese, Japanese, Korean,
Thai, ...) are indexed character by character, in texts and in searches alike.
"""

from __future__ import annotations

import re
import unicodedata
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any
from urllib.parse import unquote

from turnwright_view.web.episode_rows import MAX_SHOWN, SEPARATOR, place_of

ORDERS = {
    "notable": "place, step DESC, failed DESC, reward, tie DESC, number",
    "newest": "number DESC",
    "oldest": "number",
    "worst": "reward, number",
    "best": "reward DESC, number",
    "longest": "tokens DESC, number",
    "slowest": "wall_s DESC, number",
}
"""Orders of a list. A reward of None is the worst: SQLite sorts it before all numbers."""

FACETS = ("phase", "stop", "error", "tool", "agent")
"""Fields of a filter whose values are counted."""

MAX_WORDS = 20
"""Maximum words of a search that are looked up; the rest is compared with the text."""

_ACCENTS = re.compile("[\u0300-\u036f]")
_SINGLE = re.compile(
    "([\u0e00-\u0eff\u1000-\u109f\u1780-\u17ff\u3040-\u30ff\u3400-\u9fff\uac00-\ud7af\uf900-\ufaff"
    "\U00020000-\U0003ffff])"
)
_WORD = re.compile(r"[^\W_]+")

Bounds = tuple[float | None, float | None]
ANY: Bounds = (None, None)


@dataclass(frozen=True, slots=True)
class EpisodeFilter:
    """Filter of a list; empty fields match all."""

    phase: str = ""
    stop: str = ""
    error: str = ""
    """Exact error; `*` matches any."""
    tool: str = ""
    agent: str = ""
    task: str = ""
    group: tuple[str, int, str] | None = None
    """Phase, step and task."""
    trained: bool | None = None
    tie: bool | None = None
    step: Bounds = ANY
    reward: Bounds = ANY
    turns: Bounds = ANY
    tokens: Bounds = ANY
    text: str = ""

    @property
    def is_empty(self) -> bool:
        """Whether it matches all."""
        return self == EpisodeFilter()

    @property
    def facet(self) -> tuple[str, str] | None:
        """Kind and value of the only condition, where its episodes are counted; or None."""
        for kind in FACETS:
            value: Any = getattr(self, kind)
            if value and self == EpisodeFilter(**{kind: value}):
                return kind, value
        return None

    def sql(self) -> tuple[str, list[Any]]:
        """Return the condition on columns, without that on texts, and its values."""
        terms: list[str] = []
        values: list[Any] = []
        if self.phase:
            # The index of the order begins with the place of a phase; that of keys, which the
            # plus excludes, would have all its episodes sorted.
            terms.append("+phase = ? AND place = ?")
            values += [self.phase, place_of(self.phase)]
        for column, wanted in (("stop", self.stop), ("task", self.task)):
            if wanted:
                terms.append(f"{column} = ?")
                values.append(wanted)
        if self.group is not None:
            terms.append("phase = ? AND step = ? AND task = ?")
            values += self.group
        if self.error == "*":
            terms.append("failed = 1")
        elif self.error:
            terms.append("error = ?")
            values.append(self.error)

        for column, name in (("tools", self.tool), ("agents", self.agent)):
            if name:
                terms.append(f"instr({column}, ?)")
                values.append(f"{SEPARATOR}{name}{SEPARATOR}")
        for column, flag in (("trained", self.trained), ("tie", self.tie)):
            if flag is not None:
                terms.append(f"{column} = ?")
                values.append(int(flag))
        for column, bounds in (
            ("step", self.step),
            ("reward", self.reward),
            ("turns", self.turns),
            ("tokens", self.tokens),
        ):
            _add_bounds(column, bounds, terms, values)
        return " AND ".join(terms) or "1", values


def _add_bounds(column: str, bounds: Bounds, terms: list[str], values: list[Any]) -> None:
    low, high = bounds
    if low is not None:
        terms.append(f"{column} >= ?")
        values.append(low)
    if high is not None:
        terms.append(f"{column} <= ?")
        values.append(high)


def filter_of(query: Mapping[str, str]) -> EpisodeFilter:
    """Return the filter in a query; raise `ValueError` or `KeyError` for what is none."""
    wanted: dict[str, Any] = {}
    for name in ("phase", "stop", "error", "tool", "agent", "task", "text"):
        wanted[name] = query.get(name, "")
    for name in ("trained", "tie"):
        wanted[name] = {"": None, "yes": True, "no": False}[query.get(name, "")]
    for name in ("step", "reward", "turns", "tokens"):
        wanted[name] = (_bound(query, f"{name}_min"), _bound(query, f"{name}_max"))
    if query.get("group"):
        wanted["group"] = _group(query["group"])
    return EpisodeFilter(**wanted)


def _bound(query: Mapping[str, str], name: str) -> float | None:
    text = query.get(name, "")
    return float(text) if text else None


def _group(address: str) -> tuple[str, int, str]:
    """Return phase, step and task of three parts, each percent-encoded by itself."""
    phase, step, task = (unquote(part, errors="surrogatepass") for part in address.split("/"))
    return phase, int(step), task


@dataclass(frozen=True, slots=True)
class Words:
    """What a text must have in it."""

    pieces: tuple[str, ...]
    """Texts between spaces, folded."""

    @classmethod
    def of(cls, text: str) -> Words:
        """Read what a user typed."""
        return cls(tuple(folded(text).split()))

    @property
    def match(self) -> str:
        """Query of the index of words; empty where it cannot help. The last word may go on."""
        words = _WORD.findall(separated(" ".join(self.pieces)))[:MAX_WORDS]
        if not words:
            return ""
        quoted = [f'"{word}"' for word in words]
        return " AND ".join([*quoted[:-1], quoted[-1] + "*"])

    def snippet(self, text: str) -> str | None:
        """Return the text around the first word; None unless all words are in the text."""
        whole = folded(text)
        if not all(piece in whole for piece in self.pieces):
            return None
        if not self.pieces:
            return ""

        # Folding keeps places except in texts with accents, which are shown as they were compared.
        at = text.lower().find(self.pieces[0])
        shown = text
        if at < 0:
            at = whole.find(self.pieces[0])
            shown = whole
        start = max(0, at - MAX_SHOWN // 3)
        words = " ".join(shown[start : start + MAX_SHOWN].split())
        return ("\u2026" if start else "") + words


def folded(text: str) -> str:
    """Return a text as it is compared: without differences of case, accents and width."""
    if text.isascii():
        return text.lower()
    decomposed = unicodedata.normalize("NFKD", text).casefold()
    return unicodedata.normalize("NFKC", _ACCENTS.sub("", decomposed))


def separated(text: str) -> str:
    """Return a folded text with spaces around each character of a script without spaces."""
    return text if text.isascii() else _SINGLE.sub(r" \1 ", text)


def indexed_text(text: str) -> str:
    """Return a text for the index of words, which is not case-sensitive itself."""
    return text if text.isascii() else separated(folded(text))
