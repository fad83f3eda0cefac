"""The page of a run in a real browser: what a person does with it, what follows a run that goes on,
one file without a server, and what hostile text cannot do.

`make test-browser` runs this.
"""

from __future__ import annotations

import json
import time

import pytest
from kit.browser import drawn, finished, shown, training, until
from kit.viewing import add_policies, write_run

from turnwright.records.run_dir import RunDir
from turnwright_view.web import ViewerServer, write_page

pytestmark = pytest.mark.browser

HOSTILE = (
    "<script>window.owned=1</script><img src=x onerror=window.owned=1><a "
    "href='javascript:window.owned=1'>x</a>\u202e\x1b[2J"
)


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    return write_run(tmp_path_factory.mktemp("run") / "hop", steps=60)


@pytest.fixture(scope="module")
def server(run):
    with ViewerServer([run]) as server:
        yield server


@pytest.fixture(scope="module")
def file(run, tmp_path_factory):
    out = tmp_path_factory.mktemp("file") / "sent.html"
    write_page([run], out)
    return out


@pytest.fixture(params=["served", "file"])
def address(request, server, file):
    """The same run on a server and in a file."""
    return server.url if request.param == "served" else file.as_uri()


def count(page, selector):
    return page.evaluate("(selector) => document.querySelectorAll(selector).length", selector)


def texts(page, selector):
    return [element.inner_text() for element in page.query_selector_all(selector)]


# Overview


def test_the_first_screen_says_what_happened(page, address):
    shown(page, address)
    assert "raised held-out success from 24.0% [19.0, 29.4] to 97.3%" in page.inner_text("h1")
    assert count(page, ".whisker") == 4
    assert texts(page, ".chart figcaption b")[:3] == ["Success", "Reward", "Turns of an episode"]
    assert page.problems == []


def test_all_charts_have_one_line_under_the_pointer_and_ticks_are_round(page, address):
    shown(page, address)
    plot = page.locator(".charts .plot").nth(1)
    plot.scroll_into_view_if_needed()
    plot.hover()
    until(page, "document.querySelector('.chart .values .muted').textContent.startsWith('step ')")
    steps = texts(page, ".chart .values .muted")
    assert len(steps) == count(page, ".chart") > 3
    assert len(set(steps)) == 1
    assert page.problems == []


def test_a_curve_is_read_by_the_keyboard_and_leads_to_its_episodes(page, address):
    shown(page, address)
    plot = page.locator(".charts .plot").nth(1)
    plot.focus()
    for key in ("Home", "ArrowRight", "ArrowRight"):
        page.keyboard.press(key)
    until(page, "document.activeElement.closest('figure').innerText.includes('step 2')")
    page.keyboard.press("Enter")
    drawn(page, "location.hash.includes('step_min=2&step_max=2')")
    assert "phase=train" in page.evaluate("location.hash")
    assert texts(page, ".episodes h2")[0].startswith("training step 2")


def test_curves_count_steps_time_or_tokens_and_are_smoothed(page, address):
    shown(page, address)
    page.click(".controls button:has-text('time')")
    drawn(page, "location.hash.includes('x=time')")
    assert page.get_attribute(".controls button:has-text('time')", "aria-pressed") == "true"
    page.evaluate(
        """() => {
          const slider = document.querySelector('.controls input[type=range]');
          slider.value = 20;
          slider.dispatchEvent(new Event('input', {bubbles: true}));
        }"""
    )
    drawn(page, "location.hash.includes('smooth=20')")
    assert "20 steps" in page.inner_text(".controls")
    # What was chosen is in the address, which is a link.
    link = page.evaluate("location.href")
    shown(page, link)
    assert "20 steps" in page.inner_text(".controls")
    assert page.problems == []


def test_themes_are_folded_and_have_every_other_metric(page, address):
    shown(page, address)
    closed = count(page, ".chart")
    for summary in page.query_selector_all("section[aria-label=curves] details > summary"):
        summary.click()
    until(page, f"document.querySelectorAll('.chart').length > {closed} + 5")
    assert page.problems == []


# The list


def test_filters_are_in_the_address_and_the_list_is_what_they_say(page, address, run):
    shown(page, f"{address}#/run/hop/episodes")
    page.select_option("#f-phase", "train")
    drawn(page, "location.hash.includes('phase=train')")
    page.select_option("#f-sort", "worst")
    drawn(page, "location.hash.includes('sort=worst')")
    page.click("details summary:has-text('ranges')")
    page.fill("#f-step_min", "60")
    page.press("#f-step_min", "Enter")
    drawn(page, "location.hash.includes('step_min=60')")
    records = [json.loads(line) for line in (run / "trajectories.jsonl").read_text().splitlines()]
    fit = [one for one in records if one["key"]["phase"] == "train" and one["key"]["step"] == 59]
    assert len(fit) == 5
    assert count(page, "a.episode") == 5
    assert texts(page, ".score") == ["none", "0", "0", "1", "1"]
    shown(page, page.evaluate("location.href"))
    assert count(page, "a.episode") == 5
    page.click("text=all episodes")
    drawn(page, "!location.hash.includes('step_min')")
    assert page.problems == []


def test_the_list_begins_with_the_last_step_and_its_failures(page, address):
    shown(page, f"{address}#/run/hop/episodes")
    assert texts(page, ".episodes h2")[0].startswith("training step 60")
    assert "step/ToolFailed" in texts(page, ".facts-line")[0]


def test_a_search_finds_words_and_shows_where(page, address):
    shown(page, f"{address}#/run/hop/episodes?step_min=60")
    page.keyboard.press("/")
    assert page.evaluate("document.activeElement.id") == "f-text"
    page.keyboard.type("table gone")
    page.keyboard.press("Enter")
    drawn(page, "location.hash.includes('text=table')")
    assert count(page, "a.episode") == 1
    page.fill("#f-text", "nowhere")
    page.press("#f-text", "Enter")
    drawn(page, "location.hash.includes('text=nowhere')")
    assert "No episode fits" in page.inner_text("main")


def test_from_row_to_row_and_into_an_episode_by_the_keyboard(page, address):
    shown(page, f"{address}#/run/hop/episodes?phase=train&sort=worst")
    page.keyboard.press("j")
    page.keyboard.press("j")
    page.keyboard.press("k")
    first = page.query_selector("a.episode").get_attribute("href")
    assert page.evaluate("document.activeElement.getAttribute('href')") == first
    page.keyboard.press("Enter")
    drawn(page, "location.hash.includes('/episode/')")
    assert page.evaluate("location.hash") == first
    page.keyboard.press("l")
    drawn(page, "location.hash.includes('/episodes')")
    page.keyboard.press("o")
    drawn(page, "!location.hash.includes('/episodes')")
    assert "raised held-out success" in page.inner_text("h1")
    assert page.problems == []


def test_a_file_finds_the_same_episodes_in_the_same_order_as_the_server(page, server, file):
    queries = (
        "phase=train",
        "sort=best",
        "sort=longest&turns_min=3",
        "sort=slowest&reward_max=0",
        "error=*",
        "stop=done&sort=oldest",
        "tie=no&sort=newest",
        "trained=no",
        "text=cedar",
        "text=lookup am",
        "step_min=58&step_max=59",
        "tokens_min=8&tokens_max=9",
    )
    shown(page, file.as_uri() + "#/run/hop/episodes")
    known = page.evaluate(
        "JSON.parse(document.getElementById('data').textContent).episodes.hop.rows.map((row) => "
        "row.key)"
    )
    for query in queries:
        found = []
        for place in (server.url, file.as_uri()):
            shown(page, f"{place}#/run/hop/episodes?{query}")
            links = page.evaluate(
                "[...document.querySelectorAll('a.episode')].map((link) => "
                "link.getAttribute('href').split('/episode/')[1])"
            )
            found.append([key for key in links if key in known])
        assert found[0] == found[1][: len(found[0])], query
        assert found[1], query


# A run that goes on


def test_a_run_is_followed_while_it_is_written(page, tmp_path):
    run = tmp_path / "live"
    process = training("quickstart.toml", run, model={"hidden": 32, "heads": 2, "kv-heads": 2})
    try:
        last = time.monotonic() + 120
        while not (run / "metrics.jsonl").exists():
            assert process.poll() is None, process.communicate()[0]
            assert time.monotonic() < last
            time.sleep(0.05)
        with ViewerServer([run]) as server:
            shown(page, server.url)
            assert page.inner_text("header .live") == "running"
            page.evaluate("window.same = 1")
            # Nobody asked for the page again.
            until(page, "document.querySelector('h1').textContent.includes('%')", seconds=200)
            finished(process)
            until(page, "document.querySelector('header .live') === null", seconds=30)
            assert page.evaluate("window.same") == 1
            assert page.problems == []
    finally:
        process.kill()
        process.wait()


SLOW = """
    const fetched = window.fetch;
    window.asked = [];
    window.ended = [];
    window.fetch = async (address, given) => {
        let waits = true;
        const end = () => waits && window.ended.push(address);
        window.asked.push(address);
        if (given && given.signal) given.signal.addEventListener('abort', end);
        await new Promise((done) => setTimeout(done, SECONDS * 1000));
        waits = false;
        return fetched(address, given);
    };
"""
"""A server that is far away."""


def test_a_server_that_answers_slower_than_one_looks_is_waited_for(page, tmp_path):
    run = write_run(tmp_path / "live", steps=3)
    page.add_init_script(SLOW.replace("SECONDS", "2.5"))
    with ViewerServer([run]) as server, RunDir(run, trajectories=False):
        shown(page, server.url)
        assert page.inner_text("header .live") == "running"
        before = page.evaluate("window.asked.length")
        until(page, f"window.asked.length >= {before + 4}", seconds=30)
        assert page.evaluate("window.ended.length") == 0, "each answer is waited for"
        assert page.problems == []


def test_what_a_place_that_was_left_asks_for_ends(page, run):
    with ViewerServer([run]) as server:
        shown(page, server.url + "#/run/hop/episodes")
        page.evaluate(f"() => {{{SLOW.replace('SECONDS', '1')}}}")
        page.click("a.episode >> nth=0")
        until(page, "window.asked.some((one) => one.includes('/api/episode?'))")
        page.go_back()
        until(page, "window.ended.some((one) => one.includes('/api/episode?'))")
        until(page, "document.querySelectorAll('a.episode').length > 0")
        assert page.problems == []


def test_a_new_run_of_the_folder_appears(page, tmp_path):
    write_run(tmp_path / "first", steps=3)
    write_run(tmp_path / "second", steps=3)
    with ViewerServer([tmp_path]) as server:
        shown(page, server.url)
        assert count(page, ".runs tbody tr") == 2
        write_run(tmp_path / "third", steps=5)
        until(page, "document.querySelectorAll('.runs tbody tr').length === 3", seconds=30)
        assert page.problems == []


# Several runs and policies


def test_runs_are_compared_in_a_plot_and_by_their_intervals(page, tmp_path):
    for name, success in (("low", 0.5), ("high", 0.97), ("close", 0.96)):
        run = write_run(tmp_path / name, steps=5)
        summary = json.loads((run / "summary.json").read_text())
        (run / "summary.json").write_text(json.dumps(summary | {"success_after": success}))
        rows = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
        kept = [row for row in rows if row["phase"] != "eval"]
        (run / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in kept))
    with ViewerServer([tmp_path]) as server:
        shown(page, server.url)
        told = page.inner_text("#verdict")
        assert told.startswith("high has the highest held-out success")
        assert "close overlaps" in told
        page.uncheck("input[aria-label='draw close']")
        drawn(page, "document.querySelector('#verdict').textContent.includes('more than chance')")
        assert "low" in page.inner_text("#verdict")
        page.select_option("#f-metric", "reward")
        drawn(page, "location.hash.includes('metric=reward')")
        assert len(page.query_selector_all(".chart .value")) == 2
        page.click("a:has-text('low')")
        drawn(page, "location.hash.startsWith('#/run/low')")
        assert page.problems == []


@pytest.mark.parametrize("inside", [False, True])
@pytest.mark.parametrize("odd", ["", HOSTILE])
def test_policies_have_their_curves_and_spans_name_them(page, tmp_path, inside, odd):
    names = tuple(name + odd.replace("/", "") for name in ("asker", "solver", "rival", "judge"))
    run = add_policies(write_run(tmp_path / "many", steps=4), names)
    out = tmp_path / "sent.html"
    write_page([run], out)
    with ViewerServer([run]) as server:
        place = out.as_uri() if inside else server.url
        shown(page, place)
        entropy = page.locator("figure", has=page.locator("b", has_text="Entropy")).first
        labels = entropy.locator(".value").all_inner_texts()
        assert any(label.startswith("asker") for label in labels)
        assert any(label.startswith("solver") for label in labels)
        shown(page, place + "#/run/many/episodes?phase=train&turns_min=4")
        page.click("a.episode >> nth=0")
        drawn(page, "location.hash.includes('/episode/')")
        page.keyboard.press("2")
        drawn(page, "location.hash.includes('view=tokens')")
        told = page.inner_text("main")
        for name in ("asker", "solver", "rival", "judge"):
            assert f"policy {name}" in told
        assert told.count("frozen") >= 2
        assert page.evaluate("window.owned") is None
        assert count(page, "main img, main script, a[href^=javascript]") == 0
        assert page.problems == []


# One file, and what cannot get into a page


def test_one_file_opens_without_server_and_network(page, quickstarts, tmp_path):
    out = tmp_path / "sent.html"
    write_page(list(quickstarts), out)
    asked = []
    page.on("request", lambda request: asked.append(request.url))
    page.context.set_offline(True)
    shown(page, out.as_uri())
    shown(page, out.as_uri() + "#/run/quickstart-vlm/episodes?phase=train&turns_min=2")
    page.click("a.episode >> nth=0")
    drawn(page, "location.hash.includes('/episode/')")
    until(page, "document.querySelector('main img').naturalWidth > 1")
    page.keyboard.press("2")
    drawn(page, "location.hash.includes('view=tokens')")
    assert count(page, ".tokens .token") > 0
    page.context.set_offline(False)
    assert [url for url in asked if not url.startswith(("file:", "data:", "blob:"))] == []
    assert page.problems == []


@pytest.mark.parametrize("inside", [False, True])
def test_hostile_text_stays_text(page, tmp_path, inside):
    run = write_run(tmp_path / "bad", steps=2, said=HOSTILE)
    rows = [json.loads(line) for line in (run / "trajectories.jsonl").read_text().splitlines()]
    turn = rows[0]["turns"][0]
    turn["messages"][0] = {
        "role": "tool",
        "name": HOSTILE,
        "content": HOSTILE + "\x00" + "x" * 10_000_000,
    }
    turn["reply"]["tool_calls"] = [
        {"id": HOSTILE, "function": {"name": HOSTILE, "arguments": {HOSTILE: HOSTILE}}}
    ]
    turn["info"] = {HOSTILE: HOSTILE, "tool_log": [{"tool": HOSTILE, "s": 0.1, "error": HOSTILE}]}
    rows[0] |= {
        "rewards": {HOSTILE: 1.0},
        "branches": {HOSTILE: 1},
        "stop": HOSTILE,
        "key": rows[0]["key"] | {"phase": HOSTILE, "task": HOSTILE + "/%2F/../"},
    }
    (run / "trajectories.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    metrics = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    metrics.append({"phase": "train", "step": 3, HOSTILE: 1.0, "stops": {HOSTILE: 2}})
    (run / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in metrics))
    out = tmp_path / "sent.html"
    write_page([run], out)
    with ViewerServer([run]) as server:
        place = out.as_uri() if inside else server.url
        shown(page, place)
        for summary in page.query_selector_all("main details > summary"):
            summary.click()
        harmless(page)
        shown(page, place + "#/run/bad/episodes?sort=oldest")
        harmless(page)
        page.click("a.episode >> nth=0")
        drawn(page, "location.hash.includes('/episode/')")
        for key in "1234":
            page.keyboard.press(key)
            drawn(page)
            harmless(page)
        page.keyboard.press("g")
        drawn(page, "location.hash.includes('/group/')")
        harmless(page)


def harmless(page):
    """See that nothing of a text was read as code or as marks."""
    assert count(page, "main img, main script, a[href^=javascript]") == 0
    told = page.evaluate("document.getElementById('app').textContent")
    assert not set("\x00\x1b\u202e") & set(told)
    assert "\u202e" not in page.content()
    assert page.evaluate("window.owned") is None


GETS_IN = """() => {
  const script = document.createElement('script');
  script.textContent = 'window.owned = 1';
  const image = document.createElement('img');
  image.setAttribute('onerror', 'window.owned = 1');
  image.src = 'data:image/png;base64,xx';
  const link = document.createElement('a');
  link.href = 'javascript:window.owned = 1';
  document.body.append(script, image, link);
  link.click();
}"""


def test_code_that_would_get_into_the_page_is_stopped_by_its_policy(page, address):
    shown(page, address)
    page.evaluate(GETS_IN)
    page.wait_for_timeout(500)
    assert page.evaluate("window.owned") is None
    assert any("Content Security Policy" in problem for problem in page.problems)


@pytest.mark.parametrize(
    ("place", "said"),
    [
        ("#/run/none", "There is no run none here."),
        ("#/run/hop/nothing", "There is no such page here."),
        ("#/run/hop/episode/train/1/none/0/0", ("no such episode", "not in the file")),
        ("#/run/hop/group/train/1/none", "there are no episodes of this group"),
        ("#/run/%/episodes", "There is no run % here."),
        ("#/run/hop/episodes?step_min=none", ("invalid request", "Episodes of hop")),
        ("#/nowhere", "raised held-out success"),
    ],
)
def test_a_place_that_is_none_says_so(page, address, place, said):
    page.goto("about:blank")
    page.goto(address + place)
    any_of = [said] if isinstance(said, str) else said
    conditions = [
        f"document.querySelector('main').textContent.includes({json.dumps(text)})"
        for text in any_of
    ]
    until(page, " || ".join(conditions), seconds=20)
