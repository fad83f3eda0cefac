"""Displays: they survive anything, cost next to nothing, and write no control
codes where none belong."""

from __future__ import annotations

import io
import re
import time

import pytest
from kit.cpu import own_cost
from rich.console import Console

from turnwright.display.progress import (
    PlainDisplay,
    ProgressState,
    RichDisplay,
    amount,
    duration,
    make_display,
    sparkline,
)
from turnwright.display.text import single_line, visible
from turnwright.errors import UsageError
from turnwright.records import NullListener, ProgressListener

NASTY = "\x1b[2J\x1b]0;owned\x07\u202eabc\x00[red]hi[/red]\r\nnext\ud800"


class Clock:
    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now


def rich_on(buffer: io.StringIO) -> RichDisplay:
    return RichDisplay(
        console=Console(file=buffer, force_terminal=True, width=100, color_system=None)
    )


def garbage(watch: ProgressListener) -> None:
    """Everything that a run should not say."""
    watch.phase(NASTY, -3, "")
    watch.progress(
        -1, {"reward": float("nan"), "loss": "x", "stops": {NASTY: 3, None: 1}, NASTY: 1}
    )
    watch.progress(10**30, {"reward": 10**400, "stops": 3})
    watch.progress(2, {"stops": {"a": "many"}, "turns": None, "success": True})
    watch.progress(None, None)  # type: ignore[arg-type]
    watch.phase(None, None, None)  # type: ignore[arg-type]
    watch.waiting(NASTY)
    watch.note(NASTY * 100_000)
    watch.note(object())  # type: ignore[arg-type]
    watch.close()
    watch.close()
    watch.progress(1, {})


def test_displays_survive_garbage():
    buffer = io.StringIO()
    garbage(PlainDisplay(buffer))
    assert not re.search("[\x00-\x09\x0b-\x1f\x7f\u202e\ud800]", buffer.getvalue())
    buffer = io.StringIO()
    garbage(rich_on(buffer))
    out = buffer.getvalue()
    assert "owned" not in out
    assert "\x1b[2J" not in out
    assert "\u202e" not in out
    garbage(NullListener())


def test_displays_survive_a_closed_stream():
    for make in (PlainDisplay, RichDisplay):
        stream = io.StringIO()
        stream.close()
        watch = make(stream)
        watch.phase("reinforce", 3, "steps")
        watch.progress(3, {"reward": 1.0})
        watch.note("still here")
        watch.close()


def test_plain_prints_a_line_now_and_then_and_the_last():
    clock, buffer = Clock(), io.StringIO()
    watch = PlainDisplay(buffer, every_s=5.0, clock=clock)
    watch.phase("reinforce", 60, "steps")
    for step in range(1, 61):
        clock.now += 1.0
        watch.progress(
            step,
            {
                "reward": step / 60,
                "turns": 2.5,
                "tokens_per_s": 3000.0,
                "stops": {"done": 3, "max_turns": 1},
            },
        )
    watch.waiting("the weights")
    watch.close()
    lines = buffer.getvalue().splitlines()
    assert lines[0] == "reinforce: 60 steps"
    assert 12 <= len(lines) <= 15
    assert (
        "reinforce 5/60 steps  reward 0.083  turns 2.50  tokens/s 3000  stops done 75% max_turns "
        "25%  55 s left" in lines
    )
    assert lines[-1].startswith("reinforce 60/60 steps  reward 1.000")
    assert "\x1b" not in buffer.getvalue()


def test_plain_says_what_it_waits_for_after_a_while():
    clock, buffer = Clock(), io.StringIO()
    watch = PlainDisplay(buffer, every_s=5.0, clock=clock)
    watch.phase("reinforce", 60, "steps")
    watch.waiting("128 episodes")
    clock.now += 6
    watch.waiting("3 of 128 episodes")
    watch.waiting("3 of 128 episodes")
    assert buffer.getvalue().splitlines()[1:] == ["reinforce: waiting for 3 of 128 episodes"]


def test_rich_shows_phase_figures_stops_waiting_and_notes():
    buffer = io.StringIO()
    watch = rich_on(buffer)
    watch.phase("warm-up", 2, "steps")
    watch.progress(2, {"loss": 0.5})
    watch.phase("reinforce", 60, "steps")
    for step in range(1, 5):
        watch.progress(
            step,
            {
                "reward": step / 10,
                "success": step / 10,
                "turns": 2.5,
                "stops": {"done": 9, "max_turns": 1},
            },
        )
    watch.waiting("128 episodes")
    watch.note("a [b]note[/b]")
    time.sleep(0.3)
    watch.close()
    out = re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", buffer.getvalue())
    for piece in (
        "✓ warm-up  2 steps",
        "reinforce",
        "4 of 60 steps",
        "0.400",
        "▁",
        "done 90%",
        "waiting for 128 episodes",
        "a [b]note[/b]",
    ):
        assert piece in out, piece


@pytest.mark.parametrize(
    "make", [lambda: PlainDisplay(io.StringIO()), lambda: rich_on(io.StringIO())]
)
def test_progress_costs_next_to_nothing(make):
    watch = make()
    watch.phase("reinforce", 100_000, "steps")
    figures = {"reward": 0.5, "success": 0.5, "turns": 2.0, "stops": {"done": 3, "max_turns": 2}}
    with own_cost() as cost:
        for step in range(5000):
            watch.progress(step, figures)
            watch.waiting("episodes")
    watch.close()
    # About 10 us; hundreds of calls a second must not be seen in a profile.
    assert cost.seconds / 5000 < 200e-6


def test_make_display_picks_by_stream(monkeypatch):
    class Terminal(io.StringIO):
        def isatty(self) -> bool:
            return True

    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.delenv("CI", raising=False)
    assert isinstance(make_display("auto", stream=Terminal()), RichDisplay)
    assert isinstance(make_display("auto", stream=io.StringIO()), PlainDisplay)
    assert isinstance(make_display("none"), NullListener)
    monkeypatch.setenv("TERM", "dumb")
    assert isinstance(make_display("auto", stream=Terminal()), PlainDisplay)
    with pytest.raises(UsageError, match="auto, rich, plain or none"):
        make_display("loud")


def test_time_left_follows_the_recent_pace():
    clock = Clock()
    state = ProgressState(clock)
    state.begin("reinforce", 100, "steps")
    for step in range(1, 41):
        clock.now += 1.0
        state.update(step, {})
    for step in range(41, 81):
        clock.now += 3.0
        state.update(step, {})
    assert state.left_s() == pytest.approx(60.0)


def test_writing_for_people():
    assert (duration(7.6), duration(200), duration(7500)) == ("8 s", "3 min 20 s", "2 h 05 min")
    assert (amount(840), amount(12_300), amount(4_100_000)) == ("840", "12.3k", "4.1M")
    assert sparkline([0, 1, 2, 3]) == "▁▃▆█"
    assert sparkline([1, 1]) == "▄▄"
    assert sparkline([]) == ""
    assert single_line("a\nb\x1b[31mc" + "d" * 50, 10) == "a bcddddd…"
    assert visible("a\x1b\u202e\n") == "a⟨ESC⟩⟨U+202E⟩\n"
