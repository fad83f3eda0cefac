"""Figures of episodes: right on cases made by hand, bounded whatever the world names, and
each of them documented."""

from __future__ import annotations

import json
import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

import turnwright as tw
from turnwright.records import rollout_metrics
from turnwright.records.episode_metrics import (
    MAX_NAMES,
    METRICS,
    OTHER,
    distribution_summary,
    flatten_row,
    top_counts,
)
from turnwright.types import (
    EpisodeKey,
    Failure,
    ImageRef,
    MediaPlacement,
    Message,
    Origin,
    Span,
    StopReason,
    Task,
    Trajectory,
    Turn,
)


def metric_doc(path):
    """The row of the tables for a flattened name (`seconds.tool.p95`); None if there is none."""
    for one in METRICS:
        if one.name == path or (
            one.name.endswith(">") and path.startswith(one.name.partition("<")[0])
        ):
            return one
    return None


def episode(sample=0, *, task="t", replies=((1, 2, 3),), stop=StopReason.DONE, reward=1.0, **more):
    """An episode of given replies (ids), each answered by two ids."""
    spans = [Span(Origin.PROMPT, (9, 9))]
    turns = []
    place = 2
    for number, ids in enumerate(replies):
        spans.append(Span(Origin.MODEL, tuple(ids), len(spans) - 1, place, (-0.5,) * len(ids), 0))
        place += len(ids)
        turn = Turn("main", 0, place, (len(spans) - 1,), (), Message("assistant", "x"), number - 1)
        turn.generate_s, turn.env_s, turn.reward = 1.0, 0.5, float(number)
        turns.append(turn)
        spans.append(Span(Origin.ENV, (7, 7), len(spans) - 1, place))
        place += 2
    return Trajectory(
        Task("q", id=task),
        EpisodeKey("train", 0, task, sample),
        spans,
        turns,
        reward,
        stop=stop,
        wall_s=10.0,
        **more,
    )


def test_turns_lengths_times_and_tokens():
    row = rollout_metrics(
        [episode(), episode(1, replies=[(1, 2), (3,), (4, 5, 6, 7)], reward_s=0.25)]
    )
    assert row["turns_spread"] == {"p50": 1, "p95": 3, "max": 3}
    assert row["turns_histogram"] == {"1": 1, "3": 1}
    assert row["tokens"] == {"env": 8, "model": 10, "prompt": 4}
    assert row["reply_tokens"] == {"mean": 2.5, "p50": 2, "p95": 4, "max": 4}
    assert row["reward_by_turn"] == {"1": 0.0, "2": 1.0, "3": 2.0}
    assert row["seconds"]["generate"] == {"p50": 1.0, "p95": 3.0, "max": 3.0, "sum": 4.0}
    assert row["seconds"]["environment"]["sum"] == 2.0
    assert row["seconds"]["wait"] == {"p50": 5.25, "p95": 8.5, "max": 8.5, "sum": 13.75}


def test_drafts_that_were_sampled_are_a_share_of_those_of_all_episodes():
    one, other = episode(), episode(1)
    one.metrics = {"draft_ids": 10, "draft_ids_accepted": 9}
    other.metrics = {"draft_ids": 30, "draft_ids_accepted": 1}
    assert rollout_metrics([one, other, episode(2)])["draft_acceptance"] == 0.25
    assert "draft_acceptance" not in rollout_metrics([episode()])


def test_stops_are_told_apart_by_cause():
    cut = [
        episode(stop=StopReason.CONTEXT),
        episode(1, stop=StopReason.MAX_TURNS),
        episode(2, stop=StopReason.CONTEXT),
    ]
    broken = episode(
        3, stop=StopReason.ENV_ERROR, reward=None, error=Failure("OSError", "gone", "step")
    )
    row = rollout_metrics([*cut, broken])
    assert row["truncations"] == {"context": 2, "max_turns": 1}
    assert (row["truncated_share"], row["failed_share"]) == (0.75, 0.25)
    assert row["errors"] == {"step/OSError": 1}


def test_groups_without_signal_and_what_a_part_of_the_reward_can_move():
    tied = [episode(n, task="a", rewards={"form": 1.0, "right": 0.0}) for n in range(2)]
    lost = [episode(n, task="b", reward=0.0, rewards={"form": 1.0, "right": 0.0}) for n in range(2)]
    told = [
        episode(n, task="c", reward=float(n), rewards={"form": 1.0, "right": float(n)})
        for n in range(2)
    ]
    unknown = [episode(n, task="d", reward=None) for n in range(2)]
    row = rollout_metrics([*tied, *lost, *told, *unknown])
    figures = {
        name: row[name]
        for name in ("groups", "groups_no_signal", "groups_solved", "groups_unsolved")
    }
    assert figures == {"groups": 4, "groups_no_signal": 3, "groups_solved": 1, "groups_unsolved": 1}
    assert row["rewards_spread"] == {"form": 0.0, "right": pytest.approx(0.5 / 3)}


def test_calls_are_counted_by_tool_with_their_mistakes_and_seconds():
    def add(a: int, b: int) -> int:
        """Add.

        Args:
            a: one.
            b: other.
        """
        return a + b

    said = ['<tool_call>{"name": "add", "arguments": {"a": 1, "b": 2}}</tool_call>']
    said += ['<tool_call>{"name": "add", "arguments": {"a": 1}}</tool_call>']
    said += ['<tool_call>{"name": "made_up", "arguments": {}}</tool_call>', "3"]
    env = tw.tool_env(tools=[add], max_turns=6)
    row = rollout_metrics(tw.rollout(env, [tw.Task("1 + 2?")], engine=tw.ScriptedEngine(said)))
    assert row["tool_calls"] == {"add": 2, "(unknown)": 1}
    assert row["tool_failures"] == {"add": 1, "(unknown)": 1}
    assert row["tool_mistakes"] == {"missing_argument": 1, "unknown_tool": 1}
    assert row["tool_users"] == 1.0
    assert 0 < row["tool_seconds"]["add"]["p50"] <= row["tool_seconds"]["add"]["max"] < 60
    assert row["seconds"]["tool"]["sum"] > 0


def test_retries_are_counted_by_phase_and_exception():
    class Shaky(tw.Env):
        failed = False

        def reset(self, task, *, seed=None):
            return "Say."

        def step(self, action):
            if not Shaky.failed:
                Shaky.failed = True
                raise ConnectionError("down")
            return tw.Step("ok", 1.0, True)

    rules = tw.EnvRules(retries=tw.RetryRules(turn=1, wait_s=0.001))
    played = tw.rollout(Shaky, [tw.Task("q")], engine=tw.ScriptedEngine(["hi"]), rules=rules)
    assert rollout_metrics(played)["retries"] == {"step/ConnectionError": 1}


@pytest.mark.parametrize(
    ("ids", "share"),
    [((1, 2, 3, 4, 5), 0.0), ((1,) * 8, 0.8), ((1, 2, 3), None), ((1, 2, 3, 4) * 2, 0.2)],
)
def test_repetition_is_the_share_of_runs_of_four_ids_seen_before(ids, share):
    assert rollout_metrics([episode(replies=[ids])]).get("repetition") == share


def test_images_and_the_ids_that_they_take():
    one = episode()
    block = MediaPlacement(ImageRef("a" * 64, 4, 4), 0, 2)
    one.spans[0].media = (block,)
    row = rollout_metrics([one])
    assert (row["images"], row["image_tokens"], row["image_token_share"]) == (1, 2, 2 / 7)
    assert "images" not in rollout_metrics([episode()])


@given(st.lists(st.text(max_size=200), max_size=300))
def test_names_that_a_model_makes_up_do_not_fill_a_row(names):
    counts = top_counts(names)
    if len({name[:80] for name in names}) == len(set(names)):
        assert sum(counts.values()) == len(names)
    assert len(counts) <= MAX_NAMES + 1
    assert all(len(name) <= 80 for name in counts)
    if len(set(names)) > MAX_NAMES:
        assert OTHER in counts


@given(st.lists(st.floats(-1e6, 1e6), min_size=1, max_size=50))
def test_percentiles_are_values_and_in_order(values):
    found = distribution_summary(values)
    assert found["p50"] <= found["p95"] <= found["max"] == max(values)
    assert found["p50"] in values
    assert sum(v <= found["p95"] for v in values) >= 0.95 * len(values) - 1e-9


def test_a_row_of_nothing_and_numbers_alone_are_flat():
    assert rollout_metrics([])["groups"] == 0
    row = {"a": {"b": 1, "c": {"d": 2.0}}, "e": "text", "f": math.nan, "g": [1], "h": None}
    assert dict(flatten_row(row)) == {"a.b": 1.0, "a.c.d": 2.0}


def test_every_metric_is_documented_once():
    assert len({one.name for one in METRICS}) == len(METRICS)
    assert all(one.unit and one.meaning and one.advice for one in METRICS)


SELDOM = {
    "kl": "needs a reference policy",
    "codes_changed": "needs quantized weights",
    "peak_gpu_memory_mib": "needs a GPU",
    "failed_plays": "needs an outage",
    "failed_play_tokens": "needs an outage",
    "by_env.<env>.success": "needs two environments",
    "by_env.<env>.n": "needs two environments",
    "render_check_failed_<error>": "needs a bug",
    "gradient_agreement": "needs two updates",
    "gradient_agreement_scaled": "needs two updates",
    "step_kl": "needs train.gradient_signal_steps",
    "step_share": "needs train.gradient_signal_steps",
    "tree_share": "needs a signal",
    "tree_gain": "needs a signal",
    "tree_unique_share": "needs a signal",
    "curriculum.<env>.share": "needs a sampler",
    "curriculum.<env>.pass_rate": "needs a sampler",
    "policy/<name>/<metric>": "needs [[policy]]",
    "teacher.<name>.answered": "needs a teacher",
    "teacher.<name>.kl": "needs a teacher",
    "teacher.<name>.bounded": "needs a teacher",
    "teacher.<name>.unaligned": "needs a teacher with another tokenizer",
    "groups_refilled": "needs train.refill",
    "groups_filtered.<reason>": "needs a filter of slime",
    "lag_mean": "needs tokens of older policies",
    "lag_max": "needs tokens of older policies",
    "tokens_by_lag.<lag>": "needs tokens of older policies",
    "mismatch_kl_by_lag.<lag>": "needs tokens of older policies",
    "importance_ess_by_lag.<lag>": "needs tokens of older policies",
    "tokens_by_cache.<cache>": "needs a cache of older weights",
    "mismatch_kl_by_cache.<cache>": "needs a cache of older weights",
    "critic.explained_variance": "needs a critic",
    "critic.explained_variance.turn_<turn>": "needs a critic",
    "critic.loss": "needs a critic",
    "critic.loss_after": "needs a critic",
    "critic.grad_norm": "needs a critic",
    "critic.return_mean": "needs a critic",
    "critic.return_std": "needs a critic",
    "correction_mean": "needs train.correction",
    "correction_ess": "needs train.correction",
    "correction_masked": "needs train.correction",
}
"""Figures that the small run below cannot have; tests/training has them."""


def everything() -> list[Trajectory]:
    """Episodes in which all happens that is measured."""
    one = episode(
        branches={"rewrite": 1},
        failures=[Failure("OSError", "gone", "step")],
        rewards={"part": 1.0},
    )
    one.metrics = {
        "control_text_user": 1,
        "render_mismatch_strip": 1,
        "render_checks": 1,
        "malformed_not_json": 1,
        "judge_calls": 1,
        "draft_ids": 4,
        "draft_ids_accepted": 3,
        "resume_new_attempts": 1,
    }
    one.spans[0].media = (MediaPlacement(ImageRef("a" * 64, 4, 4), 0, 2),)
    one.turns[0].info = {"tool_log": [{"tool": "add", "s": 0.1, "error": "raised"}]}
    return [
        one,
        episode(
            1, error=Failure("OSError", "gone", "step"), stop=StopReason.CONTEXT, replies=[(1,) * 9]
        ),
    ]


def test_every_name_that_a_run_writes_is_documented_and_the_other_way_round(tmp_path):
    from turnwright.training.metrics import step_row

    tw.train(
        model=tw.tiny(hidden=16, heads=1, kv_heads=1, layers=1),
        env=tw.resolve_env("hop_json").factory,
        out=tmp_path / "run",
        display="none",
        limits={"turns": 2, "turn_tokens": 8},
        rollout={"groups": 2, "group_size": 2},
        warmup={"demos": 8, "steps": 2, "gate_every": 1, "gate_success": 0.0, "gate_tasks": 2},
        train={"steps": 1},
        eval={"tasks": 2},
    )
    rows = [
        json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()
    ]
    trained = dict.fromkeys(("optimizer_steps", "train_s", "tokens_per_s", "tokens_no_signal"), 1.0)
    names = (
        "ratio_mean",
        "clip_fraction",
        "entropy",
        "mismatch_mean",
        "mismatch_p95",
        "mismatch_max",
        "mismatch_kl",
        "importance_ess",
    )
    rows.append(
        step_row(everything(), trained | dict.fromkeys(names, 0.0), 1.0, 1.0)
        | {"mismatch_by_turn": {"1": 0.0}}
    )
    seen = set()
    for row in rows:
        for name, value in row.items():
            found = metric_doc(f"{name}.x" if isinstance(value, dict) else name)
            assert found is not None, (
                f"{name} stands in no table of src/turnwright/records/episode_metrics.py"
            )
            seen.add(found.name)
    assert {one.name for one in METRICS} - seen <= set(SELDOM)
