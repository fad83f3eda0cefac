"""A row's own `chat_template_kwargs`: taken where they are what the run's template renders anyway,
else refused."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from functools import lru_cache
from typing import Any

from turnwright.errors import TaskError, suggest_or_list
from turnwright.renderers.chat_renderer import ChatRenderer
from turnwright.renderers.template import ChatTemplate, sample_conversations
from turnwright.types import Task

COLUMN = "chat_template_kwargs"
"""Column of rows of ms-swift and TRL with variables of the chat template."""


def check_row_arguments(tasks: Iterable[Task], renderer: Any) -> None:
    """Check that the template renders with a row's own variables what it renders without them.

    A run has one template, whose variables `model.template_args` sets for all tasks: its end
    tokens, thinking marks and reply format are derived once. A row whose variables render the same
    conversations, because they equal the run's or the template's defaults, is played; any other
    would be played with another prompt than its author meant.

    Raises:
        TaskError: for a row that asks for another rendering, or for a variable that the template
            does not have.
    """
    for task in tasks:
        row_value = task.info.get(COLUMN)
        if row_value is not None:
            check_arguments_of_row(row_value, f"task {task.id}", renderer)


def check_arguments_of_row(row_value: Any, where: str, renderer: Any) -> None:
    """Check one row's value of the column, as `check_row_arguments`; `where` begins its errors."""
    try:
        arguments = json.loads(row_value) if isinstance(row_value, str) else row_value
        written = json.dumps(arguments, sort_keys=True, ensure_ascii=False)
    except (TypeError, ValueError) as error:
        raise TaskError(
            f"{where}: {COLUMN} is no JSON ({error}); write an object of template variables"
        ) from None
    if not isinstance(arguments, Mapping):
        raise TaskError(
            f"{where}: {COLUMN} is {type(arguments).__name__}; write an object of template "
            "variables"
        )
    if not arguments:
        return

    if not isinstance(renderer, ChatRenderer):
        raise TaskError(
            f"{where}: {COLUMN} = {written:.200}, and the renderer has no template; remove the "
            "column"
        )
    problem = _problem(renderer.template, written)
    if problem:
        raise TaskError(f"{where}: {COLUMN} = {written:.200}: {problem}")


@lru_cache(maxsize=256)
def _problem(template: ChatTemplate, written: str) -> str:
    """Return why variables cannot be those of a row; empty if they change nothing that the template
    renders."""
    arguments: dict[str, Any] = json.loads(written)
    for name in arguments:
        if name not in template.parameters:
            remedy = suggest_or_list(name, sorted(template.parameters)) or "it uses none"
            return (
                f"{template.origin} has no variable {name!r}; {remedy}, or remove it from the row"
            )

    changed = template.with_message_format(variables=arguments)
    if list(sample_conversations(changed)) == list(sample_conversations(template)):
        return ""

    settings = ", ".join(
        f"{name} = {json.dumps(value, ensure_ascii=False)}" for name, value in arguments.items()
    )
    return (
        f"{template.origin} would render another prompt, and a run has one setting for all rows; "
        f"set it for the run ([model.template_args] {settings}; load_renderer(..., "
        "template_args=...)) and keep rows with other values in a run of their own"
    )
