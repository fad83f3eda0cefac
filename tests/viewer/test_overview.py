"""A run's page: its sentence, its tables, and the links to what to look at."""

from __future__ import annotations

import ast
import json
import re
from pathlib import Path
from urllib.parse import parse_qs, unquote

import pytest
from kit.viewing import get_json, read_whole

from turnwright.display import diagnosis
from turnwright.display.run_data import read_run
from turnwright_view.web import ViewerServer
from turnwright_view.web.diagnosed import EPISODES, diagnoses_of
from turnwright_view.web.evaluations import held_out
from turnwright_view.web.index import RunIndex
from turnwright_view.web.overview import overview
from turnwright_view.web.run_tables import stops_by_step, time_split, tokens_by_lag
from turnwright_view.web.search import filter_of
from turnwright_view.web.story import largest_jump, sentence


def page_of(run: Path) -> dict:
    index = RunIndex(run)
    index.update()
    return overview(index, run.name, run.name, "finished")


def write_metrics(run: Path, rows: list[dict]) -> None:
    (run / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))


def metrics(run: Path) -> list[dict]:
    return [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]


def test_it_says_what_was_learned_with_intervals(make_run, tmp_path):
    page = page_of(make_run(tmp_path / "hop"))
    said = page["story"]["sentence"]
    assert said.startswith(
        "Reinforcement raised held-out success from 24.0% [19.0, 29.4] to 97.3% [94.5, 98.7] in 60 "
        "reinforcement steps (1 min 33 s, "
    )
    assert said.endswith(" sampled tokens); a single reply could reach 10.0% at best.")
    assert ["turns of an episode", "2.1 \u2192 3.0"] in page["story"]["facts"]
    names = [(one["name"], one["mode"]) for one in page["evaluations"]]
    assert names == [
        ("before", "sampled"),
        ("after", "sampled"),
        ("before", "greedy"),
        ("after", "greedy"),
    ]
    assert page["reference"] == 0.1
    assert ["seed", "0"] in page["story"]["facts"]
    assert page["versions"]["torch"] == "2.13.0"
    assert ["env.0.use", '"hop"', "command line"] in page["settings"]
    assert page["defaults"] > 50
    assert "--train.lr 0.002" in page["command"]


def test_overlapping_intervals_claim_nothing(make_run, tmp_path):
    run = make_run(tmp_path / "hop", steps=3)
    rows = metrics(run)
    for row in rows:
        if row.get("name") == "after":
            row |= {"success": 0.27, "ci": [0.22, 0.33]}
    write_metrics(run, rows)
    said = page_of(run)["story"]["sentence"]
    assert "the 95% intervals overlap, so no change is established" in said


def test_the_blind_control_stands_beside_success(tmp_path):
    tmp_path.joinpath("summary.json").write_text(
        json.dumps(
            {"success_before": 0.3, "success_after": 0.95, "success_after_ci": [0.92, 0.97], "success_before_ci": [0.25, 0.36],  # noqa: E501
             "success_blind": 0.04, "success_blind_ci": [0.02, 0.07], "n_eval": 256, "rl_steps": 4}
        )
    )  # fmt: skip
    page = page_of(tmp_path)
    assert "with every image gray the same policy has 4.0%" in page["story"]["sentence"]
    blind = page["evaluations"][-1]
    assert (blind["name"], blind["mode"], blind["low"], blind["high"]) == (
        "after",
        "blind",
        0.02,
        0.07,
    )
    assert blind["step"] == 4


def test_a_run_that_is_being_written_and_an_empty_one_say_how_far_they_are(make_run, tmp_path):
    (tmp_path / "empty").mkdir()
    assert page_of(tmp_path / "empty")["story"]["sentence"] == "This run has no metrics yet."
    run = make_run(tmp_path / "hop", steps=6)
    (run / "summary.json").unlink()
    rows = [
        line for line in (run / "metrics.jsonl").read_text().splitlines() if '"after"' not in line
    ]
    (run / "metrics.jsonl").write_text("\n".join(rows) + '\n{"phase": "tra')
    with (run / "trajectories.jsonl").open("a") as file:
        file.write('{"schema": 1, "spans": [\n')
    page = page_of(run)
    assert "6 of 60 reinforcement steps are done" in page["story"]["sentence"]
    assert "metrics.jsonl: skipped 1 unreadable line" in page["problems"]
    assert "trajectories.jsonl: skipped 1 unreadable line" in page["problems"]


def test_a_step_trained_again_after_a_resume_counts_once(tmp_path):
    rows = [
        {"phase": "train", "step": step, "reward": reward}
        for step, reward in ((0, 0.1), (1, 0.2), (1, 0.3))
    ]
    write_metrics(tmp_path, rows)
    assert [row["reward"] for row in read_run(tmp_path).phase("train")] == [0.1, 0.3]


def test_every_link_leads_to_a_list_that_has_what_it_says(make_run, tmp_path):
    run = make_run(tmp_path / "hop", steps=30)
    rows = metrics(run)
    for row in rows:
        if row["phase"] == "train":
            row["step"] += 1
            row |= {"groups": 4, "groups_no_signal": 1, "trajectories": 5.0}
    write_metrics(run, rows)
    lines = [json.loads(line) for line in (run / "trajectories.jsonl").read_text().splitlines()]
    lines[0]["key"]["phase"] = lines[1]["key"]["phase"] = "eval-after-sampled"
    (run / "trajectories.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    with ViewerServer([run]) as server:
        read_whole(server)
        places = get_json(server, "/api/run", run="hop")["story"]["next"]
        assert len(places) >= 3
        for place in places:
            found = re.fullmatch(r"#/run/([^/?]+)/episodes\?(.*)", place["link"])
            assert found is not None
            assert unquote(found[1]) == "hop"
            query = {name: values[0] for name, values in parse_qs(found[2]).items()}
            query.pop("tie", None)
            rows = get_json(server, "/api/episodes", run="hop", **query)["rows"]
            assert rows, place
        texts = " ".join(place["text"] for place in places)
        assert "of 5 episodes of the last step did not succeed" in texts
        assert "1 of 4 groups of the last step had equal rewards" in texts
        assert "Success rose most between steps" in texts
        assert "held-out episodes fail after training" in texts


def test_the_largest_jump_is_found_where_it_is():
    rows = [{"step": n, "success": 0.1 if n < 20 else 0.8} for n in range(1, 41)]
    assert largest_jump(rows) == pytest.approx((15, 24, 0.1, 0.8))
    assert largest_jump([{"step": n, "success": 0.5} for n in range(40)]) is None
    assert largest_jump(rows[:8]) is None
    assert largest_jump([{"step": "x", "success": None}] * 30) is None


def test_every_diagnosis_names_its_episodes():
    """By the names that the code of the diagnoses has."""
    tree = ast.parse(Path(diagnosis.__file__).read_text())
    names = {
        node.args[0].value
        for node in ast.walk(tree)
        if isinstance(node, ast.Call)
        and getattr(node.func, "id", "") == "Diagnosis"
        and isinstance(node.args[0], ast.Constant)
    }
    assert len(names) > 15
    assert names == set(EPISODES)
    train = [{"step": n, "truncations": {"max_turns": 3}} for n in range(1, 9)]
    for name, episodes in EPISODES.items():
        wanted = episodes(train)
        assert wanted, name
        filter_of({key: value for key, value in wanted.items() if key != "sort"})
    assert EPISODES["everything truncated"](train) == {
        "phase": "train",
        "step_min": "4",
        "stop": "max_turns",
    }
    assert EPISODES["entropy collapsed"]([]) is None


def test_a_diagnosis_comes_with_remedy_filter_and_level(tmp_path):
    rows = [
        {"phase": "train", "step": n, "truncated_share": 1.0, "truncations": {"context": 4}}
        for n in range(1, 9)
    ]
    write_metrics(tmp_path, rows)
    (tmp_path / "summary.json").write_text(json.dumps({"n_eval": 4}))
    found = {one["name"]: one for one in diagnoses_of(read_run(tmp_path))}
    cut_off = found["everything truncated"]
    assert cut_off["filter"] == {"phase": "train", "step_min": "4", "stop": "context"}
    assert cut_off["level"] == "warn"
    assert found["few held-out episodes"]["level"] == "note"


def test_stop_reasons_over_time(make_run, tmp_path):
    stops = stops_by_step(read_run(make_run(tmp_path / "hop", steps=8)))
    assert stops["steps"] == list(range(8))
    assert list(stops["shares"]) == ["done", "max_turns"]
    for done, max_turns in zip(*stops["shares"].values(), strict=True):
        assert done + max_turns == pytest.approx(1)
    assert stops["sentences"]["max_turns"]


def test_wall_time_is_split_without_rest(make_run, tmp_path):
    split = time_split(read_run(make_run(tmp_path / "hop", steps=8)))
    assert [what for what, _, _ in split] == [
        "warmup",
        "rollout",
        "training",
        "rest of the steps",
        "evaluation",
    ]
    assert sum(share for _, _, share in split) == pytest.approx(1)


def test_tokens_by_lag_are_summed_and_their_figures_weighted(tmp_path):
    rows = [
        {
            "phase": "train",
            "step": 1,
            "tokens_by_lag": {"0": 30, "1": 10},
            "mismatch_kl_by_lag": {"1": 0.02},
        },
        {
            "phase": "train",
            "step": 2,
            "tokens_by_lag": {"1": 30, "10": 10},
            "mismatch_kl_by_lag": {"1": 0.06},
        },
        {"phase": "train", "step": 3, "stops": {"done": 1}},
    ]
    write_metrics(tmp_path, rows)
    assert tokens_by_lag(read_run(tmp_path)) == [
        ["0", 30, 0.375, None, None],
        ["1", 40, 0.5, pytest.approx(0.05), None],
        ["10", 10, 0.125, None, None],
    ]
    write_metrics(tmp_path, rows[-1:])
    assert tokens_by_lag(read_run(tmp_path)) == []


def test_a_finding_of_the_sanity_check_leads_to_its_episode(tmp_path):
    row = {"cause": "close", "turn": 0, "sentence": "x", "key": ["train", 2, "a/b", 1, 0]}
    (tmp_path / "sanity.jsonl").write_text(
        json.dumps(row) + "\n" + json.dumps(row | {"key": 3}) + "\n"
    )
    (tmp_path / "metrics.jsonl").write_text("")
    first, second = page_of(tmp_path)["findings"]
    assert first["key"] == "train/3/a%2Fb/1/0"
    assert second["key"] == ""


def test_what_is_written_of_a_run_without_reinforcement(make_run, tmp_path):
    run = read_run(make_run(tmp_path / "hop", steps=3))
    assert sentence(run, held_out(run)[:1], 3).startswith("The run has no final evaluation yet")
