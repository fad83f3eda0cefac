"""The viewer in a real browser: what a person does with it, and what hostile text cannot do.

`make test-browser` runs this.
"""

from __future__ import annotations

import json

import pytest
from kit.browser import drawn, until
from kit.viewing import add_policies, write_run

from turnwright_view.web import ViewerServer, self_contained

pytestmark = pytest.mark.browser

HOSTILE = (
    "<script>window.owned=1</script><img src=x onerror=window.owned=1><a "
    "href='javascript:window.owned=1'>x</a>\u202e\x1b[2J"
)
PNG = bytes.fromhex(
    "89504e470d0a1a0a0000000d4948445200000002000000020802000000fdd49a730000001249444154789c63f8cfc0c0f09f81e13f0300"
    "0cfe01ff6bd0d0a30000000049454e44ae426082"
)
HASH = "ab" * 32


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    path = write_run(tmp_path_factory.mktemp("run") / "hop", steps=4)
    (path / "media").mkdir()
    (path / "media" / f"{HASH}.png").write_bytes(PNG)
    rows = [json.loads(line) for line in (path / "trajectories.jsonl").read_text().splitlines()]
    image = {"type": "image", "image": HASH, "width": 2, "height": 2}
    rows[3]["turns"][0]["messages"] = [
        {"role": "user", "content": [image, {"type": "text", "text": "what is this?"}]}
    ]
    (path / "trajectories.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    row = rows[3]
    trained = {"key": list(row["key"].values()), "advantage": 1.5, "reason": None}
    trained["logprobs"] = {"1": [value - 0.05 for value in row["spans"][1]["logprobs"]]}
    (path / "training.jsonl").write_text(json.dumps(trained) + "\n")
    return path


@pytest.fixture(scope="module")
def server(run):
    server = ViewerServer([run])
    server.start()
    yield server
    server.close()


def ready(page):
    page.wait_for_selector("main[data-ready]")


def open_fourth(page, server):
    at = server.stores[0].entries[3].at
    page.goto(f"{server.url}#/t/0/{at}")
    page.wait_for_selector("section.turn")
    return at


def test_overview_filter_trajectory_and_turns_by_keyboard(page, server):
    page.goto(server.url)
    page.wait_for_selector("figure svg.chart")
    page.click("figure svg.chart .link >> nth=2")
    drawn(page, "location.hash.includes('step_min=2&step_max=2&worst=1')")
    page.click("text=clear")
    drawn(page, "location.hash === '#/list/0'")
    page.select_option("#f-error", "*")
    drawn(page, "location.hash.includes('error=')")
    assert page.evaluate("document.querySelectorAll('table.list tbody tr').length") == 1
    page.click("table.list tbody tr a")
    page.wait_for_selector(".broken")
    assert "ToolFailed" in page.inner_text(".broken")
    drawn(page)
    page.keyboard.press("j")
    assert page.evaluate("document.activeElement.id") == "turn-1"
    page.keyboard.press("j")
    assert page.evaluate("document.activeElement.id") == "turn-2"
    address = page.evaluate("location.href")
    assert address.endswith("/conversation/2")
    page.goto("about:blank")
    page.goto(address)
    page.wait_for_selector("#turn-2:focus")
    assert page.problems == []


def test_an_image_is_seen_and_a_token_tells_id_and_logprob(page, server):
    open_fourth(page, server)
    until(page, "document.querySelector('.message img').naturalWidth === 2")
    page.keyboard.press("2")
    page.wait_for_selector("#by-mismatch")
    page.hover(".span.model .tok")
    told = page.inner_text("#token")
    span = json.loads((server.stores[0].trajectories).read_text().splitlines()[3])["spans"][1]
    assert told.startswith(f"id {span['ids'][0]}\n")
    assert f"logprob {span['logprobs'][0]:.4f}" in told
    page.click("#by-mismatch")
    page.wait_for_selector("#by-mismatch[aria-pressed=true]")
    assert "l3" in page.get_attribute(".span.model .tok", "class")
    page.keyboard.press("c")
    page.wait_for_selector("#by-mask[aria-pressed=true]")
    assert "m1" in page.get_attribute(".span.model .tok", "class")
    page.keyboard.press("3")
    page.wait_for_selector(".tree .piece")
    page.keyboard.press("4")
    page.wait_for_selector(".sibling.here")
    assert page.problems == []


def test_a_run_that_is_being_written_is_watched(page, tmp_path):
    run = write_run(tmp_path / "live", steps=2)
    server = ViewerServer([run])
    server.start()
    try:
        page.goto(server.url)
        page.wait_for_selector("figure")
        row = json.loads((run / "metrics.jsonl").read_text().splitlines()[-3]) | {
            "phase": "train",
            "step": 77,
        }
        with (run / "metrics.jsonl").open("a") as file:
            file.write(json.dumps(row) + "\n")
        page.wait_for_selector("text=Metrics of step 77", timeout=30_000)
    finally:
        server.close()


def test_one_file_works_without_server_and_network(page, run, tmp_path):
    out = tmp_path / "sent.html"
    self_contained([run], out)
    asked = []
    page.on("request", lambda request: asked.append(request.url))
    page.context.set_offline(True)
    page.goto(out.as_uri())
    page.wait_for_selector("figure")
    page.click("text=trajectories >> nth=0")
    page.fill("#f-text", "lookup")
    page.press("#f-text", "Enter")
    drawn(page, "location.hash.includes('text=lookup')")
    page.click("table.list tbody tr a")
    page.wait_for_selector("section.turn")
    page.context.set_offline(False)
    assert [url for url in asked if not url.startswith(("file:", "data:"))] == []
    assert page.problems == []


def test_what_is_being_written_outlives_a_list_that_is_drawn_anew(page, run, tmp_path):
    out = tmp_path / "sent.html"
    self_contained([run], out)
    page.goto(out.as_uri() + "#/list/0")
    drawn(page)
    page.focus("#f-text")
    page.keyboard.type("loo")
    # As another filter does that was chosen just before.
    page.evaluate("location.hash = '#/list/0?phase=train'")
    drawn(page, "location.hash.includes('phase=train')")
    assert page.evaluate("[document.activeElement.id, document.activeElement.value]") == [
        "f-text",
        "loo",
    ]
    page.keyboard.press("Enter")
    drawn(page, "location.hash.includes('text=loo')")
    page.keyboard.type("kup")
    page.keyboard.press("Enter")
    drawn(page, "location.hash.includes('text=lookup')")
    assert page.evaluate("location.hash.includes('phase=train')")
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
        "key": rows[0]["key"] | {"phase": HOSTILE},
    }
    (run / "trajectories.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    out = tmp_path / "sent.html"
    self_contained([run], out)
    server = ViewerServer([run])
    server.start()
    try:
        page.goto(out.as_uri() if inside else server.url)
        page.wait_for_selector("figure")
        page.click("text=trajectories >> nth=0")
        page.wait_for_selector("table.list tbody tr")
        page.click("table.list tbody tr a")
        for key in "1234":
            page.keyboard.press(key)
            page.wait_for_selector(f".tabs a[aria-selected=true]:has-text('{key} ')")
            ready(page)
            assert (
                page.evaluate(
                    "document.querySelectorAll('main img, main script, a[href^=javascript]').length"
                )
                == 0
            )
            assert not set("\x00\x1b\u202e") & set(page.evaluate("document.body.textContent"))
        assert page.evaluate("window.owned") is None
        assert "\u202e" not in page.content()
    finally:
        server.close()


@pytest.mark.parametrize("inside", [False, True])
@pytest.mark.parametrize("odd", ["", HOSTILE])
def test_policies_have_their_curves_and_spans_name_them(page, tmp_path, inside, odd):
    names = tuple(name + odd.replace("/", "") for name in ("asker", "solver", "rival", "judge"))
    run = add_policies(write_run(tmp_path / "many", steps=4), names)
    out = tmp_path / "sent.html"
    self_contained([run], out)
    server = ViewerServer([run])
    server.start()
    try:
        page.goto(out.as_uri() if inside else server.url)
        page.wait_for_selector("section.policy")
        titles = [one.inner_text() for one in page.query_selector_all("section.policy h2")]
        assert [title[:13] for title in titles] == ["Policy asker"[:13] + odd[:1], "Policy solver"]
        first = page.query_selector("section.policy")
        assert [one.inner_text() for one in first.query_selector_all(".charts > figure b")][:2] == [
            "Reward",
            "Entropy",
        ]
        # The learning rate is among the other metrics.
        assert len(first.query_selector_all("figure .curve")) == 3
        at = next(
            one.at for one in server.stores[0].entries if one.phase == "train" and one.turns == 4
        )
        page.goto((out.as_uri() if inside else server.url) + f"#/t/0/{at}/tokens")
        page.wait_for_selector(".span.model")
        told = [one.inner_text() for one in page.query_selector_all(".span.model > p")]
        assert [
            f"policy {name}" in line
            for name, line in zip(("asker", "solver", "rival", "judge"), told, strict=True)
        ] == [True] * 4
        assert ["not trained: frozen" in line for line in told] == [False, False, True, True]
        assert page.evaluate("window.owned") is None
        assert (
            page.evaluate(
                "document.querySelectorAll('main img, main script, a[href^=javascript]').length"
            )
            == 0
        )
        assert page.problems == []
    finally:
        server.close()


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


@pytest.mark.parametrize("inside", [False, True])
def test_code_that_would_get_into_the_page_is_stopped_by_its_policy(
    page, run, server, tmp_path, inside
):
    out = tmp_path / "sent.html"
    self_contained([run], out)
    page.goto(out.as_uri() if inside else server.url)
    page.wait_for_selector("figure")
    page.evaluate(GETS_IN)
    page.wait_for_timeout(500)
    assert page.evaluate("window.owned") is None
    assert any("Content Security Policy" in problem for problem in page.problems)


def test_two_runs_are_compared(page, run, tmp_path):
    other = write_run(tmp_path / "other", steps=3)
    server = ViewerServer([run, other])
    server.start()
    try:
        page.goto(server.url)
        page.wait_for_selector(".curve.run1")
        page.click("#compare summary")
        assert "change" in page.inner_text("#compare")
    finally:
        server.close()
