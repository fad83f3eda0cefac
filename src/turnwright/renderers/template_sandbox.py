"""Jinja sandbox for chat templates, with transformers' names and filters and a budget of work and
size.

Chat templates are untrusted. Jinja's sandbox protects Python's internals, but does not stop a
template from hanging or filling the memory (`'x' * 10**10`, nested loops, a list that contains
itself twice). So every operation that can take long or grow is charged to a budget before it runs;
rendering ends when the budget is used up. The charge depends only on template and conversation, so
a rejected rendering is rejected on every machine.

Charged are: calls (`check_call`), filters and tests (`charge_filter`), operators
(`TemplateSandbox.call_binop`), what is written (`as_text`), and what the environment cannot
intercept, by filters that `BudgetTransformer` puts into the syntax tree. Messages are plain values
here; `ChatTemplate` reduces them to that.
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


def names_in(words: str) -> frozenset[str]:
    """Return the names in a text, separated by white space."""
    return frozenset(words.split())


WORK = 100_000_000
"""Work units of one rendering, which take a few seconds at most: one per character, `STEP` per loop
step."""
STEP = 40
"""Units of a loop step, or of a filter."""
CALL = 200
"""Units of a call."""
_ITEM = 10
"""Units of an item of a list or dict."""
_MAX_DEPTH = 100
_CONTAINERS = frozenset((list, tuple, dict))
_DICT_ATTRIBUTES = frozenset(dir(dict))
_WIDE = re.compile(
    r"[0-9]{5,}|%(?:[^a-zA-Z%*]*+|[^a-zA-Z%*(]*+\([^()]*+\)[^a-zA-Z%*]*+)\*|\{[^{}]*+\{"
)
"""Unbounded widths in a format: five digits or more, or given by an argument."""
_RUN = re.compile(r"\s+|\S+")
_CODECS = names_in("utf-8 utf8 ascii latin-1")
_TEXT_CALLS = names_in(
    "capitalize casefold count encode endswith find index isalnum isalpha isascii isdecimal "
    "isdigit islower isnumeric isspace istitle isupper lower lstrip partition removeprefix "
    "removesuffix rfind rindex rpartition rsplit rstrip split splitlines startswith strip "
    "swapcase title upper"
)
"""Text methods with a result no larger than their arguments."""
_BOTH = names_in("strip lstrip rstrip rfind rindex rsplit rpartition")
"""Text methods that may compare each character of the text with each of an argument."""
_PADDING = names_in("center ljust rjust zfill expandtabs")
"""Text methods whose result is as wide as an argument says."""
_OTHER_CALLS = names_in(
    "append copy count extend fromkeys get index insert items keys pop popitem remove reverse "
    "setdefault sort update values bit_length is_integer clear isoformat strftime"
)
_THROUGH = names_in("copy count index insert pop remove reverse sort update")
"""List and dict methods that visit every item."""
_ONE_BY_ONE = names_in("map select reject selectattr rejectattr first")
"""Filters that take values one by one, on demand."""
_SERIALISING = names_in(
    "tojson string pprint join replace indent sum sort unique dictsort groupby min max xmlattr "
    "urlize escape e forceescape wordwrap list center format batch slice"
)
"""Filters that visit all of a nested value."""

_left: ContextVar[list[float]] = ContextVar("_left")


class TemplateBudgetExceeded(jinja2.TemplateRuntimeError):
    """Raised when a template exceeds its work budget."""


@contextmanager
def render_budget(units: int = WORK) -> Iterator[None]:
    """Set the work budget for rendering in the body."""
    token = _left.set([units])
    try:
        yield
    finally:
        _left.reset(token)


def spend(units: float) -> None:
    """Charge units to the budget. Raises `TemplateBudgetExceeded` if the budget is used up."""
    left = _left.get(None)
    if left is None:
        return
    left[0] -= units
    if left[0] < 0:
        raise TemplateBudgetExceeded(
            f"the template does too much work or writes too much text (over {WORK:,} units); it is "
            "not used"
        )


def charge_size(value: Any, depth: int = 0) -> int:
    """Charge the size of a nested value while measuring it: its characters, and `_ITEM` per
    item."""
    kind = type(value)
    if kind is str:
        size = len(value) + _ITEM
    elif kind is int:
        size = value.bit_length() // 3 + _ITEM
    elif kind in _CONTAINERS or isinstance(value, (Mapping, list, tuple, set, frozenset)):
        if depth > _MAX_DEPTH:
            raise TemplateBudgetExceeded("the template nests lists too deep")
        items: Iterable[Any] = value
        if isinstance(value, Mapping):
            items = chain.from_iterable(value.items())
        text_size = 0
        size = _ITEM
        for item in items:
            if type(item) is str:  # most items; a call for each would take most of the time
                text_size += len(item) + _ITEM
            else:
                size += charge_size(item, depth + 1)
        spend(2 * _ITEM + text_size)
        return size + text_size
    else:
        size = len(value) + _ITEM if isinstance(value, str) else _ITEM
    spend(size)
    return size


class BudgetTransformer(NodeTransformer):
    """Charges operations that the environment cannot intercept: loop steps, joined texts, new lists
    and dicts."""

    def visit_For(self, node: nodes.For) -> nodes.Node:
        self.generic_visit(node)
        written = 0
        for part in node.body:
            written += sum(len(data.data) for data in part.find_all(nodes.TemplateData))
        node.iter = _filtered(node.iter, "_steps", nodes.Const(written))
        return node

    def visit_Concat(self, node: nodes.Concat) -> nodes.Node:
        self.generic_visit(node)
        return _filtered(nodes.Tuple(node.nodes, "load").set_lineno(node.lineno), "_concat")

    def visit_List(self, node: nodes.List | nodes.Dict) -> nodes.Node:
        self.generic_visit(node)
        values = node.items if isinstance(node, nodes.List) else [pair.value for pair in node.items]
        if all(isinstance(value, nodes.Const) for value in values):
            return node
        return _filtered(node, "_charged")

    visit_Dict = visit_List

    def visit_Tuple(self, node: nodes.Tuple) -> nodes.Node:
        self.generic_visit(node)
        return node if node.ctx != "load" else _filtered(node, "_charged")

    def visit_Compare(self, node: nodes.Compare) -> nodes.Node:
        self.generic_visit(node)
        compared = [node.expr, *[operand.expr for operand in node.ops]]
        if not any(isinstance(expression, nodes.Const) for expression in compared):
            node.expr = _filtered(node.expr, "_charged")
            for operand in node.ops:
                operand.expr = _filtered(operand.expr, "_charged")
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
    """Return an expression with a filter applied to it."""
    filtered = nodes.Filter(cast(nodes.Expr, node), name, list(args), [], None, None)
    filtered.set_lineno(node.lineno)
    return filtered


def check_call(function: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> None:
    """Charge a call to the budget.

    Raises `SecurityError` for calls that no chat template makes and whose cost is unknown.
    """
    spend(CALL)
    owner = getattr(function, "__self__", None)
    name = getattr(function, "__name__", "")
    if isinstance(owner, (str, bytes)):
        is_known = _charge_text_call(owner, name, args, kwargs)
    elif isinstance(owner, (list, tuple, dict, int, float)) or owner is None:
        charge_size(args)
        charge_size(kwargs)
        takes_last = name == "pop" and not args
        if name in _THROUGH and not takes_last:
            passes = bits(length(owner)) if name == "sort" else 1
            spend(charge_size(owner) * passes)
        is_known = owner is None or name in _OTHER_CALLS
    else:
        module = getattr(type(owner), "__module__", "")
        is_known = isinstance(owner, LoopContext) or module.startswith(("jinja2", "datetime"))
    if not is_known:
        raise jinja2.exceptions.SecurityError(
            f"a chat template cannot call {name!r} of {type(owner).__name__}"
        )


def _charge_text_call(
    owner: Any, name: str, args: tuple[Any, ...], kwargs: Mapping[str, Any]
) -> bool:
    """Charge a call of a text's method; return whether its cost is known."""
    size = len(owner)
    spend(size)
    if name in _TEXT_CALLS or name == "formatted":
        _check_text_call(name, size, args, kwargs)
        return True
    if name == "replace" and len(args) > 1:
        old, new = args[:2]
        if isinstance(old, str) and isinstance(new, str):
            spend(owner.count(old) * len(new))
            return True
    if name == "join" and args and isinstance(args[0], (str, list, tuple, Mapping)):
        charge_size(args[0])
        spend(len(args[0]) * size)
        return True
    if name in _PADDING and args and isinstance(args[0], int):
        columns = 1 + owner.count("\t") if name == "expandtabs" else 1
        spend(abs(args[0]) * columns)
        return True
    return False


def _check_text_call(
    name: str, size: int, args: tuple[Any, ...], kwargs: Mapping[str, Any]
) -> None:
    charge_size(args)
    if name in _BOTH:
        spend(size * max(map(length, args), default=0) // 16)
    if name == "encode":
        encodings = (*args[:1], kwargs.get("encoding", "utf-8"))
        if not _CODECS.issuperset(str(encoding).lower() for encoding in encodings):
            raise jinja2.exceptions.SecurityError(
                "a chat template can encode only as UTF-8, ASCII or Latin-1"
            )


def check_format(form: str | bytes) -> None:
    """Reject formats whose widths may be large."""
    text = form if isinstance(form, str) else form.decode("latin-1")
    spend(len(text))
    if _WIDE.search(text):
        raise TemplateBudgetExceeded(f"a format with an unbounded width: {text:.40}")


def charge_filter(name: str, function: Callable[..., Any]) -> Callable[..., Any]:
    """Wrap a filter or test so that it charges its work first.

    Iterators without a length, such as the results of other filters, become lists, charged per
    item. So every argument has a known size.
    """
    # Jinja passes its context or environment to some, before the value.
    skipped = 1 if hasattr(function, "jinja_pass_arg") else 0
    is_one_by_one = name in _ONE_BY_ONE

    @wraps(function)
    def filtered(*args: Any, **kwargs: Any) -> Any:
        spend(STEP)
        if len(args) > skipped and (is_one_by_one or isinstance(args[skipped], Iterator)):
            value = args[skipped]
            if isinstance(value, Iterator):
                value = _counted(value, STEP) if is_one_by_one else list(_counted(value, STEP))
            else:
                spend(STEP * length(value))
            args = (*args[:skipped], value, *args[skipped + 1 :])

        arguments = (*args[skipped:], *kwargs.values())
        size = charge_size(arguments) if name in _SERIALISING else sum(map(length, arguments))
        spend(size)

        if name in _GROWING:
            value = arguments[0] if arguments else ""
            numbers = [abs(number) for number in arguments[1:] if isinstance(number, int)]
            largest = max(numbers, default=0)
            text_size = sum(map(length, arguments[1:]))
            spend(_GROWING[name](value, largest, text_size, size))
            if name == "format" and isinstance(value, str):
                check_format(value)
        return function(*args, **kwargs)

    return filtered


# Maximum cost of a filter beyond reading its arguments: the size of its result, and repeated work
# per character. Computed from its value, the largest number argument, the length of its text
# arguments, and the size of all arguments.
_GROWING: Mapping[str, Callable[[Any, int, int, int], float]] = {
    **dict.fromkeys(("center", "batch", "slice"), lambda value, number, texts, size: number),
    "indent": lambda value, number, texts, size: (
        (number + texts) * (1 + (value.count("\n") if isinstance(value, str) else _count(value)))
    ),
    # A word that is too long is split line by line.
    "wordwrap": lambda value, number, texts, size: (
        size * (8 + texts) * (1 + _longest(value) // (number or 79))
    ),
    "replace": lambda value, number, texts, size: (_count(value) + 1) * texts,
    "join": lambda value, number, texts, size: _count(value) * texts,
    "tojson": lambda value, number, texts, size: size * (number + texts),
    "sum": lambda value, number, texts, size: size * (1 if _are_numbers(value) else _count(value)),
    **dict.fromkeys(
        ("sort", "dictsort", "groupby"),
        lambda value, number, texts, size: size * bits(_count(value)),
    ),
    "round": lambda value, number, texts, size: number * number,
    "format": lambda value, number, texts, size: size,
    # It searches the end of brackets from each of them in a word; each removed tag copies the rest.
    "urlize": lambda value, number, texts, size: size * (12 + _longest(value)),
    "striptags": lambda value, number, texts, size: (
        size * (4 + (value.count("<") if isinstance(value, str) else 0) // 64)
    ),
    **dict.fromkeys(("pprint", "title"), lambda value, number, texts, size: size * 4),
    "truncate": lambda value, number, texts, size: 0,
}


def _longest(value: Any) -> int:
    """Return the length of the longest word or gap."""
    if not isinstance(value, str):
        return length(value)
    return max((len(run[0]) for run in _RUN.finditer(value)), default=0)


def _are_numbers(value: Any) -> bool:
    if not isinstance(value, (list, tuple)):
        return False
    return all(isinstance(item, (int, float)) for item in value)


def _count(value: Any) -> int:
    return len(value) if isinstance(value, (str, list, tuple, Mapping, range)) else 1


def length(value: Any) -> int:
    """Return the number of characters or items of a value; 0 for one without a length."""
    return len(value) if isinstance(value, (str, bytes, list, tuple, Mapping, range)) else 0


def bits(value: Any) -> int:
    """Return the number of bits of an integer."""
    return value.bit_length() if isinstance(value, int) else 1


def as_text(value: Any) -> Any:
    """Charge a value that is written to the output."""
    if isinstance(value, str):
        spend(len(value))
    else:
        charge_size(value)
    return value


def _steps(values: Any, written: int) -> Any:
    """Charge the values of a loop; lists and dicts keep their type, so that `loop` knows their
    length."""
    if not isinstance(values, (str, list, tuple, Mapping, range)):
        return _counted(values, STEP + written)
    spend(len(values) * (STEP + written))
    return values


def _counted(values: Iterable[Any], price: int) -> Iterator[Any]:
    for value in values:
        spend(price)
        yield value


def _concat(values: tuple[Any, ...]) -> str:
    charge_size(values)
    return "".join(map(str, values))


def _charged(value: Any) -> Any:
    charge_size(value)
    return value


def _searched(value: Any) -> Any:
    """Charge a search through a value."""
    if not isinstance(value, Mapping):
        spend(length(value))
    return value


_MAX_FREE_BITS = 10_000
"""Bits of an integer product whose cost is negligible."""


class _Dict:
    """`dict(...)` without its class."""

    def __call__(self, *args: Any, **kwargs: Any) -> dict[Any, Any]:
        return dict(*args, **kwargs)

    def fromkeys(self, *args: Any) -> dict[Any, Any]:
        return dict.fromkeys(*args)


class _Namespace(Namespace):
    """Namespace without attributes that start with an underscore."""

    def __init__(*args: Any, **kwargs: Any) -> None:
        self, rest = args[0], args[1:]
        attributes = dict(*rest, **kwargs)
        for name in attributes:
            _check_name(name)
        Namespace.__init__(self, attributes)

    def __setitem__(self, name: str, value: Any) -> None:
        _check_name(name)
        super().__setitem__(name, value)


def _check_name(name: Any) -> None:
    if isinstance(name, str) and name.startswith("_"):
        raise jinja2.exceptions.SecurityError(
            f"a namespace cannot contain {name!r}: rename the attribute"
        )


class _Generation(Extension):
    """Parses `{% generation %}`, which encloses the assistant's text; writes marks around it if
    requested."""

    tags = {"generation"}  # noqa: RUF012 - jinja2 declares it so

    def parse(self, parser: Any) -> nodes.Node | list[nodes.Node]:
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        scope = nodes.Scope(body).set_lineno(line)
        environment = self.environment
        marks = environment.generation_marks if isinstance(environment, TemplateSandbox) else None
        if marks is None:
            return scope
        begin, end = (nodes.Output([nodes.TemplateData(mark)]).set_lineno(line) for mark in marks)
        return [begin, scope, end]


_COMPARING_TESTS = names_in("== eq equalto != ne > gt < lt >= ge <= le in")
"""Tests that compare all of two values."""
_BY_NAME = frozenset((str, list, dict, LoopContext, _Namespace))


class TemplateSandbox(SandboxedEnvironment):
    """Jinja's sandbox with a budget; not the immutable one, because templates modify lists that
    they create."""

    intercepted_binops = frozenset(("+", "*", "**", "%"))

    def __init__(
        self, strftime: Callable[[str], str], marks: tuple[str, str] | None = None
    ) -> None:
        """`marks` are texts to write before and after each `{% generation %}` block."""
        super().__init__(
            trim_blocks=True,
            lstrip_blocks=True,
            extensions=[_Generation, loopcontrols],
            optimized=False,  # constants are evaluated while rendering, under the budget
            finalize=as_text,
        )
        self.generation_marks = marks

        def refuse(message: str) -> None:
            raise jinja2.TemplateError(message)

        def formatted(form: str) -> str:
            check_format(form)
            return strftime(form)

        self.filters["tojson"] = _to_json
        self.filters: dict[str, Any] = {
            name: charge_filter(name, function) for name, function in self.filters.items()
        }
        # Those that `BudgetTransformer` adds to a template.
        self.filters |= {
            "_steps": _steps,
            "_concat": _concat,
            "_charged": _charged,
            "_searched": _searched,
        }
        for name in _COMPARING_TESTS:
            self.tests[name] = charge_filter("sort", cast(Any, self.tests[name]))
        self.globals |= {
            "raise_exception": refuse,
            "strftime_now": formatted,
            "dict": _Dict(),
            "namespace": _Namespace,
        }
        del self.globals["lipsum"]  # random, and without bounds

    def _parse(self, source: str, name: str | None, filename: str | None) -> nodes.Template:
        tree: nodes.Template = BudgetTransformer().visit(super()._parse(source, name, filename))
        self._text = sum(len(data.data) for data in tree.find_all(nodes.TemplateData))
        return tree

    def template(self, source: str) -> jinja2.Template:
        """Compile a template, or reuse its compiled code, which depends on the source alone."""
        if self.generation_marks is not None:
            return self.from_string(source)
        code, self._text = _compiled(source)
        return self.template_class.from_code(self, code, self.make_globals(None))

    def getattr(self, obj: Any, attribute: str) -> Any:
        """Return an attribute or item as Jinja does; for messages, which are dicts, without an
        `AttributeError` first."""
        if type(obj) is not dict or attribute in _DICT_ATTRIBUTES:
            return super().getattr(obj, attribute)
        return obj[attribute] if attribute in obj else self.undefined(obj=obj, name=attribute)

    def is_safe_attribute(self, obj: Any, attr: str, value: Any) -> bool:
        """Return whether a template may read an attribute; of these types, Jinja examines the name
        alone."""
        if type(obj) in _BY_NAME:
            return not attr.startswith("_")
        return super().is_safe_attribute(obj, attr, value)

    def call_binop(self, context: Any, operator: str, left: Any, right: Any) -> Any:
        if operator == "+":
            spend(STEP // 4 + length(left) + length(right))
            return self.binop_table[operator](left, right)

        spend(STEP // 4)
        if operator == "*":
            # Integers multiply, and texts and lists are repeated.
            left_bits, right_bits = bits(left), bits(right)
            product_bits = left_bits + right_bits
            if product_bits > _MAX_FREE_BITS:
                product_bits = left_bits * right_bits
            left_count = max(left, 0) if isinstance(left, int) else 0
            right_count = max(right, 0) if isinstance(right, int) else 0
            spend(length(left) * right_count + length(right) * left_count + product_bits)
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
        wrapped = super().wrap_str_format(value)
        if wrapped is None:
            return None
        form: str = value.__self__

        def formatted(*args: Any, **kwargs: Any) -> str:
            check_format(form)
            spend((charge_size(args) + charge_size(kwargs)) * (1 + form.count("{")))
            return wrapped(*args, **kwargs)

        # So that it is charged as a text's method.
        formatted.__self__ = ""  # type: ignore[attr-defined]
        return formatted


@lru_cache(maxsize=256)
def _compiled(source: str) -> tuple[CodeType, int]:
    """Return a template's code, and the number of characters of its own text."""
    environment = TemplateSandbox(str)
    return environment.compile(source), environment._text


def _to_json(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: Any = None,
    sort_keys: bool = False,
) -> str:
    return json.dumps(
        value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys
    )
