"""Jinja as chat templates are run: transformers' names and filters, a sandbox, and a bound on work and size.

A chat template is text from outside. Jinja's sandbox keeps it from Python's internals but not from hanging or from filling the
memory (`'x' * 10**10`, nested loops, a list that holds itself twice), so whatever can take long or grow takes from a budget of
work in proportion, before it is done; when that is used up the rendering ends. The count depends on nothing but template and
conversation, so what is refused is refused everywhere.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from functools import lru_cache
from types import CodeType
from typing import Any, cast

import jinja2
from jinja2 import nodes
from jinja2.ext import Extension, loopcontrols
from jinja2.runtime import Macro
from jinja2.sandbox import SandboxedEnvironment
from jinja2.utils import Namespace

from turnwise.render.metered import (
    CALL,
    FILTERS,
    STEP,
    BudgetTransformer,
    as_text,
    bits,
    charge_filter,
    charge_size,
    check_call,
    check_format,
    length,
    repeat_count,
    spend,
)

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
