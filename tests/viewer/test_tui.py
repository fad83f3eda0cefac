"""The terminal viewer: what keys do, in a real pseudo-terminal too, where no text of a run
may write control codes."""

from __future__ import annotations

import fcntl
import os
import pty
import select
import struct
import sys
import termios
import time
from contextlib import suppress
from pathlib import Path

import pytest

from turnwright.cli.main import main
from turnwright_view.tui import TuiState, conversation_lines
from turnwright_view.web.episode import episode_page
from turnwright_view.web.index import RunIndex

HOSTILE = "\x1b]0;owned\x07\x1b[?1000h<script>\u202e\x00[red]x[/red]"


@pytest.fixture
def run(make_run, tmp_path):
    return make_run(tmp_path / "hop", steps=6)


def test_keys_move_open_filter_and_leave(run):
    index = RunIndex(run)
    index.update()
    state = TuiState(index)
    assert len(state.lines(10)) == 10
    for key in ("j", "j", "\x1b[B", "k"):
        state.key(key)
    assert state.selected == 2
    state.key("G")
    assert state.selected == state.count - 1 == 26
    state.key("f")
    assert [row["error"] for row in state.rows(0, 10)] == ["step/ToolFailed"]
    state.key("\r")
    assert state.record is not None
    assert any("ToolFailed" in text for line in state.lines(10) for _, text in line)
    state.key("q")
    state.key("f")
    state.key("w")
    assert state.rows(0, 1)[0]["reward"] is None
    state.key("\r")
    state.key("n")
    assert state.record["reward"] == state.rows(1, 1)[0]["reward"]
    for key in ("q", "q"):
        state.key(key)
    assert state.over


def test_a_run_that_is_begun_anew_while_an_episode_is_open_ends_nothing(run):
    index = RunIndex(run)
    index.update()
    state = TuiState(index)
    state.key("\r")
    (run / "trajectories.jsonl").write_bytes(b"")
    index.update()
    state.key("n")
    assert state.record is not None
    state.key("q")
    assert state.lines(10) == []


def test_tokens_are_told_with_id_and_logprob(run):
    index = RunIndex(run)
    index.update()
    whole = episode_page(index, index.at(3))
    text = "\n".join(
        "".join(piece for _, piece in line) for line in conversation_lines(whole, tokens=True)
    )
    span = next(span for span in whole["spans"] if "tokens" in span)
    assert f"id {span['ids'][0]:>7} {span['logprobs'][0]:10.4f}" in text
    styles = {style for line in conversation_lines(whole, tokens=False) for style, _ in line}
    assert {"bold", "bold cyan"} <= styles


class Terminal:
    """A pseudo-terminal of 30 lines with the viewer in it."""

    def __init__(self, run):
        self.pid, self.fd = pty.fork()
        if self.pid == 0:
            os.environ |= {"TERM": "xterm", "PYTHONPATH": str(Path(__file__).parents[2] / "src")}
            os.execv(
                sys.executable,
                [sys.executable, "-m", "turnwright.cli.main", "view", str(run), "--tui"],
            )
        fcntl.ioctl(self.fd, termios.TIOCSWINSZ, struct.pack("HHHH", 30, 100, 0, 0))
        self.seen = b""

    def until(self, text, seconds=60):
        """Read on until a text was written; gives what was written since the last key."""
        last = time.monotonic() + seconds
        while text not in self.seen:
            assert time.monotonic() < last, f"{text!r} is not in {self.seen[-3000:]!r}"
            self.read(0.5)
        return self.seen

    def read(self, seconds):
        if select.select([self.fd], [], [], seconds)[0]:
            with suppress(OSError):  # it has ended
                self.seen += os.read(self.fd, 65536)

    def press(self, key):
        self.seen = b""
        os.write(self.fd, key)

    def close(self):
        _, status = os.waitpid(self.pid, 0)
        os.close(self.fd)
        return os.waitstatus_to_exitcode(status)


def test_in_a_real_terminal_hostile_text_stays_text(make_run, tmp_path):
    run = make_run(tmp_path / "hop", steps=2, said=HOSTILE)
    terminal = Terminal(run)
    everything = terminal.until(b"11 episodes")
    terminal.press(b"\r")
    everything += terminal.until(b"--- turn 1")
    assert b"<script>" in terminal.seen
    assert b"[red]x[/red]" in terminal.seen, "no markup of a text is taken"
    terminal.press(b"t")
    everything += terminal.until(b" id ")
    terminal.press(b"q")
    everything += terminal.until(b"11 episodes")
    terminal.press(b"q")
    assert terminal.close() == 0
    for code in (b"\x1b]0;owned", b"\x07", b"\x1b[?1000h", b"\x00", "\u202e".encode()):
        assert code not in everything


def test_without_a_terminal_it_says_what_else_there_is(run, capsys):
    assert main(["view", str(run), "--tui"]) == 2
    assert "--html" in capsys.readouterr().err


def test_what_a_run_says_does_not_reach_the_terminal_as_codes(make_run, tmp_path, capfd):
    run = make_run(tmp_path / "hop", steps=2, said=HOSTILE)
    rows = (run / "metrics.jsonl").read_text().splitlines()
    ill = rows[-3].replace(
        '"phase": "train"',
        '"phase": "train", "truncated_share": 1.0, "truncations": {"\\u001b]0;owned\\u0007": 9}',
    )
    (run / "metrics.jsonl").write_text("\n".join([*rows, ill]) + "\n")
    assert main(["view", str(run), "--html", str(tmp_path / "sent.html")]) == 0
    assert main(["replay", str(run)]) in (0, 1, 2)
    said = capfd.readouterr()
    assert "were truncated" in said.out
    assert not set("\x1b\x07\x00") & set(said.out + said.err)
