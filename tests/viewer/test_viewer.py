"""The viewer without a browser: what it serves, what it refuses, and that hostile text stays
text."""

from __future__ import annotations

import gzip
import json
import random
from urllib.parse import quote

import orjson
import pytest
from hypothesis import given
from hypothesis import strategies as st
from kit.viewing import add_policies, get, get_json, read_whole, trajectory

from turnwright.cli.main import main
from turnwright_view.web import ViewerServer
from turnwright_view.web.episode import episode_page
from turnwright_view.web.index import RunIndex
from turnwright_view.web.media import media_of
from turnwright_view.web.texts import embed_json, escape_json

HASH = "ab" * 32
HOSTILE = (
    "<script>alert(1)</script><img src=x onerror=alert(1)></script><a "
    "href='javascript:alert(1)'>x</a>\u202etxt.exe\x00\x1b[2J\x1b]0;owned\x07&amp;\ud800"
)


@pytest.fixture
def run(make_run, tmp_path):
    path = make_run(tmp_path / "hop", steps=6)
    (path / "media").mkdir()
    (path / "media" / f"{HASH}.png").write_bytes(b"\x89PNG not really")
    return path


@pytest.fixture
def server(run):
    with ViewerServer([run]) as server:
        read_whole(server)
        yield server


def episodes(server, run="hop", **query):
    return get_json(server, "/api/episodes", run=run, most=1000, **query)


def episode(server, key, run="hop"):
    return get_json(server, "/api/episode", run=run, key=key)


def test_page_and_data_are_served_with_a_policy_that_allows_no_foreign_script(server):
    status, headers, body = get(server, "/")
    assert status == 200
    assert "default-src 'none'; script-src 'self'" in headers["Content-Security-Policy"]
    assert "unsafe" not in headers["Content-Security-Policy"]
    assert headers["X-Content-Type-Options"] == "nosniff"
    for path, kind in (
        ("/app.js", "text/javascript"),
        ("/vendor.js", "text/javascript"),
        ("/app.css", "text/css"),
        ("/vendor.css", "text/css"),
        ("/icon.svg", "image/svg+xml"),
    ):
        assert path.encode() in body
        assert get(server, path)[1]["Content-Type"].startswith(kind)
    page = get_json(server, "/api/run", run="hop")
    assert (page["id"], page["name"], page["state"]) == ("hop", "hop", "finished")
    assert [row["step"] for row in page["rows"] if row["phase"] == "train"] == list(range(6))
    later = get_json(server, "/api/run", run="hop", since=len(page["rows"]) - 1)
    assert later["rows"] == page["rows"][-1:]
    assert page["indexed"]["read"] == page["indexed"]["size"] > 0
    assert page["indexed"]["count"] == 27


def test_the_session_names_its_runs_and_what_metrics_mean(server):
    session = get_json(server, "/api/session")
    (row,) = session["runs"]
    assert (row["id"], row["env"], row["steps"]) == ("hop", "hop", 5)
    assert session["folder"] == ""
    assert session["live"]
    assert session["glossary"]["reward"][0] == "reward"
    assert get_json(server, "/api/runs") == {"runs": session["runs"]}


def test_runs_of_a_folder_are_found_and_new_ones_appear(make_run, tmp_path, monkeypatch):
    from turnwright_view.web import sessions

    monkeypatch.setattr(sessions, "SEARCH_S", 0.0)
    make_run(tmp_path / "runs" / "one", steps=3)
    make_run(tmp_path / "runs" / "sweep" / "a b", steps=3)
    with ViewerServer([tmp_path / "runs"]) as server:
        session = get_json(server, "/api/session")
        assert session["folder"] == "runs"
        assert [row["id"] for row in session["runs"]] == ["one", "sweep/a b"]
        make_run(tmp_path / "runs" / "new", steps=3)
        ids = [row["id"] for row in get_json(server, "/api/runs")["runs"]]
        assert set(ids) == {"one", "sweep/a b", "new"}
        read_whole(server)
        for run_id in ids:
            assert get_json(server, "/api/run", run=run_id)["id"] == run_id
            assert episodes(server, run_id)["total"] == 15


def test_runs_of_one_name_have_ids_of_their_own(make_run, tmp_path):
    paths = [make_run(tmp_path / part / "hop", steps=3) for part in "ab"]
    with ViewerServer(paths) as server:
        rows = get_json(server, "/api/session")["runs"]
        assert [row["id"] for row in rows] == ["hop", "hop-2"]


def test_filters_find_what_they_name(server):
    assert episodes(server)["total"] == 27
    before = episodes(server, phase="before")["rows"]
    assert {row["phase"] for row in before} == {"before"}
    assert [row["error"] for row in episodes(server, error="*")["rows"]] == ["step/ToolFailed"]
    best = episodes(server, phase="train", reward_min=0.5)["rows"]
    assert {row["reward"] for row in best} == {1.0}
    assert {row["turns"] for row in episodes(server, turns_min=3, turns_max=3)["rows"]} == {3}
    steps = episodes(server, phase="train", step_min=2, step_max=3)["rows"]
    assert {row["step"] for row in steps} == {2, 3}
    first = episodes(server)["rows"][0]
    (same,) = episodes(server, task=first["task"])["rows"]
    assert same["key"] == first["key"]
    assert episodes(server, text="no such words")["rows"] == []
    worst = [row["reward"] for row in episodes(server, sort="worst")["rows"]]
    assert worst[0] is None
    assert worst[1:] == sorted(worst[1:])
    said = episodes(server, text="ANSWER 7")["rows"]
    assert len(said) == 27
    assert all("answer 7" in row["snippet"] for row in said)
    assert episodes(server, text="origin")["rows"] == [], "names of fields are not what was said"
    assert get(server, "/api/episodes?run=hop&step_min=x")[0] == 400
    assert get(server, "/api/episodes?run=hop&sort=x")[0] == 400
    assert get(server, "/api/episodes?run=hop&tie=x")[0] == 400
    assert get(server, "/api/episodes?run=hop&group=x")[0] == 400
    large = 10**20  # more than SQLite has integers for
    assert get(server, f"/api/episodes?run=hop&start={large}")[0] == 400
    assert get(server, f"/api/episodes?run=hop&group=train/{large}/x")[0] == 400
    assert get(server, f"/api/episode?run=hop&key=train/{large}/x/0/0")[0] == 400
    pages = [
        get_json(server, "/api/episodes", run="hop", start=start, most=10) for start in (0, 10, 20)
    ]
    assert [page["next"] for page in pages] == [10, 20, None]


def test_a_list_opens_on_the_last_step_with_failures_first_and_tells_task_and_reply(server):
    rows = episodes(server)["rows"]
    assert (rows[0]["phase"], rows[0]["step"], rows[0]["error"]) == ("train", 6, "step/ToolFailed")
    assert [row["reward"] for row in rows[1:5]] == [0.0, 0.0, 1.0, 1.0]
    assert [row["step"] for row in rows[:25]] == sorted([row["step"] for row in rows[:25]])[::-1]
    assert rows[0]["prompt"].startswith("code of ")
    assert rows[0]["reply"] == "answer 7"
    facets = get_json(server, "/api/facets", run="hop")
    assert facets["phase"] == [["train", 25], ["before", 2]]
    assert facets["error"] == [["step/ToolFailed", 1]]
    assert facets["step"] == [0, 6]
    assert get_json(server, "/api/run", run="hop")["facets"] == facets


def test_an_episode_comes_with_turns_tokens_siblings_and_what_training_made_of_it(server, run):
    index = server.session.index("hop")
    columns = index.at(5)
    row = {
        "key": columns.key.recorded,
        "advantage": 0.75,
        "reason": None,
        "logprobs": {"1": [-0.25, None, -1.0]},
    }
    (run / "training.jsonl").write_text(json.dumps(row) + "\n")
    read_whole(server)
    whole = episode(server, columns.key.address)
    assert whole["advantage"] == 0.75
    assert whole["row"]["trained"]
    span = whole["spans"][1]
    assert span["trainer"] == [-0.25, None, -1.0]
    assert span["advantage"] == 0.75
    assert span["state"] == [
        [0, 1, "trained", ""],
        [1, 2, "untrained", "no loss"],
        [2, 3, "trained", ""],
    ]
    assert whole["spans"][0]["state"] == [[0, whole["spans"][0]["length"], "never", ""]]
    assert len(span["ids"]) == len(span["tokens"]) == len(span["logprobs"]) == 3
    assert [one["key"] for one in whole["siblings"]] == [columns.key.address]
    assert len(whole["turns"]) == len(whole["timing"]["turns"]) == columns.turns
    assert whole["previous"] == index.at(4).key.address
    assert whole["next"] == index.at(6).key.address
    with open(whole["record"]["file"], "rb") as file:
        file.seek(whole["record"]["at"])
        assert json.loads(file.read(whole["record"]["length"]))["reward"] == whole["reward"]
    assert get(server, "/api/episode?run=hop&key=train/1/gone/0/0")[0] == 404
    assert get(server, "/api/episode?run=hop&key=x")[0] == 404
    assert get(server, "/api/episode?run=hop")[0] == 400
    assert get(server, f"/api/episode?run=gone&key={quote(columns.key.address)}")[0] == 404


def test_where_the_time_of_an_episode_went_adds_up(server):
    key = episodes(server)["rows"][0]["key"]
    timing = episode(server, key)["timing"]
    spent = sum(turn["generate_s"] + turn["env_s"] for turn in timing["turns"])
    assert timing["wait_s"] == pytest.approx(timing["wall_s"] - spent)


def test_only_episodes_of_training_steps_are_called_trained(server):
    rows = episodes(server)["rows"]
    assert len({row["phase"] for row in rows}) > 1
    for row in rows:
        whole = episode(server, row["key"])
        is_training = row["phase"] == "train"
        assert whole["untrained"] == ("" if is_training else "not of a training step")
        sampled = [span for span in whole["spans"] if span["origin"] == "model"]
        states = {tuple(state[2:]) for span in sampled for state in span["state"]}
        if is_training:
            assert states == {("untrained", "no record of training")}
        else:
            assert states == {("never", "not of a training step")}


def policies_of_spans(server, turns):
    """What an episode of so many turns names as the policies of its sampled spans, and why
    they are not trained."""
    found = episodes(server, "many", phase="train", turns_min=turns, turns_max=turns)["rows"]
    spans = episode(server, found[0]["key"], "many")["spans"]
    return [(span["policy"], span.get("untrained")) for span in spans if span["origin"] == "model"]


def test_each_span_names_its_policy_and_each_policy_has_its_metrics(make_run, tmp_path):
    run = add_policies(make_run(tmp_path / "many", steps=8))
    with ViewerServer([run]) as server:
        read_whole(server)
        # versions count from the start of the warm-up, of which this run has 190 steps
        before = "of warm-up step 7"
        assert policies_of_spans(server, 4) == [
            (f"asker {before}", None),
            (f"solver {before}", None),
            (f"rival: solver {before}", "frozen"),
            ("judge, not trained", "frozen"),
        ]
        page = get_json(server, "/api/run", run="many")
        rows = [row for row in page["rows"] if row["phase"] == "train"]
        assert [
            row["policy/solver/entropy"] - row["policy/asker/entropy"] for row in rows
        ] == pytest.approx([1.0] * 8)


def test_metrics_are_read_for_names_of_policies_only_when_they_have_changed(run, monkeypatch):
    from turnwright_view.web import index as index_module

    index = RunIndex(run)
    index.update()
    read = index_module.read_run
    reads = []
    monkeypatch.setattr(index_module, "read_run", lambda path: reads.append(path) or read(path))
    for number in range(3):
        assert episode_page(index, index.at(number))["spans"][1]["policy"]
    assert len(reads) == 1
    assert index.policies().label({"origin": "model", "version": 1050}) != "after 50 steps"
    with (run / "metrics.jsonl").open("a") as file:
        file.write('{"phase": "warmup", "step": 1000}\n')
    assert index.policies().label({"origin": "model", "version": 1050}) == "after 50 steps"
    assert len(reads) == 2


def test_a_run_with_one_policy_names_none(server):
    rows = episodes(server, phase="train", step_min=3, step_max=3)["rows"]
    for row in rows:
        spans = [s for s in episode(server, row["key"])["spans"] if s["origin"] == "model"]
        assert {span["policy"] for span in spans} == {"of warm-up step 2"}


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
    index = RunIndex(run)
    index.update()
    shown = json.dumps(escape_json(episode_page(index, index.at(0))["spans"]), ensure_ascii=False)
    assert not set("\x00\x1b\u202e") & set(shown)


FOREIGN = ("evil.example", "127.0.0.1", "localhost:1", "127.0.0.1.evil.example", "", "[::1]")


@pytest.mark.parametrize("host", FOREIGN)
def test_another_host_is_refused(server, host):
    assert get(server, "/api/run?run=hop", host or " ")[0] == 403
    assert get(server, "/api/run?run=hop", f"localhost:{server.port}")[0] == 200


OUTSIDE = [
    "/media/hop/../../config.json",
    "/media/hop/..%2f..%2fconfig.json",
    "/media/hop/" + HASH + ".png/../../config.json",
    "/media/hop/" + HASH.upper() + ".png",
    "/media/gone/" + HASH + ".png",
    "/media/..%2fhop/" + HASH + ".png",
    "/media/hop/../hop/" + HASH + ".png",
    "/media/%2e/" + HASH + ".png",
    "/media/hop/" + "cd" * 32 + ".png",
    "/../../../../etc/passwd",
    "//etc/passwd",
    "/config.json",
    "/app.js/..",
    "/vendor/preact.js",
    "/media/hop/" + HASH + ".png%00",
    "/api/run?run=..",
    "/api/run?run=%2e%2e%2fhop",
    "/api/run?run=/etc",
    "/api/run",
]


@pytest.mark.parametrize("path", OUTSIDE)
def test_no_path_outside_the_run_can_be_read(server, path):
    status, _, body = get(server, path)
    assert status in (400, 404)
    assert b"root:" not in body
    assert b'"config"' not in body


def test_images_come_by_their_hash_and_links_are_not_followed(server, run, tmp_path):
    assert get(server, f"/media/hop/{HASH}.png")[2] == b"\x89PNG not really"
    secret = tmp_path / "secret"
    secret.write_text("no")
    (run / "media" / ("ef" * 32 + ".png")).symlink_to(secret)
    assert get(server, "/media/hop/" + "ef" * 32 + ".png")[0] == 404
    (run / "media").rename(tmp_path / "elsewhere")
    (run / "media").symlink_to(tmp_path / "elsewhere")
    assert get(server, f"/media/hop/{HASH}.png")[0] == 404


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


def test_large_answers_are_compressed_where_the_browser_takes_them_so(server):
    for path in ("/api/run?run=hop", "/vendor.js", "/api/episodes?run=hop"):
        plain = get(server, path)
        assert "Content-Encoding" not in plain[1]
        packed = get(server, path, Accept_Encoding="gzip, br")
        assert packed[1]["Content-Encoding"] == "gzip"
        assert gzip.decompress(packed[2]) == plain[2]
        assert len(packed[2]) < len(plain[2]) / 2
    assert "Content-Encoding" not in get(server, "/api/facets?run=hop", Accept_Encoding="gzip")[1]
    image = get(server, f"/media/hop/{HASH}.png", Accept_Encoding="gzip")
    assert "Content-Encoding" not in image[1]


def test_what_has_not_changed_is_not_sent_again(server, run):
    for path in ("/", "/app.css", "/api/runs", "/api/run?run=hop", "/api/run?run=hop&since=3"):
        status, headers, _ = get(server, path)
        again = get(server, path, If_None_Match=headers["ETag"])
        assert (again[0], again[2]) == (304, b""), path
        assert again[1]["Content-Security-Policy"] == headers["Content-Security-Policy"]
    tag = get(server, "/api/run?run=hop")[1]["ETag"]
    with (run / "metrics.jsonl").open("a") as file:
        file.write('{"phase": "train", "step": 6, "reward": 1.0}\n')
    status, headers, body = get(server, "/api/run?run=hop", If_None_Match=tag)
    assert status == 200
    assert json.loads(body)["rows"][-1]["step"] == 6
    with (run / "trajectories.jsonl").open("ab") as file:
        file.write(orjson.dumps(trajectory(random.Random(1))) + b"\n")
    read_whole(server)
    assert get(server, "/api/run?run=hop", If_None_Match=headers["ETag"])[0] == 200
    for path in ("/api/episodes?run=hop", f"/media/hop/{HASH}.png", "/api/session"):
        assert get(server, path)[1]["Cache-Control"] == "no-store"


def test_a_run_that_was_begun_anew_sends_all_its_rows(server, run):
    rows = get_json(server, "/api/run", run="hop")["rows"]
    page = get_json(server, "/api/run", run="hop", since=len(rows))
    assert (page["since"], page["rows"]) == (len(rows), [])
    (run / "metrics.jsonl").write_text('{"phase": "train", "step": 1, "reward": 0.25}\n')
    page = get_json(server, "/api/run", run="hop", since=len(rows))
    assert (page["since"], [row["reward"] for row in page["rows"]]) == (0, [0.25])
    (run / "metrics.jsonl").write_text("")
    page = get_json(server, "/api/run", run="hop", since=1)
    assert (page["since"], page["rows"]) == (0, [])


@given(st.dictionaries(st.text(), st.lists(st.text())))
def test_embedded_data_cannot_end_its_element_and_reads_back(value):
    text = embed_json(value)
    assert "<" not in text
    assert json.loads(text) == value


def test_a_run_that_is_being_written_is_followed_and_half_a_line_waits(make_run, tmp_path):
    run = make_run(tmp_path / "hop", steps=2)
    index = RunIndex(run)
    index.update()
    before = index.state().records
    lines = (run / "trajectories.jsonl").read_bytes().splitlines(keepends=True)
    new = lines[0].replace(b'"sample": 0', b'"sample": 7')
    with (run / "trajectories.jsonl").open("ab") as file:
        file.write(new + lines[0][:50])
    index.update()
    assert index.state().records == before + 1
    with (run / "trajectories.jsonl").open("ab") as file:
        file.write(lines[0][50:] + b"not json\n")
    index.update()
    state = index.state()
    assert (state.records, state.unreadable) == (before + 3, 1)
    assert state.episodes == before + 1, "the last record is one that was there, played again"
    (run / "trajectories.jsonl").write_bytes(lines[0])
    index.update()
    assert index.state().records == 1, "another run in its place"


def test_odd_records_are_shown_as_far_as_they_go(tmp_path):
    rows = [{"key": 3, "spans": [1, {"ids": 5}], "turns": [{"reply": 4}]}]
    rows += [{"spans": [{"ids": [1], "tokens": ["a"], "logprobs": [None]}]}]
    said = [{"content": [{"type": "text", "text": "x"}, 3]}]
    rows += [{"error": {"type": "E"}, "final": said, "turns": [{"messages": ["m"]}]}]
    (tmp_path / "trajectories.jsonl").write_bytes(
        b"".join(orjson.dumps(row) + b"\n" for row in rows)
    )
    index = RunIndex(tmp_path)
    index.update()
    assert index.state().episodes == 3
    for number in range(3):
        columns = index.at(number)
        assert episode_page(index, columns)["number"] == number
        assert index.episode(columns.key) == columns


def test_the_command_line_refuses_what_is_no_run(run, tmp_path, capsys):
    assert main(["view", str(run), "--port", "70000"]) == 2
    assert main(["view", str(run), str(tmp_path / "gone")]) == 2
    assert "no such run directory" in capsys.readouterr().err
    (tmp_path / "empty").mkdir()
    assert main(["view", str(tmp_path / "empty")]) == 2
    assert "none is in it" in capsys.readouterr().err
    assert main(["view", str(run), "--html", str(tmp_path / "x.html"), "--episodes", "-1"]) == 2
    assert main(["view", str(tmp_path), "--report"]) == 2
    assert "one run directory" in capsys.readouterr().err


TOKEN = "not-guessed-by-anyone"


@pytest.fixture
def locked(run):
    with ViewerServer([run], token=TOKEN) as server:
        yield server


def test_with_a_token_nothing_is_told_without_it(locked):
    assert locked.url.endswith(f"/?token={TOKEN}")
    for path in (
        "/",
        "/app.js",
        "/api/session",
        "/api/run?run=hop",
        "/api/episodes?run=hop",
        f"/media/hop/{HASH}.png",
        "/?token=wrong",
        "/?token=",
    ):
        assert get(locked, path)[0] == 403, path
    assert get(locked, "/api/run?run=hop&token=" + TOKEN)[0] == 403, (
        "the address of the page alone takes it"
    )
    for cookie in (
        "turnwright_view=",
        "turnwright_view=wrong",
        f"other={TOKEN}",
        "turnwright_view=\xe9",
    ):
        assert get(locked, "/", Cookie=cookie)[0] == 403, cookie


def test_the_token_becomes_a_cookie_that_scripts_cannot_read_and_leaves_the_address(locked):
    status, headers, body = get(locked, "/?token=" + TOKEN, host="somewhere.example")
    assert (status, headers["Location"], body) == (303, "/", b"")
    assert "HttpOnly" in headers["Set-Cookie"]
    assert "SameSite=Strict" in headers["Set-Cookie"]
    cookie = headers["Set-Cookie"].partition(";")[0]
    assert get(locked, "/api/run?run=hop", Cookie="a=b; " + cookie)[0] == 200
    assert get(locked, f"/media/hop/{HASH}.png", Cookie=cookie)[0] == 200


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
    rows[2]["key"]["task"] = "\x1b" + "k" * 3_000_000
    (run / "trajectories.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    with ViewerServer([run]) as server:
        read_whole(server)
        key = server.session.index("hop").at(2).key.address
        status, _, body = get(server, f"/api/episode?run=hop&key={quote(key, safe='')}")
    assert status == 200
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


def test_no_text_of_any_answer_holds_a_control_or_hidden_character(run):
    for name in ("trajectories.jsonl", "metrics.jsonl"):
        rows = [json.loads(line) for line in (run / name).read_text().splitlines()]
        (run / name).write_text("".join(json.dumps(soiled(row)) + "\n" for row in rows))
    (run / "summary.json").write_text(json.dumps({"stopped": RAW, "steps": 3}))
    with ViewerServer([run]) as server:
        read_whole(server)
        told = {
            "session": get_json(server, "/api/session"),
            "run": get_json(server, "/api/run", run="hop"),
            "facets": get_json(server, "/api/facets", run="hop"),
            "list": episodes(server),
            "search": episodes(server, text="task"),
        }
        assert told["search"]["rows"]
        for row in told["list"]["rows"][::9]:
            told[row["key"]] = episode(server, row["key"])
    found = {
        name: [
            text for text in strings(value) if set(RAW[4:6] + "\x1b\x9b\u202e\u200b") & set(text)
        ]
        for name, value in told.items()
    }
    assert not any(found.values()), found
    assert any("\u27e8ESC\u27e9" in text for text in strings(told["list"]))


def test_a_port_that_is_taken_is_named(server, run, capsys):
    assert main(["view", str(run), "--port", str(server.port)]) == 2
    assert f"port {server.port} is unavailable" in capsys.readouterr().err
