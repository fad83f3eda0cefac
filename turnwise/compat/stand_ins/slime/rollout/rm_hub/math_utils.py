"""Answers of mathematics in boxes."""

from __future__ import annotations


def extract_answer(passage: str) -> str | None:
    r"""Return the content of the last ``\boxed{...}`` of a text; None without one."""
    from turnwise.envs.builtin.answers import boxed

    _, found, rest = passage.rpartition("\\boxed")
    return boxed(found + rest) if found else None
