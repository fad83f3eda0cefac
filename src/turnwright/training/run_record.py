"""What the files of a run record of it: metrics rows, and the episodes of the journal that a
resumed run takes again."""

from __future__ import annotations

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


class RunRecord:
    """What a run recorded so far, in earlier processes and in this one."""

    def __init__(
        self, run: RunDir, began: tuple[float, float], *, covered: int, asynchronous: bool
    ) -> None:
        """Read the metrics rows. `began`: `time.time()` and `time.process_time()` at the start of
        this process' share; `covered`: steps of reinforcement that the last checkpoint covers."""
        self.run = run
        self._began, self._covered, self._asynchronous = began, covered, asynchronous
        self._rows: set[tuple[Any, ...]] = set()
        self._spent = (0.0, 0.0)
        """Wall-clock and CPU seconds of earlier processes, each up to its last metrics row."""
        self.steps: dict[int, tuple[float, float]] = {}
        """Success of the episodes and effective learning rate of each step so far,
        steps counted from 1."""
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
            wall, cpu = self.times()
            self.run.metrics.append(dict(row) | {"time_s": wall, "cpu_s": cpu})

    def _note(self, row: Mapping[str, Any]) -> bool:
        """Take notice of a row; return whether it is new."""
        name = row.get("phase"), row.get("name"), row.get("mode"), row.get("step")
        if row.get("phase") == "train":
            # A step without a reward is no evidence of success.
            success = 0.0 if row["success"] is None else row["success"]
            self.steps[row["step"]] = success, row.get("lr", math.nan)
        known = name in self._rows
        self._rows.add(name)
        return not known

    def times(self) -> tuple[float, float]:
        """Return wall-clock and CPU seconds of the run so far, earlier processes included."""
        return self._spent[0] + time.time() - self._began[0], self._spent[
            1
        ] + time.process_time() - self._began[1]

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

    def accept(self, found: Sequence[Trajectory]) -> None:
        """Record the failures of episodes as final that a retry might have mended."""
        failed = [t.key for t in found if may_pass(t) and t.key not in self.accepted]
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
        checks = Checks((mark[0], mark[1]) if mark else None)
        found: dict[EpisodeKey, Trajectory] = {}
        interrupted = InterruptedEpisodes()
        try:
            found = rebuild_trajectories(
                self._events(checks, interrupted), tasks, self.count_failed_play
            )
            self.interrupted |= {
                key: record
                for key, record in interrupted.episodes(tasks).items()
                if key.phase != "train" or self._is_ahead(key)
            }
            check_fingerprints(
                renderer.fingerprint, found.values(), f"the journal of {self.run.given_path}"
            )
        except TraceError as error:
            checks.damage.append(str(error))
        if not found and any(row[0] in ("gate", "eval", "train") for row in self._rows):
            checks.damage.append(
                f"{self.run.given_path / 'journal.jsonl'}: empty or missing, but metrics.jsonl "
                "records episodes"
            )
        if checks.damage:
            raise TraceError(
                f"{checks.damage[0]}. A run resumes only from its journal: restore it from a copy, "
                "or start a new run"
            )
        found = {k: t for k, t in found.items() if k.phase != "train" or self._is_ahead(k)}
        written: dict[tuple[Any, ...], float] = {}
        for row in read_json_lines(self.run.path / "trajectories.jsonl"):
            written[tuple(row["key"].values())] = row["wall_s"]  # of two plays, the later
        for key, trajectory in found.items():
            if (
                written.get((key.phase, key.step, key.task, key.sample, key.attempt))
                != trajectory.wall_s
            ):
                self.run.trajectories.append(trajectory_row(trajectory, renderer))
        final = {
            key
            for key in found
            if key in self.accepted or (key.phase == "train" and self._is_trained(key))
        }
        retried = [
            key for key, trajectory in found.items() if may_pass(trajectory) and key not in final
        ]
        for key in retried:
            self.count_failed_play(found.pop(key))
            self.interrupted.pop(key, None)  # a failed play is repeated from the start
        if retried:
            note(
                f"retrying {len(retried)} episodes that failed in the environment, the engine or "
                "at a deadline"
            )
        return found

    def _is_ahead(self, key: EpisodeKey) -> bool:
        """Return whether an episode is for a step after the checkpoint."""
        if self._asynchronous:
            return (key.step, key.task) not in self.stream.consumed
        return key.step >= self._covered

    def _is_trained(self, key: EpisodeKey) -> bool:
        """Return whether a step was trained on an episode, before or after the checkpoint."""
        if self._asynchronous:
            return (key.step, key.task) in self.stream.batched
        return key.step in self.trained

    def _events(self, checks: Checks, interrupted: InterruptedEpisodes) -> Iterator[dict[str, Any]]:
        """Yield the journal's events; record those that belong to no episode, and the
        turns of interrupted ones."""
        for event in self.run.events(checks):
            interrupted.read(event)
            self.resumed_turns += event["e"] == "turn" and "resumed" in event
            if event["e"] == "trained":
                self.trained.add(event["step"])
            self.stream.apply(event, self._covered)
            if event["e"] == "accepted":
                self.accepted.update(EpisodeKey(*key) for key in event["failed"])
            self.resumes += event["e"] == "resumed"
            yield event
