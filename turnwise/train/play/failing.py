"""When too many episodes of a step fail, the run stops and says of what."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from pathlib import Path

from turnwise.errors import TurnwiseError
from turnwise.types import Trajectory

MOST_FAILED = 0.2
"""Share of a step's episodes that may fail before the run stops: it would train on whatever is left."""


def check_failures(trajectories: Sequence[Trajectory], where: str, run: Path | None) -> None:
    """See that enough of some episodes came to an end of their own.

    Args:
        where: what they were played for.
        run: the run directory, where tracebacks stand; None where nothing is written down.

    Raises:
        TurnwiseError: when more than `MOST_FAILED` of them failed.
    """
    failed = [t for t in trajectories if t.stop is not None and t.stop.failed]
    if len(failed) <= MOST_FAILED * len(trajectories):
        return
    kinds = Counter((str(t.stop), t.error.type if t.error else "") for t in failed)
    error = next((t.error for t in failed if t.error is not None), None)
    told = f"; the first in {error.phase}: {error.type}: {error.message}" if error else ""
    counts = ", ".join(f"{stop} {kind} x{count}" for (stop, kind), count in kinds.most_common(3))
    what = "mend the cause, and try again"
    if run is not None:
        what = f"Tracebacks stand in {run / 'trajectories.jsonl'}; mend the cause, then start a new run"
    raise TurnwiseError(f"{len(failed)} of {len(trajectories)} episodes of {where} failed ({counts}){told}. {what}")
