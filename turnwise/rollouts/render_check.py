"""The sanity check of a rollout: some episodes are compared with a full render when they are over; a measurement only."""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import asdict
from pathlib import Path
from typing import Any, Literal

from turnwise.errors import UsageError, class_name
from turnwise.records.run_dir import JsonLines, read_json_lines
from turnwise.records.serialization import key_row
from turnwise.renderers import Renderer
from turnwise.renderers.chat_renderer import ChatRenderer
from turnwise.renderers.render_check import CAUSES, BuiltConversation, OriginRun, RenderDifference, compare_with_render
from turnwise.rollouts.recorder import Recorder
from turnwise.types import Trajectory
from turnwise.types.seeds import derive_seed

FILE = "sanity.jsonl"
SHARE = 1 / 8
"""Share of the episodes that are compared by default; `benchmarks/rollout_loop.py` measures what it and all of them cost."""
_BY_DESIGN = ("inline", "history", "truncated", "control_text", "retokenised")
"""Causes that are counted without a warning: what the caller asked for, or ids that have the same text."""
Sanity = Literal["strict", "ignore_strippable", "off", "disable"]


class RenderCheck:
    """Compares finished episodes, counts by cause, warns once, and keeps the first report of each cause."""

    def __init__(
        self,
        renderer: Renderer,
        level: Sanity = "strict",
        every: Literal["episode", "turn"] = "episode",
        share: float = SHARE,
        directory: Path | None = None,
    ) -> None:
        """
        Args:
            renderer: of the episodes; one without a chat template of its own is not looked at.
            level: `strict`, `ignore_strippable` (white space may differ) or `off`.
            every: the last turn of an episode, or each.
            share: of the episodes, chosen by their keys.
            directory: a run's, for `sanity.jsonl`.

        Raises:
            UsageError: for another level or an impossible share.
        """
        if level not in ("strict", "ignore_strippable", "off", "disable") or every not in ("episode", "turn"):
            raise UsageError(
                f'sanity is "strict", "ignore_strippable" or "off", by "episode" or "turn", not {level!r}, {every!r}'
            )
        if not 0 <= share <= 1:
            raise UsageError(f"the share of episodes for the sanity check is from 0 to 1, not {share}")
        self._renderer = renderer if isinstance(renderer, ChatRenderer) else None
        self._level = level
        self._every = every
        self.settings = (level, every, share)
        """As they were given."""
        self._bound = int(share * (1 << 32)) if level in ("strict", "ignore_strippable") and self._renderer else 0
        self._warned = False
        self._path = directory / FILE if directory is not None else None
        self.reports: dict[str, dict[str, Any]] = {}
        """The first report of each cause, as it stands in `sanity.jsonl`."""
        if self._path is not None:
            self.reports = {row["cause"]: row for row in read_json_lines(self._path)}

    def check(self, recorder: Recorder) -> None:
        """Compare an episode that is over, where its key chooses it; only its metrics change."""
        if not self._bound or not recorder.trajectory.turns or derive_seed(recorder.seed, "sanity") % (1 << 32) >= self._bound:
            return
        trajectory = recorder.trajectory
        for turn in self._turns(trajectory):
            built = built_conversation(trajectory, turn, recorder.told[turn], history=recorder.history)
            assert self._renderer is not None
            level: Any = self._level
            try:
                found = compare_with_render(self._renderer, built, level)
            except Exception as error:  # a measurement fails no episode; that it failed is counted
                _count(trajectory, f"template_check_failed_{class_name(error)}")
                continue
            _count(trajectory, "template_checks")
            if found is not None:
                _count(trajectory, f"template_breaks_{found.cause}")
                self._keep(found, trajectory)

    def _turns(self, trajectory: Trajectory) -> Iterator[int]:
        """The turns to look at: all, or those that no other goes on from."""
        parents = {turn.parent for turn in trajectory.turns}
        for number in range(len(trajectory.turns)):
            if self._every == "turn" or number not in parents:
                yield number

    @staticmethod
    def _warn(found: RenderDifference, trajectory: Trajectory) -> None:
        key = trajectory.key
        warnings.warn(
            f"the ids of an episode differ from a full render of its conversation ({found.cause}, turn {found.turn + 1} of "
            f"{key.phase}/{key.step}/{key.task}/{key.sample}). {found.description}\n  trained:  {found.sent!r}\n  "
            f"template: {found.canonical!r}\nOther differences are only counted (template_breaks_*); "
            'sanity = "ignore_strippable" or "off" checks less.',
            stacklevel=2,
        )

    def _keep(self, found: RenderDifference, trajectory: Trajectory) -> None:
        if not self._warned and found.cause not in _BY_DESIGN:
            self._warned = True
            with suppress(UserWarning):  # whoever makes errors of warnings loses no episode by a measurement
                self._warn(found, trajectory)
        if found.cause in self.reports:
            return
        row = asdict(found) | {"sentence": CAUSES[found.cause], "key": key_row(trajectory.key)}
        self.reports[found.cause] = row
        if self._path is not None:
            lines = JsonLines(self._path)
            lines.append(row)
            lines.close()


def built_conversation(trajectory: Trajectory, turn: int, tools: Any = (), *, history: Any = "append") -> BuiltConversation:
    """A conversation of a trajectory, up to and including the reply of a turn.

    Args:
        tools: that the model was told of.
        history: of the rollout; what a policy leaves out or an edit changed cannot be told apart from here.
    """
    record = trajectory.turns[turn]
    owner = {span: number for number, one in enumerate(trajectory.turns) for span in one.spans}
    leaf = record.spans[-1] if record.spans else record.prompt
    pieces: list[OriginRun] = []
    ids: list[int] = []
    for index, used in trajectory.chain(leaf):
        span = trajectory.spans[index]
        pieces.append(OriginRun(span.origin, len(ids), len(ids) + used, owner.get(index, -1)))
        ids.extend(span.ids[:used])
    finish = {number: one.finish for number, one in enumerate(trajectory.turns)}
    neutralised = bool(trajectory.metrics.get("neutralised"))
    inline = history == "inline"
    rewritten = history != "template" and (bool(trajectory.branches) or history not in ("append", "inline"))
    placed = trajectory.media_placements(leaf)
    return BuiltConversation(ids, pieces, trajectory.conversation(turn), tools, finish, neutralised, inline, rewritten, placed)


def _count(trajectory: Trajectory, name: str) -> None:
    trajectory.metrics[name] = trajectory.metrics.get(name, 0) + 1
