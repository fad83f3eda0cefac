"""Every view of every kind of run, as it looks: on a desk and on a phone, light and dark, without
anything beside of the window and without a finding of axe-core.

`PICTURES=docs/images .venv/bin/python -m pytest -m browser tests/browser/test_browser_looks.py`
takes the pictures of the documentation too, of the runs in the folder that `RUNS` names or else of
these small ones.
"""

from __future__ import annotations

import json
import os
from itertools import product
from pathlib import Path
from urllib.parse import quote

import pytest
from kit.browser import SIZES, findings, fits, shown
from kit.viewing import read_whole

from turnwright_view.web import ViewerServer

pytestmark = pytest.mark.browser

RUNS = ("quickstart", "quickstart-vlm", "tools", "policies", "async", "failing")
SCHEMES = ("light", "dark")
LOOKS = list(product(SIZES, SCHEMES))
AXE_LOOKS = (("desk", "light"), ("phone", "dark"))
"""Contrast depends on the scheme and layout on the size: two looks have both of each."""
EPISODE_VIEWS = ("conversation", "tokens", "tree", "trainer")


@pytest.fixture(scope="module")
def server(runs):
    with ViewerServer([runs]) as server:
        yield server


def keys(run):
    """Addresses of the last group of a run's training: each of its episodes."""
    lines = (run / "trajectories.jsonl").read_text().splitlines()
    played = [json.loads(line)["key"] for line in lines]
    trained = [key for key in played if key["phase"] == "train"]
    last = [key for key in trained if key["task"] == trained[-1]["task"]]
    return [
        "/".join(
            quote(str(part), safe="")
            for part in (key["phase"], key["step"] + 1, key["task"], key["sample"], key["attempt"])
        )
        for key in last
    ]


def views(name, run):
    """Name and address of each view of a run."""
    first, *others = keys(run)
    place = f"#/run/{name}"
    group = "/".join(first.split("/")[:3])
    yield "overview", place
    yield "episodes", f"{place}/episodes"
    yield "group", f"{place}/group/{group}"
    for view in EPISODE_VIEWS:
        yield view, f"{place}/episode/{first}?view={view}"
    yield "diff", f"{place}/diff/{first}?with={quote(others[-1], safe='')}"


@pytest.fixture(scope="module")
def windows(browser):
    """A page for each size and scheme."""
    pages = {}
    for size, scheme in LOOKS:
        width, height = SIZES[size]
        page = browser.new_page(viewport={"width": width, "height": height}, color_scheme=scheme)
        page.problems = []
        page.on("pageerror", lambda error, page=page: page.problems.append(str(error)))
        page.set_default_timeout(60_000)
        pages[size, scheme] = page
    yield pages
    for page in pages.values():
        page.close()


def look(windows, address, window, where, *, axe):
    """See that nothing is wrong with a view."""
    page = windows[window]
    shown(page, address)
    assert fits(page), f"{where}: {page.evaluate('document.documentElement.scrollWidth')} pixels"
    if axe:
        assert findings(page) == [], where
    assert page.problems == [], where


@pytest.mark.parametrize("name", RUNS)
def test_every_view_of_a_run(windows, server, runs, name):
    for number, (view, address) in enumerate(views(name, runs / name)):
        # axe-core takes a second or two: of the run with images in both looks, else by turns.
        looked_at = AXE_LOOKS if name == "quickstart-vlm" else [AXE_LOOKS[number % 2]]
        for window in LOOKS:
            where = f"{name}, {view}, {window}"
            look(windows, server.url + address, window, where, axe=window in looked_at)


@pytest.mark.parametrize(("size", "scheme"), LOOKS)
def test_the_table_of_runs(windows, server, size, scheme):
    window = (size, scheme)
    look(windows, server.url + "#/runs", window, f"runs, {window}", axe=window in AXE_LOOKS)


@pytest.mark.parametrize("size", SIZES)
def test_all_that_is_folded_fits_too(windows, server, size):
    page = windows[size, "light"]
    for address in ("#/runs", "#/run/tools", "#/run/failing/episodes"):
        shown(page, server.url + address)
        for summary in page.query_selector_all("main details > summary"):
            summary.click()
        page.wait_for_timeout(300)
        look_at = f"{address}, {size}"
        assert fits(page), look_at
        assert findings(page) == [], look_at


def pictured(runs):
    """Pictures of the documentation: name, address, look, and what is done before it is taken."""
    rows = (runs / "quickstart" / "training.jsonl").read_text().splitlines()
    trained = [json.loads(row) for row in rows]
    failed = [row for row in trained if (row["advantage"] or 0) < 0] or trained
    phase, step, task, sample, attempt = failed[-2 if len(failed) > 1 else -1]["key"]
    key = f"{phase}/{step + 1}/{quote(task, safe='')}/{sample}/{attempt}"
    group = "/".join(key.split("/")[:3])
    seen = keys(runs / "quickstart-vlm")[0]
    quickstart, vlm = "#/run/quickstart", "#/run/quickstart-vlm"
    yield "viewer-overview", quickstart, ("desk", "light"), None
    yield "viewer-dark", quickstart, ("desk", "dark"), None
    yield "viewer-phone", quickstart, ("phone", "light"), None
    yield "viewer-list", f"{quickstart}/episodes", ("desk", "light"), None
    yield "viewer-group", f"{quickstart}/group/{group}", ("desk", "light"), None
    yield "viewer-conversation", f"{vlm}/episode/{seen}", ("desk", "light"), None
    tokens = f"{quickstart}/episode/{key}?by=logprob"
    yield "viewer-tokens", tokens, ("desk", "light"), (".tokens .token.l4", ".tokens .token")
    yield "viewer-trainer", f"{quickstart}/episode/{key}?view=trainer", ("desk", "light"), None
    yield "viewer-runs", "#/runs", ("desk", "light"), None


def test_pictures_of_the_documentation(windows, runs, tmp_path):
    folder = Path(os.environ.get("RUNS", runs))
    out = Path(os.environ.get("PICTURES", tmp_path))
    with ViewerServer([folder]) as server:
        read_whole(server)
        for name, address, window, hovered in pictured(folder):
            page = windows[window]
            shown(page, server.url + address)
            there = [selector for selector in hovered or () if page.query_selector(selector)]
            if there:
                page.hover(there[0])
            page.wait_for_timeout(400)
            page.screenshot(path=str(out / f"{name}.png"))
            assert (out / f"{name}.png").stat().st_size > 10_000
