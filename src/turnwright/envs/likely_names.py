"""The right name for what user code calls by another one: what an `AttributeError` about our types
leaves out."""

from __future__ import annotations

import re
from dataclasses import fields
from typing import Any

from turnwright.errors import did_you_mean
from turnwright.types import Message, Task

_UNEXPECTED = re.compile(
    r"(Step\.__new__|Task\.__init__)\(\) got an unexpected keyword argument '(\w+)'"
)
STEP = ("observation", "reward", "terminated", "truncated", "info")
"""Fields of `Step`."""

_WITHOUT_SELF = re.compile(
    r"\w\.(solver|demonstrator|tasks|texts)\(\) takes \d+ positional arguments? but \d+ were given"
)
_OVER = ("done", "over", "finished", "end", "ended", "is_done", "terminal")
"""What other libraries call `Step.terminated`."""


def likely_name(error: BaseException) -> str:
    """Return what the code that raised an exception probably meant, after `; `; empty where nothing
    is known."""
    hint = ""
    kind = type(error)
    if kind is AttributeError:
        hint = _of_attribute(error.obj, error.name)  # type: ignore[attr-defined]
    elif kind is TypeError:
        message = str(error)
        unexpected = _UNEXPECTED.search(message)
        without_self = _WITHOUT_SELF.search(message)
        if unexpected:
            hint = _of_argument(*unexpected.groups())
        elif without_self:
            hint = f"write @staticmethod above def {without_self[1]}, or give it self"
    return f"; {hint}" if hint else ""


def _of_attribute(obj: Any, name: str | None) -> str:
    """Return what was probably meant by an attribute that one of our objects lacks."""
    if not isinstance(name, str):
        return ""
    kind = type(obj)
    # By name, since its module imports this one.
    is_action = (kind.__module__, kind.__name__) == ("turnwright.envs.env", "Action")

    if is_action and hasattr(str, name):
        return f"the text of the reply is action.text, so action.text.{name}"
    if kind is Message and hasattr(str, name):
        return f"the text of the message is message.text, so message.text.{name}"
    if kind is Task:
        if name in obj.info:
            return f"write task.info[{name!r}]"
        near = did_you_mean(name, [field.name for field in fields(Task)], 0.75)
        return near or "fields of your own are in task.info"
    if is_action or kind is Message:
        names = [field.name for field in fields(kind)]
        return did_you_mean(name, names, 0.75) or f"it has {', '.join(names)}"
    return ""


def _of_argument(function: str, name: str) -> str:
    """Return what was probably meant by an argument that `Step` or `Task` lacks."""
    if function == "Task.__init__":
        return f"write Task(..., info={{{name!r}: ...}})"
    if name in _OVER:
        return "write terminated=True where the task is over, truncated=True where it is cut short"
    return did_you_mean(name, STEP, 0.6) or f"a step has {', '.join(STEP)}"
