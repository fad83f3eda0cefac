"""When too many episodes of a step fail, the run stops and says of what."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Sequence
from pathlib import Path

from turnwise.env.blame import passing
from turnwise.errors import TurnwiseError
from turnwise.rollout import EpisodeSpec
from turnwise.types import EpisodeKey, Trajectory


def may_pass(trajectory: Trajectory) -> bool:
    """Whether the world, the engine or a deadline failed an episode, so that another play of it may go well."""
    error, stop = trajectory.error, trajectory.stop
    return stop is not None and stop.failed and error is not None and passing(error)


def to_play_again(episodes: Sequence[EpisodeSpec], found: Sequence[Trajectory], accepted: Collection[EpisodeKey]) -> list[int]:
    """The numbers of episodes that are to be played again; of a group that is rewarded together all.

    Args:
        found: how the episodes ended.
        accepted: of those whose failure counts already.
    """
    failed = {t.key for t in found if may_pass(t) and t.key not in accepted}
    groups = {(k.phase, k.step, k.task) for k in failed}
    return [
        number
        for number, episode in enumerate(episodes)
        if episode.key in failed or (episode.group_reward and (episode.key.phase, episode.key.step, episode.key.task) in groups)
    ]


def check_failures(trajectories: Sequence[Trajectory], where: str, run: Path | None, most: float) -> None:
    """See that enough of some episodes came to an end of their own.

    Args:
        where: what they were played for.
        run: the run directory, where tracebacks stand; None where nothing is written down.
        most: share of them that may fail.

    Raises:
        TurnwiseError: when more of them failed: the run would train on whatever is left.
    """
    failed = [t for t in trajectories if t.stop is not None and t.stop.failed]
    if len(failed) <= most * len(trajectories):
        return
    kinds = Counter((str(t.stop), t.error.type if t.error else "") for t in failed)
    error = next((t.error for t in failed if t.error is not None), None)
    told = f"; the first in {error.phase}: {error.type}: {error.message}" if error else ""
    counts = ", ".join(f"{stop} {kind} x{count}" for (stop, kind), count in kinds.most_common(3))
    what = "mend the cause, and try again"
    if run is not None:
        what = f"Tracebacks stand in {run / 'trajectories.jsonl'}; mend the cause, then "
        what += f"go on with --resume {run}, which plays them again" if any(map(may_pass, failed)) else "start a new run"
    raise TurnwiseError(f"{len(failed)} of {len(trajectories)} episodes of {where} failed ({counts}){told}. {what}")
