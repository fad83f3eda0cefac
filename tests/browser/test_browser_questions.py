"""Questions of a newcomer, each answered within three clicks from the first screen."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest
from kit.browser import Clicks, finished, shown, training

from turnwright_view.web import ViewerServer

pytestmark = pytest.mark.browser

CURVE = "figure:has(b:text-is('{}')) .plot"


@pytest.fixture(scope="module")
def learned(runs, tmp_path_factory):
    """Folder of a run that learned and of one that did not: those that `LEARNED` names, or new
    ones."""
    named = os.environ.get("LEARNED")
    if named:
        return Path(named)
    folder = tmp_path_factory.mktemp("learned")
    few = {"eval": {"tasks": 64}, "train": {"steps": 40}}
    processes = [
        training("quickstart.toml", folder / "seed-0", small={}, **few),
        # Too short a warm-up, from which nothing is learned.
        training(
            "quickstart.toml",
            folder / "seed-1",
            small={},
            seed=1,
            warmup={"steps": 50, "rounds": 1, "gate-success": 0},
            **few,
        ),
    ]
    for process in processes:
        finished(process)
    return folder


@pytest.fixture(scope="module")
def server(learned):
    with ViewerServer([learned]) as server:
        yield server


@pytest.fixture(scope="module")
def run(learned):
    return learned / "seed-0"


@pytest.fixture
def click(page, server):
    """A person before the first screen of a run."""
    shown(page, server.url + "#/run/seed-0")
    return Clicks(page)


def rows(run, name):
    return [json.loads(line) for line in (run / name).read_text().splitlines()]


def training_rows(run):
    return [row for row in rows(run, "metrics.jsonl") if row["phase"] == "train"]


def test_what_was_learned(click, page, run):
    summary = json.loads((run / "summary.json").read_text())
    said = page.inner_text("h1")
    for name in ("success_before", "success_after"):
        low, high = (100 * end for end in summary[f"{name}_ci"])
        assert f"{summary[name]:.1%} [{low:.1f}, {high:.1f}]" in said
    assert "in 40 reinforcement steps" in said
    assert "sampled tokens" in said


def test_why_an_episode_of_the_last_step_failed(click, page):
    click("nav a:has-text('episodes')")
    click.choose("#f-sort", "worst")
    click("a.episode >> nth=0")
    told = page.inner_text("main")
    assert "reward 0" in told
    assert "Expected answer" in told
    assert page.query_selector(".message, .turn, [id^=turn-]") is not None


def test_which_tokens_of_an_episode_were_trained(click, page, run):
    trained = {tuple(row["key"]): row for row in rows(run, "training.jsonl")}
    click("nav a:has-text('episodes')")
    click.choose("#f-trained", "yes")
    click("a.episode >> nth=0")
    key = page.evaluate("location.hash.split('/episode/')[1].split('?')[0].split('/')")
    row = trained[key[0], int(key[1]) - 1, key[2], int(key[3]), int(key[4])]
    assert row["reason"] is None
    states = page.evaluate(
        "[...document.querySelectorAll('.tokens .token')].map((one) => one.className)"
    )
    record = next(
        record
        for record in rows(run, "trajectories.jsonl")
        if list(record["key"].values()) == row["key"]
    )
    sampled = sum(len(span["ids"]) for span in record["spans"] if span["mask"])
    assert len([state for state in states if "trained" in state]) == sampled


def test_when_success_jumped(click, page, run):
    link = page.locator(".next a:has-text('Success rose most between steps')")
    first, last = (int(word) for word in link.inner_text().split(":")[0].split() if word.isdigit())
    success = [row["success"] for row in training_rows(run)]
    middle = (first - 1 + last) // 2
    rise = sum(success[middle:last]) - sum(success[first - 1 : middle])
    assert rise > 0
    click(".next a:has-text('Success rose most')")
    assert f"step_min={first}" in page.evaluate("location.hash")


def test_which_task_came_last(click, page, run):
    last = rows(run, "trajectories.jsonl")[-1]
    click("nav a:has-text('episodes')")
    click.choose("#f-sort", "newest")
    click("a.episode >> nth=0")
    assert last["task"]["messages"][0]["content"] in page.inner_text("main")


def test_what_a_step_changed(click, page, run):
    plot = page.locator(CURVE.format("Success"))
    plot.scroll_into_view_if_needed()
    box = plot.locator(".u-over").bounding_box()
    assert box is not None
    # The pointer over a step shows it in all curves; a click, its episodes.
    page.mouse.move(box["x"] + box["width"] / 2, box["y"] + 40)
    page.wait_for_function(
        "document.querySelector('.chart .values .muted').textContent.startsWith('step ')"
    )
    step = int(page.inner_text(".chart .values .muted >> nth=0").split()[-1])
    by_step = {row["step"]: row for row in training_rows(run)}
    entropy = page.locator("figure:has(b:text-is('Entropy')) .value").first.inner_text()
    assert float(entropy) == pytest.approx(by_step[step]["entropy"], rel=0.01)
    page.mouse.click(box["x"] + box["width"] / 2, box["y"] + 40)
    page.wait_for_function(f"location.hash.includes('step_min={step}')")


def test_which_of_two_runs_is_better_and_whether_it_is_chance(click, page, learned):
    click("nav a:has-text('runs')")
    told = page.inner_text("#verdict")
    after = {
        name: json.loads((learned / name / "summary.json").read_text())
        for name in ("seed-0", "seed-1")
    }
    best, other = sorted(after, key=lambda name: -after[name]["success_after"])
    assert told.startswith(best) or after[best]["success_after"] == after[other]["success_after"]
    apart = after[best]["success_after_ci"][0] > after[other]["success_after_ci"][1]
    assert ("more than chance" in told) is apart
    assert ("may be chance" in told) is not apart


def test_where_siblings_part_ways(click, page):
    click("nav a:has-text('episodes')")
    click.choose("#f-tie", "no")
    click("a.group-link >> nth=0")
    assert "They part ways in turn" in page.inner_text("main")
    assert "mean reward" in page.inner_text("main")


def test_which_settings_were_used(click, page):
    click("summary:has-text('Settings')")
    told = page.inner_text("main")
    assert "train.steps" in told
    assert "40" in told


def test_where_the_time_went(click, page):
    click("summary:has-text('Where the time went')")
    assert "%" in page.inner_text("details:has(summary:has-text('Where the time went')) table")


def test_which_tokens_were_not_trained_and_why(click, page, run):
    counts = {}
    for row in training_rows(run):
        for reason, count in row["untrained"].items():
            counts[reason] = counts.get(reason, 0) + count
    click("summary:has-text('not trained, by reason')")
    table = page.inner_text("details:has(summary:has-text('not trained, by reason')) table")
    for reason, count in counts.items():
        assert reason in table
        assert f"{count:,.0f}" in table


def test_on_which_id_trainer_and_engine_differ_most(click, page, run):
    click("nav a:has-text('episodes')")
    click("a.episode >> nth=0")
    page.keyboard.press("4")
    click("button:has-text('largest difference')")
    assert "Account of the sampled ids" in page.inner_text("main")


def test_how_often_success_was_measured_on_held_out_tasks(click, page):
    assert page.locator(".whisker").count() >= 2
    assert "of 64" in page.inner_text("section[aria-label='held-out success']")
