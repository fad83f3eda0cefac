"""A chat template is text from outside: it can neither hang nor fill the memory nor
reach what is not its own."""

from __future__ import annotations

import resource
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from functools import partial
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from jinja2.runtime import LoopContext, Undefined
from jinja2.sandbox import SandboxedEnvironment
from kit.cpu import own_cost

from turnwright.errors import TemplateError
from turnwright.renderers import ChatTemplate, template_sandbox
from turnwright.renderers.template_sandbox import TemplateSandbox, _Namespace
from turnwright.types import Message

TALK = [Message("user", "Hi"), Message("assistant", "Yes.", reasoning="So.")]
DOUBLING = "{% set n = namespace(x=X) %}{% for i in range(60) %}{% set n.x = STEP %}{% endfor %}"
LOOP = "{% set l = range(99999) | list %}{% for i in range(9999) %}BODY{% endfor %}"
HOSTILE = {
    "range": "{% for i in range(10**9) %}{% endfor %}",
    "loops in loops": "{% for i in range(99999) %}" * 3 + "{% endfor %}" * 3,
    "loops that write": "{% for i in range(99999) %}{% for j in range(999) %}"
    + "x" * 1000
    + "{% endfor %}{% endfor %}",
    "loops over a text": "{% for i in 'x' * 9999 %}{% for j in 'x' * 9999 %}{{ i + j "
    "}}{% endfor %}{% endfor %}",
    "recursive loop": "{% for i in [1, 2, 3] recursive %}{{ loop([1, 2, 3]) }}{% endfor %}",
    "text times": "{{ 'x' * 10**10 }}",
    "times text": "{{ 10**10 * 'x' }}",
    "times, not written": "{% set x = 'x' * 10**10 %}",
    "list times": "{% set x = [1] * 10**10 %}",
    "power": "{% set x = 10 ** (10 ** 10) %}",
    "product": DOUBLING.replace("X", "9**999").replace("STEP", "n.x * n.x"),
    "plus": DOUBLING.replace("X", "'x'").replace("STEP", "n.x + n.x") + "{{ n.x }}",
    "tilde": DOUBLING.replace("X", "'x'").replace("STEP", "n.x ~ n.x"),
    "list plus": DOUBLING.replace("X", "[1]").replace("STEP", "n.x + n.x"),
    "nested lists": DOUBLING.replace("X", "[1]").replace("STEP", "[n.x, n.x]") + "{{ n.x }}",
    "nested tuples": DOUBLING.replace("X", "(1,)").replace("STEP", "(n.x, n.x)")
    + "{{ n.x | string }}",
    "nested dicts": DOUBLING.replace("X", "{}").replace("STEP", "{'a': n.x, 'b': n.x}")
    + "{{ n.x | tojson }}",
    "deep list": "{% set n = namespace(x=[]) %}{% for i in range(5000) %}{% set n.x = [n.x] "
    "%}{% endfor %}{{ n.x }}",
    "lists filled later": (
        "{% set l = [[], []] %}{% for i in range(60) %}{% set n = [] %}{% set _ = "
        "l[-1].append(n) %}{% set _ = l[-1].append(n) %}{% set _ = l.append(n) %}{% endfor "
        "%}{{ l[1] | string }}"
    ),
    "compared": (
        "{% set a = [[]] %}{% set b = [[]] %}{% for i in range(60) %}{% for l in (a, b) "
        "%}{% set n = [] %}{% set _ = l[-1].append(n) %}{% set _ = l[-1].append(n) %}{% "
        "set _ = l.append(n) %}{% endfor %}{% endfor %}{{ a[0] == b[0] }}{{ a[0] is "
        "eq(b[0]) }}"
    ),
    "percent": "{{ '%1000000000s' % 'x' }}",
    "percent by name": "{{ '%(a)1000000000s' % {'a': 'x'} }}",
    "percent star": "{{ '%*s' % (10**10, 'x') }}",
    "percent precision": "{{ '%.1000000000f' % 1.0 }}",
    "format filter": "{{ '%1000000000s' | format('x') }}",
    "format": "{{ '{:1000000000}'.format('x') }}",
    "format nested": "{{ '{:{}}'.format('x', 10**10) }}",
    "format map": "{{ '{a:1000000000}'.format_map({'a': 'x'}) }}",
    "format kept": "{% set f = '{:{}}'.format %}{{ f('x', 10**10) }}",
    "many formats": "{{ ('{0}' * 9999).format('x' * 99999) }}",
    "center": "{{ 'x' | center(10**10) }}",
    "methods": "{{ 'x'.center(10**10) }}",
    "ljust": "{{ 'x'.ljust(10**10) }}",
    "zfill": "{{ 'x'.zfill(10**10) }}",
    "tabs": "{{ '\t'.expandtabs(10**10) }}",
    "replace": "{{ ('x' * 9999).replace('', 'x' * 99999) }}",
    "replace filter": "{{ ('x' * 9999) | replace('x', 'x' * 99999) }}",
    "join": "{{ (['x'] * 9999) | join('x' * 99999) }}",
    "join of one text": "{{ (['x' * 99999] * 99999) | join }}",
    "join method": "{{ ('x' * 99999).join('y' * 9999) }}",
    "translate": "{{ ('x' * 9999).translate({120: 'x' * 99999}) }}",
    "indent": "{{ ('x\n' * 9999) | indent(99999) }}",
    "indent text": "{{ ('x\n' * 9999) | indent('x' * 99999) }}",
    "json indent": "{{ [1, 2, 3] | tojson(indent=10**10) }}",
    "json indent text": "{{ ([1] * 9999) | tojson(indent='x' * 99999) }}",
    "batch": "{{ [1] | batch(10**10, 'x') | list }}",
    "slice": "{{ [1] | slice(10**10) | list }}",
    "wordwrap": "{{ ('x ' * 9999) | wordwrap(1, wrapstring='x' * 99999) }}",
    "wordwrap of one word": "{% set x = ('x' * 200000) | wordwrap(1) %}",
    "urlize": "{% set x = (')' * 30000 ~ 'q') | urlize %}",
    "striptags": "{% set x = ('<>' * 100000) | striptags %}",
    "join of what comes one by one": "{% set x = range(9999) | map('string') | join('x' * 99999) "
    "%}",
    "sum of what comes one by one": "{% set x = range(9999) | map('string') | map('list') | "
    "sum(start=[]) %}",
    "found by none": LOOP.replace("BODY", "{% set x = range(999) | select('none') | first %}"),
    "found in a list": LOOP.replace("BODY", "{% if 'x' in l %}{% endif %}"),
    "found in a list by a method": LOOP.replace("BODY", "{% set x = l.count('x') %}"),
    "sorted": LOOP.replace("BODY", "{% set x = l.sort() %}"),
    "slices": LOOP.replace("BODY", "{% set x = l[1:] %}"),
    "stripped of many": "{% for i in range(30) %}{% set x = ('x' * 99999).strip('y' * 99999 ~ "
    "'x') %}{% endfor %}",
    "ends looked for": "{% set t = 'a' * 99999 %}{% for i in range(300) %}{% set x = "
    "t.rfind('b' ~ 'a' * 40000) %}{% endfor %}",
    "beginnings looked for": "{% set s = ('y',) * 99999 %}{% for i in range(999) %}{% set x "
    "= 'x'.startswith(s) %}{% endfor %}",
    "punycode": "{% set x = TEXT.encode('punycode') %}".replace(
        "TEXT", repr("".join(map(chr, range(5000, 9000))))
    ),
    "sum": "{{ ([[1] * 999] * 9999) | sum(start=[]) | length }}",
    "round": "{{ 1.5 | round(10**9) }}",
    "bytes": "{{ (1).to_bytes(10**10) }}",
    "macro": "{% macro m() %}{{ m() }}{{ m() }}{% endmacro %}{{ m() }}",
    "macros that double": "{% macro m0() %}x{% endmacro %}"
    + "".join(
        f"{{% macro m{i + 1}() %}}{{{{ m{i}() ~ m{i}() }}}}{{% endmacro %}}" for i in range(60)
    )
    + "{{ m60() }}",
    "lipsum": "{{ lipsum(n=10**9) }}",
    "cycler": "{% set c = cycler(*range(9)) %}"
    + "{% for i in range(99999) %}" * 2
    + "{{ c.next() }}"
    + "{% endfor %}" * 2,
    "clock": "{{ strftime_now('%99999999d') }}",
    "constants": "{% if 'x' * 10**10 == 'y' %}{% endif %}",
    "digits": "{{ " + "9" * 5000 + " }}",
    "parentheses": "{{ " + "(" * 5000 + "1" + ")" * 5000 + " }}",
    "blocks": "{% if true %}" * 5000,
    "loops nested": "{% for i in [1] %}" * 60 + "{% endfor %}" * 60,
    "internals": "{{ messages.__class__.__mro__ }}{{ "
    "''.__class__.__mro__[1].__subclasses__()[0] }}",
    "namespace": "{% set n = namespace() %}{% set n.__class__ = 1 %}",
    "include": "{% include '/etc/passwd' %}",
    "import": "{% import 'os' as os %}{{ os.getcwd() }}",
    "message": "{{ raise_exception('x' * 1000000) }}",
}


@pytest.fixture(autouse=True)
def _bounded():
    """No test may take more than 2 GiB more than what is in use."""
    soft, hard = resource.getrlimit(resource.RLIMIT_AS)
    pages = int(Path("/proc/self/statm").read_text().split()[0])
    resource.setrlimit(resource.RLIMIT_AS, (pages * resource.getpagesize() + (2 << 30), hard))
    yield
    resource.setrlimit(resource.RLIMIT_AS, (soft, hard))


@contextmanager
def a_tenth_of_the_budget() -> Iterator[None]:
    """Used up in a tenth of the time."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(
            template_sandbox,
            "render_budget",
            partial(template_sandbox.render_budget, template_sandbox.WORK // 10),
        )
        yield


def refused_within(name: str, seconds: float) -> None:
    with own_cost() as cost, pytest.raises(TemplateError) as caught:
        ChatTemplate(HOSTILE[name], origin="t").render(TALK)
    assert cost.seconds < seconds
    assert not isinstance(caught.value.__cause__, MemoryError), "the memory was what stopped it"
    assert len(str(caught.value)) < 1000


@pytest.mark.parametrize("name", HOSTILE)
def test_a_hostile_template_is_refused_soon(name: str) -> None:
    with a_tenth_of_the_budget():
        refused_within(name, 2)


@pytest.mark.parametrize("name", ["loops that write", "nested lists", "sorted"])
def test_by_the_budget_that_templates_have(name: str) -> None:
    refused_within(name, 20)


def test_a_long_conversation_is_no_hostile_one() -> None:
    from turnwright.renderers import template_source

    talk = [
        Message("user", "word " * 200),
        Message("assistant", "Yes. " * 100, reasoning="So. " * 100),
    ] * 500
    for name in ("chatml", "qwen3_with_thinking", "qwen3_without_thinking"):
        assert len(ChatTemplate(template_source(name)).render(talk)) > 500_000


ROW = {"role": "user", "items": 1, "format": 2, "_private": 3, "__class__": 4}
OBJECTS = [
    ROW,
    {},
    "text",
    ["x"],
    ("x",),
    9,
    LoopContext(["x", "y"], Undefined),
    _Namespace(x=1),
    print,
    [].append,
    dict,
]


@pytest.mark.parametrize("value", OBJECTS, ids=lambda value: type(value).__name__)
def test_an_attribute_is_that_of_jinja_s_sandbox(value: object) -> None:
    """Those of messages are looked up faster, and no other is let through."""
    ours, theirs = TemplateSandbox(str), SandboxedEnvironment()
    names = {
        *dir(value),
        *dir(dict),
        *ROW,
        "missing",
        "_missing",
        "__missing__",
        "mro",
        "x",
        "index",
        "gi_frame",
        "__code__",
    }
    for name in sorted(names):
        mine, other = ours.getattr(value, name), theirs.getattr(value, name)
        assert type(mine) is type(other), name
        if isinstance(mine, Undefined):
            assert (mine._undefined_exception, mine._undefined_message) == (
                other._undefined_exception,
                other._undefined_message,
            )
        elif name not in ("format", "format_map"):  # a new wrapper each time
            assert mine == other, name


PIECES = """n.x; 'x'; [n.x]; (n.x, n.x); {'a': n.x}; 9; n.x + n.x; n.x * 9; n.x ~ n.x; n.x | string; n.x | list; n.x | tojson
n.x | join(n.x); n.x | replace('x', n.x); n.x.join(n.x); n.x | indent(9); [n.x] * 99; n.x | length; n.x | sum(start=[])
n.x == [n.x]; '%s%s' % (n.x, n.x); '{0}{0}'.format(n.x); n.x | upper; dict(a=n.x, b=n.x); n.x | map('string') | list
n.x | batch(9, n.x) | list; n.x | center(999); n.x.split('x'); n.x | unique | list""".replace(  # noqa: E501
    "\n", "; "
).split("; ")


@settings(max_examples=60, deadline=None)
@given(
    st.lists(st.sampled_from(PIECES), min_size=1, max_size=6),
    st.sampled_from(["'x'", "['x']", "9", "'x' * 999"]),
)
def test_whatever_is_done_forty_times_over_ends(steps: list[str], start: str) -> None:
    body = "".join(f"{{% set n.x = {step} %}}" for step in steps)
    source = (
        f"{{% set n = namespace(x={start}) %}}{{% for i in range(40) %}}{body}{{% endfor "
        "%}{{ n.x }}"
    )
    with a_tenth_of_the_budget(), own_cost() as cost, suppress(TemplateError):
        ChatTemplate(source).render(TALK)
    assert cost.seconds < 2
