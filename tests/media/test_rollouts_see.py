"""Episodes with images: in processes, tried again, in play functions, in the journal; all exact."""

from __future__ import annotations

import asyncio
import random

import gymnasium
import numpy as np
import orjson
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from kit.picture_world import Fails, Painter, Remembers
from kit.pictures import noise, png
from kit.rollouts import facts
from kit.seeing import check_media, play, shown

import turnwright as tw
from turnwright.media import MediaStore
from turnwright.records import RunDir, read_json_lines, rebuild_trajectories, to_json
from turnwright.rollouts import Rollout, make_episode_specs
from turnwright.rollouts.resume import EarlierEpisodes
from turnwright.rollouts.rollout_settings import RolloutSettings
from turnwright.types import ImageRef

RULES = tw.EnvRules(retries=tw.RetryRules(turn=2, wait_s=0.001))


def speak(messages, rng):
    return rng.choice(["red", "blue!", "a long green line", "nothing"])


def test_every_observation_of_a_canvas_is_its_own_image(vlm):
    store = MediaStore()
    (trajectory,) = play(Painter, vlm, speak, store=store)
    assert trajectory.error is None
    seen = shown(trajectory.messages)
    assert len(seen) == len({media.key for media in seen}) or trajectory.metrics.get(
        "invalid_actions"
    )
    assert shown(trajectory.final)
    for media in (*seen, *shown(trajectory.final)):
        for ref in getattr(media, "frames", (media,)):
            assert store.pixels(ref).shape == (64, 64, 3)


def test_a_process_of_its_own_shows_the_same(vlm):
    tasks = [tw.Task(f"{n}", id=f"{n}") for n in range(3)]
    inside = play(Painter, vlm, speak, tasks)
    outside = play(Painter, vlm, speak, tasks, rules=tw.EnvRules(isolation="process"))
    assert [facts(t) for t in inside] == [facts(t) for t in outside]
    assert all(t.error is None and shown(t.messages) for t in outside)


def failing(turn: int, folder) -> tw.Task:
    return tw.Task("Begin.", info={"turn": turn, "file": str(folder / "broken")})


@pytest.mark.parametrize("env", [Fails, Remembers])
@pytest.mark.parametrize("isolation", ["thread", "process"])
def test_a_failure_at_any_turn_changes_nothing(tmp_path, vlm, env, isolation):
    for turn in range(Painter.turns) if isolation == "thread" else (2,):
        task = failing(turn, tmp_path)
        (whole,) = play(env, vlm, speak, [task])
        (tmp_path / "broken").touch()
        rules = tw.EnvRules(isolation=isolation, retries=tw.RetryRules(turn=2, wait_s=0.001))
        (mended,) = play(env, vlm, speak, [task], rules=rules)
        assert mended.error is None, mended.error
        assert [f.recovery for f in mended.failures] == ["replayed" if env is Fails else "restored"]
        mended.failures.clear()
        for one in mended.turns:
            one.retries = 0
        assert facts(mended) == facts(whole)


def test_a_replay_that_paints_otherwise_is_seen_by_its_pixels(tmp_path, vlm):
    class Moody(Fails):
        lives = 0

        def paint(self, said):
            image = super().paint(said)
            if self.turn == 1:
                Moody.lives += 1
                self.canvas[63, 63] = Moody.lives  # one pixel
            return image

    (tmp_path / "broken").touch()
    (trajectory,) = play(Moody, vlm, lambda m, r: "red", [failing(2, tmp_path)], rules=RULES)
    assert trajectory.error is None
    assert trajectory.failures[0].recovery == "attempt"
    assert trajectory.failed_turns


# Play functions


def test_an_image_object_is_taken_in_once(vlm, monkeypatch):
    import turnwright.media.store as module

    decoded = []
    real = module.decode
    monkeypatch.setattr(
        module, "decode", lambda value, limits: decoded.append(1) or real(value, limits)
    )
    images = [tw.Image(noise(64, 64, seed)) for seed in range(3)]
    clip = tw.Video([noise(64, 64, 7), noise(64, 64, 8)], fps=1)

    async def look(task, model):
        messages = [{"role": "user", "content": ["Look: ", images[0]]}]
        for image in (*images[1:], clip):
            reply = await model.generate(messages)
            messages += [reply.message, {"role": "user", "content": [image, " and now?"]}]
        await model.generate(messages)
        return 1.0

    (trajectory,) = play(look, vlm, speak)
    assert trajectory.error is None, trajectory.error
    assert len(decoded) == 5
    assert [turn.parent for turn in trajectory.turns] == [-1, 0, 1, 2]
    assert trajectory.branches == {}
    assert len(list(trajectory.samples())) == 1


def test_a_play_function_may_repeat_its_parts_in_any_form(vlm):
    """Arrays and data URIs that stand in each call's dicts anew are the same
    images, so the path goes on."""
    pixels = noise(64, 64)

    async def look(task, model):
        asked = {"role": "user", "content": [{"type": "image", "image": pixels}, "What?"]}
        one = await model.generate([asked])
        same = {"role": "user", "content": [{"type": "image", "image": png(pixels)}, "What?"]}
        two = await model.generate([same, one.message, {"role": "user", "content": "Sure?"}])
        other = {"role": "user", "content": [{"type": "image", "image": noise(64, 64, 1)}, "What?"]}
        await model.generate([other, one.message, {"role": "user", "content": "Sure?"}])
        return float(bool(two.message))

    (trajectory,) = play(look, vlm, speak)
    assert trajectory.error is None, trajectory.error
    assert [turn.parent for turn in trajectory.turns] == [-1, 0, -1]
    assert len(list(trajectory.samples())) == 2


def test_play_functions_meet_the_limits(vlm):
    async def look(task, model):
        one = await model.generate([{"role": "user", "content": [tw.Image(noise(64, 64))]}])
        again = [
            {
                "role": "user",
                "content": [tw.Image(noise(64, 64, s)) for s in range(int(task.messages[0].text))],
            }
        ]
        await model.generate([{"role": "user", "content": "x"}, one.message, *again])
        return 1.0

    limits = tw.Limits(images=3, episode_images=3)
    two, three, four = play(look, vlm, speak, [tw.Task(n) for n in "234"], limits=limits)
    assert two.reward == 1.0
    assert "4 images in one episode" in three.error.message
    assert "4 images in one observation" in four.error.message
    assert three.error.type == four.error.type == "MediaError"


def test_siblings_of_one_prompt_share_it_and_pixels_part_them(vlm):
    same, other = tw.Image(noise(64, 64)), tw.Image(noise(64, 64, 1))

    async def ask(task, model):
        ask = [
            model.generate([{"role": "user", "content": [image, "?"]}])
            for image in (same, same, other, same)
        ]
        await asyncio.gather(*ask)
        return 0.0

    runs = [play(ask, vlm, speak)[0] for _ in range(3)]
    assert facts(runs[0]) == facts(runs[1]) == facts(runs[2])
    contexts = [turn.prompt for turn in runs[0].turns]
    trajectory = runs[0]
    roots = [trajectory.chain(prompt)[0][0] for prompt in contexts]
    paths = [tuple(trajectory.path(prompt)) for prompt in contexts]
    assert len(set(paths)) == 1  # the same ids: what differs is what stands behind them
    keys = [
        [block.media.key for block in trajectory.media_placements(prompt)] for prompt in contexts
    ]
    assert keys[0] == keys[1] == keys[3] != keys[2]
    assert (
        trajectory.chain(contexts[0])[-1]
        == trajectory.chain(contexts[1])[-1]
        == trajectory.chain(contexts[3])[-1]
    )
    assert contexts[2] != contexts[0]
    assert roots[0] == roots[1]


def test_environments_meet_the_limits(vlm):
    (trajectory,) = play(Painter, vlm, lambda m, r: "red", limits=tw.Limits(episode_images=2))
    assert "3 images in one episode; at most 2" in trajectory.error.message
    assert len(trajectory.turns) == 2


# The journal


class Watching:
    """Lines of a journal; when one is written, every image that it names stands on disk."""

    def __init__(self, lines, folder):
        self._lines, self._folder, self.seen, self.append_definition = (
            lines,
            folder,
            set(),
            lines.append_definition,
        )

    def append(self, value):
        def find(inner):
            if isinstance(inner, dict):
                if inner.get("type") == "image" and "image" in inner:
                    self.seen.add(inner["image"])
                for one in inner.values():
                    find(one)
            elif isinstance(inner, list):
                for one in inner:
                    find(one)

        find(orjson.loads(to_json(value)))
        for name in self.seen:
            assert (self._folder / f"{name}.png").is_file()
        self._lines.append(value)


def record(out, vlm, seed, tasks, recorded=None, watch=True):
    with RunDir(out) as run:
        if watch:
            run.journal = lines = Watching(run.journal, out / "media")
        rollout = Rollout(
            tw.ScriptedEngine(speak),
            vlm,
            RolloutSettings(seed=seed, sanity="off"),
            run=run,
            earlier=EarlierEpisodes(recorded or {}),
        )
        played = asyncio.run(
            rollout.play(make_episode_specs(Painter, tasks, phase="train", step=0, samples=2))
        )
        if watch:
            run.journal, named = lines._lines, lines.seen
            return played, named
        return played, set()


@settings(max_examples=6, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(seed=st.integers(0, 2**32), cut=st.floats(0, 1))
def test_a_run_with_images_replays_and_goes_on(tmp_path_factory, vlm, seed, cut):
    """The journal tells of equal trajectories; cut off anywhere, the rest is
    played again as it was."""
    out = tmp_path_factory.mktemp("run")
    tasks = [tw.Task(f"{n}", id=f"t{n}") for n in range(2)]
    by_id = {task.id: task for task in tasks}.get
    played, named = record(out, vlm, seed, tasks)
    assert {path.stem for path in (out / "media").iterdir()} == named
    found = rebuild_trajectories(read_json_lines(out / "journal.jsonl"), by_id)
    assert found == {t.key: t for t in played}
    for trajectory in found.values():
        check_media(trajectory, vlm)
    journal = (out / "journal.jsonl").read_bytes()
    (out / "journal.jsonl").write_bytes(journal[: int(cut * len(journal))])
    left = rebuild_trajectories(read_json_lines(out / "journal.jsonl"), by_id)
    again, _ = record(out, vlm, seed, tasks, recorded=left, watch=False)
    assert [facts(t) for t in again] == [facts(t) for t in played]


def test_finished_records_name_the_images_of_tasks(tmp_path, vlm):
    task = tw.Task([{"role": "user", "content": ["x", tw.Image(noise(64, 64), alt="noise")]}])

    class Once(tw.Env):
        def reset(self, task, *, seed=None):
            return None

        def step(self, action):
            return tw.Step(terminated=True)

    with RunDir(tmp_path) as run:
        rollout = Rollout(tw.ScriptedEngine(["x"]), vlm, RolloutSettings(sanity="off"), run=run)
        (trajectory,) = asyncio.run(
            rollout.play(make_episode_specs(Once, [task], phase="train", step=0))
        )
    (row,) = read_json_lines(tmp_path / "trajectories.jsonl")
    (image,) = shown(trajectory.messages)
    assert row["turns"][0]["messages"][0]["content"][1] == image.to_dict()
    assert (tmp_path / "media" / f"{image.sha256}.png").is_file()
    assert row["task"]["messages"][0]["content"][1]["type"] == "image"


# Gymnasium


class Drawn(gymnasium.Env):
    """A world of pixels; its number is told too."""

    metadata = {"render_modes": ["rgb_array", "ansi"]}  # noqa: RUF012
    action_space = gymnasium.spaces.Discrete(2)

    def __init__(self, pixels=True, render_mode=None):
        self.render_mode, self._pixels = render_mode, pixels
        box = gymnasium.spaces.Box(0, 255, (64, 64, 3), np.uint8)
        self.observation_space = box if pixels else gymnasium.spaces.Discrete(9)

    def look(self):
        return np.full((64, 64, 3), self.at * 20, np.uint8) if self._pixels else self.at

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        self.at = 0
        return self.look(), {}

    def step(self, action):
        self.at += int(action)
        return self.look(), 1.0, self.at == 2, False, {}

    def render(self):
        return np.full((64, 64, 3), self.at * 20, np.uint8)


@pytest.mark.parametrize(
    "make", [{}, {"render_mode": "rgb_array", "pixels": False}, {"render_mode": "rgb_array"}]
)
def test_gymnasium_worlds_show_their_pixels(vlm, make):
    if "Drawn-v0" not in gymnasium.registry:
        gymnasium.register("Drawn-v0", Drawn)
    store = MediaStore()
    env = tw.gym_env("Drawn-v0", **make)
    (trajectory,) = play(env, vlm, ["1", "say what", "0", "1"], store=store)
    assert trajectory.error is None, trajectory.error
    seen = [
        int(store.pixels(ref)[0, 0, 0]) for ref in shown([*trajectory.messages, *trajectory.final])
    ]
    assert seen == [0, 20, 20, 40]
    if make.get("pixels") is False:
        (text,) = tw.rollout(env, [tw.Task()], tw.ScriptedEngine(["1", "0", "1"]))
        assert [m.text for m in text.messages if m.role == "user"] == [
            "State 0.",
            "State 1.",
            "State 1.",
        ]
        assert text.final[0].text == "State 2."


@pytest.mark.parametrize("retries", [0, 1])
def test_an_opening_with_an_image_counts_toward_the_prompt_limit(vlm, retries):
    class Opens(tw.Env):
        def reset(self, task, *, seed=None):
            return [tw.Image(noise(64, 64, 1)), "Look."]

        def step(self, action):
            return tw.Step(None, 0.0, True)

    rules = tw.EnvRules(retries=tw.RetryRules(turn=retries))
    specs = make_episode_specs(
        Opens, [tw.Task("Begin.", id="a")], phase="rollout", step=0, rules=rules
    )
    rollout = Rollout(
        tw.ScriptedEngine(["1"]),
        vlm,
        RolloutSettings(sanity="off", limits=tw.Limits(prompt_tokens=2)),
        media=MediaStore(),
    )
    assert asyncio.run(rollout.within_prompt_limit(specs)) == (set(), ["a"])


def test_noise_of_concurrent_calls_does_not_depend_on_who_decodes_first(vlm, monkeypatch):
    """Calls with and without images that continue one reply get their noise in the order in
    which they were made."""
    import time

    import turnwright.rollouts.observations as sight

    real = sight.store_media

    def slow(messages, store):
        time.sleep(random.random() * 0.01)
        return real(messages, store)

    monkeypatch.setattr(sight, "store_media", slow)
    images = [tw.Image(noise(64, 64, seed)) for seed in range(4)]

    async def ask(task, model):
        one = await model.generate("Begin.")
        said = [{"role": "user", "content": "Begin."}, one.message]
        follow = [
            [*said, {"role": "user", "content": [image, "?"] if image else "?"}]
            for image in (*images, None, None)
        ]
        await asyncio.gather(*(model.generate(messages) for messages in follow))
        return 0.0

    def draw(messages, rng):
        return f"{rng.random()}"

    runs = [play(ask, vlm, draw)[0] for _ in range(3)]

    def told(trajectory):
        return sorted(
            (str([m.key for m in shown(t.messages)]), t.reply.text) for t in trajectory.turns
        )

    assert told(runs[0]) == told(runs[1]) == told(runs[2])


def test_references_of_another_store_are_unknown(vlm):
    class Forges(tw.Env):
        def reset(self, task, *, seed=None):
            return [{"role": "user", "content": [ImageRef("ab" * 32, 64, 64)]}]

        def step(self, action):
            return tw.Step(terminated=True)

    (trajectory,) = play(Forges, vlm, speak)
    assert "is not in the media store" in trajectory.error.message


def test_a_blank_store_blinds_whoever_gives_references(vlm):
    store = MediaStore()
    ref = store.put(tw.Image(noise(64, 64)))
    blank = MediaStore(blank=True)
    task = tw.Task([{"role": "user", "content": ["x", ref, tw.Image(noise(64, 64, 1))]}])
    (trajectory,) = play(tw.tool_env([]), vlm, ["y"], [task], store=blank)
    one, two = shown(trajectory.messages)
    assert one == two != ref
    assert (blank.pixels(one) == 128).all()
