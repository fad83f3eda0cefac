"""Properties of arguments: whatever a model gives, a tool sees only what its hints say, and the
model is told of the rest."""

import asyncio
import json
from dataclasses import dataclass
from enum import Enum
from typing import Any, Literal, TypedDict

import pytest
from hypothesis import given
from hypothesis import strategies as st

from turnwright.envs.tools.tool import Tools
from turnwright.envs.tools.tool_schema import InvalidArguments, tool_signature
from turnwright.types import ToolCall

JSON = st.recursive(
    st.none()
    | st.booleans()
    | st.integers()
    | st.floats(allow_nan=False)
    | st.text(max_size=5)
    | st.sampled_from(["up", "red"]),
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.dictionaries(st.sampled_from(["x", "y", "title", "z"]), inner, max_size=3)
    ),
    max_leaves=6,
)


class Colour(Enum):
    RED = "red"


@dataclass
class Point:
    x: int
    y: float = 0.0


class Card(TypedDict):
    title: str


HINTS: dict[str, tuple[Any, Any, st.SearchStrategy]] = {
    "str": (str, lambda v: type(v) is str, st.text(max_size=5)),
    "int": (int, lambda v: type(v) is int, st.integers()),
    "float": (
        float,
        lambda v: type(v) is float,
        st.floats(allow_nan=False, allow_infinity=False) | st.integers(-9, 9),
    ),
    "bool": (bool, lambda v: type(v) is bool, st.booleans()),
    "literal": (
        Literal["up", "down"],
        lambda v: v in ("up", "down"),
        st.sampled_from(["up", "down"]),
    ),
    "enum": (Colour, lambda v: isinstance(v, Colour), st.just("red")),
    "list": (
        list[int],
        lambda v: type(v) is list and all(type(i) is int for i in v),
        st.lists(st.integers(), max_size=3),
    ),
    "dict": (
        dict[str, int],
        lambda v: type(v) is dict and all(type(i) is int for i in v.values()),
        st.dictionaries(st.text(max_size=3), st.integers(), max_size=3),
    ),
    "point": (
        Point,
        lambda v: type(v) is Point and type(v.x) is int and type(v.y) is float,
        st.fixed_dictionaries({"x": st.integers()}, optional={"y": st.integers(-9, 9)}),
    ),
    "points": (
        list[Point],
        lambda v: type(v) is list and all(type(p) is Point for p in v),
        st.lists(st.fixed_dictionaries({"x": st.integers()}), max_size=2),
    ),
    "card": (
        Card,
        lambda v: type(v) is dict and type(v["title"]) is str,
        st.fixed_dictionaries({"title": st.text(max_size=3)}),
    ),
    "optional": (int | None, lambda v: v is None or type(v) is int, st.none() | st.integers()),
}


def function_of(hint, seen):
    def act(value, extra=0):
        seen.append(value)
        return "done"

    act.__doc__ = "Act."
    act.__annotations__ = {"value": hint, "extra": int}
    return act


@given(st.sampled_from(sorted(HINTS)), JSON)
def test_a_tool_sees_only_what_its_hints_say(name, value):
    hint, fits, _ = HINTS[name]
    seen = []
    outcome = asyncio.run(
        Tools([function_of(hint, seen)]).call(ToolCall("act", {"value": value}, "call_0"))
    )
    if outcome.error is None:
        assert len(seen) == 1
        assert fits(seen[0]), (name, seen[0])
    else:
        assert seen == []
        assert outcome.error == "wrong_type"
        assert outcome.message.text.startswith("Error: argument 'value'")


@given(
    st.sampled_from(sorted(HINTS)).flatmap(lambda name: st.tuples(st.just(name), HINTS[name][2]))
)
def test_what_fits_is_never_refused(pair):
    name, value = pair
    hint, fits, _ = HINTS[name]
    read = tool_signature(function_of(hint, [])).read({"value": json.loads(json.dumps(value))})
    assert fits(read["value"])


@given(
    st.dictionaries(
        st.sampled_from(["value", "extra", "valu", "", "self", "x"]) | st.text(max_size=4),
        JSON,
        max_size=4,
    )
)
def test_any_arguments_are_run_or_refused_with_a_reason(arguments):
    seen = []
    tools = Tools([function_of(str, seen)])
    outcome = asyncio.run(tools.call(ToolCall("act", arguments)))
    unknown = [key for key in arguments if key not in ("value", "extra")]
    expected = (
        "unknown_argument" if unknown else "missing_argument" if "value" not in arguments else None
    )
    if expected is not None:
        assert outcome.error == expected
    else:
        assert outcome.error in (None, "wrong_type")
    assert (outcome.error is None) is bool(seen)
    assert len(outcome.message.text) < 400


@given(
    st.lists(
        st.tuples(st.sampled_from(["wait", "add", "nothing", "fail"]), st.integers(0, 9)),
        max_size=6,
    )
)
def test_outcomes_follow_in_the_order_of_the_calls_whatever_runs_at_once(asked):
    async def wait(n: int) -> str:
        """Wait."""
        for _ in range(9 - n):
            await asyncio.sleep(0)
        return f"wait {n}"

    def add(n: int) -> str:
        """Add."""
        return f"add {n}"

    async def fail(n: int) -> str:
        """Fail."""
        raise ValueError(f"fail {n}")

    calls = [ToolCall(name, {"n": n}, f"call_{at}") for at, (name, n) in enumerate(asked)]
    outcomes = asyncio.run(Tools([wait, add, fail]).call_all(calls))
    assert [outcome.message.tool_call_id for outcome in outcomes] == [call.id for call in calls]
    for (name, n), outcome in zip(asked, outcomes, strict=True):
        said = {"nothing": "Error: no tool 'nothing'", "fail": f"Error: fail {n}"}.get(
            name, f"{name} {n}"
        )
        assert outcome.message.text.startswith(said)


def test_bad_arguments_say_which_part_is_wrong():
    read = tool_signature(function_of(list[Point], [])).read
    cases = [
        ([{"x": 1}, {"y": 2}], r"at \[1\] lacks 'x'"),
        ([{"x": 1, "z": 2}], r"at \[0\] at \['z'\] is not known there"),
        ([{"x": True}], "not true"),
    ]
    for value, said in cases:
        with pytest.raises(InvalidArguments, match=said):
            read({"value": value})
