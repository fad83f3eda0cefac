"""The loop run again against a recorded engine, and a recorded world or a real one: what a change of code changes."""

from __future__ import annotations

import tempfile
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

from turnwise.config import EnvRules, Limits
from turnwise.engines import Sampling
from turnwise.envs import EnvSpec
from turnwise.envs.resolve import as_env_spec
from turnwise.errors import TraceError, UsageError
from turnwise.media import MediaStore
from turnwise.records.journal import RecordedEpisode, read_recorded_steps
from turnwise.records.run_dir import read_json_lines
from turnwise.records.serialization import read_tasks
from turnwise.renderers import Renderer, byte_renderer
from turnwise.renderers.history import History
from turnwise.rollouts.api import run_sync
from turnwise.rollouts.replay.compare import EpisodeDifference, compare_episodes
from turnwise.rollouts.replay.engine import RecordedEngine
from turnwise.rollouts.replay.env import RecordedEpisodeEnvs, Reward, group_reward, unreplayable_reason
from turnwise.rollouts.runner import EpisodeSpec, Rollout
from turnwise.types import EpisodeKey, StopReason, Task

Worlds = EnvSpec | Mapping[str, EnvSpec]
OF_A_WORLD = ("rules", "max_turns", "play", "group")
"""Settings that may differ between the worlds of one run."""


@dataclass(slots=True)
class ReplayResult:
    """What running the loop again came to."""

    episodes: int = 0
    """Episodes that were played again."""
    differences: list[EpisodeDifference] = field(default_factory=list)
    """Where they are not what was recorded: of an episode whose prompt differs that alone, of others all that does."""
    left_out: Counter[str] = field(default_factory=Counter)
    """Episodes that could not be played again, by why."""

    @property
    def ok(self) -> bool:
        """Whether episodes were played again, and all of them came to what was recorded."""
        return not self.differences and self.episodes > 0

    @property
    def different(self) -> int:
        """How many episodes differ."""
        return len({one.key for one in self.differences})


@dataclass(frozen=True, slots=True)
class ReplayChanges:
    """What is another than it was in the run; None leaves it as it was."""

    renderer: Renderer | None = None
    history: History | None = None
    limits: Limits | None = None
    stop: Sequence[str] | None = None
    rules: EnvRules | None = None
    reward: Reward | None = None


def replay_loop(
    run: str | Path,
    *,
    env: Any = None,
    tasks: Iterable[Task] | None = None,
    renderer: Renderer | None = None,
    history: History | None = None,
    limits: Limits | None = None,
    stop: Sequence[str] | None = None,
    rules: EnvRules | None = None,
    reward: Reward | None = None,
    only: Callable[[EpisodeKey], bool] | None = None,
    settings: Mapping[str, Any] | None = None,
) -> ReplayResult:
    """Run the loop again against what the engine of a run sampled, and compare every episode with its record.

    The recorded engine answers a prompt only where the record has that very prompt; where it has not, the episode ends, and the
    first id that differs is told. Times, and what is measured in them, are not compared.

    Example, in a test of one's own::

        assert not tw.replay_loop("runs/calc", env=MyEnv).differences

    Args:
        run: the run directory; it is only read.
        env: an environment, changed maybe, as of `turnwise.rollout` (or a `EnvSpec`, or several by name); its own play function
            for a run of one. None plays against what the world said in the run.
        tasks: those of the run, for an environment; by default as `trajectories.jsonl` has them.
        renderer: of the run's model, changed maybe; by default the built-in one, where the run had it.
        history: another history.
        limits: other limits.
        stop: other stop texts.
        rules: other rules for mistakes and failures.
        reward: a reward function of a finished trajectory, in place of the recorded reward of a recorded world.
        only: chooses the episodes.
        settings: `seed`, `limits`, `stop`, `history` and `sanity` of a run whose journal does not say them.

    Raises:
        TraceError: when there is no journal, or it cannot be read.
        UsageError: when the renderer of the run has to be named, or its tasks.
    """
    path = Path(run)
    journal = path / "journal.jsonl"
    if not journal.is_file():
        raise TraceError(f"{journal}: is not there; name the directory of a run that has played episodes")
    changes = ReplayChanges(renderer, history, limits, stop, rules, reward)
    known = {task.id: task for task in tasks} if tasks is not None else read_tasks(path)
    worlds = _worlds(env)
    found = ReplayResult()
    with tempfile.TemporaryDirectory() as scratch:
        for step in read_recorded_steps(read_json_lines(journal), known):
            whys = [(told, _cannot(told, worlds, known)) for told in step if only is None or only(told.key)]
            found.left_out.update(why for _, why in whys if why)
            for mine, alike in _alike([told for told, why in whys if not why]):
                shelf = ReadOnlyMediaStore(
                    path / "media", Path(scratch), blank=mine.get("blank", alike[0].key.phase.endswith("-blind"))
                )
                _again(alike, mine or settings or {}, changes, worlds, shelf, found)
    return found


class ReadOnlyMediaStore(MediaStore):
    """The images of a run, without writing to it: new ones go elsewhere."""

    def __init__(self, run: Path, scratch: Path, *, blank: bool = False) -> None:
        super().__init__(scratch, blank=blank)
        self._run = run

    def _path(self, name: str) -> Path | None:
        there = self._run / f"{name}.png"
        return there if there.exists() else super()._path(name)


def _worlds(env: Any) -> Worlds | None:
    if env is None or isinstance(env, (EnvSpec, Mapping)):
        return env
    return as_env_spec(env)


def _world_of(told: RecordedEpisode, worlds: Worlds) -> EnvSpec | None:
    if isinstance(worlds, EnvSpec):
        return worlds
    return worlds.get(told.trajectory.task.env) or (next(iter(worlds.values())) if len(worlds) == 1 else None)


def _cannot(told: RecordedEpisode, worlds: Worlds | None, known: Mapping[str, Task]) -> str:
    """Why an episode is left out; empty where it is not."""
    if told.trajectory.stop is StopReason.ABORTED:
        return "stopped from outside"
    if worlds is None:
        return unreplayable_reason(told)
    if _world_of(told, worlds) is None:
        return f"no environment is named {told.trajectory.task.env!r}"
    return "" if told.key.task in known else "the run does not hold its task: give tasks="


def _alike(step: Sequence[RecordedEpisode]) -> Iterator[tuple[Mapping[str, Any], list[RecordedEpisode]]]:
    """Episodes with equal settings but for what each world has of its own."""
    groups: list[tuple[Mapping[str, Any], list[RecordedEpisode]]] = []
    for told in step:
        mine = {name: value for name, value in told.settings.items() if name not in OF_A_WORLD}
        for settings, alike in groups:
            if settings == mine:
                alike.append(told)
                break
        else:
            groups.append((mine, [told]))
    yield from groups


def _again(
    episodes: Sequence[RecordedEpisode],
    settings: Mapping[str, Any],
    changes: ReplayChanges,
    worlds: Worlds | None,
    shelf: MediaStore,
    found: ReplayResult,
) -> None:
    """Play episodes of like settings again, and compare them."""
    renderer = changes.renderer or uses_builtin_renderer(episodes[0])
    engine = RecordedEngine(episodes, renderer.token_texts, settings.get("context"))
    level, every, share = settings.get("sanity", ("off", "episode", 0.0))
    rollout = Rollout(
        engine,
        renderer,
        sampling=_sampling(episodes[0], settings),
        limits=changes.limits or Limits(**settings.get("limits", {})),
        seed=settings.get("seed", 0),
        stop=settings.get("stop", ()) if changes.stop is None else changes.stop,
        history=settings.get("history", "append") if changes.history is None else changes.history,
        sanity=level,
        sanity_every=every,
        sanity_share=share,
        media=shelf,
        want=settings.get("want", ()),
    )
    recorded = {told.key: RecordedEpisodeEnvs(told, changes.reward) for told in episodes} if worlds is None else {}
    rows = [_episode(told, changes, worlds, recorded) for told in episodes]
    played = run_sync(rollout.play(rows))
    same = changes.renderer is None or changes.renderer.fingerprint == episodes[0].trajectory.template
    for told, trajectory in zip(episodes, played, strict=True):
        found.episodes += 1
        first = engine.differences.get(told.key)
        found.differences += [first] if first else compare_episodes(told.trajectory, trajectory, template=same)


def _sampling(told: RecordedEpisode, settings: Mapping[str, Any]) -> Sampling:
    """The distribution that episodes sampled from: of their settings, else of the first ids that say so."""
    if "sampling" in settings:
        return Sampling(**settings["sampling"])
    known = (span.sampling for span in told.trajectory.spans if span.sampling is not None)
    return next((Sampling(one.temperature, one.top_p, one.top_k) for one in known), Sampling())


def _episode(
    told: RecordedEpisode, changes: ReplayChanges, worlds: Worlds | None, recorded: Mapping[EpisodeKey, RecordedEpisodeEnvs]
) -> EpisodeSpec:
    """One episode, as it was played but for the changes."""
    rules = changes.rules or EnvRules(**told.settings.get("rules", {}))
    most, task = _max_turns(told), told.trajectory.task
    if worlds is None:
        compares: Any = partial(group_reward, recorded) if told.settings["group"] else None
        here = replace(rules, isolation="thread", reward_isolation="thread")
        return EpisodeSpec(task, told.key, recorded[told.key].make, None, most, here, compares)
    world = _world_of(told, worlds)
    assert world is not None
    rules = changes.rules or (rules if told.settings else world.rules)
    compares = world.group_reward if told.settings.get("group", told.key.phase in ("train", "rollout")) else None
    make = None if world.agent_function is not None else world.factory
    return EpisodeSpec(task, told.key, make, world.agent_function, world.max_turns, rules, compares)


def _max_turns(told: RecordedEpisode) -> int | None:
    """Return the turns that the environment granted; those that it set itself show in where they ended the episode."""
    trajectory, most = told.trajectory, told.settings.get("max_turns")
    granted = len(trajectory.turns) - sum(bool(turn.info.get("asked_again")) for turn in trajectory.turns if turn.info)
    if trajectory.stop == StopReason.MAX_TURNS and granted < told.settings.get("limits", {}).get("turns", 0):
        return granted
    return most


def uses_builtin_renderer(told: RecordedEpisode) -> Renderer:
    """The built-in renderer, where an episode was played with it.

    Raises:
        UsageError: where it was played with another.
    """
    for control_text in ("neutralise", "reject", "allow"):
        renderer = byte_renderer(control_text)
        if renderer.fingerprint == told.trajectory.template:
            return renderer
    raise UsageError(
        f"the run was played with the renderer {told.trajectory.template or 'of an older release'}, which is not the built-in "
        "one: give renderer=load_renderer(PATH) of its model"
    )
