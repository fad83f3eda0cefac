"""Schedulers of users under ms-swift's own package: its `run` against ours. `make test-compat`."""

import json
import subprocess
import sys
from pathlib import Path

import originals
import pytest

pytestmark = pytest.mark.compat
PLAY = Path(__file__).parent / "swift_episodes.py"


def played(*args):
    made = subprocess.run([sys.executable, str(PLAY), *args], capture_output=True, text=True, timeout=600)
    assert made.returncode == 0, made.stderr[-2000:]
    return json.loads(made.stdout.splitlines()[-1])


@pytest.fixture(scope="module")
def sides():
    if not (originals.folder() / "ready").is_file():
        raise RuntimeError("run make test-compat")
    return played(), played("originals")


def test_their_loop_and_ours_have_the_same_contexts_weights_rewards_and_outputs(sides):
    ours, theirs = sides
    assert len(ours) == 12
    for name, found in ours.items():
        if name == "a shortened text":
            continue
        assert found["error"] is None, (name, found["error"])
        home, other = found.pop("home"), theirs[name].pop("home")
        assert ("stand_ins" in home, "stand_ins" in other) == (True, False), name
        assert theirs[name] == found, name


def test_their_loop_continues_the_complete_ids_of_a_text_that_a_step_shortened(sides):
    """The difference of docs/compat.md: 4.6.0 puts the sampled ids in place of the text."""
    ours, theirs = (side["a shortened text"] for side in sides)
    assert (ours["error"], theirs["error"]) == (None, None)
    first = ours["contexts"][0]
    assert first == theirs["contexts"][0]
    assert theirs["contexts"][1] == [*first, *ours["replies"][0]]
    kept = sum(map(bool, ours["weights"][0]))
    assert ours["contexts"][1][: len(first) + kept] == [*first, *ours["replies"][0][:kept]]
    assert ours["contexts"][1] != theirs["contexts"][1]
