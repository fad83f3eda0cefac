"""The page as one file, which is also a run's report: what is in it, what it must not let through,
and what it does without."""

from __future__ import annotations

import io
import json
import re
import threading
import time
from base64 import b64encode
from hashlib import sha256

import orjson
import pytest
from kit.viewing import SentPage, sent, trajectory

from turnwright.cli.main import main
from turnwright.errors import TraceError
from turnwright_view.web import cache, one_file, write_report
from turnwright_view.web.index import RunIndex
from turnwright_view.web.one_file import chosen

HOSTILE = (
    "<script>alert(1)</script><img src=x "
    "onerror=alert(1)>\x1b[31mred\x1b]0;t\x07\u202egnp.exe\x00 \"q\" 'q' <a "
    "href=javascript:alert(1)>x</a> </pre></style></title>{{7*7}} {% raw %} \ud800 "
    "[bold]x[/bold] <!-- ]]> <!--BODY--> <!--HEAD-->"
)


def digest(text: str) -> str:
    return "'sha256-" + b64encode(sha256(text.encode()).digest()).decode() + "'"


def test_it_holds_the_run_and_hostile_text_stays_text(make_run, tmp_path):
    run = make_run(tmp_path / "hop", steps=3, said=HOSTILE)
    page = sent([run], tmp_path / "sent.html")
    assert set(page.tags) <= {
        *("html", "head", "meta", "title", "style", "body", "div", "main", "p"),
        *("noscript", "script"),
    }
    assert not [name for name, _ in page.attributes if name.startswith("on") or name == "src"]
    assert page.tags.count("script") == 1 + len(page.packs) + 2
    found = page.episodes()
    assert len(found) == page.data["episodes"]["hop"]["all"] == 15
    said = [span["text"] for one in found.values() for span in one["spans"]]
    assert any("<script>alert(1)</script>" in text for text in said)
    for piece in ("\u27e8ESC\u27e9[31mred", "\u27e8U+202E\u27e9gnp.exe", "\u27e8NUL\u27e9"):
        assert any(piece in text for text in said), piece
    assert not any(sign in text for text in said for sign in ("\x00", "\x1b", "\u202e", "\ud800"))


def test_it_allows_its_own_scripts_and_styles_alone(make_run, tmp_path):
    out = tmp_path / "sent.html"
    page = sent([make_run(tmp_path / "hop", steps=3)], out)
    text = out.read_text()
    styles = re.findall(r"<style>(.*?)</style>", text, re.DOTALL)
    scripts = page.scripts[-2:]
    assert page.policy == (
        f"default-src 'none'; script-src {' '.join(map(digest, scripts))}; style-src "
        f"{' '.join(map(digest, styles))}; img-src data:; base-uri 'none'; form-action 'none'"
    )
    assert "@import" not in text
    assert "url(" not in text


def test_its_data_are_those_of_the_page(make_run, tmp_path):
    run = make_run(tmp_path / "hop", steps=3)
    page = sent([run], tmp_path / "sent.html")
    session = page.data["session"]
    assert not session["live"]
    assert [row["id"] for row in session["runs"]] == ["hop"]
    overview = page.data["overviews"]["hop"]
    assert overview["story"]["sentence"].startswith("Reinforcement raised held-out success")
    rows = page.data["episodes"]["hop"]["rows"]
    assert [row["number"] for row in rows] == list(range(15))
    for row in rows:
        pack = page.packs[f"chunk-0-{row['chunk']}"]
        assert pack["episodes"][row["key"]]["row"] | {"chunk": row["chunk"]} == row
    assert page.data["episodes"]["hop"]["chunks"] == len(page.packs)


def test_a_file_is_whole_though_another_viewer_indexes_the_same_run(make_run, tmp_path):
    run = make_run(tmp_path / "hop", steps=3)
    index = RunIndex(run)
    taken = threading.Event()

    def write() -> None:
        with cache.exclusive(index.file) as is_mine:
            assert is_mine
            taken.set()
            time.sleep(0.5)

    other = threading.Thread(target=write)
    other.start()
    taken.wait(10)
    page = sent([run], tmp_path / "sent.html")
    other.join()
    assert len(page.episodes()) == page.data["episodes"]["hop"]["all"] == 15


def test_several_runs_stand_in_one_file(make_run, tmp_path):
    for name in ("a", "b"):
        make_run(tmp_path / "runs" / name, steps=3)
    page = sent([tmp_path / "runs"], tmp_path / "sent.html", episodes=10)
    assert [row["id"] for row in page.data["session"]["runs"]] == ["a", "b"]
    assert [len(page.episodes(0)), len(page.episodes(1))] == [5, 5]


def kinds(run):
    index = RunIndex(run)
    index.update()
    return index


def test_failures_the_last_step_extremes_ties_and_evaluations_are_chosen(make_run, tmp_path):
    run = make_run(tmp_path / "hop", steps=40)
    picked = chosen(kinds(run), 20)
    assert len(picked) == 20
    assert any(one.failed for one in picked)
    assert sum(one.step == 40 for one in picked) >= 4
    assert {one.phase for one in picked} == {"train", "before"}
    assert len({one.step for one in picked if one.phase == "train"}) > 4, "steps of all the run"
    everything = chosen(kinds(run), 1000)
    steps = {one.step for one in everything if one.phase == "train"}
    assert steps == set(range(1, 41))
    assert chosen(kinds(run), 0) == []


def test_groups_without_signal_are_chosen(tmp_path):
    import random

    rng = random.Random(0)
    rows = [trajectory(rng, step=n // 8, reward=n / 100) for n in range(64)]
    for number, row in enumerate(rows):
        row["key"] |= {"task": f"t{number // 8}", "sample": number % 8}
        if 16 <= number < 24:
            row["reward"] = 0.0
    (tmp_path / "trajectories.jsonl").write_bytes(b"".join(orjson.dumps(r) + b"\n" for r in rows))
    assert sum(one.tie for one in chosen(kinds(tmp_path), 24)) > 2


def test_what_does_not_fit_is_left_out_and_the_rest_is_whole(make_run, tmp_path, monkeypatch):
    run = make_run(tmp_path / "hop", steps=6)
    sent([run], tmp_path / "all.html")
    room = (tmp_path / "all.html").stat().st_size - 6_000
    monkeypatch.setattr(one_file, "MAX_BYTES", room)
    page = sent([run], tmp_path / "small.html")
    rows = page.data["episodes"]["hop"]["rows"]
    assert 0 < len(rows) < 27
    assert set(page.episodes()) == {row["key"] for row in rows}
    assert page.data["episodes"]["hop"]["all"] == 27
    assert (tmp_path / "small.html").stat().st_size <= room


def test_one_episode_of_megabytes_does_not_keep_others_out(make_run, tmp_path, monkeypatch):
    import random

    run = make_run(tmp_path / "hop", steps=3)
    rows = [json.loads(line) for line in (run / "trajectories.jsonl").read_text().splitlines()]
    rng = random.Random(0)
    span = rows[3]["spans"][1]
    span["ids"] = [rng.randrange(10**6) for _ in range(20_000)]
    span["tokens"] = [f"{rng.random()}" for _ in range(20_000)]
    (run / "trajectories.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    fixed = len(one_file._page({}, []).encode())
    monkeypatch.setattr(one_file, "MAX_BYTES", fixed + 180_000)
    page = sent([run], tmp_path / "small.html")
    assert len(page.episodes()) == 14


@pytest.mark.parametrize(
    "missing", ["config.json", "metrics.jsonl", "summary.json", "trajectories.jsonl"]
)
def test_any_file_may_be_missing(make_run, tmp_path, missing):
    run = make_run(tmp_path / "hop", steps=3)
    (run / missing).unlink()
    page = SentPage(write_report(run).read_text())
    assert page.data["overviews"]["hop"]["story"]["sentence"]


@pytest.mark.parametrize(
    "row",
    [
        {"spans": "x", "turns": 3},
        {
            "key": None,
            "spans": [{"origin": "model", "ids": [1], "tokens": ["a", "b"]}],
            "turns": [{"spans": [0, 9]}],
        },
        {
            "spans": [{"origin": "env", "parent": 0, "ids": [1]}],
            "turns": [{"messages": ["hi", None], "reply": None, "spans": None}],
        },
        {
            "reward": float("nan"),
            "turns": [
                {"reply": {"role": "assistant", "content": [{"type": "image"}, 3]}, "spans": []}
            ],
        },
        {
            "task": {"messages": None, "answer": {"a": [1]}},
            "error": {"message": None},
            "stop": "unheard",
        },
    ],
)
def test_odd_episodes_are_shown_or_named_never_raised(tmp_path, row):
    (tmp_path / "trajectories.jsonl").write_text(json.dumps(row) + "\n")
    assert "</html>" in write_report(tmp_path).read_text()


def test_odd_metrics_are_left_out(tmp_path):
    rows = [
        {"phase": "train", "step": None, "reward": 1},
        {"phase": "train", "step": 1, "reward": "x", "stops": [1]},
        {"phase": 3},
    ]
    rows += [
        {"phase": "train", "step": 2, "reward": float("inf"), "stops": {"done": "x"}, "time_s": -1},
        {"phase": "eval", "ci": 3, "success": 2},
    ]
    (tmp_path / "metrics.jsonl").write_text(
        "".join(json.dumps(row) + "\n" for row in rows) + "[]\n3\n"
    )
    assert "</html>" in write_report(tmp_path).read_text()


def test_view_writes_the_report_and_prints_its_path(make_run, tmp_path, capsys):
    run = make_run(tmp_path / "hop", steps=3)
    assert main(["view", str(run), "--report"]) == 0
    assert capsys.readouterr().out.strip() == str(run / "report.html")
    assert "Content-Security-Policy" in (run / "report.html").read_text()
    assert sorted(path.name for path in run.iterdir() if path.name.startswith(".")) == []


def test_view_writes_one_file_of_as_many_episodes_as_asked(make_run, tmp_path, capsys):
    run = make_run(tmp_path / "hop", steps=6)
    out = tmp_path / "sent.html"
    assert main(["view", str(run), "--html", str(out), "--episodes", "5"]) == 0
    assert capsys.readouterr().out.splitlines()[0] == str(out)
    assert len(SentPage(out.read_text()).episodes()) == 5


def test_a_place_that_cannot_be_written_is_named(make_run, tmp_path):
    run = make_run(tmp_path / "hop", steps=3)
    with pytest.raises(TraceError, match=r"gone/r\.html: cannot be written"):
        write_report(run, tmp_path / "gone" / "r.html")


def test_records_of_a_real_rollout_are_understood(tmp_path):
    import turnwright as tw
    from turnwright.envs.builtin import HopJson
    from turnwright.records import to_json, trajectory_row
    from turnwright.renderers import byte_renderer

    played = tw.rollout(HopJson, HopJson.tasks("eval", 2, 0), tw.ScriptedEngine(HopJson.solver))
    rows = [
        to_json(trajectory_row(trajectory, byte_renderer())).rstrip() + b"\n"
        for trajectory in played
    ]
    (tmp_path / "trajectories.jsonl").write_bytes(b"".join(rows))
    page = sent([tmp_path], tmp_path / "sent.html")
    (overview,) = page.data["overviews"].values()
    assert overview["story"]["sentence"] == "2 episodes were played; nothing was trained."
    assert overview["problems"] == []
    found = page.episodes()
    assert len(found) == 2
    for one in found.values():
        assert one["turns"][0]["reply"]["calls"][0]["name"] == "lookup"
        assert one["answer"] is not None
        assert one["error"] is None
        assert one["row"]["tools"] == ["lookup"]


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def test_progress_is_told_if_it_takes_longer_than_a_second(make_run, tmp_path, monkeypatch):
    run = make_run(tmp_path / "hop", steps=3)
    quick, slow, log = Terminal(), Terminal(), io.StringIO()
    one_file.write_page([run], tmp_path / "a.html", progress=quick)
    assert quick.getvalue() == ""
    monkeypatch.setattr(one_file, "PROGRESS_S", -1.0)
    one_file.write_page([run], tmp_path / "a.html", progress=slow)
    assert "packing episodes of hop: " in slow.getvalue()
    assert slow.getvalue().endswith(" \r"), "the line is left empty"
    assert "\n" not in slow.getvalue()
    one_file.write_page([run], tmp_path / "a.html", progress=log)
    assert log.getvalue().count("\n") == 1


def test_rows_of_metrics_without_end_are_thinned(make_run, tmp_path, monkeypatch):
    monkeypatch.setattr(one_file, "METRIC_ROWS", 20)
    run = make_run(tmp_path / "hop", steps=200)
    page = sent([run], tmp_path / "sent.html")
    rows = page.data["overviews"]["hop"]["rows"]
    assert 10 < len(rows) <= 21
    assert rows[-1]["name"] == "after"
