"""Replay of the episode loop against recorded replies, with recorded or real environments, to see
effects of code changes."""

from __future__ import annotations

import tempfile
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

from turnwright.config import EnvRules, Limits
from turnwright.config.recorded import rules_of
from turnwright.engines import Sampling
from turnwright.envs import EnvSpec
from turnwright.envs.resolve import as_env_spec
from turnwright.errors import TraceError, UsageError
from turnwright.media import MediaStore
from turnwright.records.journal import RecordedEpisode, read_recorded_steps
from turnwright.records.run_dir import read_json_lines, to_json
from turnwright.records.serialization import read_tasks
from turnwright.renderers import Renderer, byte_renderer
from turnwright.renderers.history import History
from turnwright.rollouts.episode_spec import EpisodeSpec
from turnwright.rollouts.rollout_settings import RolloutSettings
from turnwright.rollouts.runner import Rollout
from turnwright.rollouts.standalone import run_sync
from turnwright.types import EpisodeKey, StopReason, Task
from turnwright_view.replay.compare import EpisodeDifference, compare_episodes
from turnwright_view.replay.engine import RecordedEngine
from turnwright_view.replay.env import (
    RecordedEpisodeEnvs,
    Reward,
    group_reward,
    unreplayable_reason,
)

EnvSpecs = EnvSpec | Mapping[str, EnvSpec]
ENV_SETTINGS = ("rules", "max_turns", "play", "group")
"""Settings that may differ between the environments of one run."""


@dataclass(slots=True)
class ReplayResult:
    """Result of a replay."""

    episodes: int = 0
    """Number of replayed episodes."""
    differences: list[EpisodeDifference] = field(default_factory=list)
    """Differences from the record: for an episode with a different prompt only
    that, for others all."""
    left_out: Counter[str] = field(default_factory=Counter)
    """Skipped episodes, by reason."""

    @property
    def ok(self) -> bool:
        """Whether episodes were replayed and all equal their records."""
        return not self.differences and self.episodes > 0

    @property
    def different(self) -> int:
        """Number of episodes that differ."""
        return len({one.key for one in self.differences})


@dataclass(frozen=True, slots=True)
class ReplayChanges:
    """Settings changed for a replay; None keeps the recorded setting."""

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
    """Replay the episodes of a run against its recorded replies, and compare each with its record.

    The recorded engine answers only prompts of the record. At any other prompt the episode ends,
    and the first differing id is reported. Timings are not compared.

    Example in a test::

        assert not tw.replay_loop("runs/calc", env=MyEnv).differences

    Args:
        run: run directory; it is only read.
        env: environment, possibly changed, as for `turnwright.rollout`; or an `EnvSpec`, or several
            by name; or the agent function of the run. None replays the recorded observations.
        tasks: tasks of the run, for an environment; by default those in `trajectories.jsonl`.
        renderer: renderer of the run's model, possibly changed; by default the built-in
            one, if the run used it.
        history: another history.
        limits: other limits.
        stop: other stop texts.
        rules: other rules for invalid actions and failures.
        reward: reward function of a finished trajectory that replaces the recorded
            reward; only without `env`.
        only: filter for episodes.
        settings: `seed`, `limits`, `stop`, `history` and `sanity` of a run whose
            journal does not have them.

    Raises:
        TraceError: when there is no journal, or it cannot be read.
        UsageError: when the run's renderer or its tasks must be passed.
    """
    path = Path(run)
    journal = path / "journal.jsonl"
    if not journal.is_file():
        raise TraceError(
            f"{journal}: is not there; name the directory of a run that has played episodes"
        )
    changes = ReplayChanges(renderer, history, limits, stop, rules, reward)
    tasks_by_id = {task.id: task for task in tasks} if tasks is not None else read_tasks(path)
    env_specs = env if env is None or isinstance(env, (EnvSpec, Mapping)) else as_env_spec(env)
    result = ReplayResult()
    with tempfile.TemporaryDirectory() as scratch:
        for step in read_recorded_steps(read_json_lines(journal), tasks_by_id):
            chosen = [episode for episode in step if only is None or only(episode.key)]
            reasons = [_skip_reason(episode, env_specs, tasks_by_id) for episode in chosen]
            result.left_out.update(filter(None, reasons))
            playable = [
                episode for episode, reason in zip(chosen, reasons, strict=True) if not reason
            ]
            for settings_here, group in _by_settings(playable):
                media = ReadOnlyMediaStore(
                    path / "media",
                    Path(scratch),
                    blank=settings_here.get("blank", group[0].key.phase.endswith("-blind")),
                )
                _replay(group, settings_here or settings or {}, changes, env_specs, media, result)
    return result


class ReadOnlyMediaStore(MediaStore):
    """Media of a run, read without writing to the run; new media are stored elsewhere."""

    def __init__(self, run: Path, scratch: Path, *, blank: bool = False) -> None:
        super().__init__(scratch, blank=blank)
        self._run = run

    def _path(self, name: str) -> Path | None:
        there = self._run / f"{name}.png"
        return there if there.exists() else super()._path(name)


def _env_spec_of(episode: RecordedEpisode, env_specs: EnvSpecs) -> EnvSpec | None:
    if isinstance(env_specs, EnvSpec):
        return env_specs
    return env_specs.get(episode.trajectory.task.env) or (
        next(iter(env_specs.values())) if len(env_specs) == 1 else None
    )


def _skip_reason(
    episode: RecordedEpisode, env_specs: EnvSpecs | None, known: Mapping[str, Task]
) -> str:
    """Return why an episode is skipped; empty if it is not."""
    if episode.trajectory.stop is StopReason.ABORTED:
        return "aborted"
    if env_specs is None:
        return unreplayable_reason(episode)
    if _env_spec_of(episode, env_specs) is None:
        return f"no environment named {episode.trajectory.task.env!r}"
    return "" if episode.key.task in known else "the run does not hold its task: give tasks="


def _by_settings(
    step: Sequence[RecordedEpisode],
) -> Iterable[tuple[Mapping[str, Any], list[RecordedEpisode]]]:
    """Group episodes with equal settings, apart from those that each environment may set."""
    groups: dict[bytes, tuple[Mapping[str, Any], list[RecordedEpisode]]] = {}
    for episode in step:
        common = {
            name: value for name, value in episode.settings.items() if name not in ENV_SETTINGS
        }
        groups.setdefault(to_json(common), (common, []))[1].append(episode)
    return groups.values()


def _replay(
    episodes: Sequence[RecordedEpisode],
    settings: Mapping[str, Any],
    changes: ReplayChanges,
    env_specs: EnvSpecs | None,
    media: MediaStore,
    result: ReplayResult,
) -> None:
    """Replay episodes with equal settings, and compare them with their records."""
    renderer = changes.renderer or uses_builtin_renderer(episodes[0])
    engine = RecordedEngine(episodes, renderer.token_texts, settings.get("context"))
    level, every, share = settings.get("sanity", ("off", "episode", 0.0))
    rollout = Rollout(
        engine,
        renderer,
        RolloutSettings(
            sampling=_sampling(episodes[0], settings),
            limits=changes.limits or Limits(**settings.get("limits", {})),
            seed=settings.get("seed", 0),
            stop=settings.get("stop", ()) if changes.stop is None else changes.stop,
            history=settings.get("history", "append")
            if changes.history is None
            else changes.history,
            sanity=level,
            sanity_share="turns" if every == "turn" else share,
            want=settings.get("want", ()),
        ),
        media=media,
    )
    recorded = (
        {episode.key: RecordedEpisodeEnvs(episode, changes.reward) for episode in episodes}
        if env_specs is None
        else {}
    )
    rows = [_episode(episode, changes, env_specs, recorded) for episode in episodes]
    played = run_sync(rollout.play(rows))
    same = (
        changes.renderer is None or changes.renderer.fingerprint == episodes[0].trajectory.template
    )
    for episode, trajectory in zip(episodes, played, strict=True):
        result.episodes += 1
        first = engine.differences.get(episode.key)
        result.differences += (
            [first] if first else compare_episodes(episode.trajectory, trajectory, template=same)
        )


def _sampling(episode: RecordedEpisode, settings: Mapping[str, Any]) -> Sampling:
    """Return the sampling parameters of episodes: from their settings, else from their
    first span that has them."""
    if "sampling" in settings:
        return Sampling(**settings["sampling"])
    known = (span.sampling for span in episode.trajectory.spans if span.sampling is not None)
    return next((Sampling(**one.settings()) for one in known), Sampling())


def _episode(
    episode: RecordedEpisode,
    changes: ReplayChanges,
    env_specs: EnvSpecs | None,
    recorded: Mapping[EpisodeKey, RecordedEpisodeEnvs],
) -> EpisodeSpec:
    """Return the spec of one episode, as recorded except for the changes."""
    rules = changes.rules or rules_of(episode.settings.get("rules", {}))
    max_turns, task = _max_turns(episode), episode.trajectory.task
    if env_specs is None:
        compares: Any = partial(group_reward, recorded) if episode.settings["group"] else None
        here = replace(rules, isolation="thread", reward_isolation="thread")
        return EpisodeSpec(
            task, episode.key, recorded[episode.key].make, None, max_turns, here, compares
        )
    spec = _env_spec_of(episode, env_specs)
    assert spec is not None
    rules = changes.rules or (rules if episode.settings else spec.rules)
    compares = (
        spec.group_reward
        if episode.settings.get("group", episode.key.phase in ("train", "rollout"))
        else None
    )
    make = None if spec.agent_function is not None else spec.factory
    return EpisodeSpec(
        task, episode.key, make, spec.agent_function, spec.max_turns, rules, compares
    )


def _max_turns(episode: RecordedEpisode) -> int | None:
    """Return the turn limit of the environment; one that it set itself is inferred from
    the end of the episode."""
    trajectory, max_turns = episode.trajectory, episode.settings.get("max_turns")
    granted = len(trajectory.turns) - sum(
        bool(turn.info.get("asked_again")) for turn in trajectory.turns if turn.info
    )
    if trajectory.stop == StopReason.MAX_TURNS and granted < episode.settings.get("limits", {}).get(
        "turns", 0
    ):
        return granted
    return max_turns


def uses_builtin_renderer(episode: RecordedEpisode) -> Renderer:
    """Return the built-in renderer if an episode was played with it, else raise `UsageError`."""
    for control_text in ("neutralise", "reject", "allow"):
        renderer = byte_renderer(control_text)
        if renderer.fingerprint == episode.trajectory.template:
            return renderer
    raise UsageError(
        f"the run was played with the renderer {episode.trajectory.template}, "
        "which is not the built-in one: pass renderer=load_renderer(PATH) of its model"
    )
