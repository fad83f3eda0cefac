"""Three values on their way, followed through a run of one step: docs/architecture.md lists the
stops, and each hands the value to the next."""

from __future__ import annotations

import re
import sys
import threading
from pathlib import Path
from types import FrameType
from typing import Any, NamedTuple

import pytest

import turnwright as tw
from turnwright.records.serialization import read_trajectories

PAGE = Path(__file__).parents[2] / "docs" / "architecture.md"
WORLD = '''
import numpy as np

import turnwright as tw


class World(tw.Env):
    """Shows a picture after the first reply; an episode is worth what its ids sum up to."""

    def reset(self, task, *, seed=None):
        self.turns = 0
        return "Say something."

    def step(self, action):
        self.turns += 1
        if self.turns == 2:
            return tw.Step(terminated=True)
        picture = tw.Image(np.full((32, 32, 3), 7, dtype=np.uint8))
        return tw.Step([{"role": "user", "content": [picture, "And now?"]}])

    def reward(self, trajectory):
        ids = [id_ for span in trajectory.spans if span.sampled for id_ in span.ids]
        return sum(ids) % 97 / 97

    @staticmethod
    def tasks(split, n, seed=0):
        return [tw.Task(f"{split} {number}", id=f"{split}-{number}") for number in range(n or 8)]
'''


class Call(NamedTuple):
    """A call that has ended."""

    arguments: dict[str, Any]
    returned: Any


class Followed:
    """Records the calls of functions, which are named as on the page (`path.py:Class.method`)."""

    def __init__(self, names: list[str]) -> None:
        self.calls: dict[str, list[Call]] = {name: [] for name in names}
        self._names = {}
        for name in names:
            path, _, function = name.partition(":")
            module = "turnwright." + path.removesuffix(".py").replace("/", ".")
            self._names[module, function] = name
        self._began: dict[FrameType, dict[str, Any]] = {}
        self._ended: dict[FrameType, int] = {}

    def __call__(self, frame: FrameType, event: str, argument: Any) -> None:
        if event not in ("call", "return"):
            return
        name = self._names.get((frame.f_globals.get("__name__", ""), frame.f_code.co_qualname))
        if name is None:
            return

        # A coroutine is called and returns each time that it waits: its first call has the
        # arguments, its last return the result.
        calls = self.calls[name]
        if event == "call":
            self._began.setdefault(frame, dict(frame.f_locals))
        elif frame in self._ended:
            calls[self._ended[frame]] = Call(self._began[frame], argument)
        else:
            self._ended[frame] = len(calls)
            calls.append(Call(self._began[frame], argument))


def stops(heading: str) -> list[str]:
    """Return the functions that a list of the page names, one for each of its lines."""
    page = PAGE.read_text(encoding="utf-8")
    lines = page.partition(f"### {heading}\n")[2].partition("\n#")[0].strip().splitlines()
    names = [re.findall(r"`([\w/]+\.py:[\w.]+)`", line) for line in lines]
    assert all(len(found) == 1 for found in names), f"a line of {heading!r} names one function"
    assert len(names) <= 5
    return [found[0] for found in names]


class Traced(NamedTuple):
    run: Path
    calls: dict[str, list[Call]]


@pytest.fixture(scope="module")
def traced(tmp_path_factory) -> Traced:
    folder = tmp_path_factory.mktemp("followed")
    (folder / "world.py").write_text(WORLD)
    followed = Followed([*stops("A reward"), *stops("A sampled id"), *stops("An image")])
    profiles = sys.getprofile(), threading.getprofile()
    sys.setprofile(followed)
    threading.setprofile(followed)
    try:
        run = tw.train(
            f"{folder / 'world.py'}:World",
            out=folder / "run",
            model=tw.tiny(vision=True),
            train={"steps": 1},
            rollout={"groups": 2, "group_size": 4},
            limits={"turn_tokens": 6, "on_turn_length": "continue"},
            eval={"tasks": 2, "samples": 1, "greedy": False},
            display="none",
        )
    finally:
        sys.setprofile(profiles[0])
        threading.setprofile(profiles[1])
    return Traced(Path(run), followed.calls)


def trained_trajectory(traced: Traced) -> tw.Trajectory:
    """An episode of the step whose reward is not the others'."""
    return next(
        trajectory
        for trajectory in read_trajectories(traced.run)
        if trajectory.key.phase == "train" and trajectory.reward
    )


def test_a_reward_reaches_the_gradient(traced):
    compute, compare, batch, loss, backward = (traced.calls[name] for name in stops("A reward"))
    recorded = trained_trajectory(traced)
    assert recorded.reward in [call.returned for call in compute]

    # The group's comparison gives the trajectory an advantage of its own.
    step = next(
        call
        for call in compare
        if any(
            trajectory.key == recorded.key and trajectory.reward == recorded.reward
            for group in call.arguments["groups"]
            for trajectory in group.trajectories
        )
        and call.returned.trained
    )
    credit = next(one for one in step.returned.credits if one.trajectory.key == recorded.key)
    assert credit.advantage

    # The batch that the loss is made of has it at each of the trajectory's ids.
    terms = loss[0]
    trained = next(call for call in batch if call.returned is terms.arguments["batch"])
    assert any(one is credit for one in trained.arguments["credits"])
    made = trained.returned
    place = made.trajectories.index(credit.trajectory)
    own_n = made.trajectory_n == place
    assert int(own_n.sum()) == credit.tokens
    assert bool((made.advantages_n[own_n] == credit.advantage).all())

    # What was differentiated is that loss, and its slope is not 0 where the trajectory's ids are.
    done = backward[0].returned
    assert done[0].terms.loss.item() == terms.returned.loss.item()
    own_m = own_n[done[0].micro.tokens_m]
    assert bool((done[0].slope_m[own_m] != 0).any())


def test_a_sampled_id_reaches_the_journal(traced):
    draw, collect, sample, turn, journal = (traced.calls[name] for name in stops("A sampled id"))
    recorded = trained_trajectory(traced)
    span = next(span for span in recorded.spans if span.sampled)
    drawn = span.ids[0], span.logprobs[0]  # a logprob is as good as a name

    assert any(drawn in zip(*call.returned, strict=True) for call in draw)
    assert any(
        drawn in zip(call.arguments["ids"], call.arguments["logprobs"], strict=True)
        for call in collect
    )

    def holds(call: Call) -> bool:
        writer = call.arguments["self"]
        trajectory = getattr(writer, "trajectory", None) or writer._trajectory
        return any(
            own.ids == span.ids and own.logprobs == span.logprobs for own in trajectory.spans
        )

    assert any(map(holds, sample))
    assert any(map(holds, turn))
    assert any(map(holds, journal))
    assert repr(drawn[1]) in (traced.run / "journal.jsonl").read_text(encoding="utf-8")


def test_an_image_reaches_the_loss(traced):
    intake, place, rows, layout, forward = (traced.calls[name] for name in stops("An image"))
    recorded = trained_trajectory(traced)
    image = next(block.media for span in recorded.spans for block in span.media)

    def shows(value: Any) -> bool:
        return image.sha256 in repr(value)

    assert any(shows(call.returned) for call in intake)
    assert any(shows(call.returned) for call in place)
    assert any(shows(row.media) for call in rows for row in call.returned)
    passes = [call.returned for call in layout if shows(call.returned.media)]
    assert passes
    assert any(call.arguments["micro"] is micro for call in forward for micro in passes)
