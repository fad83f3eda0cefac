"""Render check: compare some finished episodes with a complete render of their conversation.

`RenderCheck.check` is called with each finished episode, `built_conversation` says what the episode
was built of, and `renderers.full_render.compare_with_render` compares. The check changes metrics
and reports only: what was sampled is trained as it is.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import asdict
from pathlib import Path
from typing import Any, Literal

from turnwright.config.names import sanity_share_error
from turnwright.config.schema import SanityShare
from turnwright.errors import UsageError, class_name
from turnwright.records.run_dir import JsonLines, read_json_lines
from turnwright.records.serialization import key_row
from turnwright.renderers import Renderer
from turnwright.renderers.chat_renderer import ChatRenderer
from turnwright.renderers.full_render import (
    CAUSES,
    BuiltConversation,
    OriginRun,
    RenderDifference,
    compare_with_render,
)
from turnwright.rollouts.counts import add_counts
from turnwright.rollouts.recorder import Recorder
from turnwright.types import Trajectory
from turnwright.types.seeds import derive_seed

FILE = "sanity.jsonl"
SHARE = 1 / 16
"""Default share of checked episodes; `benchmarks/rollout_loop.py` measures the cost."""
_BY_DESIGN = ("inline", "history", "truncated", "control_text", "retokenised")
"""Causes counted without a warning: requested by the caller, or different ids with equal text."""
Sanity = Literal["strict", "ignore_strippable", "off", "disable"]


class RenderCheck:
    """Compares finished episodes, counts differences by cause, warns once, and stores the first
    report of each cause."""

    def __init__(
        self,
        renderer: Renderer,
        level: Sanity = "strict",
        share: SanityShare = SHARE,
        directory: Path | None = None,
    ) -> None:
        """Only a renderer with a chat template is checked.

        `directory` is the run's, for `sanity.jsonl`.
        """
        if level not in ("strict", "ignore_strippable", "off", "disable"):
            raise UsageError(f'sanity is "strict", "ignore_strippable" or "off", not {level!r}')
        problem = sanity_share_error(share)
        if problem:
            raise UsageError(f"the share of episodes for the sanity check {problem}, not {share!r}")

        self._renderer = renderer if isinstance(renderer, ChatRenderer) else None
        self._level = level
        self.settings = recorded_settings(level, share)
        """The settings, as the journal has them."""
        _, unit, episode_share = self.settings
        self._each_turn = unit == "turn"
        self._threshold = 0
        """Episodes whose seed gives a smaller number of 32 bits are checked."""
        if level in ("strict", "ignore_strippable") and self._renderer is not None:
            self._threshold = int(episode_share * (1 << 32))

        self._warned = False
        self._path = directory / FILE if directory is not None else None
        self.reports: dict[str, dict[str, Any]] = {}
        """The first report of each cause, as in `sanity.jsonl`."""
        if self._path is not None:
            self.reports = {row["cause"]: row for row in read_json_lines(self._path)}

    def check(self, recorder: Recorder) -> None:
        """Check a finished episode if its key is chosen; only its metrics change."""
        trajectory = recorder.trajectory
        if not self._threshold or not trajectory.turns:
            return
        if derive_seed(recorder.seed, "sanity") % (1 << 32) >= self._threshold:
            return

        for turn in self._turns(trajectory):
            built = built_conversation(
                trajectory, turn, recorder.tools_by_turn[turn], history=recorder.history
            )
            assert self._renderer is not None
            level: Any = self._level
            try:
                difference = compare_with_render(self._renderer, built, level)
            except Exception as error:  # the check never fails an episode; its failures are counted
                add_counts(trajectory, f"render_check_failed_{class_name(error)}")
                continue
            add_counts(trajectory, "render_checks")
            if difference is not None:
                add_counts(trajectory, f"render_mismatch_{difference.cause}")
                self._report(difference, trajectory)

    def _turns(self, trajectory: Trajectory) -> Iterator[int]:
        """Yield the turns to check: all, or those that no other turn continues."""
        parents = {turn.parent for turn in trajectory.turns}
        for number in range(len(trajectory.turns)):
            if self._each_turn or number not in parents:
                yield number

    def _report(self, difference: RenderDifference, trajectory: Trajectory) -> None:
        """Warn of the first difference, and store the first of each cause."""
        if not self._warned and difference.cause not in _BY_DESIGN:
            self._warned = True
            # The check never fails an episode, even if warnings are errors.
            with suppress(UserWarning):
                warnings.warn(_warning(difference, trajectory), stacklevel=1)

        if difference.cause in self.reports:
            return
        report = asdict(difference) | {
            "sentence": CAUSES[difference.cause],
            "key": key_row(trajectory.key),
        }
        self.reports[difference.cause] = report
        if self._path is not None:
            lines = JsonLines(self._path)
            lines.append(report)
            lines.close()


def _warning(difference: RenderDifference, trajectory: Trajectory) -> str:
    return (
        "the ids of an episode differ from a full render of its conversation "
        f"({difference.cause}, turn {difference.turn + 1} of {trajectory.key.label}). "
        f"{difference.description}\n"
        f"  trained:  {difference.sent!r}\n"
        f"  template: {difference.canonical!r}\n"
        "What was sampled is trained as it is, so nothing has to change here; a server of chats "
        "that renders the conversation again has other ids than the policy learned from. Other "
        "differences are only counted (render_mismatch_*); "
        'sanity = "ignore_strippable" or "off" checks less.'
    )


def recorded_settings(level: Sanity, share: SanityShare) -> tuple[Sanity, str, float]:
    """Return what the journal has of the settings.

    That is the level, `turn` or `episode`, and the share of episodes as a number.
    """
    if share == "turns":
        return level, "turn", 1.0
    return level, "episode", share


def built_conversation(
    trajectory: Trajectory, turn: int, tools: Any = (), *, history: Any = "append"
) -> BuiltConversation:
    """Return a conversation of a trajectory, up to and including the reply of a turn.

    Messages that a policy of `history` dropped or an edit changed cannot be distinguished here.
    """
    last_turn = trajectory.turns[turn]
    leaf = last_turn.spans[-1] if last_turn.spans else last_turn.prompt
    turn_of_span = trajectory.turn_of_span()

    ids: list[int] = []
    runs: list[OriginRun] = []
    for index, used in trajectory.chain(leaf):
        span = trajectory.spans[index]
        begin = len(ids)
        runs.append(OriginRun(span.origin, begin, begin + used, turn_of_span.get(index, -1)))
        ids.extend(span.ids[:used])

    # Branches and policies change earlier messages; history = "template" does so by design.
    changes_history = bool(trajectory.branches) or history not in ("append", "inline")
    return BuiltConversation(
        ids,
        runs,
        trajectory.conversation(turn),
        tools,
        {number: other_turn.finish for number, other_turn in enumerate(trajectory.turns)},
        neutralised=bool(trajectory.metrics.get("neutralised")),
        inline=history == "inline",
        rewritten=history != "template" and changes_history,
        placed=trajectory.media_placements(leaf),
    )
