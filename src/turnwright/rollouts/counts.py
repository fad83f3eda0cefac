"""Counts among the metrics of an episode."""

from __future__ import annotations

from turnwright.renderers import Branch, Extend
from turnwright.types import Trajectory


def add_counts(trajectory: Trajectory, *names: str, by: int = 1) -> None:
    """Add to metrics of an episode."""
    for name in names:
        trajectory.metrics[name] = trajectory.metrics.get(name, 0) + by


def count_branch(trajectory: Trajectory, reason: str) -> None:
    """Count why a conversation went on from another position than its end."""
    trajectory.branches[reason] = trajectory.branches.get(reason, 0) + 1


def count_rendered(trajectory: Trajectory, rendered: Extend | Branch) -> None:
    """Count in the episode's metrics what a rendered observation or prompt held.

    That is control texts, by role and where they were neutralized, and media with their ids.
    """
    if rendered.neutralised:
        add_counts(trajectory, "neutralised", by=rendered.neutralised)
    for role, count in rendered.control_text.items():
        add_counts(trajectory, "control_text", f"control_text_{role}", by=count)
    if rendered.tool_images_moved:
        add_counts(trajectory, "tool_media_moved", by=rendered.tool_images_moved)
    if rendered.media:
        add_counts(trajectory, "media_shown", by=len(rendered.media))
        media_tokens = sum(block.length for block in rendered.media)
        add_counts(trajectory, "media_tokens", by=media_tokens)
