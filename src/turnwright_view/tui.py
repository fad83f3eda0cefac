"""Terminal viewer: the table, an episode turn by turn, its tokens. All text is escaped first."""

from __future__ import annotations

import math
import os
import select
import sys
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from turnwright.display.diagnosis import diagnose
from turnwright.display.run_data import read_run
from turnwright.display.text import single_line
from turnwright.errors import UsageError
from turnwright_view.web.episode import episode_page
from turnwright_view.web.index import RunIndex
from turnwright_view.web.index_tables import Found
from turnwright_view.web.search import EpisodeFilter
from turnwright_view.web.texts import escape_json, one_line, truncate

Line = tuple[str, str]  # style and text of a piece
HELP = {
    "table": "j k  up, down   enter  open   f  failed only   w  worst first   space  a page   q  "
    "leave",
    "conversation": "j k  scroll   J K  turns   n p  episodes   t  tokens   space  a page   "
    "q  back",
}
ARROWS = {
    "\x1b[A": "k",
    "\x1b[B": "j",
    "\x1b[5~": "b",
    "\x1b[6~": " ",
    "\x1b[D": "q",
    "\x1b[C": "\r",
    "\n": "\r",
    "\x1b": "q",
}
LEVELS = (
    (-0.10536, ""),
    (-0.69315, "yellow"),
    (-2.30259, "bold yellow"),
    (-4.60517, "bold magenta"),
    (-math.inf, "bold red"),
)
"""Style by logprob: at least 90%, 50%, 10%, 1%, and below."""


class TuiState:
    """State of the viewer and its key bindings, independent of the terminal."""

    def __init__(self, index: RunIndex) -> None:
        self.index = index
        self.selected = self.top = 0
        self.failed = self.worst = self.tokens = self.over = False
        self.record: Mapping[str, Any] | None = None
        self.starts: list[int] = []  # lines at which turns start
        self.height = 20

    @property
    def count(self) -> int:
        """Number of rows of the table."""
        return self._found(0, 1).total or 0

    def rows(self, start: int, most: int) -> list[dict[str, Any]]:
        """Return some rows of the table."""
        return self._found(start, most).rows

    def _found(self, start: int, most: int) -> Found:
        wanted = EpisodeFilter(error="*" if self.failed else "")
        return self.index.find(wanted, "worst" if self.worst else "oldest", start, most)

    def key(self, key: str) -> None:
        """Handle a key."""
        key = ARROWS.get(key, key)
        (self._table_key if self.record is None else self._conversation_key)(key)

    def _table_key(self, key: str) -> None:
        count = self.count
        moves = {"j": 1, "k": -1, " ": self.height, "b": -self.height, "g": -count, "G": count}
        if key in moves:
            self.selected = max(0, min(count - 1, self.selected + moves[key]))
        elif key == "\r" and count:
            self._open()
        elif key in "fw":
            self.failed ^= key == "f"
            self.worst ^= key == "w"
            self.selected = 0
        elif key in "q\x03":
            self.over = True

    def _conversation_key(self, key: str) -> None:
        moves = {"j": 1, "k": -1, " ": self.height, "b": -self.height, "g": -(10**9), "G": 10**9}
        if key in moves:
            self.top = max(0, self.top + moves[key])
        elif key == "J":
            self.top = next((start for start in self.starts if start > self.top), self.top)
        elif key == "K":
            self.top = next((start for start in reversed(self.starts) if start < self.top), 0)
        elif key in "np":
            by = 1 if key == "n" else -1
            self.selected = max(0, min(self.count - 1, self.selected + by))
            self._open()
        elif key == "t":
            self.tokens, self.top = not self.tokens, 0
        elif key in "q\x03":
            self.record = None

    def _open(self) -> None:
        # The table may have become shorter: a run can be begun anew while one looks at it.
        for row in self.rows(self.selected, 1):
            columns = self.index.at(row["number"])
            if columns is not None:
                self.record = escape_json(episode_page(self.index, columns))
                self.top = 0

    def lines(self, height: int) -> list[list[Line]]:
        """Return the lines between head and foot, each a list of pieces; long texts
        exceed the screen width."""
        self.height = max(1, height)
        if self.record is not None:
            return list(conversation_lines(self.record, self.tokens))
        count = self.count
        self.selected = max(0, min(self.selected, count - 1))
        first = max(0, min(self.selected - self.height // 2, count - self.height))
        rows = self.rows(first, height)
        return [_row(row, number == self.selected) for number, row in enumerate(rows, first)]


def _row(row: Mapping[str, Any], here: bool) -> list[Line]:
    reward = "none" if row["reward"] is None else f"{row['reward']:.4g}"
    texts = ((row["phase"], 20), (row["prompt"], 24), (row["stop"], 14), (row["error"], 40))
    phase, prompt, stop, error = (escape_json(one_line(text, most)) for text, most in texts)
    mark = ">" if here else " "
    head = f"{mark} {phase:<12} {row['step']:>5}  {prompt:<24} {row['sample']:>3} "
    text = f"{reward:>8}  {stop:<14} {row['turns']:>3} turns {row['tokens']:>6} ids  {error}"
    return [("reverse" if here else "red" if row["error"] else "", head + text)]


def conversation_lines(record: Mapping[str, Any], tokens: bool) -> Iterator[list[Line]]:
    """Yield an episode, turn by turn."""
    reward = "none" if record["reward"] is None else f"{record['reward']:.4g}"
    yield [
        (
            "bold",
            f"reward {reward}, {record['stop']}, {len(record['turns'])} turns, task "
            f"{record['row']['task']}",
        )
    ]
    advantage = "" if record["advantage"] is None else f"  Advantage {record['advantage']:.4g}."
    answer = "" if record["answer"] is None else f"  Expected answer: {record['answer']}"
    yield [("", record["why"] + answer + advantage)]
    if record["error"]:
        yield [
            (
                "red",
                f"{record['error']['type']} in {record['error']['phase']}: "
                f"{record['error']['message']}",
            )
        ]
        yield from ([("dim", line)] for line in record["error"]["traceback"].splitlines())
    for number, turn in enumerate(record["turns"], 1):
        facts = f"  context {turn['context']}, {turn['finish']}, reward {turn['reward']}"
        yield from ([("", "")], [("bold cyan", f"--- turn {number}"), ("dim", facts)])
        for message in turn["messages"]:
            yield from _message(message)
        spans = [record["spans"][index] for index in turn["spans"] if index < len(record["spans"])]
        if tokens:
            yield from (line for span in spans for line in _tokens(span))
        elif spans:
            yield [("bold", "assistant: "), *(piece for span in spans for piece in _pieces(span))]
        else:
            yield from _message(turn["reply"])
        for call in turn["calls"]:
            yield [
                (
                    "red" if call["error"] else "green",
                    f"  call {call['tool']}: {call['error'] or 'done'}",
                )
            ]
    for message in record["final"]:
        yield from _message(message)


def _message(message: Mapping[str, Any]) -> Iterator[list[Line]]:
    pictures = "".join(f"[image {image['hash'][:12]}] " for image in message["images"])
    yield [("bold", f"{message['role']}: "), ("", pictures + message["text"])]


def _pieces(span: Mapping[str, Any]) -> Iterator[Line]:
    if "tokens" not in span:
        yield "", span["text"]
        return
    logprobs = span["logprobs"] or [None] * len(span["tokens"])
    yield from (
        (_style(logprob), text) for text, logprob in zip(span["tokens"], logprobs, strict=False)
    )


def _tokens(span: Mapping[str, Any]) -> Iterator[list[Line]]:
    if "tokens" not in span:
        return
    logprobs = span["logprobs"] or [None] * len(span["tokens"])
    for number, text, logprob in zip(span["ids"], span["tokens"], logprobs, strict=False):
        score = (
            "      none"
            if logprob is None
            else f"{logprob:10.4f} {100 * math.exp(min(0.0, logprob)):6.1f}%"
        )
        yield [("dim", f"  id {number:>7} {score}  "), (_style(logprob), text)]


def _style(logprob: float | None) -> str:
    return "" if logprob is None else next(style for bound, style in LEVELS if logprob >= bound)


def run_tui(run: Path) -> None:
    """Run the viewer until the user quits; a UsageError if there is no terminal."""
    if not (sys.stdin.isatty() and sys.stdout.isatty()):
        raise UsageError("--tui needs a terminal; without one, use --html FILE or --report")
    import termios
    import tty

    from rich.console import Console

    index = RunIndex(run)
    index.start()
    state = TuiState(index)
    found = read_run(run)
    heads = [
        single_line(f"{one.name}: {one.fault}", 300) for one in diagnose(found.rows, found.summary)
    ]
    console = Console(highlight=False, markup=False, emoji=False)
    before = termios.tcgetattr(sys.stdin)
    try:
        tty.setcbreak(sys.stdin)
        with console.screen(hide_cursor=True) as screen:
            while not state.over:
                screen.update(
                    _drawn(state, escape_json(truncate(run.resolve().name, 60)), heads, console)
                )
                if select.select([sys.stdin], [], [], 0.5)[0]:
                    state.key(os.read(sys.stdin.fileno(), 8).decode(errors="replace"))
    except KeyboardInterrupt:
        pass
    finally:
        termios.tcsetattr(sys.stdin, termios.TCSADRAIN, before)
        index.close()


def _drawn(state: TuiState, name: str, heads: Sequence[str], console: Any) -> Any:
    """Return the complete screen, exactly as high as the terminal."""
    from rich.text import Text

    width, height = console.size
    body = height - 3
    made = [Text.assemble(*((text, style) for style, text in line)) for line in state.lines(body)]
    if state.record is None:
        head = f"{name}: {state.count} episodes" + (f"   ! {heads[0]}" if heads else "")
        body_lines = made
        for line in body_lines:
            line.truncate(width)
    else:
        head = name
        body_lines, state.starts = [], []
        for line in made:
            if line.plain.startswith("--- turn"):
                state.starts.append(len(body_lines))
            body_lines += line.wrap(console, width) or [Text("")]
        state.top = max(0, min(state.top, len(body_lines) - body))
        body_lines = body_lines[state.top : state.top + body]
    top = Text(head[:width], style="bold")
    foot = Text(HELP["table" if state.record is None else "conversation"][:width], style="dim")
    return Text("\n").join(
        [top, Text(""), *body_lines, *[Text("")] * (body - len(body_lines)), foot]
    )
