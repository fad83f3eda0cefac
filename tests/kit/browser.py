"""Small runs of shipped recipes by the command line, and waiting for pages."""

from __future__ import annotations

import subprocess
import sys
import time
from pathlib import Path

RECIPES = Path(__file__).parents[2] / "recipes"
SMALL = {
    "warmup": {"demos": 100, "steps": 10, "gate-every": 10, "gate-success": 0, "gate-tasks": 8},
    "train": {"steps": 2},
    "rollout": {"groups": 2, "group-size": 4},
    "eval": {"tasks": 4},
    "limits": {"on-turn-length": "continue", "turns": 4},
}


def training(recipe, out, **more):
    """`turnwright train` of a shipped recipe, a small one, as a process of its own."""
    sections = {name: keys | more.get(name, {}) for name, keys in SMALL.items()}
    words = [
        f"--{section}.{key}={value}"
        for section, keys in sections.items()
        for key, value in keys.items()
    ]
    command = [
        sys.executable,
        "-m",
        "turnwright",
        "train",
        str(RECIPES / recipe),
        "--out",
        str(out),
        "--display",
        "none",
        *words,
    ]
    return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)


def finished(process):
    """Wait until a run is over, and see that it went well."""
    told, _ = process.communicate(timeout=280)
    assert process.returncode == 0, told


def until(page, expression, seconds=60.0):
    """Wait until an expression holds; asked from outside, since the page's policy allows no code
    that is made of text."""
    last = time.monotonic() + seconds
    while not page.evaluate(expression):
        assert time.monotonic() < last, f"never became true: {expression}"
        time.sleep(0.02)


def drawn(page, expression="true", seconds=60.0):
    """Wait until an expression of the page's address holds and the page of
    that address is drawn whole.

    `page.url` is what Playwright was last told, which may be before the last key; the
    page itself knows better.
    """
    until(
        page,
        f"({expression}) && document.querySelector('main').dataset.ready === location.hash",
        seconds,
    )
