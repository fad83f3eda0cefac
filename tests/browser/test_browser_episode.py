"""An episode, a group and a difference in a real browser: what the page says of ids equals the
files, sums add up, keys lead where they should, and hostile records do nothing.

`make test-browser` runs this.
"""

from __future__ import annotations

import json
from urllib.parse import quote

import pytest
from kit.browser import SIZES, drawn, findings, fits, shown, until
from kit.written_run import END, HOSTILE, TASK, write_run

from turnwright_view.web import ViewerServer

pytestmark = pytest.mark.browser

LONG = 6000


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    return write_run(tmp_path_factory.mktemp("run") / "written", long=LONG)


@pytest.fixture(scope="module")
def server(run):
    with ViewerServer([run]) as server:
        yield server


@pytest.fixture
def go(page, server):
    """Open a place of the run, and see at the end that nothing went wrong."""

    def open_place(name, *key, **query):
        words = "/".join(quote(str(word), safe="") for word in key)
        values = "&".join(f"{name}={quote(str(value))}" for name, value in query.items())
        shown(page, f"{server.url}#/run/written/{name}/{words}" + (f"?{values}" if values else ""))
        return page

    yield open_place
    assert not page.problems


@pytest.fixture(scope="module")
def records(run):
    lines = (run / "trajectories.jsonl").read_text().splitlines()
    return [json.loads(line) for line in lines]


def sibling(sample):
    """Key of an episode of the group."""
    return "train", 1, TASK, sample, 0


def press(page, key, expression="true"):
    page.keyboard.press(key)
    page.wait_for_timeout(50)
    drawn(page, expression)


def tokens(page):
    """(place, text, class) of each id that is shown."""
    return page.evaluate(
        "[...document.querySelectorAll('.token[data-token]')]"
        ".map((one) => [one.dataset.token, one.textContent, one.className])"
    )


def texts(page, selector):
    return [text.strip() for text in page.locator(selector).all_inner_texts()]


# What an id is


def test_the_states_of_ids_are_those_of_the_files(go, records):
    page = go("episode", *sibling(2))
    record = records[2]

    expected = []
    for turn in record["turns"]:
        for number in turn["spans"]:
            span = record["spans"][number]
            excluded_from = span.get("untrained_from", len(span["ids"]))
            for index, text in enumerate(span["tokens"]):
                state = "trained" if index < excluded_from else "untrained"
                expected.append([f"{number}:{index}", text, f"token {state}"])
    assert tokens(page) == expected
    assert [state for _, _, state in expected].count("token untrained") == 2


def test_what_was_given_is_never_for_training(go, records):
    page = go("episode", *sibling(0), view="tokens")
    given = [place for place, _, classes in tokens(page) if classes == "token never"]
    assert given == [
        f"{number}:-1"
        for number, span in enumerate(records[0]["spans"])
        if span["origin"] != "model"
    ]


def test_an_id_tells_all_that_is_known_of_it(go, records):
    page = go("episode", *sibling(2))
    page.hover('.token[data-token="1:0"]')
    until(page, "document.querySelector('.token-panel.chosen') !== null")
    panel = page.inner_text(".token-panel")
    told = ["look", str(records[2]["spans"][1]["ids"][0]), "−0.0100 (99%)", "−0.0120", "−0.002"]
    for text in (*told, "trained", "−0.5", "after 5 steps"):
        assert text in panel, text

    page.hover('.token[data-token="1:2"]')
    until(page, "document.querySelector('.token-panel').innerText.includes('rewound')")
    assert "not scored" in page.inner_text(".token-panel")
    assert page.inner_text(".token-panel [role=status]").startswith("amber, id ")


@pytest.mark.parametrize(
    ("coloring", "classes"),
    [
        ("logprob", ["l0"] * 4),
        ("advantage", ["down", "down", "none", "none"]),
        ("mismatch", ["l2", "l2", "none", "none"]),
    ],
)
def test_ids_are_colored_by_other_figures(go, coloring, classes):
    page = go("episode", *sibling(2), by=coloring)
    assert [one[2] for one in tokens(page)[:4]] == [f"token {name}" for name in classes]
    legend = page.locator(".legend .token")
    assert legend.count() >= 3


def test_every_level_has_an_underline_of_its_own(go):
    page = go("episode", *sibling(0))
    for coloring in ("state", "logprob", "advantage", "mismatch"):
        page.select_option("#coloring", coloring)
        drawn(page, f"location.hash.includes('by={coloring}')")
        looks = page.evaluate(
            "[...document.querySelectorAll('.legend .token')].map((one) => {"
            "  const style = getComputedStyle(one);"
            "  const line = style.textDecorationLine;"
            "  if (line === 'none') return line;"
            "  return style.textDecorationStyle + style.textDecorationThickness;"
            "})"
        )
        assert len(set(looks)) == len(looks), (coloring, looks)


def test_arrow_keys_lead_from_id_to_id(go):
    page = go("episode", *sibling(0))
    page.click('.token[data-token="1:0"]')
    focused = "document.activeElement.dataset.token"
    steps = [("ArrowRight", "1:1"), ("End", "1:3"), ("ArrowRight", "1:3"), ("Home", "1:0")]
    for key, place in steps:
        page.keyboard.press(key)
        assert page.evaluate(focused) == place, key
    # Of a reply, one id can be reached by Tab.
    assert page.locator('#turn-1 .token[tabindex="0"]').count() == 1
    page.keyboard.press("Tab")
    assert page.evaluate("document.activeElement.closest('.turn').id") == "turn-2"


def test_a_long_reply_stays_usable(go):
    page = go("episode", "train", 4, "long", 0, 0)
    assert page.locator(".token[data-token]").count() == LONG
    page.click('.token[data-token="1:0"]')
    page.keyboard.press("End")
    assert page.evaluate("document.activeElement.dataset.token") == f"1:{LONG - 1}"
    until(page, f"document.querySelector('.token-panel').innerText.includes('{END}')")


# What the trainer saw


@pytest.mark.parametrize("sample", range(4))
def test_the_account_adds_up(go, records, sample):
    page = go("episode", *sibling(sample), view="trainer")
    *parts, total = [int(text.replace(",", "")) for text in texts(page, ".account td:nth-child(2)")]
    record = records[sample]
    sampled = [span for span in record["spans"] if span["origin"] == "model"]
    assert sum(parts) == total == sum(len(span["ids"]) for span in sampled)
    names = texts(page, ".account th")
    assert names[-1] == "sampled"
    assert ("not trained: rewound" in names) == (sample == 2)


def test_the_ledger_has_every_sampled_id(go, records):
    page = go("episode", *sibling(2), view="trainer")
    rows = page.locator(".ledger tbody tr")
    cells = [row.locator("td").all_inner_texts() for row in rows.all()]
    spans = [span for span in records[2]["spans"] if span["origin"] == "model"]
    assert [int(row[1]) for row in cells] == [one for span in spans for one in span["ids"]]
    assert [row[3] for row in cells[:2]] == ["−0.0100", "−0.0200"]
    assert [row[4] for row in cells[:3]] == ["−0.0120", "−0.0220", "–"]
    assert [row[8] for row in cells[:3]] == ["trained", "trained", "not trained: rewound"]


def test_the_ledger_is_ordered_by_the_largest_difference(go, run):
    page = go("episode", *sibling(2), view="trainer")
    page.get_by_role("button", name="least likely").click()
    page.wait_for_timeout(50)
    engine = [
        float(text.replace("−", "-")) for text in texts(page, ".ledger tbody td:nth-child(4)")
    ]
    assert engine == sorted(engine)
    page.get_by_role("button", name="largest difference").click()
    page.wait_for_timeout(50)
    differences = texts(page, ".ledger tbody td:nth-child(6)")
    assert differences[-2:] == ["–", "–"]


def test_weights_that_an_agent_gave_are_told(go):
    page = go("episode", "train", 2, "tools", 0, 0, view="trainer")
    assert texts(page, ".ledger tbody td:nth-child(7)")[:3] == ["1", "0.5", "0"]
    assert "not trained: weight 0" in texts(page, ".account th")


def test_what_the_engine_was_given_is_the_history_of_the_turn(go, records):
    page = go("episode", "train", 2, "tools", 0, 0, view="trainer", turn=3)
    # The history was written anew after four of the five ids of the first reply.
    parts = [" ".join(text.split()) for text in texts(page, ".context .span")]
    assert parts == [
        "0: the prompt · 2 ids · 1 cached Use tools.Where is amber?|",
        "1: the model · 2 ids of 5 <think>Hm",
        "4: the environment · 2 ids Summary: amber was looked for.|",
    ]
    assert page.locator(".context .fault").count() == 0
    page.select_option("#context-turn", "1")
    until(page, "document.querySelectorAll('.context .span').length === 3")
    assert "amber is in drawer 7" in page.inner_text(".context")


def test_nothing_of_a_tie_is_trained(go):
    page = go("group", "train", 2, "tie")
    assert "tie" in page.inner_text(".head")
    assert page.inner_text(".parting h2") == "All gave the same replies"
    assert texts(page, ".sibling .small")[0] == "not trained: no_signal"

    page = go("episode", "train", 2, "tie", 0, 0, view="trainer")
    assert texts(page, ".account th") == ["not trained: no_signal", "sampled"]
    assert texts(page, ".account td:nth-child(2)") == ["4", "4"]


def test_alternatives_are_told_where_they_are_recorded(go, page):
    def with_alternatives(route):
        answer = route.fetch()
        episode = answer.json()
        rows = [[[7, " other", -0.7], [8, "<b>third</b>", -9.0]]]
        episode["spans"][1]["alternatives"] = rows
        route.fulfill(response=answer, json=episode)

    page.route("**/api/episode?*", with_alternatives)
    go("episode", *sibling(0))
    page.hover('.token[data-token="1:0"]')
    until(page, "document.querySelector('.alternatives') !== null")
    assert texts(page, ".alternatives td") == ["49.7%", "0.0123%"]
    assert "<b>third</b>" in page.inner_text(".alternatives")


# The conversation


def test_calls_reasoning_branches_and_failures_are_told(go):
    page = go("episode", "train", 2, "tools", 0, 0)
    turn = page.inner_text("#turn-1")
    for text in ('"query": "amber"', "50 ms", "BadArguments", "not JSON", "2 more tries"):
        assert text in turn, text
    assert "continues after turn 1" in page.inner_text("#turn-3")
    assert "ended by length" in page.inner_text("#turn-3")
    head = page.inner_text(".head")
    for text in ("Where is amber?", "Timeout", "compaction", "short"):
        assert text in head, text
    assert "line 3" not in head
    page.click(".finding summary")
    assert "line 3" in page.inner_text(".finding")


def test_the_timeline_has_widths_by_seconds(go):
    page = go("episode", "train", 2, "tools", 0, 0)
    widths = page.evaluate(
        "[...document.querySelectorAll('.timeline .bars li')].map((one) => one.offsetWidth)"
    )
    # Three turns of 0.3 s, 0.02 s for the reward, 0.08 s of waiting.
    shares = [width / sum(widths) for width in widths]
    assert shares == pytest.approx([0.3, 0.3, 0.3, 0.02, 0.08], abs=0.01)
    label = page.locator(".timeline a").first.get_attribute("aria-label")
    assert label == "turn 1: generation 200 ms, tools 60 ms, environment 40 ms"
    page.locator(".timeline a").nth(1).click()
    drawn(page, "location.hash.includes('turn=2')")
    assert page.evaluate("document.activeElement.id") == "turn-2"


def test_the_tree_shows_where_the_history_was_rewritten(go):
    page = go("episode", "train", 2, "tools", 0, 0, view="tree")
    assert page.locator(".tree .tree > li").count() == 2
    assert "2 histories" in page.inner_text("main")
    assert page.locator(".piece", has_text="✂").count() == 1


def test_the_record_is_found_by_the_shell_command(go, run):
    import subprocess

    page = go("episode", *sibling(3))
    page.click(".record summary")
    command = page.inner_text(".record pre")
    line = subprocess.run(["sh", "-c", command], capture_output=True, check=True).stdout
    assert json.loads(line)["key"]["sample"] == 3


# Keys and addresses


def test_every_key_of_an_episode(go):
    page = go("episode", *sibling(1))
    for key, view in (("2", "tokens"), ("3", "tree"), ("4", "trainer")):
        press(page, key, f"location.hash.includes('view={view}')")
        assert page.inner_text(".views a[aria-current=page]").split()[0] == view
    press(page, "1", "!location.hash.includes('view=')")

    history = page.evaluate("history.length")
    press(page, "j", "location.hash.includes('turn=1')")
    # The other views lead to the same turn.
    for key in "2341":
        press(page, key)
        assert page.evaluate("document.activeElement.id") == "turn-1", key
    press(page, "j", "location.hash.includes('turn=2')")
    assert page.evaluate("document.activeElement.id") == "turn-2"
    press(page, "k", "location.hash.includes('turn=1')")
    press(page, "c", "location.hash.includes('by=logprob')")
    assert page.evaluate("history.length") == history

    press(page, "n", "location.hash.includes('/2/0?by=logprob')")
    press(page, "p", "location.hash.includes('/1/0?by=logprob')")
    press(page, "d", "location.hash.startsWith('#/run/written/diff/')")
    press(page, "g", "location.hash.startsWith('#/run/written/group/')")


def test_the_address_of_a_turn_leads_to_it(go):
    page = go("episode", *sibling(0), turn=3)
    until(page, "document.activeElement.id === 'turn-3'")


def test_an_unknown_episode_is_an_error(page, server):
    shown(page, f"{server.url}#/run/written/episode/train/1/nothing/0/0")
    assert page.locator(".fault[role=alert]").count() == 1


# The group


def test_a_group_tells_where_its_siblings_part(go):
    page = go("group", "train", 1, TASK)
    assert page.inner_text(".parting h2") == "They part ways in turn 2"
    replies = texts(page, ".parting ol > li:nth-child(2) .reply-count")
    assert [" ".join(text.split()) for text in replies] == [
        "2 × mean reward 1 lookup birch",
        "1 × mean reward 0 lookup heron",
        "1 × mean reward 0 answer 3",
    ]
    head = page.inner_text(".head")
    for text in ("4 siblings", "mean reward 0.5", "spread 0.5", "from 0 to 1"):
        assert text in head, text
    assert "tie" not in head


def test_the_first_other_cell_is_marked_and_what_is_common_is_muted(go):
    page = go("group", "train", 1, TASK)
    marked = page.evaluate(
        "[...document.querySelectorAll('.sibling')].map((row) =>"
        "  [...row.querySelectorAll('td')].findIndex((cell) => cell.matches('.parting-cell')))"
    )
    assert marked == [-1, -1, 1, 1]
    muted = page.evaluate(
        "[...document.querySelectorAll('.sibling')].map((row) =>"
        "  [...row.querySelectorAll('td')].map((cell) =>"
        "    (cell.querySelector('.alike') || {}).textContent || ''))"
    )
    assert muted[0] == ["", "", ""]
    assert muted[1] == [f"lookup amber{END}", f"lookup birch{END}", f"answer 7{END}"]
    assert muted[2] == [f"lookup amber{END}", "lookup", ""]
    assert muted[3] == [f"lookup amber{END}", "", ""]


# The difference


def test_a_difference_marks_exactly_the_changed_ids(go):
    key = "/".join(quote(str(word), safe="") for word in sibling(2))
    page = go("diff", *sibling(0), **{"with": key})
    turns = page.locator(".diff-turn")
    assert turns.nth(0).locator("mark").count() == 0
    assert texts(page, ".diff-turn:nth-of-type(3) mark") == ["birch", "heron"]
    ranges = page.evaluate(
        "[...document.querySelectorAll('.diff-turn mark')]"
        ".map((one) => [one.dataset.from, one.dataset.to])"
    )
    # " birch" against " heron", then "7" against "0".
    assert ranges == [["2", "3"]] * 4
    lines = page.evaluate(
        "[...document.querySelectorAll('mark')]"
        ".map((one) => getComputedStyle(one).textDecorationLine)"
    )
    assert set(lines) == {"underline"}
    assert "they part ways in turn 2" in page.inner_text(".head")


def test_sides_are_swapped_and_another_sibling_chosen(go):
    key = "/".join(quote(str(word), safe="") for word in sibling(2))
    page = go("diff", *sibling(0), **{"with": key})
    page.get_by_role("link", name="swap sides").click()
    drawn(page, "location.hash.includes('/2/0?with=')")
    other = "/".join(quote(str(word), safe="") for word in sibling(3))
    page.select_option("#sibling", other)
    page.wait_for_timeout(50)
    drawn(page)
    assert texts(page, ".head h2") == ["sample 2", "sample 3"]


# Whoever wrote the record, whatever the window


def places():
    """(view, key, query) of all kinds of places."""
    other = "/".join(quote(str(word), safe="") for word in sibling(3))
    for view in ("", "tokens", "tree", "trainer"):
        yield "episode", ("train", 2, "tools", 0, 0), {"view": view}
    yield "episode", sibling(2), {"turn": 2, "by": "mismatch"}
    yield "group", ("train", 1, TASK), {}
    yield "diff", sibling(0), {"with": other}
    for sample in range(3):
        yield "episode", ("train", 3, HOSTILE, sample, 0), {}
    yield "episode", ("train", 3, HOSTILE, 0, 0), {"view": "trainer"}
    yield "group", ("train", 3, HOSTILE), {}


@pytest.mark.parametrize("scheme", ["light", "dark"])
@pytest.mark.parametrize("size", SIZES)
def test_every_view_fits_and_is_accessible(go, page, scheme, size):
    width, height = SIZES[size]
    page.set_viewport_size({"width": width, "height": height})
    page.emulate_media(color_scheme=scheme)
    for view, key, query in places():
        go(view, *key, **query)
        assert fits(page), (view, key, query)
        assert not findings(page), (view, key, query)


def test_hostile_records_do_nothing(go):
    for sample in range(3):
        for view in ("", "tokens", "tree", "trainer"):
            page = go("episode", "train", 3, HOSTILE, sample, 0, view=view)
            assert page.evaluate("window.owned === undefined")
            links = page.evaluate(
                "[...document.querySelectorAll('main a')].map((one) => one.getAttribute('href'))"
            )
            assert all(link.startswith("#/") for link in links)
            assert page.locator("main script, main img").count() == 0
            assert "\u202e" not in page.inner_text("main")
    page = go("group", "train", 3, HOSTILE)
    assert "\u202e" not in page.inner_text("main")
    assert page.evaluate("window.owned === undefined")


def test_the_panel_of_an_id_covers_nothing_on_a_phone(go, page):
    width, height = SIZES["phone"]
    page.set_viewport_size({"width": width, "height": height})
    go("episode", *sibling(0))
    page.click("#turn-3 .token")
    page.keyboard.press("End")
    until(page, "document.querySelector('.token-panel.chosen') !== null")
    page.wait_for_timeout(100)
    boxes = page.evaluate(
        "[document.activeElement, document.querySelector('.token-panel')]"
        ".map((one) => one.getBoundingClientRect()).map(({top, bottom}) => [top, bottom])"
    )
    (_, token_bottom), (panel_top, panel_bottom) = boxes
    assert token_bottom <= panel_top
    assert panel_bottom <= height
