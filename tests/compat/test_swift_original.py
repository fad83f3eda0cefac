"""Schedulers of users under ms-swift's own package: its `run` against ours. `make test-compat`."""

import json
import subprocess
import sys
from pathlib import Path

import pytest
import swift_episodes
from kit import originals

pytestmark = pytest.mark.compat
PLAY = Path(__file__).parent / "swift_episodes.py"


def played(*args):
    made = subprocess.run(
        [sys.executable, str(PLAY), *args], capture_output=True, text=True, timeout=600
    )
    assert made.returncode == 0, made.stderr[-2000:]
    return json.loads(made.stdout.splitlines()[-1])


@pytest.fixture(scope="module")
def sides():
    if not (originals.folder() / "ready").is_file():
        raise RuntimeError("run make test-compat")
    return played(), played("originals")


OTHERWISE = {"a shortened text", "a picture, and a message that goes on"}
"""Episodes of docs/compat.md in which 4.6.0 goes on with sampled ids where `step`
changed the text alone."""
PLAYED = [
    *(name for name in swift_episodes.EPISODES if name not in OTHERWISE),
    *swift_episodes.CUT,
    *(
        f"{name}, {number}"
        for name in swift_episodes.SAMPLES
        for number in range(swift_episodes.MANY)
    ),
    *(name for name in swift_episodes.PICTURES if name not in OTHERWISE),
]
BUILT_IN = [
    (name, number) for name, made in swift_episodes.BUILT_IN.items() for number in range(len(made))
]


@pytest.mark.parametrize("name", PLAYED)
def test_their_loop_and_ours_have_the_same_contexts_weights_rewards_and_outputs(sides, name):
    ours, theirs = (dict(side["episodes"][name]) for side in sides)
    assert ours["error"] is None
    home, other = ours.pop("home"), theirs.pop("home")
    assert ("stand_ins" in home, "stand_ins" in other) == (True, False)
    assert theirs == ours


@pytest.mark.parametrize("name", swift_episodes.CUT)
def test_a_cut_reply_is_seen_by_the_scheduler_and_by_the_reward(sides, name):
    (output,) = sides[1]["episodes"][name]["output"]
    cut = name != "no reply is cut"
    assert (output["is_truncated"], output["finish_reason"]) == (
        [cut],
        ["length" if cut else "stop"],
    )
    assert sides[1]["episodes"][name]["stop"] == ("turn_length" if cut else "done")


def test_every_name_that_either_registers_has_an_episode(sides):
    assert sorted(swift_episodes.BUILT_IN) == sides[1]["names"]
    assert set(sides[0]["names"]) == set(sides[1]["names"])


@pytest.mark.parametrize(("name", "number"), BUILT_IN)
def test_every_built_in_name_plays_with_ms_swift_installed_as_without(sides, name, number):
    ours, theirs = (side["episodes"][f"built in: {name}, {number}"] for side in sides)
    assert ours["error"] is None
    keys = set(ours) - {"home"}
    if (name, number) == ("gym_scheduler", 0):
        keys -= {"contexts", "output"}  # the system message of math_env is ours
    assert {key: theirs[key] for key in keys} == {key: ours[key] for key in keys}


@pytest.mark.parametrize("name", swift_episodes.REWARDED)
def test_rewards_are_called_with_what_ms_swift_calls_them_with(sides, name):
    played = sides[1]["episodes"][name]
    made = played["of ms-swift"]
    ours, theirs = made["ours"], made["theirs"]
    # Of release 3.6, and the question for environments that read it.
    assert set(ours) - set(theirs) <= {"multi_turn_infos", "problem"}
    assert {key: ours.get(key, "missing") for key in theirs} == theirs
    rewards = [reward for reward, _ in played["rewards by row"]] or [played["reward"]]
    assert made["rewards"] == pytest.approx(rewards)


def test_registered_rewards_are_ms_swifts():
    """Those that have no ms-swift to be compared with in the tests without it."""
    script = Path(__file__).parent / "swift_rewards.py"
    made = subprocess.run(
        [sys.executable, str(script)], capture_output=True, text=True, timeout=600
    )
    assert made.returncode == 0, made.stderr[-2000:]
    found = json.loads(made.stdout.splitlines()[-1])
    assert len(found) == 7
    for name, (ours, theirs) in found.items():
        assert ours == pytest.approx(theirs), name
        assert len(set(theirs)) > 1, name


def test_their_loop_continues_the_complete_ids_of_a_text_that_a_step_shortened(sides):
    """The difference of docs/compat.md: 4.6.0 puts the sampled ids in place of the text."""
    ours, theirs = (side["episodes"]["a shortened text"] for side in sides)
    assert (ours["error"], theirs["error"]) == (None, None)
    first = ours["contexts"][0]
    assert first == theirs["contexts"][0]
    assert theirs["contexts"][1] == [*first, *ours["replies"][0]]
    kept = sum(map(bool, ours["weights"][0]))
    assert ours["contexts"][1][: len(first) + kept] == [*first, *ours["replies"][0][:kept]]
    assert ours["contexts"][1] != theirs["contexts"][1]
