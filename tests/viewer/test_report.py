"""The report: what it says, what it must not let through, and what it does without."""

from __future__ import annotations

import json
import re
import tracemalloc
from base64 import b64encode
from hashlib import sha256
from html.parser import HTMLParser

import pytest

from turnwright.cli.main import main
from turnwright.display.run_data import choose, index, load_at, read_run
from turnwright.errors import TraceError
from turnwright_view.report import lag_table, render_report, write_report

HOSTILE = (
    "<script>alert(1)</script><img src=x "
    "onerror=alert(1)>\x1b[31mred\x1b]0;t\x07\u202egnp.exe\x00 \"q\" 'q' <a "
    "href=javascript:alert(1)>x</a> </pre></style></title>{{7*7}} {% raw %} \ud800 "
    "[bold]x[/bold] <!-- ]]>"
)


class Page(HTMLParser):
    """Every tag with its attributes, and the text."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.tags: list[tuple[str, dict[str, str | None]]] = []
        self.text = ""
        self.feed(text)

    def handle_starttag(self, tag, attrs):
        self.tags.append((tag, dict(attrs)))

    def handle_data(self, data):
        self.text += data


def test_it_says_what_was_learned_with_intervals(make_run, tmp_path):
    text = " ".join(Page(render_report(make_run(tmp_path / "hop"))).text.split())
    assert "Reinforcement raised held-out success from 24.0% to 97.3%" in text
    assert "in 60 reinforcement steps; a single reply could reach 10.0% at best." in text
    assert "An episode took 2.1 turns before and 3.0 after." in text
    for piece in (
        "before, sampled",
        "after, greedy",
        "94.5% – 98.7%",
        "Warmup",
        "Reinforcement",
        "max_turns",
        "no_signal",
        "torch",
    ):
        assert piece in text, piece
    assert (
        text.index("Supervised loss")
        < text.index("Training on sampled episodes")
        < text.index("Used share")
    )
    assert "reinforcement, last step (60): worst" in text
    assert "a failure" in text
    assert "ToolFailed in step: the table is gone" in text
    assert "reward not computed" in text
    assert "command line" in text


def test_model_tokens_are_marked_and_tell_id_and_logprob(make_run, tmp_path):
    run = make_run(tmp_path / "hop", steps=3)
    row = load_at(run / "trajectories.jsonl", 0)
    span = next(span for span in row["spans"] if span["origin"] == "model")
    page = Page(render_report(run))
    tokens = [
        attributes for tag, attributes in page.tags if tag == "span" and "title" in attributes
    ]
    assert all(re.fullmatch(r"tk l[0-4]", attributes["class"] or "") for attributes in tokens)
    titles = [attributes["title"] for attributes in tokens]
    assert any(
        f"id {span['ids'][0]}, logprob {span['logprobs'][0]:.4f}" in (title or "")
        for title in titles
    )


def test_hostile_content_stays_text(make_run, tmp_path):
    text = render_report(make_run(tmp_path / "hop", steps=3, said=HOSTILE))
    page = Page(text)
    assert not {tag for tag, _ in page.tags} & {
        "script",
        "img",
        "iframe",
        "object",
        "link",
        "base",
        "form",
    }
    for _, attributes in page.tags:
        assert not any(name.startswith("on") or name == "style" for name in attributes)
        for name in ("href", "src", "action", "xlink:href"):
            assert re.fullmatch(r"#[a-z-]+", attributes.get(name) or "#a")
    assert not re.search(
        "[\x00-\x08\x0b-\x1f\x7f-\x9f\u202a-\u202e\u2066-\u2069\ud800-\udfff]", text
    )
    for piece in (
        "<script>alert(1)</script>",
        "⟨ESC⟩[31mred",
        "⟨U+202E⟩gnp.exe",
        "⟨NUL⟩",
        "{{7*7}}",
        "⟨U+D800⟩",
        "[bold]x[/bold]",
    ):
        assert piece in page.text, piece


def test_it_refers_to_nothing_outside_and_forbids_scripts(make_run, tmp_path):
    text = render_report(make_run(tmp_path / "hop", steps=3))
    assert "://" not in text
    assert "@import" not in text
    assert "url(" not in text
    policy = next(
        a["content"]
        for tag, a in Page(text).tags
        if a.get("http-equiv") == "Content-Security-Policy"
    )
    style = re.search(r"<style>(.*?)</style>", text, re.DOTALL)
    assert style is not None
    digest = b64encode(sha256(style.group(1).encode()).digest()).decode()
    assert (
        policy
        == f"default-src 'none'; style-src 'sha256-{digest}'; base-uri 'none'; form-action 'none'"
    )
    assert "prefers-color-scheme: dark" in text


def test_overlapping_intervals_claim_nothing(make_run, tmp_path):
    run = make_run(tmp_path / "hop", steps=3)
    rows = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    for row in rows:
        if row.get("name") == "after":
            row |= {"success": 0.27, "ci": [0.22, 0.33]}
    (run / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    assert "the intervals overlap, so no change is established" in Page(render_report(run)).text


@pytest.mark.parametrize(
    "missing", ["config.json", "metrics.jsonl", "summary.json", "trajectories.jsonl"]
)
def test_any_file_may_be_missing(make_run, tmp_path, missing):
    run = make_run(tmp_path / "hop", steps=3)
    (run / missing).unlink()
    assert "<h1>hop</h1>" in render_report(run)


def test_an_empty_run_and_one_that_is_being_written(make_run, tmp_path):
    (tmp_path / "empty").mkdir()
    assert "This run has no metrics yet." in render_report(tmp_path / "empty")
    run = make_run(tmp_path / "hop", steps=6)
    (run / "summary.json").unlink()
    rows = [
        line for line in (run / "metrics.jsonl").read_text().splitlines() if '"after"' not in line
    ]
    (run / "metrics.jsonl").write_text("\n".join(rows) + '\n{"phase": "tra')
    with (run / "trajectories.jsonl").open("a") as file:
        file.write('{"schema": 1, "spans": [')
    text = Page(render_report(run)).text
    assert "6 of 60 reinforcement steps are done" in text
    assert "metrics.jsonl: skipped 1 unreadable line" in text
    assert "trajectories.jsonl: skipped 1 unreadable line" in text


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
def test_odd_trajectories_are_shown_or_named_never_raised(tmp_path, row):
    (tmp_path / "trajectories.jsonl").write_text(json.dumps(row) + "\n")
    assert "</html>" in render_report(tmp_path)


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
    assert "</html>" in render_report(tmp_path)


def test_examples_are_chosen_and_long_ones_cut(make_run, tmp_path):
    run = make_run(tmp_path / "hop", steps=5)
    picks = choose(index(run / "trajectories.jsonl", []))
    assert [pick.why for pick in picks][:3] == [
        "evaluation “before”: best",
        "evaluation “before”: worst",
        "reinforcement, first step (1): best",
    ]
    assert picks[-1].entry.failed
    row = load_at(run / "trajectories.jsonl", picks[0].entry.offset)
    row["turns"][0]["messages"][0]["content"] = "x" * 10_000_000
    row["spans"][1] |= {"ids": [1] * 50_000, "tokens": ["y"] * 50_000, "logprobs": [-1.0] * 50_000}
    (run / "trajectories.jsonl").write_text(json.dumps(row) + "\n")
    text = render_report(run)
    assert len(text) < 1_000_000
    assert "9,992,000 more characters in trajectories.jsonl" in text
    assert "Only the first 3000 of" in text


def test_a_long_file_is_read_once_and_let_go(make_run, tmp_path):
    run = make_run(tmp_path / "hop", steps=1)
    line = (run / "trajectories.jsonl").read_bytes().splitlines(keepends=True)[2]
    with (run / "trajectories.jsonl").open("ab") as file:
        for _ in range(8000):
            file.write(line)
    size = (run / "trajectories.jsonl").stat().st_size
    tracemalloc.start()
    entries = index(run / "trajectories.jsonl", [])
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert len(entries) > 8000
    assert peak < size / 3


def test_a_step_trained_again_after_a_resume_counts_once(tmp_path):
    rows = [
        {"phase": "train", "step": step, "reward": reward}
        for step, reward in ((0, 0.1), (1, 0.2), (1, 0.3))
    ]
    (tmp_path / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    assert [row["reward"] for row in read_run(tmp_path).phase("train")] == [0.1, 0.3]


def test_view_writes_the_report_and_prints_its_path(make_run, tmp_path, capsys):
    run = make_run(tmp_path / "hop", steps=3)
    assert main(["view", str(run), "--report"]) == 0
    assert capsys.readouterr().out.strip() == str(run / "report.html")
    assert "Content-Security-Policy" in (run / "report.html").read_text()
    assert sorted(path.name for path in run.iterdir() if path.name.startswith(".")) == []


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
    text = Page(render_report(tmp_path)).text
    assert '<tool_call>{"name": "lookup"' in text
    assert "tool lookup" in text
    assert "2 trajectories were played" in text
    assert "Expected answer" in text
    assert "cannot render" not in text


def test_a_place_that_cannot_be_written_is_named(make_run, tmp_path):
    run = make_run(tmp_path / "hop", steps=3)
    with pytest.raises(TraceError, match=r"gone/r\.html: cannot be written"):
        write_report(run, tmp_path / "gone" / "r.html")


SLIME_CURVES = {
    "Reward": ("reward", [0.25, 0.5, 0.75], "0.75"),
    "Repetition": ("repetition", [0.4, 0.2, 0.03], "3.0%"),
    "Reply length": ("reply_tokens.mean", [44.0, 33.0, 26.0], "26"),
    "Tokens per second": ("tokens_per_s", [9_500.0, 9_100.0, 8_900.0], "8900"),
    "Training time": ("train_s", [3.25, 2.25, 1.25], "1.25 s"),
    "Rollout time": ("rollout_s", [4.5, 3.5, 2.75], "2.75 s"),
    "Rollout over training": ("rollout_over_train", [1.38, 1.56, 2.2], "2.20"),
}


@pytest.mark.parametrize("title", SLIME_CURVES)
def test_the_curves_of_slime_s_report_are_drawn(make_run, tmp_path, title):
    """Reward, repetition, reply length, effective tokens a second, training and rollout
    time, and their ratio."""
    name, values, last = SLIME_CURVES[title]
    key, _, inner = name.partition(".")
    run = make_run(tmp_path / "geometry", steps=3)
    rows = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    for row in rows:
        row.pop(key, None)
    (run / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    assert f"<title>{title}</title>" not in render_report(run)
    steps = [row for row in rows if row["phase"] == "train"]
    for row, value in zip(steps, values, strict=True):
        row[key] = {inner: value} if inner else value
    (run / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (drawn,) = re.findall(rf"<svg[^>]*><title>{title}</title>.*?</svg>", render_report(run))
    assert len(re.findall(rf"<title>{title}, step \d+: ", drawn)) == 3
    assert re.search(rf'class="endlabel"[^>]*>{last}<', drawn)


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
    path = tmp_path / "metrics.jsonl"
    path.write_text("".join(f"{json.dumps(row)}\n" for row in rows))
    assert lag_table(read_run(tmp_path)) == [
        ("0", "30", "37.5%", "-", "-"),
        ("1", "40", "50.0%", "5e-02", "-"),
        ("10", "10", "12.5%", "-", "-"),
    ]
    assert "Trained tokens by lag" in render_report(tmp_path)
    path.write_text(json.dumps(rows[-1]) + "\n")
    assert lag_table(read_run(tmp_path)) == []
    assert "Trained tokens by lag" not in render_report(tmp_path)
