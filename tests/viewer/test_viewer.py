"""The viewer without a browser: what it serves, what it refuses, and how much
of a large run it holds."""

from __future__ import annotations

import http.client
import json
import random
import time
import tracemalloc
from html.parser import HTMLParser

import orjson
import pytest
from hypothesis import given
from hypothesis import strategies as st
from kit.viewing import add_policies

from turnwright.cli.main import main
from turnwright_view.report import render_report
from turnwright_view.web import ViewerServer, self_contained
from turnwright_view.web.index import TableFilter, TrajectoryIndex
from turnwright_view.web.pages import embed_json, escape_json, media_of, trajectory

HASH = "ab" * 32
HOSTILE = (
    "<script>alert(1)</script><img src=x onerror=alert(1)></script><a "
    "href='javascript:alert(1)'>x</a>\u202etxt.exe\x00\x1b[2J\x1b]0;owned\x07&amp;\ud800"
)


def get(server, path, host=None, cookie=None):
    """Status, headers and body of one request, whose host may be forged and whose
    path is sent as it is."""
    connection = http.client.HTTPConnection("127.0.0.1", server.port, timeout=30)
    connection.putrequest("GET", path, skip_host=True)
    connection.putheader("Host", host or f"127.0.0.1:{server.port}")
    if cookie is not None:
        connection.putheader("Cookie", cookie)
    connection.endheaders()
    answer = connection.getresponse()
    body = answer.read()
    connection.close()
    return answer.status, dict(answer.getheaders()), body


def read_whole(server):
    """Wait until the index has read everything."""
    until = time.monotonic() + 60
    while time.monotonic() < until:
        if all(store.size and store.read == store.size for store in server.stores):
            return
        time.sleep(0.01)
    raise AssertionError("the index did not get through the file")


@pytest.fixture
def run(make_run, tmp_path):
    path = make_run(tmp_path / "hop", steps=6)
    (path / "media").mkdir()
    (path / "media" / f"{HASH}.png").write_bytes(b"\x89PNG not really")
    return path


@pytest.fixture
def server(run):
    server = ViewerServer([run])
    server.start()
    read_whole(server)
    yield server
    server.close()


def test_page_and_data_are_served_with_a_policy_that_allows_no_foreign_script(server):
    status, headers, body = get(server, "/")
    assert status == 200
    assert "default-src 'none'; script-src 'self'" in headers["Content-Security-Policy"]
    assert "unsafe" not in headers["Content-Security-Policy"]
    assert headers["X-Content-Type-Options"] == "nosniff"
    assert b"/app.js" in body
    assert get(server, "/app.js")[1]["Content-Type"].startswith("text/javascript")
    overview = json.loads(get(server, "/api/overview")[2])
    assert overview["name"] == "hop"
    assert [row["step"] for row in overview["rows"] if row["phase"] == "train"] == list(range(6))
    later = json.loads(get(server, f"/api/overview?since={len(overview['rows']) - 1}")[2])
    assert later["rows"] == overview["rows"][-1:]


def test_filters_find_what_they_name(server):
    def found(query):
        return json.loads(get(server, "/api/list?most=1000&" + query)[2])

    assert found("")["total"] == 27
    assert {row["phase"] for row in found("phase=before")["rows"]} == {"before"}
    assert [row["error"] for row in found("error=*")["rows"]] == ["step/ToolFailed"]
    assert {row["reward"] for row in found("phase=train&reward_min=0.5")["rows"]} == {1.0}
    assert {row["turns"] for row in found("turns_min=3&turns_max=3")["rows"]} == {3}
    assert {row["step"] for row in found("phase=train&step_min=2&step_max=3")["rows"]} == {2, 3}
    first = found("")["rows"][0]
    assert [row["at"] for row in found(f"task={first['task']}")["rows"]] == [first["at"]]
    assert found("text=no%20such%20words")["rows"] == []
    worst = [row["reward"] for row in found("worst=1")["rows"]]
    assert worst[0] is None
    assert worst[1:] == sorted(worst[1:])
    said = found("text=ANSWER%207")["rows"]
    assert len(said) == 27
    assert found("text=origin")["rows"] == [], "names of fields are not what somebody said"
    assert get(server, "/api/list?step_min=x")[0] == 400
    pages = [
        json.loads(get(server, f"/api/list?start={start}&most=10")[2]) for start in (0, 10, 20)
    ]
    assert [page["next"] for page in pages] == [10, 20, None]


def test_a_trajectory_comes_with_turns_tokens_siblings_and_what_training_made_of_it(server, run):
    entry = server.stores[0].entries[5]
    key = [entry.phase, entry.played, entry.task, entry.sample, entry.attempt]
    row = {
        "key": key,
        "step": entry.played,
        "advantage": 0.75,
        "reason": None,
        "logprobs": {"1": [-0.25, None, -1.0]},
    }
    (run / "training.jsonl").write_text(json.dumps(row) + "\n")
    server.stores[0].update()
    whole = json.loads(get(server, f"/api/trajectory?at={entry.at}")[2])
    assert whole["advantage"] == 0.75
    span = whole["spans"][1]
    assert span["trainer"] == [-0.25, None, -1.0]
    assert len(span["ids"]) == len(span["tokens"]) == len(span["logprobs"]) == 3
    assert [one["at"] for one in whole["siblings"]] == [entry.at]
    assert len(whole["turns"]) == entry.turns
    assert get(server, f"/api/trajectory?at={entry.at + 1}")[0] == 404
    assert get(server, "/api/trajectory?at=99999999999")[0] == 404
    assert get(server, "/api/trajectory?at=x")[0] == 400


def test_only_episodes_of_training_steps_are_called_trained(server):
    entries = server.stores[0].entries
    assert len({entry.phase for entry in entries}) > 1
    for entry in entries:
        whole = json.loads(get(server, f"/api/trajectory?at={entry.at}")[2])
        assert whole["untrained"] == ("" if entry.phase == "train" else "not of a training step")


def policies_of_spans(server, turns):
    """What an episode of so many turns names as the policies of its sampled spans, and why
    they are not trained."""
    entry = next(
        one
        for one in server.stores[0].entries
        if one.phase == "train" and one.step == 3 and one.turns == turns
    )
    found = json.loads(get(server, f"/api/trajectory?at={entry.at}")[2])["spans"]
    return [(span["policy"], span.get("untrained")) for span in found if span["origin"] == "model"]


def test_each_span_names_its_policy_and_each_policy_has_its_metrics(make_run, tmp_path):
    run = add_policies(make_run(tmp_path / "many", steps=8))
    server = ViewerServer([run])
    server.start()
    try:
        read_whole(server)
        # versions count from the start of the warm-up, of which this run has 190 steps
        before = "of warm-up step 2"
        assert policies_of_spans(server, 4) == [
            (f"asker {before}", None),
            (f"solver {before}", None),
            (f"rival: solver {before}", "frozen"),
            ("judge, not trained", "frozen"),
        ]
        rows = [
            row
            for row in json.loads(get(server, "/api/overview")[2])["rows"]
            if row["phase"] == "train"
        ]
        assert [
            row["policy/solver/entropy"] - row["policy/asker/entropy"] for row in rows
        ] == pytest.approx([1.0] * 8)
        report = render_report(run)
        assert "policy rival: solver of warm-up step" in report
        assert "policy judge, not trained" in report
    finally:
        server.close()


def test_a_run_with_one_policy_names_none(server):
    assert {policy for policy, _ in policies_of_spans(server, 3)} == {"of warm-up step 2"}


@pytest.mark.parametrize(
    "given",
    [None, 3, ["x", None, {}], [{"name": HOSTILE, "agents": [HOSTILE, 7], "past": "x", "urls": 1}]],
)
def test_policies_that_are_none_or_hostile_are_text(make_run, tmp_path, given):
    run = make_run(tmp_path / "odd", steps=4)
    config = json.loads((run / "config.json").read_text())
    config["config"]["policy"] = given
    (run / "config.json").write_text(json.dumps(config))
    rows = [json.loads(line) for line in (run / "trajectories.jsonl").read_text().splitlines()]
    for row in rows:
        for span in row["spans"]:
            span["agent"] = HOSTILE
    (run / "trajectories.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    store = TrajectoryIndex(run)
    store.update()
    shown = json.dumps(
        escape_json(trajectory(store, 0, store.entries[0])["spans"]), ensure_ascii=False
    )
    assert not set("\x00\x1b\u202e") & set(shown)
    assert "<script>alert(1)</script><img" not in render_report(run)


FOREIGN = ("evil.example", "127.0.0.1", "localhost:1", "127.0.0.1.evil.example", "", "[::1]")


@pytest.mark.parametrize("host", FOREIGN)
def test_another_host_is_refused(server, host):
    assert get(server, "/api/overview", host or " ")[0] == 403
    assert get(server, "/api/overview", f"localhost:{server.port}")[0] == 200


OUTSIDE = [
    "/media/0/../../config.json",
    "/media/0/..%2f..%2fconfig.json",
    "/media/0/" + HASH + ".png/../../config.json",
    "/media/0/" + HASH.upper() + ".png",
    "/media/9/" + HASH + ".png",
    "/media/0/" + "cd" * 32 + ".png",
    "/../../../../etc/passwd",
    "//etc/passwd",
    "/config.json",
    "/app.js/..",
    "/media/0/" + HASH + ".png%00",
]


@pytest.mark.parametrize("path", OUTSIDE)
def test_no_path_outside_the_run_can_be_read(server, path):
    status, _, body = get(server, path)
    assert status in (400, 404)
    assert b"root:" not in body
    assert b'"config"' not in body


def test_images_come_by_their_hash_and_links_are_not_followed(server, run, tmp_path):
    assert get(server, f"/media/0/{HASH}.png")[2] == b"\x89PNG not really"
    secret = tmp_path / "secret"
    secret.write_text("no")
    (run / "media" / ("ef" * 32 + ".png")).symlink_to(secret)
    assert get(server, "/media/0/" + "ef" * 32 + ".png")[0] == 404


NO_HASH = [
    "../x",
    "http://evil/x.png",
    "javascript:alert(1)",
    HASH + ".png",
    HASH[:-1],
    HASH.upper(),
    3,
]


@pytest.mark.parametrize("name", NO_HASH)
def test_an_image_that_is_no_hash_is_none(name):
    assert media_of({"type": "image", "image": name}) == []
    assert media_of({"type": "video", "frames": [{"type": "image", "image": name}]}) == []
    assert media_of({"type": "image", "image": HASH})[0]["hash"] == HASH


class Parsed(HTMLParser):
    """Elements of a page, with what stands in scripts."""

    def __init__(self, text):
        super().__init__()
        self.tags, self.attributes, self.scripts, self._inside = [], [], [], False
        self.feed(text)

    def handle_starttag(self, tag, attrs):
        self.tags.append(tag)
        self.attributes += attrs
        self._inside = tag == "script"
        if self._inside:
            self.scripts.append("")

    def handle_endtag(self, tag):
        self._inside = False

    def handle_data(self, data):
        if self._inside:
            self.scripts[-1] += data


def test_one_file_holds_the_run_and_hostile_text_stays_text(make_run, tmp_path):
    run = make_run(tmp_path / "hop", steps=3, said=HOSTILE)
    out = tmp_path / "sent.html"
    assert self_contained([run], out) == 15
    page = Parsed(out.read_text())
    assert page.tags.count("script") == 2
    assert "img" not in page.tags
    assert not [name for name, _ in page.attributes if name.startswith("on") or name == "src"]
    data = json.loads(page.scripts[0])
    said = [
        span["text"]
        for whole in data["runs"][0]["trajectories"].values()
        for span in whole["spans"]
    ]
    assert any("<script>alert(1)</script>" in text for text in said)
    assert not any(sign in text for text in said for sign in ("\x00", "\x1b", "\u202e", "\ud800"))
    policy = next(
        value for name, value in page.attributes if name == "content" and "default-src" in value
    )
    assert policy.startswith("default-src 'none'; script-src 'sha256-")
    assert "unsafe" not in policy


@given(st.dictionaries(st.text(), st.lists(st.text())))
def test_embedded_data_cannot_end_its_element_and_reads_back(value):
    text = embed_json(value)
    assert "<" not in text
    assert json.loads(text) == value


def test_what_does_not_fit_into_one_file_is_left_out_failures_last(run, tmp_path):
    out = tmp_path / "small.html"
    count = self_contained([run], out, max_bytes=40_000)
    assert 0 < count < 27
    data = json.loads(Parsed(out.read_text()).scripts[0])["runs"][0]
    assert data["all"] == 27
    assert [row["error"] for row in data["list"] if row["error"]] == ["step/ToolFailed"]
    assert set(data["trajectories"]) == {str(row["at"]) for row in data["list"]}


def test_a_run_that_is_being_written_is_followed_and_half_a_line_waits(make_run, tmp_path):
    run = make_run(tmp_path / "hop", steps=2)
    store = TrajectoryIndex(run)
    store.update()
    before = len(store.entries)
    line = (run / "trajectories.jsonl").read_bytes().splitlines(keepends=True)[0]
    with (run / "trajectories.jsonl").open("ab") as file:
        file.write(line + line[:50])
    store.update()
    assert len(store.entries) == before + 1
    with (run / "trajectories.jsonl").open("ab") as file:
        file.write(line[50:] + b"not json\n")
    store.update()
    assert (len(store.entries), store.unreadable) == (before + 2, 1)
    (run / "trajectories.jsonl").write_bytes(line)
    store.update()
    assert len(store.entries) == 1, "another run in its place"


def test_odd_records_are_shown_as_far_as_they_go(tmp_path):
    rows = [{"key": 3, "spans": [1, {"ids": 5}], "turns": [{"reply": 4}]}]
    rows += [{"spans": [{"ids": [1], "tokens": ["a"], "logprobs": [None]}]}]
    said = [{"content": [{"type": "text", "text": "x"}, 3]}]
    rows += [{"error": {"type": "E"}, "final": said, "turns": [{"messages": ["m"]}]}]
    (tmp_path / "trajectories.jsonl").write_bytes(
        b"".join(orjson.dumps(row) + b"\n" for row in rows)
    )
    store = TrajectoryIndex(tmp_path)
    store.update()
    assert len(store.entries) == 3
    for number, entry in enumerate(store.entries):
        assert trajectory(store, number, entry)["at"] == entry.at


def test_a_large_run_is_indexed_in_little_memory_and_pages_come_early(make_run, tmp_path):
    run = make_run(tmp_path / "hop", steps=1)
    line = json.loads((run / "trajectories.jsonl").read_bytes().splitlines()[2])
    line["spans"][0]["text"] = "x" * 20_000
    with (run / "trajectories.jsonl").open("wb") as file:
        for number in range(1000):
            line["key"]["sample"], line["task"]["id"] = number % 8, f"t{number // 8}"
            line["key"]["task"] = line["task"]["id"]
            file.write(orjson.dumps(line) + b"\n")
    size = (run / "trajectories.jsonl").stat().st_size
    tracemalloc.start()
    store = TrajectoryIndex(run)
    assert store.update(2**20), "there is more"
    assert 0 < len(store.entries) < 200
    assert len(store.find(TableFilter())["rows"]) > 20, (
        "the first page is there before the file was read"
    )
    while store.update(2**20):
        pass
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert len(store.entries) == 1000
    assert size > 20e6
    assert peak < 8e6, f"{peak} bytes for {size}"
    some = random.Random(0).choice(store.entries)
    assert store.row(some)["key"]["sample"] == some.sample
    assert len(store.siblings(some)) == 8


def test_the_command_line_writes_one_file_and_refuses_what_is_no_run(run, tmp_path, capsys):
    out = tmp_path / "sent.html"
    assert main(["view", str(run), "--html", str(out)]) == 0
    assert capsys.readouterr().out.splitlines()[0] == str(out)
    assert main(["view", str(run), "--port", "70000"]) == 2
    assert main(["view", str(run), "--against", str(tmp_path / "gone")]) == 2


TOKEN = "not-guessed-by-anyone"


@pytest.fixture
def locked(run):
    server = ViewerServer([run], token=TOKEN)
    server.start()
    yield server
    server.close()


def test_with_a_token_nothing_is_told_without_it(locked):
    assert locked.url.endswith(f"/?token={TOKEN}")
    for path in (
        "/",
        "/app.js",
        "/api/overview",
        "/api/list",
        f"/media/0/{HASH}.png",
        "/?token=wrong",
        "/?token=",
    ):
        assert get(locked, path)[0] == 403, path
    assert get(locked, "/api/overview?token=" + TOKEN)[0] == 403, (
        "the address of the page alone takes it"
    )
    for cookie in (
        "turnwright_view=",
        "turnwright_view=wrong",
        f"other={TOKEN}",
        "turnwright_view=\xe9",
    ):
        assert get(locked, "/", cookie=cookie)[0] == 403, cookie


def test_the_token_becomes_a_cookie_that_scripts_cannot_read_and_leaves_the_address(locked):
    status, headers, body = get(locked, "/?token=" + TOKEN, host="somewhere.example")
    assert (status, headers["Location"], body) == (303, "/", b"")
    assert "HttpOnly" in headers["Set-Cookie"]
    assert "SameSite=Strict" in headers["Set-Cookie"]
    cookie = headers["Set-Cookie"].partition(";")[0]
    assert get(locked, "/api/overview", cookie="a=b; " + cookie)[0] == 200
    assert get(locked, f"/media/0/{HASH}.png", cookie=cookie)[0] == 200


def test_other_machines_are_let_in_with_a_token_alone(run, capsys, monkeypatch):
    monkeypatch.delenv("TURNWRIGHT_VIEW_TOKEN", raising=False)
    assert main(["view", str(run), "--host", "0.0.0.0"]) == 2
    assert "TURNWRIGHT_VIEW_TOKEN" in capsys.readouterr().err
    for token in ("short", "with spaces and more"):
        monkeypatch.setenv("TURNWRIGHT_VIEW_TOKEN", token)
        assert main(["view", str(run), "--host", "0.0.0.0"]) == 2
        assert "at least 16" in capsys.readouterr().err
    monkeypatch.setenv("TURNWRIGHT_VIEW_TOKEN", TOKEN)
    assert main(["view", str(run), "--host", "no.such.host.invalid"]) == 2
    assert "is unavailable" in capsys.readouterr().err


def test_a_message_of_ten_megabytes_is_cut_and_the_rest_is_quick_to_send(make_run, tmp_path):
    run = make_run(tmp_path / "hop", steps=1)
    rows = [json.loads(line) for line in (run / "trajectories.jsonl").read_text().splitlines()]
    rows[2]["turns"][0]["messages"][0]["content"] = "\x00<b>\u202e" + "x" * 10_000_000
    rows[2]["turns"][0]["info"] = {"said": "\x1b[2J" * 3_000_000}
    (run / "trajectories.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    server = ViewerServer([run])
    server.start()
    try:
        read_whole(server)
        body = get(server, f"/api/trajectory?at={server.stores[0].entries[2].at}")[2]
    finally:
        server.close()
    whole = json.loads(body)
    assert len(body) < 100_000
    assert "more characters are left out" in whole["turns"][0]["messages"][0]["text"]
    assert not set("\x00\x1b\u202e") & set(body.decode())
    assert b"\\u0000" not in body
    assert b"\\u001b" not in body


RAW = "task\x00\x07\x1b[2J\x9b1m\u202e\u200b"


def strings(value):
    """Every text of a JSON, keys too."""
    if isinstance(value, dict):
        for name, item in value.items():
            yield name
            yield from strings(item)
    elif isinstance(value, list):
        for item in value:
            yield from strings(item)
    elif isinstance(value, str):
        yield value


def soiled(value, kept=("origin", "phase")):
    """The same JSON with control characters in each text of it, keys aside; short lists of
    numbers get a text too."""
    if isinstance(value, dict):
        return {name: item if name in kept else soiled(item) for name, item in value.items()}
    if isinstance(value, list):
        return [soiled(item) for item in value] + (
            [RAW] if value and all(type(item) is int for item in value) else []
        )
    return value + RAW if isinstance(value, str) else value


def test_no_text_of_any_answer_holds_a_control_or_hidden_character(run, tmp_path):
    for name in ("trajectories.jsonl", "metrics.jsonl"):
        rows = [json.loads(line) for line in (run / name).read_text().splitlines()]
        (run / name).write_text("".join(json.dumps(soiled(row)) + "\n" for row in rows))
    (run / "summary.json").write_text(json.dumps({"stopped": RAW, "steps": 3}))
    server = ViewerServer([run])
    server.start()
    try:
        read_whole(server)
        told = {
            "all": get(server, "/api/runs"),
            "overview": get(server, "/api/overview"),
            "facets": get(server, "/api/facets"),
        }
        told["list"] = get(server, "/api/list?most=1000")
        for row in json.loads(told["list"][2])["rows"][::9]:
            told[row["at"]] = get(server, f"/api/trajectory?at={row['at']}")
    finally:
        server.close()
    assert self_contained([run], tmp_path / "sent.html") == 27
    whole = {name: json.loads(body) for name, (_, _, body) in told.items()}
    whole["file"] = json.loads(Parsed((tmp_path / "sent.html").read_text()).scripts[0])
    found = {
        name: [
            text for text in strings(value) if set(RAW[4:6] + "\x1b\x9b\u202e\u200b") & set(text)
        ]
        for name, value in whole.items()
    }
    assert not any(found.values()), found
    assert any("\u27e8ESC\u27e9" in text for text in strings(whole["file"]))


def test_a_port_that_is_taken_is_named(server, run, capsys):
    assert main(["view", str(run), "--port", str(server.port)]) == 2
    assert f"port {server.port} is unavailable" in capsys.readouterr().err
