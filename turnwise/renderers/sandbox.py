"""Jinja sandbox with a work and size budget.

Jinja as chat templates are run: transformers' names and filters, a sandbox, and a bound on work and size.

A chat template is text from outside. Jinja's sandbox keeps it from Python's internals but not from hanging or from filling the
memory (`'x' * 10**10`, nested loops, a list that holds itself twice), so whatever can take long or grow takes from a budget of
work in proportion, before it is done; when that is used up the rendering ends. The count depends on nothing but template and
conversation, so what is refused is refused everywhere.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from functools import lru_cache, wraps
from itertools import chain
from types import CodeType
from typing import Any, cast

import jinja2
from jinja2 import nodes
from jinja2.ext import Extension, loopcontrols
from jinja2.runtime import LoopContext, Macro
from jinja2.sandbox import SandboxedEnvironment
from jinja2.utils import Namespace
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


_MOST_BITS = 10_000
"""Of a product of whole numbers, whose cost is negligible."""


class _Dict:
    """`dict(...)` without the class behind it."""

    def __call__(self, *args: Any, **kwargs: Any) -> dict[Any, Any]:
        return dict(*args, **kwargs)

    def fromkeys(self, *args: Any) -> dict[Any, Any]:
        return dict.fromkeys(*args)


class _Namespace(Namespace):
    """A namespace whose attributes do not begin with an underscore."""

    def __init__(*args: Any, **kwargs: Any) -> None:
        self, rest = args[0], args[1:]
        attributes = dict(*rest, **kwargs)
        for name in attributes:
            _check_name(name)
        Namespace.__init__(self, attributes)

    def __setitem__(self, name: str, value: Any) -> None:
        _check_name(name)
        super().__setitem__(name, value)


def _product(left: int, right: int) -> int:
    return left * right if left + right > _MOST_BITS else left + right


def _check_name(name: Any) -> None:
    if isinstance(name, str) and name.startswith("_"):
        raise jinja2.exceptions.SecurityError(f"a namespace cannot hold {name!r}: rename the attribute")


class _Generation(Extension):
    """Reads `{% generation %}`, which marks the assistant's part; where marks are asked for, they are written around it."""

    tags = {"generation"}  # noqa: RUF012 - jinja2 declares it so

    def parse(self, parser: Any) -> nodes.Node | list[nodes.Node]:
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        scope = nodes.Scope(body).set_lineno(line)
        marks = self.environment.generation_marks if isinstance(self.environment, TemplateSandbox) else None
        if marks is None:
            return scope
        begin, end = (nodes.Output([nodes.TemplateData(one)]).set_lineno(line) for one in marks)
        return [begin, scope, end]


class TemplateSandbox(SandboxedEnvironment):
    """Jinja's sandbox with a budget; not the immutable one: templates fill lists of their own, made anew for each rendering."""

    intercepted_binops = frozenset(("+", "*", "**", "%"))

    def __init__(self, strftime: Callable[[str], str], marks: tuple[str, str] | None = None) -> None:
        """
        Args:
            strftime: what `strftime_now` calls.
            marks: written before and behind what stands in `{% generation %}`.
        """
        super().__init__(
            trim_blocks=True,
            lstrip_blocks=True,
            extensions=[_Generation, loopcontrols],
            optimized=False,  # constants are worked out while rendering, under the budget
            finalize=as_text,
        )
        self.generation_marks = marks

        def refuse(message: str) -> None:
            raise jinja2.TemplateError(message)

        def formatted(form: str) -> str:
            check_format(form)
            return strftime(form)

        self.filters["tojson"] = _to_json
        self.filters: dict[str, Any] = {name: charge_filter(name, function) for name, function in self.filters.items()}
        self.filters |= FILTERS
        for name in ("==", "eq", "equalto", "!=", "ne", ">", "gt", "<", "lt", ">=", "ge", "<=", "le", "in"):
            self.tests[name] = charge_filter("sort", cast(Any, self.tests[name]))
        self.globals |= {"raise_exception": refuse, "strftime_now": formatted, "dict": _Dict(), "namespace": _Namespace}
        del self.globals["lipsum"]  # random, and without bounds

    def _parse(self, source: str, name: str | None, filename: str | None) -> nodes.Template:
        tree: nodes.Template = BudgetTransformer().visit(super()._parse(source, name, filename))
        self._text = sum(len(data.data) for data in tree.find_all(nodes.TemplateData))
        return tree

    def template(self, source: str) -> jinja2.Template:
        """Compile a template, or take what compiling it in another environment came to: that depends on its source alone."""
        if self.generation_marks is not None:
            return self.from_string(source)
        code, self._text = _compiled(source)
        return self.template_class.from_code(self, code, self.make_globals(None))

    def call_binop(self, context: Any, operator: str, left: Any, right: Any) -> Any:
        spend(STEP // 4)
        if operator == "+":
            spend(length(left) + length(right))
        elif operator == "*":
            spend(length(left) * repeat_count(right) + length(right) * repeat_count(left) + _product(bits(left), bits(right)))
        elif operator == "**":
            spend(bits(left) * abs(right) if isinstance(right, int) else 1)
        elif isinstance(left, (str, bytes)):
            check_format(left)
            charge_size(right)
        return super().call_binop(context, operator, left, right)

    def call(__self, __context: Any, __obj: Any, *args: Any, **kwargs: Any) -> Any:
        if isinstance(__obj, Macro):
            spend(CALL + __self._text)
        else:
            check_call(__obj, args, kwargs)
        return super().call(__context, __obj, *args, **kwargs)

    def wrap_str_format(self, value: Any) -> Callable[..., str] | None:
        found = super().wrap_str_format(value)
        if found is None:
            return None
        form: str = value.__self__

        def formatted(*args: Any, **kwargs: Any) -> str:
            check_format(form)
            spend((charge_size(args) + charge_size(kwargs)) * (1 + form.count("{")))
            return found(*args, **kwargs)

        formatted.__self__ = ""  # type: ignore[attr-defined]  # so that it is called as a method of text
        return formatted


@lru_cache(maxsize=256)
def _compiled(source: str) -> tuple[CodeType, int]:
    """Return the code of a template, and the characters of its own text."""
    environment = TemplateSandbox(str)
    return environment.compile(source), environment._text


def _to_json(
    value: Any, ensure_ascii: bool = False, indent: int | None = None, separators: Any = None, sort_keys: bool = False
) -> str:
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)
