"""The viewer over runs that both quickstarts' recipes really made: what a person does
with them in a browser."""

from __future__ import annotations

import json
import re
import time

import pytest
from kit.browser import drawn, finished, training, until

from turnwright_view.web import ViewerServer, self_contained

pytestmark = pytest.mark.browser


@pytest.fixture(scope="module")
def server(quickstarts):
    server = ViewerServer(list(quickstarts))
    server.start()
    yield server
    server.close()


@pytest.fixture(scope="module")
def row(quickstarts):
    """Records of both runs, as the files have them."""
    return [
        [json.loads(line) for line in (run / "trajectories.jsonl").read_text().splitlines()]
        for run in quickstarts
    ]


def entry(server, run, wanted):
    """The number of the first trajectory that is wanted, and where it stands in its file."""
    store = server.stores[run]
    store.update()
    return next((number, one.at) for number, one in enumerate(store.entries) if wanted(one))


def wanted(one):
    return one.phase == "train" and one.turns > 1


def test_from_the_overview_by_a_filter_to_a_trajectory_and_through_its_turns(page, server, row):
    page.goto(server.url)
    page.wait_for_selector("figure svg.chart")
    assert "quickstart" in page.inner_text("main")
    page.click("text=trajectories >> nth=0")
    page.wait_for_selector("table.list tbody tr")
    page.select_option("#f-phase", "train")
    drawn(page, "location.hash.includes('phase=train')")
    page.fill("#f-turns_min", "2")
    page.press("#f-turns_min", "Enter")
    fit = [one for one in row[0] if one["key"]["phase"] == "train" and len(one["turns"]) > 1]
    assert fit, "no episode of the run has two turns"
    drawn(page, "location.hash.includes('turns_min=2')")
    assert page.evaluate("document.querySelectorAll('table.list tbody tr').length") == len(fit)
    page.click("table.list tbody tr a >> nth=0")
    drawn(page, "location.hash.startsWith('#/t/')")
    assert page.evaluate("document.querySelectorAll('section.turn').length") == len(fit[0]["turns"])
    for turn in range(1, len(fit[0]["turns"]) + 1):
        page.keyboard.press("j")
        assert page.evaluate("document.activeElement.id") == f"turn-{turn}"
    page.keyboard.press("k")
    assert page.evaluate("location.hash").endswith(f"/conversation/{len(fit[0]['turns']) - 1}")
    assert page.problems == []


def test_a_link_leads_to_a_turn(page, server):
    _, at = entry(server, 1, wanted)
    page.goto(f"{server.url}#/t/1/{at}")
    page.wait_for_selector("#turn-2")
    address = page.evaluate("document.querySelector('#turn-2 h3 a').href")
    page.goto("about:blank")
    page.goto(address)
    page.wait_for_selector("#turn-2:focus")
    assert page.problems == []


def test_the_images_that_the_agent_saw_are_seen(page, server, row):
    number, at = entry(server, 1, wanted)
    turns = row[1][number]["turns"]
    page.goto(f"{server.url}#/t/1/{at}")
    page.wait_for_selector("#turn-2 .message img")
    parts = [
        part
        for turn in turns
        for message in turn["messages"]
        if isinstance(message["content"], list)
        for part in message["content"]
    ]
    images = [part for part in parts if part["type"] == "image"]
    assert len(images) > 1
    until(
        page,
        "[...document.querySelectorAll('.message img')].filter((one) => one.naturalWidth === "
        f"{images[0]['width']}).length > 1",
    )
    shown = page.evaluate(
        "[...document.querySelectorAll('.message img')].map((one) => one.getAttribute('src'))"
    )
    assert [image["image"] for image in images] == [
        source.split("/")[-1].removesuffix(".png") for source in shown
    ]
    assert page.problems == []


@pytest.mark.parametrize("run", [0, 1])
def test_a_token_tells_its_id_and_logprob_and_is_coloured_otherwise(
    page, server, quickstarts, row, run
):
    number, at = entry(server, run, wanted)
    span = next(span for span in row[run][number]["spans"] if span["mask"])
    page.goto(f"{server.url}#/t/{run}/{at}/tokens")
    page.wait_for_selector("#by-mask")
    page.hover(".span.model .tok")
    told = page.inner_text("#token")
    assert told.startswith(f"id {span['ids'][0]}\n")
    assert f"logprob {span['logprobs'][0]:.4f}" in told
    assert re.search(r"policy (after \d+ steps|of warm-up step \d+)", told.replace("\n", " "))
    colours = {}
    for name in ("mask", "logprob", "advantage", "mismatch"):
        page.click(f"#by-{name}")
        page.wait_for_selector(f"#by-{name}[aria-pressed=true]")
        colours[name] = page.get_attribute(".span.model .tok", "class")
    lines = (quickstarts[run] / "training.jsonl").read_text().splitlines()
    reasons = {tuple(one["key"]): one["reason"] for one in map(json.loads, lines)}
    reason = reasons[tuple(row[run][number]["key"].values())]
    assert colours["mask"] == ("tok m1" if reason is None else "tok m0")
    likely = [-0.10536, -0.69315, -2.30259, -4.60517]  # 90%, 50%, 10%, 1%
    assert colours["logprob"] == f"tok l{sum(span['logprobs'][0] < bound for bound in likely)}"
    assert page.problems == []


def test_a_run_is_watched_while_it_is_being_written(page, tmp_path):
    run = tmp_path / "live"
    process = training("quickstart.toml", run, model={"hidden": 32, "heads": 2, "kv-heads": 2})
    server = None
    try:
        last = time.monotonic() + 120
        while not (run / "metrics.jsonl").exists():
            assert process.poll() is None, process.communicate()[0]
            assert time.monotonic() < last
            time.sleep(0.05)
        server = ViewerServer([run])
        server.start()
        page.goto(server.url)
        page.wait_for_selector("main[data-ready]")
        assert "Metrics of step 2" not in page.inner_text("main")
        # Nobody asked for the page again.
        page.wait_for_selector("text=Metrics of step 2", timeout=200_000)
        finished(process)
        assert page.problems == []
    finally:
        process.kill()
        process.wait()
        if server is not None:
            server.close()


def test_the_file_of_both_runs_opens_without_server_and_network(page, quickstarts, tmp_path):
    out = tmp_path / "sent.html"
    self_contained(list(quickstarts), out)
    asked = []
    page.on("request", lambda request: asked.append(request.url))
    page.context.set_offline(True)
    page.goto(out.as_uri())
    page.wait_for_selector("figure svg.chart")
    page.goto(out.as_uri() + "#/list/1?phase=train&turns_min=2")
    page.wait_for_selector("table.list tbody tr")
    page.click("table.list tbody tr a >> nth=0")
    page.wait_for_selector("section.turn .message img")
    until(page, "document.querySelector('.message img').naturalWidth > 1")
    page.keyboard.press("2")
    page.hover(".span.model .tok")
    assert page.inner_text("#token").startswith("id ")
    page.context.set_offline(False)
    assert [url for url in asked if not url.startswith(("file:", "data:", "blob:"))] == []
    assert page.problems == []
