"""Each diagnosis fires on rows that have the fault, and stays silent just beside its threshold."""

from __future__ import annotations

from pathlib import Path

import pytest

import turnwright as tw
from turnwright.display import diagnosis
from turnwright.display.diagnosis import LAST, DiagnosingListener, diagnose
from turnwright.records import NullListener, rollout_metrics

HEALTHY = {
    "phase": "train",
    "groups": 10,
    "groups_no_signal": 3,
    "groups_unsolved": 2,
    "groups_solved": 1,
    "success": 0.5,
    "truncated_share": 0.1,
    "truncations": {"max_turns": 2},
    "tools_offered": 2,
    "tool_users": 0.8,
    "mismatch_mean": 1e-6,
    "entropy": 0.5,
    "rewards_spread": {"form": 0.2, "right": 0.4},
}


def names(rows, summary=None):
    return [one.name for one in diagnose(rows, summary)]


def run(count=2 * LAST, **last):
    """Healthy steps, of which the last `LAST` have other figures."""
    return [HEALTHY] * (count - LAST) + [HEALTHY | last] * LAST


def test_nothing_is_said_of_a_healthy_run_or_of_none():
    assert names(run()) == []
    assert names([]) == []
    assert names([{"phase": "train"}, {"phase": "eval", "success": None}]) == []


CASES = [
    ("all groups tie", {"groups_no_signal": 9}, {"groups_no_signal": 8}),
    (
        "all groups tie",
        {"groups_no_signal": 10, "success": 0.0},
        {"groups_no_signal": 10, "success": 1.0},
    ),
    ("everything truncated", {"truncated_share": 0.5}, {"truncated_share": 0.49}),
    ("episodes fail", {"failed_share": 0.1, "errors": {"step/OSError": 3}}, {"failed_share": 0.09}),
    ("the tool is never called", {"tool_users": 0.0}, {"tool_users": 0.02}),
    ("the tool is never called", {"tool_users": 0.0}, {"tool_users": 0.0, "tools_offered": 0}),
    ("mismatch rises", {"mismatch_mean": 1e-3}, {"mismatch_mean": 9e-5}),
    ("entropy collapsed", {"entropy": 0.02}, {"entropy": 0.03}),
    ("entropy collapsed", {"entropy": 0.02}, {"entropy": 0.02, "success": 1.0}),
    (
        "one part of the reward dominates",
        {"rewards_spread": {"a": 0.97, "b": 0.03}},
        {"rewards_spread": {"a": 0.9, "b": 0.1}},
    ),
    (
        "one part of the reward dominates",
        {"rewards_spread": {"a": 0.5, "b": 0.0}},
        {"rewards_spread": {"a": 0.5}},
    ),
    (
        "calls fail",
        {"tool_calls": {"add": 6}, "malformed_calls": {"no_json": 4}},
        {"tool_calls": {"add": 8}, "malformed_calls": {"no_json": 2}},
    ),
    (
        "calls fail",
        {"tool_calls": {"add": 10}, "tool_mistakes": {"raised": 3}},
        {"tool_calls": {"add": 10}},
    ),
]


@pytest.mark.parametrize(("name", "fault", "beside"), CASES)
def test_a_diagnosis_fires_and_does_not(name, fault, beside):
    assert names(run(**fault)) == [name]
    silent = (
        [row | {"tools_offered": beside["tools_offered"]} for row in run(**beside)]
        if "tools_offered" in beside
        else run(**beside)
    )
    assert name not in names(silent)
    assert name not in names(run(**fault) + run(count=LAST)), "it is over"


DONE = {
    "success_after": 0.5,
    "success_after_ci": [0.4, 0.6],
    "n_eval": 100,
    "turns_after": 2.0,
    "single_turn_best": 0.5,
}


@pytest.mark.parametrize(
    ("name", "fault", "beside"),
    [
        ("reinforcement made it worse", {"rolled_back": "warmed"}, {"rolled_back": ""}),
        ("what is learned does not carry over", {"success_after": 0.2}, {"success_after": 0.21}),
        ("few held-out episodes", {"n_eval": 19}, {"n_eval": 20}),
        ("no better than one reply", {"turns_after": 1.5}, {"turns_after": 1.6}),
        (
            "no better than one reply",
            {"turns_after": 1.0},
            {"turns_after": 1.0, "success_after_ci": [0.51, 0.6]},
        ),
    ],
)
def test_a_diagnosis_of_a_finished_run_fires_and_does_not(name, fault, beside):
    assert names(run(), DONE) == []
    assert names(run(), DONE | fault) == [name]
    assert names(run(), DONE | beside) == []


def test_a_run_in_which_nothing_changes():
    steps = [
        HEALTHY | {"trajectories": 128, "success": 0.3, "gradient_agreement": 0.01}
        for _ in range(diagnosis.FLAT_STEPS)
    ]
    (found,) = diagnose(steps)
    assert found.name == "nothing changes"
    assert "do not agree (0.01)" in found.fault
    agreeing = [row | {"gradient_agreement": 0.3, "lr": 1e-3} for row in steps]
    assert "too small" in diagnose(agreeing)[0].fault
    assert (
        "by no more than chance, so no step was taken"
        in diagnose([row | {"lr": 0.0} for row in agreeing])[0].fault
    )
    half = [row | {"groups_no_signal": 5} for row in agreeing]
    assert (
        "in 100 of 200 groups all episodes had the same reward, in 40 of them none succeeded"
        in diagnose(half)[0].fault
    )
    assert "warmup.steps" in diagnose(half)[0].remedy
    assert "too small" in diagnose([*half[1:], half[0] | {"groups_no_signal": 4}])[0].fault
    assert names(steps[1:]) == []
    rising = [row | {"success": 0.3 + 0.01 * number} for number, row in enumerate(steps)]
    assert names(rising) == []
    assert names([row | {"success": 0.97} for row in steps]) == []


def test_a_few_steps_are_no_evidence():
    ill = HEALTHY | {
        "groups_no_signal": 10,
        "tool_users": 0.0,
        "rewards_spread": {"a": 1.0, "b": 0.0},
    }
    assert names([ill] * (LAST - 1)) == []
    assert len(names([ill] * LAST)) == 3


def test_mismatch_that_was_always_there_does_not_rise():
    assert names([HEALTHY | {"mismatch_mean": 1e-2}] * 2 * LAST) == []


def test_the_model_is_blind_where_grey_images_do_as_well():
    seen = {"success_after": 0.9, "success_after_ci": [0.85, 0.95]}
    assert names(run(), seen | {"success_blind": 0.88}) == ["the model is blind"]
    assert names(run(), seen | {"success_blind": 0.4}) == []
    assert names(run(), seen) == []
    assert names(
        run(), {"success_after": 0.5, "success_after_ci": [0.3, 0.7], "success_blind": 0.35}
    ) == ["the model is blind"]


def gate(success, passed=False, loss=0.1):
    return {"phase": "gate", "success": success, "gate_passed": passed, "loss": loss}


def test_the_warmup_gate_is_not_met():
    [found] = diagnose([gate(0.0, loss=2.0), gate(0.05, loss=0.01)])
    assert found.name == "the warmup gate is not met"
    assert "at most 5%" in found.text
    assert "from 2 to 0.01" in found.text
    assert names([gate(0.0)]) == []
    assert names([gate(0.0), gate(0.3, passed=True)]) == []
    assert names([gate(0.0), gate(0.1), HEALTHY]) == []


def test_reinforcement_that_changes_nothing_after_an_unmet_gate_names_the_warmup_first():
    steps = [
        HEALTHY | {"success": 0.3, "trajectories": 64, "gradient_agreement": 0.0}
    ] * diagnosis.FLAT_STEPS
    gates = [gate(0.2), gate(0.3)]
    assert names(gates + steps) == ["the warmup gate is not met", "nothing changes"]
    assert names([*gates, gate(0.6, passed=True), *steps]) == ["nothing changes"]
    rising = [row | {"success": 0.3 + 0.01 * number} for number, row in enumerate(steps)]
    assert names(gates + rising) == []
    cut = [row | {"truncated_share": 0.8, "truncations": {"max_turns": 51}} for row in steps]
    assert names(gates + cut) == ["the warmup gate is not met", "everything truncated"]


def test_the_commonest_limit_is_named_with_what_to_do():
    [found] = diagnose(run(truncated_share=0.9, truncations={"turn_length": 80, "max_turns": 3}))
    assert "turn_length" in found.fault
    assert "limits.turn_tokens" in found.remedy


def test_figures_of_real_episodes_trigger_it():
    class Endless(tw.Env):
        max_turns = 2

        def reset(self, task, *, seed=None):
            return "Go."

        def step(self, action):
            return tw.Step("go on")

    played = tw.rollout(
        Endless, [tw.Task("a"), tw.Task("b")], engine=tw.ScriptedEngine(["x", "y"]), samples=2
    )
    row = {"phase": "train", "success": 0.0} | rollout_metrics(played)
    assert names([row] * LAST) == ["all groups tie", "everything truncated"]


class Notes(NullListener):
    def __init__(self):
        self.notes = []

    def note(self, text):
        self.notes.append(text)


def test_a_diagnosis_is_told_once_while_the_run_goes_on():
    notes = Notes()
    watch = DiagnosingListener(notes)
    for number, row in enumerate([*run(), *run(entropy=0.0)[LAST:], *run(entropy=0.0)]):
        watch.progress(number, row)
    watch.progress(0, {"phase": "train", "rewards_spread": 3, "truncations": None})
    assert len(notes.notes) == 1
    assert notes.notes[0].startswith("diagnosis: Entropy fell")


def test_every_threshold_and_every_diagnosis_stands_in_the_documents():
    text = (Path(__file__).parents[2] / "docs" / "metrics.md").read_text(encoding="utf-8")
    for look in diagnosis.DIAGNOSES:
        assert f"{(look.__doc__ or '').partition(':')[0]}" in text, look.__name__
    for name, value in vars(diagnosis).items():
        if name.isupper() and not name.startswith("_") and isinstance(value, (int, float)):
            assert f"`{name}` = {value:g}" in text, name
