"""Tools and tool arguments set by the row of a task."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

from turnwise.envs.tools.tool import Tool
from turnwise.errors import TaskError, suggest_or_list
from turnwise.types import Task

PHASES = ("create", "execute", "calc_reward", "release")


@dataclass(frozen=True, slots=True)
class RowArguments:
    """Column `tools_kwargs` of a row: ``{tool: {"create_kwargs": {...}, "execute_kwargs": {...}, ...}}``."""

    task: str = ""
    given: Mapping[str, Mapping[str, Mapping[str, Any]]] = field(default_factory=dict)

    def for_method(self, name: str, phase: str, target: Callable[..., Any] | Tool) -> dict[str, Any]:
        """Return the row's arguments for a method, or for the `from_row` parameters of a tool (the model sets all others).

        Raises:
            TaskError: for an unknown or missing argument.
        """
        given = (self.given.get(name) or {}).get(f"{phase}_kwargs") or {}
        where = f"task {self.task}: tools_kwargs[{name!r}][{phase + '_kwargs'!r}]"
        tool = target if isinstance(target, Tool) else None
        parameters = inspect.signature(target if tool is None else tool.function).parameters
        named = [key for key, p in parameters.items() if key != "self" and p.kind in (p.POSITIONAL_OR_KEYWORD, p.KEYWORD_ONLY)]
        named = named if tool is None else [*tool.from_row]
        takes_any = tool is None and any(p.kind is p.VAR_KEYWORD for p in parameters.values())
        found: dict[str, Any] = {}
        for key, value in given.items():
            if key in named or (takes_any and value is not None):
                found[key] = value
            elif value is None:  # Arrow columns have all keys in all rows
                continue
            elif tool is not None:
                set_by_model = key in (tool.signature.parameters.get("properties") or {})
                problem = "is the model's to give" if set_by_model else "is no parameter of it"
                raise TaskError(f"{where}: {key!r} {problem}; name parameters of the row in from_row")
            else:
                raise TaskError(f"{where}: {key!r} is not taken; {suggest_or_list(key, named) or 'it takes none'}")
        for key in named:
            if key not in found and parameters[key].default is inspect.Parameter.empty:
                raise TaskError(f"{where} lacks {key!r}, which the tool needs of the row")
        return found


def arguments_of(task: Task) -> RowArguments:
    """Read the `tools_kwargs` column of a task's row, or of its `extra_info`."""
    column = task.info.get("tools_kwargs")
    if column is None and isinstance(extra := task.info.get("extra_info"), Mapping):
        column = extra.get("tools_kwargs")
    if column is None:
        return RowArguments(task.id)
    form = f"task {task.id}: tools_kwargs is {{tool: {{'create_kwargs': {{...}}, 'execute_kwargs': {{...}}, ...}}}}"
    if not isinstance(column, Mapping):
        raise TaskError(f"{form}, not {type(column).__name__}")
    given: dict[str, dict[str, Any]] = {}
    known = [f"{phase}_kwargs" for phase in PHASES]
    for name, phases in column.items():
        if phases is None:
            continue
        if not isinstance(phases, Mapping) or not all(isinstance(v, (Mapping, type(None))) for v in phases.values()):
            raise TaskError(f"{form}; that of {name!r} is {phases!r:.60}")
        for phase in phases:
            if phase not in known:
                raise TaskError(f"{form}; {name!r} has {phase!r}; {suggest_or_list(str(phase), known)}")
        given[name] = {phase: kwargs for phase, kwargs in phases.items() if kwargs}
    return RowArguments(task.id, given)


def tool_names_of(task: Task) -> tuple[str, ...] | None:
    """Read the tools named in a row's column `tools` (names or OpenAI schemas); None for all tools."""
    column = task.info.get("tools")
    if column is None:
        return None
    names = [_name(item) for item in column] if isinstance(column, (list, tuple)) else [None]
    if None in names:
        raise TaskError(f"task {task.id}: the column tools is a list of names of tools, not {column!r:.80}")
    return tuple(dict.fromkeys(name for name in names if name is not None))


def check_names(wanted: Iterable[str], known: Iterable[str], task: Task, column: str) -> None:
    """Check tool names of a row."""
    known = list(known)
    for name in wanted:
        if name not in known:
            near = suggest_or_list(name, known) or "there is none"
            raise TaskError(f"task {task.id}: {column} names {name!r}, which is no tool of this environment; {near}")


def _name(item: Any) -> str | None:
    if isinstance(item, str):
        return item
    body = item.get("function", item) if isinstance(item, Mapping) else None
    name = body.get("name") if isinstance(body, Mapping) else None
    return name if isinstance(name, str) else None
