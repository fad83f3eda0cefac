"""What was built against a full render: where it differs and why; a measurement that
changes and fails nothing."""

from __future__ import annotations

import copy
import json
from functools import lru_cache
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from kit.rollouts import bpe, facts

import turnwright as tw
from turnwright.config import Limits
from turnwright.errors import UsageError
from turnwright.records import RunDir
from turnwright.renderers import ChatRenderer, ChatTemplate, HFTokenizer, template_source
from turnwright.renderers.full_render import CAUSES, RenderDifference, compare_with_render
from turnwright.rollouts import Rollout, make_episode_specs, run_sync
from turnwright.rollouts.render_check import built_conversation
from turnwright.rollouts.rollout_settings import RolloutSettings
from turnwright.types import Message

LOOK = {
    "type": "function",
    "function": {"name": "look", "parameters": {"type": "object", "properties": {"key": {}}}},
}
THOUGHT = "<think>\nI look.\n</think>\n\nYes."
CALL = '<tool_call>\n{"name": "look", "arguments": {"key": "a"}}\n</tool_call>'


@lru_cache
def renderer(name: str = "qwen3_with_thinking", change: Any = None) -> ChatRenderer:
    source = template_source(name)
    return ChatRenderer(
        HFTokenizer(bpe()), ChatTemplate(change(source) if change else source, origin=name)
    )


def world(*observations: Any, tools: Any = ()) -> type[tw.Env]:
    class World(tw.Env):
        def reset(self, task: tw.Task, *, seed: int | None = None) -> Any:
            self.tools = list(tools)
            self.left = list(observations)
            return "Begin."

        def step(self, action: Any) -> tw.Step:
            said = self.left.pop(0) if self.left else None
            return tw.Step(said, 0.0, said is None)

    return World


def played(
    render: ChatRenderer,
    replies: list[Any],
    *observations: Any,
    tools: Any = (),
    directory: Path | None = None,
    **options: Any,
) -> tuple[tw.Trajectory, dict[str, Any]]:
    run = RunDir(directory) if directory is not None else None
    settings = RolloutSettings(**{"sanity_share": 1.0, "limits": Limits(turn_tokens=200)} | options)
    player = Rollout(tw.ScriptedEngine(replies), render, settings, run=run)
    env = world(*observations, tools=tools)
    found = run_sync(
        player.play(make_episode_specs(env, [tw.Task("Begin.", id="t")], phase="x", step=0))
    )[0]
    if run is not None:
        run.close()
    return found, player.sanity.reports


def cause_of(*args: Any, **options: Any) -> dict[str, Any]:
    trajectory, reports = played(*args, **options)
    assert trajectory.error is None
    assert len(reports) == 1, reports
    (cause,) = reports
    assert trajectory.metrics[f"render_mismatch_{cause}"] == 1
    report: dict[str, Any] = reports[cause]
    assert report["sentence"] == CAUSES[cause]
    assert report["canonical"] != report["sent"]
    return report


def test_an_append_only_render_mismatch_nowhere() -> None:
    trajectory, reports = played(
        renderer(), [THOUGHT, "Well.", THOUGHT], "Go on.", "More.", sanity_share="turns"
    )
    assert reports == {}
    assert trajectory.metrics["render_checks"] == 3
    assert not any(name.startswith("render_mismatch") for name in trajectory.metrics)


def test_thinking_that_is_stripped() -> None:
    report = cause_of(renderer("qwen3_without_thinking"), [THOUGHT, "Well."], "Go on.")
    assert report["cause"] == "thinking_stripped"
    assert report["origin"] == "model"
    assert report["turn"] == 0
    assert "I look." in report["sent"]
    assert "I look." in report["sampled"]
    assert "I look." not in report["canonical"]
    assert "Yes." in report["canonical"]


def test_thinking_that_is_added() -> None:
    def always(source: str) -> str:
        return source.replace("message.reasoning_content is string", "true").replace(
            "message.reasoning_content.strip", "(message.reasoning_content or '').strip"
        )

    assert cause_of(renderer(change=always), ["Yes."])["cause"] == "thinking_added"


def test_a_generation_prompt_that_is_not_shown_later() -> None:
    report = cause_of(
        renderer(change=lambda s: "{% set enable_thinking = false %}" + s),
        ["Yes.", "Well."],
        "Go on.",
    )
    assert report["cause"] == "prefill"
    assert report["origin"] in ("prompt", "env")


def test_tool_calls_that_are_written_anew() -> None:
    other = CALL.replace('"key": "a"', '"key":"a"')
    report = cause_of(
        renderer(), [other, "Well."], [Message("tool", "b", tool_call_id="call_0")], tools=[LOOK]
    )
    assert report["cause"] == "tool_calls"
    assert '"key":"a"' in report["sampled"]
    assert '"key": "a"' in report["canonical"]


def test_ids_that_the_tokenizer_would_not_write() -> None:
    render = renderer()
    ids = [i for byte in "word" for i in render.codec.encode(byte)]
    assert ids != render.codec.encode("word")
    report = cause_of(render, [[*ids, *render.encode_reply("")], "Well."], "Go on.")
    assert report["cause"] == "retokenised"
    assert "w|o|r|d" in report["sent"]
    assert report["origin"] == "model"


def test_white_space_and_only_where_it_counts() -> None:
    trim = lambda source: source.replace("{{- said -}}", "{{- said | trim -}}")  # noqa: E731
    assert cause_of(renderer(change=trim), ["  Yes.  ", "Well."], "Go on.")["cause"] == "whitespace"
    _, reports = played(
        renderer(change=trim), ["  Yes.  ", "Well."], "Go on.", sanity="ignore_strippable"
    )
    assert reports == {}
    _, reports = played(renderer("qwen3_without_thinking", trim), [" Yes. ", THOUGHT, "Well."], "Go on.", "More.",  # noqa: E501
                        sanity="ignore_strippable")  # fmt: skip
    assert list(reports) == ["thinking_stripped"]


def test_a_close_that_is_swapped() -> None:
    swap = lambda source: source.replace(  # noqa: E731
        "        {{- '<|im_end|>' -}}\n",
        "        {{- '<|im_end|>' if loop.last else '<|endoftext|>' -}}\n",
    )
    assert cause_of(renderer(change=swap), ["Yes.", "Well."], "Go on.")["cause"] == "close"


def test_results_of_tools_that_are_folded() -> None:
    render = renderer()
    one = [Message("tool", "1", tool_call_id="call_0")]
    trajectory, reports = played(render, [CALL, CALL, "Well."], one, one, tools=[LOOK])
    assert reports == {}, "results behind replies of their own are not folded"
    assert trajectory.error is None
    for shown, cause in (("loop.last", "tool_folding"), ("messages | length < 6", "state")):
        folded = ChatRenderer(
            HFTokenizer(bpe()),
            ChatTemplate(
                template_source("qwen3_with_thinking").replace(
                    "'\\n<tool_response>\\n' + said",
                    f"('\\n<tool_response>\\n' if {shown} else '\\n<results>\\n') + said",
                )
            ),
        )
        assert list(played(folded, [CALL, CALL, "Well."], one, one, tools=[LOOK])[1]) == [cause]


def test_control_text_from_the_world() -> None:
    report = cause_of(renderer(), ["Yes.", "Well."], "Say <|im_end|> now.")
    assert report["cause"] == "control_text"
    assert report["origin"] == "env"


def test_a_reply_that_was_cut_off() -> None:
    limits = Limits(turn_tokens=6, on_turn_length="continue")
    thought = "<think>\nI look and look and look"
    report = cause_of(
        renderer("qwen3_without_thinking"), [thought, "Yes."], "Go on.", limits=limits
    )
    assert report["cause"] == "truncated"
    trajectory, reports = played(renderer(), [thought, "Yes."], "Go on.", limits=limits)
    assert reports == {}, "open thinking is closed as the template closes it"
    assert len(trajectory.turns) == 2
    stop = Limits(turn_tokens=6)
    assert played(renderer(), ["I look and look and look and look"], limits=stop)[1] == {}


def test_history_inside_one_message() -> None:
    _, reports = played(renderer(), ["Yes.", "Well."], "Go on.", history="inline")
    assert list(reports) in (["inline"], [])


def test_a_template_that_refuses_the_whole() -> None:
    once = lambda source: (  # noqa: E731
        "{% if messages | length > 6 %}{{ raise_exception('too long') }}{% endif %}" + source
    )
    report = cause_of(renderer(change=once), ["Yes."] * 5, "a", "b", "c", "d")
    assert report["cause"] == "template_refuses"
    assert "too long" in report["said"]


def test_off_is_off_and_a_share_is_of_the_keys(tmp_path: Path) -> None:
    for level in ("off", "disable"):
        trajectory, reports = played(
            renderer("qwen3_without_thinking"), [THOUGHT, "Well."], "Go on.", sanity=level
        )
        assert not reports
        assert not trajectory.metrics
    player = Rollout(
        tw.ScriptedEngine(["Yes."] * 400), renderer(), RolloutSettings(sanity_share=0.25)
    )
    tasks = [tw.Task("Begin.", id=f"t{n}") for n in range(400)]
    looked = [[t.key for t in run_sync(player.play(make_episode_specs(world(), order, phase="x", step=0))) if t.metrics]  # noqa: E501
              for order in (tasks, tasks[::-1])]  # fmt: skip
    assert sorted(map(repr, looked[0])) == sorted(map(repr, looked[1]))
    assert 60 < len(looked[0]) < 140
    with pytest.raises(UsageError, match="from 0 to 1"):
        Rollout(tw.ScriptedEngine([]), renderer(), RolloutSettings(sanity_share=2))


def test_one_report_of_each_cause_is_kept_and_nothing_else_changes(tmp_path: Path) -> None:
    render = renderer("qwen3_without_thinking")
    checked, reports = played(
        render,
        [THOUGHT, THOUGHT, "Well."],
        "Go on.",
        "More.",
        sanity_share="turns",
        directory=tmp_path,
    )
    rows = [json.loads(line) for line in (tmp_path / "sanity.jsonl").read_text().splitlines()]
    assert [row["cause"] for row in rows] == list(reports) == ["thinking_stripped"]
    assert checked.metrics["render_mismatch_thinking_stripped"] == 2
    again, _ = played(render, [THOUGHT, "Well."], "Go on.", directory=tmp_path)
    assert again.metrics["render_mismatch_thinking_stripped"] == 1
    assert len((tmp_path / "sanity.jsonl").read_text().splitlines()) == 1
    off, _ = played(render, [THOUGHT, THOUGHT, "Well."], "Go on.", "More.", sanity="off")
    checked.metrics = {}
    assert facts(checked) == facts(off)


TEXTS = st.text(max_size=12) | st.sampled_from(
    ["<think>", "</think>", "<|im_end|>", CALL, THOUGHT, " ", "\n\n", "</think>\n\nYes."]
)


@settings(max_examples=150, deadline=None)
@given(
    st.lists(st.lists(TEXTS, max_size=4).map("".join), min_size=1, max_size=4),
    st.lists(st.lists(TEXTS, max_size=3).map("".join), max_size=3),
    st.sampled_from(["chatml", "qwen3_with_thinking", "qwen3_without_thinking"]),
    st.sampled_from(["strict", "ignore_strippable"]),
    st.booleans(),
)
def test_it_never_raises_and_never_changes_anything(
    replies: list[str], observations: list[str], name: str, level: Any, tools: bool
) -> None:
    trajectory, _ = played(
        renderer(name), replies * 4, *observations, tools=[LOOK] if tools else (), sanity="off"
    )
    before = copy.deepcopy(facts(trajectory))
    for turn in range(len(trajectory.turns)):
        built = built_conversation(trajectory, turn, [LOOK] if tools else ())
        found = compare_with_render(renderer(name), built, level)
        if found is not None:
            assert isinstance(found, RenderDifference)
            assert found.cause in CAUSES
            assert 0 <= found.position <= len(built.ids)
        elif level == "strict":
            text = renderer(name).template.render(built.messages, built.tools)
            said = renderer(name).decode(built.ids)
            assert (
                text.startswith(said)
                or said.rstrip("\n") in text
                or trajectory.turns[turn].finish == "length"
            )
    assert facts(trajectory) == before


@settings(max_examples=60, deadline=None)
@given(st.lists(st.text("abc xyz.,", min_size=1, max_size=20), min_size=1, max_size=5), st.data())
def test_equal_conversations_have_no_difference(words: list[str], data: Any) -> None:
    """Canonical replies and texts without control text: over append-only
    templates nothing breaks."""
    observations = data.draw(
        st.lists(
            st.text("abc xyz.,", min_size=1, max_size=20),
            min_size=len(words) - 1,
            max_size=len(words) - 1,
        )
    )
    name = data.draw(st.sampled_from(["chatml", "qwen3_with_thinking"]))
    trajectory, reports = played(renderer(name), words, *observations, sanity_share="turns")
    assert reports == {}
    assert trajectory.metrics["render_checks"] == len(words)
