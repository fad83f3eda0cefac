"""Episodes with images played again: the recorded pictures are seen, and another
picture is a difference."""

from __future__ import annotations

import pytest
from kit.picture_world import Fails, Painter
from kit.pictures import noise
from kit.seeing import play, shown

import turnwright as tw
from turnwright.media import MediaStore
from turnwright.records import RunDir
from turnwright_view import replay_loop


def speak(messages, rng):
    return rng.choice(["red", "blue!", "a long green line", "nothing"])


class Other(Painter):
    """Shows another picture behind the first reply that it takes."""

    def step(self, action):
        made = super().step(action)
        if not hasattr(self, "taken"):
            self.taken = True
            return made._replace(observation=["Look:", tw.Image(noise(64, 64, 7))])
        return made


def recorded(out, world, vlm, tasks, **more):
    with RunDir(out, trajectories=False) as run:
        return play(world, vlm, speak, tasks, store=MediaStore(out / "media"), run=run, **more)


@pytest.mark.parametrize("blank", [False, True])
def test_what_was_seen_is_seen_again_and_the_run_is_only_read(tmp_path, vlm, blank):
    tasks = [tw.Task(f"{n}", id=f"{n}") for n in range(3)]
    with RunDir(tmp_path / "run", trajectories=False) as run:
        store = MediaStore(tmp_path / "run" / "media", blank=blank)
        played = play(Painter, vlm, speak, tasks, store=store, run=run, n=2)
    assert any(shown(trajectory.messages) for trajectory in played)
    before = sorted((tmp_path / "run").rglob("*"))
    for words in ({}, {"env": Painter, "tasks": tasks}):
        found = replay_loop(tmp_path / "run", renderer=vlm, **words)
        assert (found.episodes, found.left_out, found.differences) == (6, {}, [])
    assert sorted((tmp_path / "run").rglob("*")) == before


def test_another_picture_is_told_where_it_is_seen_first(tmp_path, vlm):
    tasks = [tw.Task(f"{n}", id=f"{n}") for n in range(3)]
    played = recorded(tmp_path / "run", Painter, vlm, tasks)
    found = replay_loop(tmp_path / "run", env=Other, tasks=tasks, renderer=vlm)
    assert found.episodes == 3
    assert found.differences
    assert {one.what for one in found.differences} == {"prompt"}
    # In the order in which the episodes ended.
    differences = {one.key: one for one in found.differences}
    assert len(differences) == len(played)
    for trajectory in played:
        one = differences[trajectory.key]
        taken = next(
            number
            for number, turn in enumerate(trajectory.turns)
            if "invalid_action" not in turn.info
        )
        assert (one.turn, one.origin) == (taken + 1, "env")
    assert len(list((tmp_path / "run" / "media").iterdir())) == len(
        {m.sha256 for t in played for m in refs(t)}
    )


def refs(trajectory):
    seen = [*shown(trajectory.messages), *shown(trajectory.final)]
    return [ref for media in seen for ref in getattr(media, "frames", (media,))]


def test_failures_with_pictures_come_again(tmp_path, vlm):
    rules = tw.EnvRules(retries=tw.RetryRules(turn=2, wait_s=0.001))
    (tmp_path / "broken").touch()
    task = tw.Task("Begin.", info={"turn": 0, "file": str(tmp_path / "broken")})
    (trajectory,) = recorded(tmp_path / "run", Fails, vlm, [task], rules=rules)
    assert trajectory.failures
    found = replay_loop(tmp_path / "run", renderer=vlm)
    assert (found.episodes, found.differences) == (1, [])
