"""What of a conversation a template can look at when it writes a later message.

`reach_of` reads it from the template's syntax tree, and where the tree does not show it says `all`.
It decides how much of a conversation belongs to the key of what was derived
(`ConversationShapes`): with `none`, most templates' appends are derived once for a whole run.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from functools import lru_cache
from typing import Literal

from jinja2 import TemplateError, nodes

from turnwright.renderers.template_sandbox import TemplateSandbox

_MESSAGES = "messages"

Reach = Literal["none", "first", "all"]
"""Earlier messages that decide how a later one is written: none, the first one, or any."""


@lru_cache(maxsize=256)
def reach_of(source: str) -> Reach:
    """Return which earlier messages a template looks at when it writes a message that is not the
    first.

    `none` and `first` are evident from the source: a single loop steps over the messages and keeps
    nothing from one to the next, and all else that reads them is written before the loop.
    Everything else is `all`.
    """
    try:
        body = TemplateSandbox(str).parse(source).body
    except TemplateError:
        return "all"

    # A single loop over the messages, and what is around it.
    loops = [
        number
        for number, node in enumerate(body)
        if isinstance(node, nodes.For) and _reads_messages(node.iter)
    ]
    if len(loops) != 1:
        return "all"
    before = body[: loops[0]]
    loop = body[loops[0]]
    after = body[loops[0] + 1 :]
    assert isinstance(loop, nodes.For)
    if any(map(_reads_messages, after)) or not _sees_one_message(loop):
        return "all"

    # No namespace keeps anything from one message to the next, and no macro reads more than its
    # arguments.
    for part in body:
        for node in _all(part):
            if isinstance(node, nodes.NSRef):
                return "all"
            if isinstance(node, nodes.Macro) and not _is_closed(node):
                return "all"

    # What is set before the loop and read in it may come from the messages.
    assigned = _names_outside_macros((*before, *after), "store")
    read_later = _names_outside_macros((*loop.body, *after), "load")
    if assigned.isdisjoint(read_later):
        return "none"
    return "first" if all(map(_reads_first_message_alone, before)) else "all"


def _names_outside_macros(parts: Iterable[nodes.Node], context: str) -> set[str]:
    """Return the names that are assigned (`store`) or read (`load`)."""
    names: set[str] = set()
    for part in parts:
        if not isinstance(part, nodes.Macro):
            names.update(_names(part, context))
    return names


def _is_closed(macro: nodes.Macro) -> bool:
    """Return whether a macro reads nothing but its arguments."""
    known = {argument.name for argument in macro.args} | {"loop"}
    for part in macro.body:
        known.update(_names(part, "store"))
    return all(known.issuperset(_names(part, "load")) for part in macro.body)


def _sees_one_message(loop: nodes.For) -> bool:
    """Return whether a loop over all messages sees nothing but its own message, and whether that is
    the first."""
    steps_over_all = isinstance(loop.iter, nodes.Filter) and _is_all_messages(loop.iter)
    is_plain = isinstance(loop.target, nodes.Name) and loop.test is None
    if not steps_over_all or not is_plain or loop.recursive or loop.else_:
        return False
    return not any(map(_reads_messages, loop.body)) and _asks_only_for_first(loop.body)


def _is_all_messages(node: nodes.Node | None) -> bool:
    """Return whether an expression is `messages` itself; the sandbox wraps what a loop steps
    over."""
    while isinstance(node, nodes.Filter) and node.name == "_steps":
        node = node.node
    return isinstance(node, nodes.Name) and node.name == _MESSAGES


def _asks_only_for_first(body: list[nodes.Node]) -> bool:
    """Return whether `loop.first` is all that a loop's body reads of `loop`, outside of loops
    inside it."""
    return all(map(_reads_only_first, body))


def _reads_only_first(node: nodes.Node) -> bool:
    if isinstance(node, nodes.Getattr) and _is_name(node.node, "loop"):
        return node.attr == "first"
    if isinstance(node, nodes.Name):
        return node.name != "loop"
    if isinstance(node, nodes.For):
        return _reads_only_first(node.iter)
    return _asks_only_for_first(list(node.iter_child_nodes()))


def _reads_first_message_alone(node: nodes.Node, decides: bool = False) -> bool:
    """Return whether a node reads `messages` only as `messages[0]`, or to decide whether there are
    any (`decides`)."""
    if isinstance(node, nodes.Name):
        return node.name != _MESSAGES or decides
    if isinstance(node, nodes.Getitem) and _is_name(node.node, _MESSAGES):
        return isinstance(node.arg, nodes.Const) and node.arg.value == 0
    is_decision = isinstance(node, (nodes.And, nodes.Or, nodes.Not))
    return all(_reads_first_message_alone(child, is_decision) for child in node.iter_child_nodes())


def _reads_messages(node: nodes.Node) -> bool:
    return _MESSAGES in _names(node, "load")


def _is_name(node: nodes.Node, name: str) -> bool:
    return isinstance(node, nodes.Name) and node.name == name


def _names(node: nodes.Node, context: str) -> Iterator[str]:
    """Yield the names inside a node that are assigned (`store`) or read (`load`)."""
    for inner in _all(node):
        if isinstance(inner, nodes.Name) and inner.ctx == context:
            yield inner.name


def _all(node: nodes.Node) -> Iterator[nodes.Node]:
    """Yield a node and all nodes inside it."""
    yield node
    yield from node.find_all(nodes.Node)
