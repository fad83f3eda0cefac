"""What notebooks show of trajectories, groups, evaluations and runs: static, escaped, bounded."""

from __future__ import annotations

import re
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import turnwright as tw
from turnwright.media import MediaStore
from turnwright.types import notebook as of_types
from turnwright_view import notebook

MakeRun = Callable[..., Path]
ELEMENTS = (
    "div style strong span table thead tbody tr th td svg title rect path line text circle figure "
    "figcaption img"
)
ATTRIBUTES = (
    "class title scope viewbox preserveaspectratio role x y x1 x2 y1 y2 width height rx cx cy r d "
    "text-anchor src alt"
)
HOSTILE = (
    '<script>alert(1)</script><img src=x onerror="alert(1)">\x1b[31m\u202eevil "\'&amp;</style>'
    "</svg><iframe src=//x> \ud800"
)


class Elements(HTMLParser):
    def __init__(self) -> None:
        super().__init__()
        self.names: set[str] = set()
        self.attributes: list[tuple[str, str]] = []
        self.text = ""
        self.open: list[str] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.names.add(tag)
        self.attributes += [(name, value or "") for name, value in attrs]
        if tag != "img":
            self.open.append(tag)

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        if self.open[-1:] != ["style"]:
            self.text += data


def parsed(value: Any) -> Elements:
    """What the HTML of a value consists of, which is checked to be inert."""
    html = value._repr_html_()
    assert html is not None
    html.encode()
    found = Elements()
    found.feed(html)
    assert found.open == []
    assert found.names <= set(ELEMENTS.split())
    assert {name for name, _ in found.attributes} <= set(ATTRIBUTES.split())
    for name, source in found.attributes:
        if name == "src":
            assert re.fullmatch(r"data:image/png;base64,[A-Za-z0-9+/=]+", source)
    assert "url(" not in html
    assert not re.search("[\x00-\x08\x0b-\x1f\x7f-\x9f\u202a-\u202e\ud800-\udfff]", html)
    return found


async def lookup(task: tw.Task, model: tw.Model) -> float:
    reply = await model.generate(task.messages)
    await model.generate([*task.messages, reply.message, tw.Message("user", "Go on.")])
    return float(reply.text == task.answer)


def test_a_trajectory_shows_its_conversation_outcome_and_tokens() -> None:
    (trajectory,) = tw.rollout(
        lookup, [tw.Task("6 * 7?", answer="42")], tw.ScriptedEngine(["42", "well"])
    )
    found = parsed(trajectory)
    for text in (f"task {trajectory.task.id}", "reward 1", "6 * 7?", "Go on.", "well", "2 turns"):
        assert text in found.text
    titles = [name for name, _ in found.attributes]
    assert "title" in titles
    assert {"svg", "rect"} <= found.names
    assert f"sampled: {len(trajectory.spans[1].ids)} tokens" in found.text

    failed = replace(trajectory, reward=None, error=tw.Failure("ToolFailed", "gone", "step"))
    assert "reward not computed" in parsed(failed).text
    assert "ToolFailed in step: gone" in parsed(failed).text
    assert "task" in parsed(tw.Trajectory(trajectory.task, trajectory.key)).text


def test_a_group_has_a_row_for_each_sample_and_says_when_rewards_are_equal() -> None:
    engine = tw.ScriptedEngine(lambda messages, rng: rng.choice(["42", "41"]))
    played = tw.rollout(lookup, [tw.Task("6 * 7?", answer="42")], engine, samples=6)
    rewards = [trajectory.reward for trajectory in played]
    assert len(set(rewards)) == 2
    found = parsed(tw.Group(played[0].task, played))
    assert found.text.count("reward 1") == rewards.count(1.0)
    assert "equal rewards" not in found.text
    equal = parsed(tw.Group(played[0].task, [t for t in played if t.reward == 1]))
    assert "equal rewards give no signal" in equal.text


def test_an_evaluation_shows_success_with_its_interval_and_how_episodes_ended() -> None:
    result = tw.evaluate("hop", engine="scripted", eval={"tasks": 5}, samples=2)
    found = parsed(result)
    low, high = result.ci
    for text in ("100.0%", f"[{100 * low:.1f}, {100 * high:.1f}]", "pass@2", "1 done 100%"):
        assert text in found.text


def test_a_run_shows_its_evaluations_and_curves(make_run: MakeRun, tmp_path: Path) -> None:
    run = tw.load_run(make_run(tmp_path / "hop-run", steps=30))
    found = parsed(run)
    for text in ("hop-run", "finished, hop, tiny", "24.0%", "97.3%", "Reward", "Turns", "Entropy"):
        assert text in found.text
    assert len([name for name, value in found.attributes if value == "chart"]) == 4
    empty = tmp_path / "empty"
    empty.mkdir()
    (empty / "trajectories.jsonl").touch()
    assert "no training" in parsed(tw.load_run(empty)).text


def test_an_episode_of_a_run_shows_what_training_made_of_it(
    make_run: MakeRun, tmp_path: Path
) -> None:
    run = tw.load_run(make_run(tmp_path, steps=2))
    episode = run.episodes.filter(phase="train")[-2]
    key = episode.key
    row = [key.phase, key.step, key.task, key.sample, key.attempt]
    (tmp_path / "training.jsonl").write_text(
        tw_json({"key": row, "step": key.step, "advantage": -1.5, "reason": "no_signal"})
    )
    text = parsed(episode).text
    assert f"train, step {episode.step}, advantage -1.5, not trained: no_signal" in text


def tw_json(value: Any) -> str:
    from turnwright.records import to_json

    return to_json(value).decode() + "\n"


def test_what_models_and_tools_say_is_text(make_run: MakeRun, tmp_path: Path) -> None:
    said = HOSTILE.replace("\ud800", "")
    run = tw.load_run(make_run(tmp_path, steps=2, said=said))
    parsed(run)
    for episode in run.episodes:
        assert "<script>alert(1)</script>" in parsed(episode).text
        parsed(episode.trajectory)
    for group in run.groups:
        parsed(group)

    async def hostile(task: tw.Task, model: tw.Model) -> float:
        await model.generate(task.messages)
        raise ValueError(HOSTILE)

    (failed,) = tw.rollout(hostile, [tw.Task(HOSTILE, id=HOSTILE[:40])], tw.ScriptedEngine(["x"]))
    parsed(failed)
    parsed(tw.Group(failed.task, [failed]))


def test_long_conversations_texts_and_groups_are_cut() -> None:
    message = tw.Message("user", "x" * 100_000)
    key = tw.EpisodeKey("train", 0, "t", 0)
    turns = [
        tw.Turn(
            agent="main", prompt=0, context=1, spans=(), parent=n - 1, messages=(message,),
            reply=tw.Message("assistant", "y" * 100_000), finish="stop",
        )
        for n in range(200)
    ]  # fmt: skip
    long = tw.Trajectory(tw.Task("t"), key, turns=turns)
    assert "376 more messages" in parsed(long).text
    assert "98,000 more characters" in parsed(long).text
    assert len(long._repr_html_() or "") < 80_000
    assert len(tw.Group(long.task, [long] * 5000)._repr_html_() or "") < 80_000


def test_pictures_of_a_run_are_small_and_never_files_that_only_pose_as_them(
    tmp_path: Path,
) -> None:
    store = MediaStore(tmp_path / "media")
    rng = np.random.default_rng(0)
    refs = [store.add(rng.integers(0, 255, (600, 800, 3), dtype=np.uint8)) for _ in range(12)]
    pictures = notebook._Pictures(tmp_path / "media")
    drawn = [str(pictures.draw(ref)) for ref in refs]
    shown = [text for text in drawn if text.startswith("<img")]
    assert 1 <= len(shown) <= notebook.MAX_PICTURES
    assert sum(map(len, shown)) < 1.4 * notebook.MAX_PICTURE_BYTES
    assert drawn[-1] == '<span class="tw-dim">[image of 800 × 600]</span>'

    changed = tmp_path / "media" / f"{refs[0].sha256}.png"
    changed.write_bytes((tmp_path / "media" / f"{refs[1].sha256}.png").read_bytes())
    again = notebook._Pictures(tmp_path / "media")
    assert "cannot be read" in str(again.draw(refs[0]))
    outside = replace(refs[1], sha256="../../secret")
    assert "<img" not in str(again.draw(outside))
    (tmp_path / "link").symlink_to(tmp_path / "media")
    assert "<img" not in str(notebook._Pictures(tmp_path / "link").draw(refs[1]))


def test_without_the_package_that_draws_a_notebook_shows_the_repr(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("importlib.metadata.entry_points", lambda group: ())
    of_types._drawer.cache_clear()
    try:
        (trajectory,) = tw.rollout(lookup, [tw.Task("x")], tw.ScriptedEngine(["a", "b"]))
        assert trajectory._repr_html_() is None
    finally:
        of_types._drawer.cache_clear()


def test_the_types_import_nothing_of_the_pages_and_do_not_look_for_packages(
    tmp_path: Path,
) -> None:
    code = (
        "import sys, turnwright as tw; tw.Trajectory; tw.load_run; tw.rollout; "
        "print([m for m in sys.modules if m.startswith(('turnwright_view', 'importlib.metadata'))])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"
