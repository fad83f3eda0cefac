"""Sandbox that records what a template inspects of placeholders; see `inspected`."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import lru_cache, wraps
from operator import contains, eq, ge, gt, le, lt, ne
from types import CodeType
from typing import Any, cast

import jinja2
from jinja2 import nodes
from jinja2.visitor import NodeTransformer

from turnwright.renderers.inspected import current_record, holds_placeholder
from turnwright.renderers.template_sandbox import TemplateSandbox, as_text, names_in

_COMPARISONS: Mapping[str, Callable[[Any, Any], Any]] = {
    "eq": eq,
    "ne": ne,
    "gt": gt,
    "gteq": ge,
    "lt": lt,
    "lteq": le,
    "in": lambda value, container: contains(container, value),
    "notin": lambda value, container: not contains(container, value),
}

_TEXT_SEARCHES = names_in(
    "startswith endswith find rfind index rindex count split rsplit partition rpartition replace "
    "removeprefix removesuffix"
)
"""Text methods whose outcome is that of a text without the word they are given, if the
text does not contain it."""
_TEXT_CHANGES = names_in("strip lstrip rstrip format join encode")
"""Text methods that return the text, or one made of it, without a decision;
`strip` only of white space."""
_CASE_CHANGES = names_in("lower upper title capitalize casefold swapcase")
_FILTERS = names_in(
    "trim string tojson safe escape e forceescape default d indent join attr _concat _charged "
    "_searched"
)
"""Filters that only change or pass on a text."""
_LIST_SEARCHES = names_in("sort unique min max groupby sum")
"""Filters that compare the items of a list with each other."""
_TYPE_TESTS = names_in(
    "defined undefined none string mapping sequence iterable number integer float boolean "
    "callable true false filter test"
)
"""Tests of a value's type: a placeholder has the type of the text in its place."""
_EQUALITY_TESTS: Mapping[str, str] = {
    "==": "eq",
    "eq": "eq",
    "equalto": "eq",
    "!=": "ne",
    "ne": "ne",
    "in": "in",
}


class _TextLength(int):
    """Length of a text that holds a placeholder; whether it is 0 is known of other texts
    too, its value is not."""


_OF_EMPTINESS = (("gt", 0), ("eq", 0), ("ne", 0), ("lteq", 0), ("gteq", 1), ("lt", 1))
"""Comparisons of a length that ask only whether the text is empty."""


def _compare(left: Any, right: Any, operator: str) -> Any:
    """Compare two values as the template does, and record the comparison if
    it depends on a text."""
    if isinstance(right, _TextLength) or (
        isinstance(left, _TextLength) and (operator, right) not in _OF_EMPTINESS
    ):
        current_record().give_up("a length")
    # `in` looks at the keys of a mapping, which are names of fields.
    searched = list(right) if operator in ("in", "notin") and isinstance(right, Mapping) else right
    from_text, in_text = holds_placeholder(left), holds_placeholder(searched)
    is_undefined = isinstance(left, jinja2.Undefined) or isinstance(right, jinja2.Undefined)
    if (from_text or in_text) and not is_undefined:
        record = current_record()
        looks_for_word = operator in ("eq", "ne", "in", "notin")
        if (
            operator in ("in", "notin")
            and isinstance(searched, str)
            and not from_text
            and left in searched
        ):
            pass  # the word is next to the text, so it is found whatever the text is
        elif looks_for_word and in_text and not from_text:
            record.add(left, searched, f"the comparison {operator}")
        elif operator in ("eq", "ne") and not in_text:
            record.add(right, left, f"the comparison {operator}")
        elif operator in ("in", "notin") and not in_text and not isinstance(searched, str):
            record.add(searched, left, f"the comparison {operator}")
        else:
            record.give_up(f"the comparison {operator}")
    return _COMPARISONS[operator](left, right)


class _CompareTransformer(NodeTransformer):
    """Turns each comparison into a filter, which can record it."""

    def visit_Compare(self, node: nodes.Compare) -> nodes.Node:
        self.generic_visit(node)
        # a < b < c is a < b and b < c; templates have no side effects that
        # evaluating b twice would repeat
        left = node.expr
        joined: nodes.Expr | None = None
        for operand in node.ops:
            step = nodes.Filter(
                left, "_compare", [operand.expr, nodes.Const(operand.op)], [], None, None
            )
            step.set_lineno(node.lineno)
            joined = step if joined is None else nodes.And(joined, step)
            joined.set_lineno(node.lineno)
            left = operand.expr
        assert joined is not None
        return joined

    def visit_Getitem(self, node: nodes.Getitem) -> nodes.Node:
        self.generic_visit(node)
        if isinstance(node.arg, nodes.Slice):
            # `_sliced` is no filter that only passes a text on, so a slice of a
            # text counts as unprovable.
            sliced = nodes.Filter(node.node, "_sliced", [], [], None, None)
            sliced.set_lineno(node.lineno)
            node.node = sliced
        return node


def _watched_filter(name: str, function: Callable[..., Any]) -> Callable[..., Any]:
    """Wrap a filter so that it records what it does to a text."""
    skipped = 1 if hasattr(function, "jinja_pass_arg") else 0

    @wraps(function)
    def filtered(*args: Any, **kwargs: Any) -> Any:
        value, rest = args[skipped] if len(args) > skipped else None, args[skipped + 1 :]
        if isinstance(value, str) and holds_placeholder(value):
            if name in ("length", "count"):
                return _TextLength(len(value))
            _watch_text_filter(name, value, rest, kwargs)
        elif isinstance(value, _TextLength):
            current_record().give_up("a length")
        elif name in _LIST_SEARCHES or name == "dictsort":
            by_key = name == "dictsort" and not rest and not kwargs
            compared = list(value) if by_key and isinstance(value, Mapping) else value
            if holds_placeholder(compared):
                current_record().give_up(f"the filter {name}")
        return function(*args, **kwargs)

    return filtered


def _watch_text_filter(
    name: str, value: str, rest: Sequence[Any], kwargs: Mapping[str, Any]
) -> None:
    record = current_record()
    if name == "replace" and rest:
        record.add(rest[0], value, "the filter replace")
    elif name in _CASE_CHANGES:
        record.any_case = True
    elif name not in _FILTERS or (
        name == "trim" and any(str(chars).strip() for chars in (*rest, *kwargs.values()))
    ):
        record.give_up(f"the filter {name}")


def _watched_test(name: str, function: Callable[..., Any]) -> Callable[..., Any]:
    """Wrap a test so that it records what it decides of a text."""
    if name in _TYPE_TESTS:
        return function
    skipped = 1 if hasattr(function, "jinja_pass_arg") else 0

    @wraps(function)
    def tested(*args: Any, **kwargs: Any) -> Any:
        given = args[skipped:]
        if name in _EQUALITY_TESTS and len(given) == 2:
            return _compare(given[0], given[1], _EQUALITY_TESTS[name])
        if any(isinstance(value, _TextLength) or holds_placeholder(value) for value in given):
            current_record().give_up(f"the test {name}")
        return function(*args, **kwargs)

    return tested


def _watch_call(function: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> None:
    """Record a call of a method of a text, or with one."""
    owner, name = getattr(function, "__self__", None), getattr(function, "__name__", "")
    # Jinja adds the variables of the loop and the block around a call, for macros.
    given = (
        *args,
        *(value for key, value in kwargs.items() if key not in ("_loop_vars", "_block_vars")),
    )
    if isinstance(owner, str):
        if holds_placeholder(owner):
            _watch_text_method(name, owner, args, given)
        elif name not in _TEXT_CHANGES and name != "replace" and any(map(holds_placeholder, given)):
            current_record().give_up(f"the method {name}")
        return

    compared: Any = ()
    if isinstance(owner, dict) and name in ("get", "pop", "setdefault"):
        compared = args[:1]  # the key; a default is only passed on
    elif isinstance(owner, list) and name in ("index", "count", "remove"):
        compared = [owner, given]
    elif name == "changed":
        compared = given
    if holds_placeholder(compared):
        current_record().give_up(f"the method {name}")


def _watch_text_method(name: str, value: str, args: Sequence[Any], given: Sequence[Any]) -> None:
    record = current_record()
    if name in _TEXT_SEARCHES and args and isinstance(args[0], (str, tuple)):
        record.add(args[0], value, f"the method {name}")
    elif name in _CASE_CHANGES:
        record.any_case = True
    elif name not in _TEXT_CHANGES or (
        name.endswith("strip") and any(str(chars).strip() for chars in given if chars)
    ):
        record.give_up(f"the method {name}")


def _watched_output(value: Any) -> Any:
    if isinstance(value, _TextLength):
        current_record().give_up("a length")
    return as_text(value)


class _WatchingSandbox(TemplateSandbox):
    """Sandbox that records operations on placeholders; it renders the same texts."""

    intercepted_binops = frozenset(("+", "-", "*", "/", "//", "%", "**"))

    def __init__(self, strftime: Callable[[str], str]) -> None:
        super().__init__(strftime)
        self.finalize = _watched_output
        self.filters["_sliced"] = lambda value: value
        self.filters: dict[str, Any] = {
            name: _watched_filter(name, found) for name, found in self.filters.items()
        }
        self.filters["_compare"] = _compare
        self.tests: dict[str, Any] = {
            name: _watched_test(name, found) for name, found in self.tests.items()
        }

    def _parse(self, source: str, name: str | None, filename: str | None) -> nodes.Template:
        return cast(
            nodes.Template, _CompareTransformer().visit(super()._parse(source, name, filename))
        )

    def template(self, source: str) -> jinja2.Template:
        code, self._text = _compiled_watching(source)
        return self.template_class.from_code(self, code, self.make_globals(None))

    def getitem(self, obj: Any, argument: Any) -> Any:
        if isinstance(obj, str) and not isinstance(argument, str) and holds_placeholder(obj):
            current_record().give_up("an index")
        return super().getitem(obj, argument)

    def call_binop(self, context: Any, operator: str, left: Any, right: Any) -> Any:
        if isinstance(left, _TextLength) or isinstance(right, _TextLength):
            current_record().give_up("a length")
        return super().call_binop(context, operator, left, right)

    def call(__self, __context: Any, __obj: Any, *args: Any, **kwargs: Any) -> Any:
        _watch_call(__obj, args, kwargs)
        return super().call(__context, __obj, *args, **kwargs)


@lru_cache(maxsize=256)
def _compiled_watching(source: str) -> tuple[CodeType, int]:
    environment = _WatchingSandbox(str)
    return environment.compile(source), environment._text


def watching_template(strftime: Callable[[str], str], source: str) -> jinja2.Template:
    """Compile a template whose renderings `watch_placeholders` records."""
    return _WatchingSandbox(strftime).template(source)
