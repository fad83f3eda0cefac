"""What the files of a run record of it: metrics rows, and the journal's episodes.

`RunRecord.episodes` reads the journal when a run is resumed: which episodes it takes again, and
which it plays again. While the run goes on, `RunRecord.row` writes each metrics row once, though a
resumed run trains some steps twice.
"""

from __future__ import annotations

import logging
import math
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from turnwright.errors import TraceError
from turnwright.records import Checks, RunDir, read_json_lines, rebuild_trajectories, trajectory_row
from turnwright.records.journal import InterruptedEpisodes, RecordedEpisode
from turnwright.records.serialization import key_row
from turnwright.renderers import ChatRenderer
from turnwright.rollouts.play_again import may_pass
from turnwright.training.batches import StreamRecord
from turnwright.training.trainer.mismatch import check_fingerprints
from turnwright.types import EpisodeKey, Task, Trajectory

_log = logging.getLogger("turnwright.run")


def log_failures(trajectories: Sequence[Trajectory], where: str) -> None:
    """Log failed episodes with the traceback of the first of each kind."""
    by_kind: dict[tuple[str, str], list[Trajectory]] = {}
    for trajectory in trajectories:
        if trajectory.error is not None:
            kind = (trajectory.error.type, trajectory.error.place or trajectory.error.phase)
            by_kind.setdefault(kind, []).append(trajectory)

    for (error_type, place), failed in by_kind.items():
        first = failed[0]
        assert first.error is not None
        _log.warning(
            "%s: %d of %d episodes failed with %s in %s; the first, of task %s: %s\n%s",
            where,
            len(failed),
            len(trajectories),
            error_type,
            place,
            first.task.id,
            first.error.message,
            first.error.traceback,
        )


class RunRecord:
    """What a run recorded so far, in earlier processes and in this one."""

    def __init__(
        self,
        run: RunDir,
        began: tuple[float, float],
        *,
        covered: int,
        asynchronous: bool,
    ) -> None:
        """Read the metrics rows. `began`: `time.time()` and `time.process_time()` at the start of
        this process' share; `covered`: steps of reinforcement that the last checkpoint covers."""
        self.run = run
        self._began = began
        self._covered = covered
        self._asynchronous = asynchronous

        self._rows: set[tuple[Any, ...]] = set()
        self._spent = (0.0, 0.0)
        """Wall-clock and CPU seconds of earlier processes, each up to its last metrics row."""
        self.steps: dict[int, tuple[float, float]] = {}
        """Success of the episodes and effective learning rate of each step so far, steps counted
        from 1."""
        for row in read_json_lines(run.path / "metrics.jsonl"):
            self._note(row)
            self._spent = (row.get("time_s", 0.0), row.get("cpu_s", 0.0))

        self.trained: set[int] = set()
        """Steps that the journal records as trained."""
        self.accepted: set[EpisodeKey] = set()
        """Episodes whose failure is final although a retry might have succeeded: a step
        continued without them."""
        self._failed_plays: Counter[tuple[str, int]] = Counter()
        """Failed plays that were retried, by phase and step."""
        self._failed_tokens: Counter[tuple[str, int]] = Counter()
        """Tokens sampled in those plays."""
        self.resumes = 0
        self.resumed_turns = 0
        """Turns of interrupted episodes that earlier processes took from the journal."""
        self.interrupted: dict[EpisodeKey, RecordedEpisode] = {}
        """Episodes of the journal to go on with."""
        self.stream = StreamRecord()

    # Metrics

    def row(self, row: Mapping[str, Any]) -> None:
        """Write a metrics row once; a resumed run produces some rows twice."""
        if self._note(row):
            wall_s, cpu_s = self.times()
            self.run.metrics.append(dict(row) | {"time_s": wall_s, "cpu_s": cpu_s})

    def _note(self, row: Mapping[str, Any]) -> bool:
        """Take notice of a row; return whether it is new."""
        name = row.get("phase"), row.get("name"), row.get("mode"), row.get("step")
        if row.get("phase") == "train":
            # A step without a reward is no evidence of success.
            success = 0.0 if row["success"] is None else row["success"]
            self.steps[row["step"]] = success, row.get("lr", math.nan)

        is_new = name not in self._rows
        self._rows.add(name)
        return is_new

    def times(self) -> tuple[float, float]:
        """Return wall-clock and CPU seconds of the run so far, earlier processes included."""
        spent_wall_s, spent_cpu_s = self._spent
        began_wall_s, began_cpu_s = self._began
        wall_s = spent_wall_s + time.time() - began_wall_s
        cpu_s = spent_cpu_s + time.process_time() - began_cpu_s
        return wall_s, cpu_s

    def resume(self) -> None:
        """Record that another process continues the run."""
        self.resumes += 1
        self.run.journal.append({"e": "resumed", "time": time.time()})

    # Failures

    def count_failed_play(self, trajectory: Trajectory) -> None:
        """Count a play that a retry replaces."""
        name = trajectory.key.phase, trajectory.key.step
        self._failed_plays[name] += 1
        self._failed_tokens[name] += trajectory.sampled_tokens

    def failed_plays(self, phase: str, step: int) -> dict[str, int]:
        """Return the metrics of plays that failed and were retried; empty if there were none."""
        if not self._failed_plays[phase, step]:
            return {}
        return {
            "failed_plays": self._failed_plays[phase, step],
            "failed_play_tokens": self._failed_tokens[phase, step],
        }

    @property
    def all_failed_plays(self) -> int:
        """Number of plays that failed and were retried."""
        return self._failed_plays.total()

    def accept(self, trajectories: Sequence[Trajectory]) -> None:
        """Record the failures of episodes as final that a retry might have mended."""
        failed = [trajectory.key for trajectory in trajectories if may_pass(trajectory)]
        failed = [key for key in failed if key not in self.accepted]
        if failed:
            self.accepted.update(failed)
            self.run.journal.append({"e": "accepted", "failed": [key_row(key) for key in failed]})

    # Episodes

    def episodes(
        self,
        tasks: Callable[[str], Task | None],
        renderer: ChatRenderer,
        mark: Sequence[int] | None,
        note: Callable[[str], None],
    ) -> dict[EpisodeKey, Trajectory]:
        """Return the journal's episodes that the checkpoint does not cover; write their missing
        records, and fill `interrupted`.

        `tasks` finds a task by its id; `mark` is the checkpoint's place in the journal. Raises
        `TraceError` for a journal that is damaged or missing.
        """
        recorded = self._read_journal(tasks, renderer, mark)

        episodes: dict[EpisodeKey, Trajectory] = {}
        for key, trajectory in recorded.items():
            if self._is_ahead(key):
                episodes[key] = trajectory
        self._write_missing(episodes, renderer)

        # Those that failed are played again from the start, unless a step went on without them.
        retried = []
        for key, trajectory in episodes.items():
            if may_pass(trajectory) and not self._is_final(key):
                retried.append(key)
        for key in retried:
            self.count_failed_play(episodes.pop(key))
            self.interrupted.pop(key, None)
        if retried:
            note(
                f"retrying {len(retried)} episodes that failed in the environment, the engine or "
                "at a deadline"
            )
        return episodes

    def _read_journal(
        self,
        tasks: Callable[[str], Task | None],
        renderer: ChatRenderer,
        mark: Sequence[int] | None,
    ) -> dict[EpisodeKey, Trajectory]:
        """Return all finished episodes of the journal, and fill `interrupted`."""
        checks = Checks((mark[0], mark[1]) if mark else None)
        recorded: dict[EpisodeKey, Trajectory] = {}
        interrupted = InterruptedEpisodes()
        try:
            recorded = rebuild_trajectories(
                self._events(checks, interrupted), tasks, self.count_failed_play
            )
            for key, episode in interrupted.episodes(tasks).items():
                if self._is_ahead(key):
                    self.interrupted[key] = episode
            check_fingerprints(
                renderer.fingerprint, recorded.values(), f"the journal of {self.run.given_path}"
            )
        except TraceError as error:
            checks.damage.append(str(error))

        if not recorded and any(row[0] in ("gate", "eval", "train") for row in self._rows):
            checks.damage.append(
                f"{self.run.given_path / 'journal.jsonl'}: empty or missing, but metrics.jsonl "
                "records episodes"
            )
        if checks.damage:
            raise TraceError(
                f"{checks.damage[0]}. A run resumes only from its journal: restore it from a copy, "
                "or start a new run"
            )
        return recorded

    def _write_missing(
        self, episodes: Mapping[EpisodeKey, Trajectory], renderer: ChatRenderer
    ) -> None:
        """Write the records of episodes that a killed process had in its journal only."""
        written: dict[tuple[Any, ...], float] = {}
        for row in read_json_lines(self.run.path / "trajectories.jsonl"):
            # Of two plays of an episode, the later counts.
            written[tuple(row["key"].values())] = row["wall_s"]

        for key, trajectory in episodes.items():
            name = (key.phase, key.step, key.task, key.sample, key.attempt)
            if written.get(name) != trajectory.wall_s:
                self.run.trajectories.append(trajectory_row(trajectory, renderer))

    def _is_ahead(self, key: EpisodeKey) -> bool:
        """Return whether the checkpoint does not cover an episode: it is for a later step, or for
        none."""
        if key.phase != "train":
            return True
        if self._asynchronous:
            return (key.step, key.task) not in self.stream.consumed
        return key.step >= self._covered

    def _is_final(self, key: EpisodeKey) -> bool:
        """Return whether a failure is final: a step went on without the episode."""
        if key in self.accepted:
            return True
        if key.phase != "train":
            return False
        if self._asynchronous:
            return (key.step, key.task) in self.stream.batched
        return key.step in self.trained

    def _events(self, checks: Checks, interrupted: InterruptedEpisodes) -> Iterator[dict[str, Any]]:
        """Yield the journal's events; record those that belong to no episode, and the turns of
        interrupted ones."""
        for event in self.run.events(checks):
            kind = event["e"]
            interrupted.read(event)
            self.stream.apply(event, self._covered)
            if kind == "turn" and "resumed" in event:
                self.resumed_turns += 1
            elif kind == "trained":
                self.trained.add(event["step"])
            elif kind == "accepted":
                self.accepted.update(EpisodeKey(*key) for key in event["failed"])
            elif kind == "resumed":
                self.resumes += 1
            yield event
