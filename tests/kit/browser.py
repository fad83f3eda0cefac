"""Small runs of shipped recipes by the command line, and what pages are looked at for."""

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


WITHOUT_WARMUP = {name: keys for name, keys in SMALL.items() if name != "warmup"}


def training(recipe, out, *, small=SMALL, **more):
    """`turnwright train` of a shipped recipe, a small one, as a process of its own.

    `more` are keys by section, over those of `small`.
    """
    sections = {name: small.get(name, {}) | more.get(name, {}) for name in {**small, **more}}
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
    here = "document.querySelector('main').dataset.ready === (location.hash || '#/')"
    until(page, f"({expression}) && {here}", seconds)


SIZES = {"desk": (1400, 900), "phone": (390, 844)}
"""Width and height of the windows in which every view is looked at."""


def shown(page, address):
    """Go to an address of the viewer, and wait until its page is drawn whole."""
    page.goto("about:blank")
    page.goto(address)
    drawn(page)


def fits(page):
    """Whether nothing of the page lies beside of the window."""
    return page.evaluate("document.documentElement.scrollWidth <= window.innerWidth")


def findings(page):
    """What axe-core finds wrong with the page: one line for each place."""
    from axe_playwright_python.sync_playwright import Axe

    violations = Axe().run(page).response["violations"]
    return [
        f"{violation['id']}: {node['html'][:160]} ({node['failureSummary'][:300]})"
        for violation in violations
        for node in violation["nodes"]
    ]


class Clicks:
    """A person with a mouse who has three clicks."""

    MOST = 3

    def __init__(self, page):
        self.page = page
        self.made = 0

    def __call__(self, selector):
        """Click on something, and wait for what it leads to."""
        self.made += 1
        assert self.made <= self.MOST, f"click {self.made} on {selector}"
        self.page.click(selector)
        self.page.wait_for_timeout(50)
        drawn(self.page)

    def choose(self, selector, value):
        """Choose a value of a field, which is a click too."""
        self.made += 1
        assert self.made <= self.MOST, f"click {self.made} on {selector}"
        self.page.select_option(selector, value)
        self.page.wait_for_timeout(50)
        drawn(self.page)
