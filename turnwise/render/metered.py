"""What a template's work costs, taken from a budget before it is done."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from functools import wraps
from itertools import chain
from typing import Any, cast

import jinja2
from jinja2 import nodes
from jinja2.runtime import LoopContext
from jinja2.visitor import NodeTransformer


def _names(words: str) -> frozenset[str]:
    return frozenset(words.split())


WORK = 100_000_000
"""Units of one rendering: a character touched is one, a step of a loop or a call `STEP`. A few seconds at most."""
STEP = 40
CALL = 200
_LOOK = 10
_DEEPEST = 100
_HOLDERS = frozenset((list, tuple, dict))
_WIDE = re.compile(r"[0-9]{5,}|%(?:[^a-zA-Z%*]*+|[^a-zA-Z%*(]*+\([^()]*+\)[^a-zA-Z%*]*+)\*|\{[^{}]*+\{")
"""Widths in a format that is no plain one: five digits and more, or given by an argument."""
_RUN = re.compile(r"\s+|\S+")
_CODECS = _names("utf-8 utf8 ascii latin-1")
_TEXT_CALLS = _names(
    "capitalize casefold count encode endswith find index isalnum isalpha isascii isdecimal isdigit islower isnumeric "
    "isspace istitle isupper lower lstrip partition removeprefix removesuffix rfind rindex rpartition rsplit rstrip split "
    "splitlines startswith strip swapcase title upper"
)
"""Methods of text whose result is no larger than what they are given."""
_BOTH = _names("strip lstrip rstrip rfind rindex rsplit rpartition")
"""Methods of text that may look at each character of an argument for each of the text."""
_OTHER_CALLS = _names(
    "append copy count extend fromkeys get index insert items keys pop popitem remove reverse setdefault sort update values "
    "bit_length is_integer clear isoformat strftime"
)
_THROUGH = _names("copy count index insert pop remove reverse sort update")
"""Methods of lists and dicts that go through all of it."""
_ONE_BY_ONE = _names("map select reject selectattr rejectattr first")
"""Filters that take a value at a time, when it is asked for."""
_SERIALISING = _names(
    "tojson string pprint join replace indent sum sort unique dictsort groupby min max xmlattr urlize escape e forceescape "
    "wordwrap list center format batch slice"
)
"""Filters that touch all of what they are given, however deep."""

_left: ContextVar[list[float]] = ContextVar("_left")


class TemplateBudgetExceeded(jinja2.TemplateRuntimeError):
    """The template did more work than a chat template has to."""


@contextmanager
def render_budget(units: int = WORK) -> Iterator[None]:
    """Give what is rendered in the body so many units of work."""
    token = _left.set([units])
    try:
        yield
    finally:
        _left.reset(token)


def spend(units: float) -> None:
    """Take from the budget.

    Raises:
        TemplateBudgetExceeded: when it is used up.
    """
    left = _left.get(None)
    if left is not None:
        left[0] -= units
        if left[0] < 0:
            raise TemplateBudgetExceeded(
                f"the template does too much work or writes too much (over {WORK:,} units); it is not used"
            )


def charge_size(value: Any, depth: int = 0) -> int:
    """Take the size of a value from the budget while it is found: its characters, and what looking at each thing costs."""
    kind = type(value)
    if kind is str:
        size = len(value) + _LOOK
    elif kind is int:
        size = value.bit_length() // 3 + _LOOK
    elif kind in _HOLDERS or isinstance(value, (Mapping, list, tuple, set, frozenset)):
        if depth > _DEEPEST:
            raise TemplateBudgetExceeded("the template nests lists too deep")
        spend(2 * _LOOK)
        items: Iterable[Any] = chain.from_iterable(value.items()) if isinstance(value, Mapping) else value
        size = _LOOK
        for item in items:
            size += charge_size(item, depth + 1)
        return size
    else:
        size = len(value) + _LOOK if isinstance(value, str) else _LOOK
    spend(size)
    return size


class BudgetTransformer(NodeTransformer):
    """Puts a price on what an environment cannot see: steps of loops, joined texts, lists and dicts that are built."""

    def visit_For(self, node: nodes.For) -> nodes.Node:
        self.generic_visit(node)
        written = sum(len(data.data) for part in node.body for data in part.find_all(nodes.TemplateData))
        node.iter = _filtered(node.iter, "_steps", nodes.Const(written))
        return node

    def visit_Concat(self, node: nodes.Concat) -> nodes.Node:
        self.generic_visit(node)
        return _filtered(nodes.Tuple(node.nodes, "load").set_lineno(node.lineno), "_concat")

    def visit_List(self, node: nodes.List) -> nodes.Node:
        self.generic_visit(node)
        return node if all(isinstance(item, nodes.Const) for item in node.items) else _filtered(node, "_weighed")

    def visit_Dict(self, node: nodes.Dict) -> nodes.Node:
        self.generic_visit(node)
        return node if all(isinstance(pair.value, nodes.Const) for pair in node.items) else _filtered(node, "_weighed")

    def visit_Tuple(self, node: nodes.Tuple) -> nodes.Node:
        self.generic_visit(node)
        return node if node.ctx != "load" else _filtered(node, "_weighed")

    def visit_Compare(self, node: nodes.Compare) -> nodes.Node:
        self.generic_visit(node)
        if not any(isinstance(one, nodes.Const) for one in (node.expr, *(operand.expr for operand in node.ops))):
            node.expr = _filtered(node.expr, "_weighed")
            for operand in node.ops:
                operand.expr = _filtered(operand.expr, "_weighed")
        else:
            for operand in node.ops:
                if operand.op in ("in", "notin") and not isinstance(operand.expr, nodes.Const):
                    operand.expr = _filtered(operand.expr, "_searched")
        return node

    def visit_Getitem(self, node: nodes.Getitem) -> nodes.Node:
        self.generic_visit(node)
        if isinstance(node.arg, nodes.Slice):
            node.node = _filtered(node.node, "_searched")
        return node


def _filtered(node: nodes.Node, name: str, *args: nodes.Expr) -> nodes.Filter:
    found = nodes.Filter(cast(nodes.Expr, node), name, list(args), [], None, None)
    found.set_lineno(node.lineno)
    return found


def check_call(function: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> None:
    """Take the price of a call from the budget.

    Raises:
        SecurityError: for what no chat template calls and whose result has no bound known here.
    """
    spend(CALL)
    owner, name = getattr(function, "__self__", None), getattr(function, "__name__", "")
    if isinstance(owner, (str, bytes)):
        size = len(owner)
        spend(size)
        if name in _TEXT_CALLS or name == "formatted":
            _check_text_call(name, size, args, kwargs)
            return
        if name == "replace" and len(args) > 1 and isinstance(args[0], str) and isinstance(args[1], str):
            spend(owner.count(args[0]) * len(args[1]))  # type: ignore[arg-type]
            return
        if name == "join" and args:
            items = args[0] if isinstance(args[0], (str, list, tuple, Mapping)) else ()
            charge_size(items)
            spend(len(items) * size)
            if items or isinstance(args[0], (str, list, tuple, Mapping)):
                return
        if name in ("center", "ljust", "rjust", "zfill", "expandtabs") and args and isinstance(args[0], int):
            spend(abs(args[0]) * (1 + owner.count("\t") if name == "expandtabs" else 1))  # type: ignore[arg-type]
            return
    elif isinstance(owner, (list, tuple, dict, int, float)) or owner is None:
        charge_size(args)
        charge_size(kwargs)
        if name in _THROUGH and not (name == "pop" and not args):
            spend(charge_size(owner) * (bits(length(owner)) if name == "sort" else 1))
        if owner is None or name in _OTHER_CALLS:
            return
    elif isinstance(owner, LoopContext) or getattr(type(owner), "__module__", "").startswith(("jinja2", "datetime")):
        return
    raise jinja2.exceptions.SecurityError(f"a chat template cannot call {name!r} of {type(owner).__name__}")


def _check_text_call(name: str, size: int, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> None:
    charge_size(args)
    if name in _BOTH:
        spend(size * max(map(length, args), default=0) // 16)
    if name == "encode" and not {str(value).lower() for value in (*args[:1], kwargs.get("encoding", "utf-8"))} <= _CODECS:
        raise jinja2.exceptions.SecurityError("a chat template encodes as UTF-8, ASCII or Latin-1 alone")


def check_format(form: str | bytes) -> None:
    """Refuse widths that one does not see to be small."""
    text = form if isinstance(form, str) else form.decode("latin-1")
    spend(len(text))
    if _WIDE.search(text):
        raise TemplateBudgetExceeded(f"a format without a bound on its width: {text:.40}")


def charge_filter(name: str, function: Callable[..., Any]) -> Callable[..., Any]:
    """A filter or test that takes the price of what it does from the budget first.

    What has no length yet, as what another filter gives one by one, is listed at the price of a step for each: no filter is
    handed what it could not be charged for.
    """
    skipped = 1 if hasattr(function, "jinja_pass_arg") else 0

    @wraps(function)
    def filtered(*args: Any, **kwargs: Any) -> Any:
        spend(STEP)
        if len(args) > skipped and (name in _ONE_BY_ONE or isinstance(args[skipped], Iterator)):
            args = (*args[:skipped], _priced(args[skipped], name in _ONE_BY_ONE), *args[skipped + 1 :])
        given = (*args[skipped:], *kwargs.values())
        size = charge_size(given) if name in _SERIALISING else sum(map(length, given))
        spend(size)
        if name in _GROWING:
            numbers = [abs(value) for value in given[1:] if isinstance(value, int)]
            text = given[0] if given else ""
            spend(_GROWING[name](text, max(numbers, default=0), sum(map(length, given[1:])), size))
            if name == "format" and isinstance(text, str):
                check_format(text)
        return function(*args, **kwargs)

    return filtered


def _priced(value: Any, one_by_one: bool) -> Any:
    if isinstance(value, Iterator):
        value = _counted(value, STEP)
        return value if one_by_one else list(value)
    spend(STEP * length(value))
    return value


def _sorting(value: Any, number: int, texts: int, size: int) -> float:
    return size * bits(_count(value))


# What a filter costs beyond being given its arguments, at most: the size of its result, and what it does more often than once
# for each character. By what it is given, the largest number beside it, the length of texts beside it, the size of all.
_GROWING: Mapping[str, Callable[[Any, int, int, int], float]] = {
    "center": lambda value, number, texts, size: number,
    "indent": lambda value, number, texts, size: (number + texts) * (1 + _lines(value)),
    # A word that is too long is cut off its rest a line at a time.
    "wordwrap": lambda value, number, texts, size: size * (8 + texts) * (1 + _longest(value) // (number or 79)),
    "replace": lambda value, number, texts, size: (_count(value) + 1) * texts,
    "join": lambda value, number, texts, size: _count(value) * texts,
    "batch": lambda value, number, texts, size: number,
    "slice": lambda value, number, texts, size: number,
    "tojson": lambda value, number, texts, size: size * (number + texts),
    "sum": lambda value, number, texts, size: size * (_count(value) if not _plain_numbers(value) else 1),
    "sort": _sorting,
    "dictsort": _sorting,
    "groupby": _sorting,
    "round": lambda value, number, texts, size: number * number,
    "format": lambda value, number, texts, size: size,
    # It looks for the end of brackets from each of them in a word; and each tag that is taken out copies the rest.
    "urlize": lambda value, number, texts, size: size * (12 + _longest(value)),
    "striptags": lambda value, number, texts, size: size * (4 + _tags(value) // 64),
    "pprint": lambda value, number, texts, size: size * 4,
    "title": lambda value, number, texts, size: size * 4,
    "truncate": lambda value, number, texts, size: 0,
}


def _longest(value: Any) -> int:
    """Characters of the longest word, or of the widest gap."""
    return max((len(run[0]) for run in _RUN.finditer(value)), default=0) if isinstance(value, str) else length(value)


def _tags(value: Any) -> int:
    return value.count("<") if isinstance(value, str) else 0


def _plain_numbers(value: Any) -> bool:
    return isinstance(value, (list, tuple)) and all(isinstance(item, (int, float)) for item in value)


def _lines(value: Any) -> int:
    return value.count("\n") if isinstance(value, str) else _count(value)


def _count(value: Any) -> int:
    return len(value) if isinstance(value, (str, list, tuple, Mapping, range)) else 1


def length(value: Any) -> int:
    """How many characters or items a value has; 0 for one without a length."""
    return len(value) if isinstance(value, (str, bytes, list, tuple, Mapping, range)) else 0


def repeat_count(value: Any) -> int:
    """How often a text is repeated by being multiplied with a value."""
    return max(value, 0) if isinstance(value, int) else 0


def bits(value: Any) -> int:
    """How large a whole number is."""
    return value.bit_length() if isinstance(value, int) else 1


def as_text(value: Any) -> Any:
    """What is written; a text as it is, the rest as `str` writes it."""
    if isinstance(value, str):
        spend(len(value))
    else:
        charge_size(value)
    return value


def _steps(values: Any, written: int) -> Any:
    """The values of a loop, each at its price; lists and dicts stay what they are, so that `loop` knows their length."""
    price = STEP + written
    if isinstance(values, (str, list, tuple, Mapping, range)):
        spend(len(values) * price)
        return values
    return _counted(values, price)


def _counted(values: Iterable[Any], price: int) -> Iterator[Any]:
    for value in values:
        spend(price)
        yield value


def _concat(values: tuple[Any, ...]) -> str:
    charge_size(values)
    return "".join(map(str, values))


def _weighed(value: Any) -> Any:
    charge_size(value)
    return value


def _searched(value: Any) -> Any:
    """What is gone through, each thing in it looked at once."""
    if not isinstance(value, Mapping):
        spend(length(value))
    return value


FILTERS: Mapping[str, Callable[..., Any]] = {
    "_steps": _steps,
    "_concat": _concat,
    "_weighed": _weighed,
    "_searched": _searched,
}
"""What `BudgetTransformer` puts into a template."""
