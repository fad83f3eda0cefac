"""A run of 100,000 made-up episodes in a real browser: every view of it, on a desk and on a phone,
light and dark."""

from __future__ import annotations

import json
import random
from itertools import product

import orjson
import pytest
from kit.browser import SIZES, findings, fits, shown
from kit.viewing import metrics, read_whole, trajectory

from turnwright_view.web import ViewerServer

pytestmark = [pytest.mark.browser, pytest.mark.timeout(900)]

EPISODES = 100_000
STEP = 1_000
GROUP = 8
LOOKS = list(product(SIZES, ("light", "dark")))
LAST = "train/100/task-12499/7/0"
VIEWS = {
    "overview": "",
    "list": "/episodes",
    "filtered": "/episodes?phase=train&step_min=40&step_max=60&reward_max=0&sort=longest",
    "search": "/episodes?text=lookup%20birch&sort=newest",
    "far": "/episodes?sort=oldest&start=99900",
    "group": "/group/train/100/task-12499",
    "conversation": f"/episode/{LAST}",
    "trainer": f"/episode/{LAST}?view=trainer",
}


@pytest.fixture(scope="module")
def large(tmp_path_factory):
    """A run's directory: records of 200 kinds, each with a key of its own."""
    run = tmp_path_factory.mktemp("large") / "large"
    run.mkdir()
    rng = random.Random(0)
    bodies = []
    for _ in range(200):
        record = trajectory(rng, turns=rng.choice((2, 3, 4)), reward=rng.choice((0.0, 1.0)))
        del record["key"]
        bodies.append(orjson.dumps(record)[1:])
    with (run / "trajectories.jsonl").open("wb") as file:
        for number in range(EPISODES):
            key = {
                "phase": "train",
                "step": number // STEP,
                "task": f"task-{number // GROUP}",
                "sample": number % GROUP,
                "attempt": 0,
            }
            file.write(orjson.dumps({"key": key})[:-1] + b"," + rng.choice(bodies) + b"\n")
    rows = metrics(rng, EPISODES // STEP)
    (run / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (run / "config.json").write_text("{}")
    return run


@pytest.fixture(scope="module")
def server(large):
    with ViewerServer([large]) as server:
        yield server


def test_its_first_screen_and_its_list_are_there_while_it_is_being_read(page, server):
    shown(page, server.url)
    shown(page, server.url + "#/run/large/episodes")
    assert page.query_selector("a.episode, .pages") is not None
    assert page.problems == []


def test_every_view_in_every_look(browser, server):
    read_whole(server)
    for size, scheme in LOOKS:
        width, height = SIZES[size]
        page = browser.new_page(viewport={"width": width, "height": height}, color_scheme=scheme)
        for name, address in VIEWS.items():
            shown(page, f"{server.url}#/run/large{address}")
            assert fits(page), f"{name}, {size}, {scheme}"
            if (size, scheme) in (("desk", "light"), ("phone", "dark")):
                assert findings(page) == [], f"{name}, {size}, {scheme}"
        page.close()


def test_the_list_counts_all_and_ends_with_the_last(page, server):
    read_whole(server)
    shown(page, server.url + "#/run/large/episodes")
    assert "of 100,000 episodes" in page.inner_text(".pages >> nth=0")
    shown(page, server.url + "#/run/large/episodes?sort=newest")
    first = page.query_selector("a.episode")
    assert first is not None
    assert (first.get_attribute("href") or "").endswith(LAST)
