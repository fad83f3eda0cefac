"""What of a conversation a template can look at when it writes a later message,
read from its source."""

from __future__ import annotations

from collections.abc import Iterator
from functools import lru_cache
from typing import Literal

from jinja2 import TemplateError, nodes

from turnwright.renderers.template_sandbox import TemplateSandbox

_MESSAGES = "messages"

Reach = Literal["none", "first", "all"]
"""Earlier messages that decide how a later one is written: none, the first one, or any."""


@lru_cache(maxsize=256)
def reach_of(source: str) -> Reach:
    """Return which earlier messages a template looks at when it writes a
    message that is not the first.

    `none` and `first` are evident from the source: a single loop steps over the messages and keeps
    nothing from one to the next, and all else that reads them is written before the loop.
    Everything else is `all`.
    """
    try:
        body = TemplateSandbox(str).parse(source).body
    except TemplateError:
        return "all"

    loops = [
        number
        for number, node in enumerate(body)
        if isinstance(node, nodes.For) and _reads_messages(node.iter)
    ]
    if len(loops) != 1:
        return "all"
    before, loop, after = body[: loops[0]], body[loops[0]], body[loops[0] + 1 :]
    assert isinstance(loop, nodes.For)
    carries_over = any(isinstance(node, nodes.NSRef) for part in body for node in _all(part))
    macros = [node for part in body for node in _all(part) if isinstance(node, nodes.Macro)]
    if (
        carries_over
        or any(map(_reads_messages, after))
        or not all(map(_is_closed, macros))
        or not _sees_one_message(loop)
    ):
        return "all"

    # What is set before the loop and read in it may come from the messages.
    assigned = {
        name
        for part in (*before, *after)
        if not isinstance(part, nodes.Macro)
        for name in _names(part, "store")
    }
    read_later = {
        name
        for part in (*loop.body, *after)
        if not isinstance(part, nodes.Macro)
        for name in _names(part, "load")
    }
    if assigned.isdisjoint(read_later):
        return "none"
    return "first" if all(map(_reads_first_message_alone, before)) else "all"


def _is_closed(macro: nodes.Macro) -> bool:
    """Return whether a macro reads nothing but its arguments."""
    own = {argument.name for argument in macro.args}
    own |= {name for part in macro.body for name in _names(part, "store")}
    return all(
        name in own or name == "loop" for part in macro.body for name in _names(part, "load")
    )


def _sees_one_message(loop: nodes.For) -> bool:
    """Return whether a loop over all messages sees nothing but its own message, and
    whether that is the first."""
    steps_over_all = isinstance(loop.iter, nodes.Filter) and _is_all_messages(loop.iter)
    plain = (
        isinstance(loop.target, nodes.Name)
        and loop.test is None
        and not loop.recursive
        and not loop.else_
    )
    if not steps_over_all or not plain:
        return False
    return not any(map(_reads_messages, loop.body)) and _asks_only_for_first(loop.body)


def _is_all_messages(node: nodes.Node | None) -> bool:
    """Return whether an expression is `messages` itself; the sandbox wraps
    what a loop steps over."""
    while isinstance(node, nodes.Filter) and node.name == "_steps":
        node = node.node
    return isinstance(node, nodes.Name) and node.name == _MESSAGES


def _asks_only_for_first(body: list[nodes.Node]) -> bool:
    """Return whether `loop.first` is all that a loop's body reads of `loop`,
    outside of loops inside it."""
    for node in body:
        if (
            isinstance(node, nodes.Getattr)
            and isinstance(node.node, nodes.Name)
            and node.node.name == "loop"
        ):
            if node.attr != "first":
                return False
        elif isinstance(node, nodes.Name):
            if node.name == "loop":
                return False
        elif isinstance(node, nodes.For):
            if not _asks_only_for_first([node.iter]):
                return False
        elif not _asks_only_for_first(list(node.iter_child_nodes())):
            return False
    return True


def _reads_first_message_alone(node: nodes.Node, decides: bool = False) -> bool:
    """Return whether a node reads `messages` only as `messages[0]`, or to decide whether
    there are any (`decides`)."""
    if isinstance(node, nodes.Name):
        return node.name != _MESSAGES or decides
    if (
        isinstance(node, nodes.Getitem)
        and isinstance(node.node, nodes.Name)
        and node.node.name == _MESSAGES
    ):
        return isinstance(node.arg, nodes.Const) and node.arg.value == 0
    is_decision = isinstance(node, (nodes.And, nodes.Or, nodes.Not))
    return all(_reads_first_message_alone(child, is_decision) for child in node.iter_child_nodes())


def _reads_messages(node: nodes.Node) -> bool:
    return _MESSAGES in _names(node, "load")


def _names(node: nodes.Node, context: str) -> Iterator[str]:
    return (one.name for one in _all(node) if isinstance(one, nodes.Name) and one.ctx == context)


def _all(node: nodes.Node) -> Iterator[nodes.Node]:
    """Yield a node and all nodes inside it."""
    yield node
    yield from node.find_all(nodes.Node)
