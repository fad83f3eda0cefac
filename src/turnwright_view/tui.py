"""Terminal viewer: the table, a trajectory turn by turn, its tokens. All text is escaped first."""

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
from turnwright_view.web.index import IndexEntry, TrajectoryIndex
from turnwright_view.web.pages import escape_json, trajectory, truncate

Line = tuple[str, str]  # style and text of a piece
HELP = {
    "table": "j k  up, down   enter  open   f  failed only   w  worst first   space  a page   q  "
    "leave",
    "conversation": "j k  scroll   J K  turns   n p  trajectories   t  tokens   space  a page   "
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

    def __init__(self, store: TrajectoryIndex) -> None:
        self.store = store
        self.selected = self.top = 0
        self.failed = self.worst = self.tokens = self.over = False
        self.record: Mapping[str, Any] | None = None
        self.starts: list[int] = []  # lines at which turns start
        self.height = 20

    @property
    def rows(self) -> list[IndexEntry]:
        """Entries of the table."""
        rows = (
            [entry for entry in self.store.entries if entry.error]
            if self.failed
            else self.store.entries[:]
        )
        return (
            sorted(rows, key=lambda e: -math.inf if e.reward is None else e.reward)
            if self.worst
            else rows
        )

    def key(self, key: str) -> None:
        """Handle a key."""
        key = ARROWS.get(key, key)
        (self._table_key if self.record is None else self._conversation_key)(key)

    def _table_key(self, key: str) -> None:
        count = len(self.rows)
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
            self.selected = max(
                0, min(len(self.rows) - 1, self.selected + (1 if key == "n" else -1))
            )
            self._open()
        elif key == "t":
            self.tokens, self.top = not self.tokens, 0
        elif key in "q\x03":
            self.record = None

    def _open(self) -> None:
        entry = self.rows[self.selected]
        self.record, self.top = escape_json(trajectory(self.store, self.selected, entry)), 0

    def lines(self, height: int) -> list[list[Line]]:
        """Return the lines between head and foot, each a list of pieces; long texts
        exceed the screen width."""
        self.height = max(1, height)
        if self.record is not None:
            return list(conversation_lines(self.record, self.tokens))
        rows = self.rows
        self.selected = max(0, min(self.selected, len(rows) - 1))
        first = max(0, min(self.selected - self.height // 2, len(rows) - self.height))
        return [
            _row(entry, number == self.selected)
            for number, entry in enumerate(rows[first : first + height], first)
        ]


def _row(entry: IndexEntry, here: bool) -> list[Line]:
    reward = "none" if entry.reward is None else f"{entry.reward:.4g}"
    texts = ((entry.phase, 20), (entry.task, 18), (entry.stop, 14), (entry.error, 40))
    phase, task, stop, error = (escape_json(truncate(text, most)) for text, most in texts)
    head = f"{'>' if here else ' '} {phase:<12} {entry.step:>5}  {task:<18} {entry.sample:>3} "
    text = head + f"{reward:>8}  {stop:<14} {entry.turns:>3} turns {entry.tokens:>6} ids  {error}"
    return [("reverse" if here else "red" if entry.error else "", text)]


def conversation_lines(record: Mapping[str, Any], tokens: bool) -> Iterator[list[Line]]:
    """Yield a trajectory, turn by turn."""
    reward = "none" if record["reward"] is None else f"{record['reward']:.4g}"
    yield [
        (
            "bold",
            f"reward {reward}, {record['stop']}, {len(record['turns'])} turns, task "
            f"{record['key'].get('task', '')}",
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

    store = TrajectoryIndex(run)
    store.start()
    state = TuiState(store)
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
        store.close()


def _drawn(state: TuiState, name: str, heads: Sequence[str], console: Any) -> Any:
    """Return the complete screen, exactly as high as the terminal."""
    from rich.text import Text

    width, height = console.size
    body = height - 3
    made = [Text.assemble(*((text, style) for style, text in line)) for line in state.lines(body)]
    if state.record is None:
        head = f"{name}: {len(state.rows)} trajectories" + (f"   ! {heads[0]}" if heads else "")
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
