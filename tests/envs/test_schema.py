"""Tool schemas from functions, and arguments held to them."""

import enum
from dataclasses import dataclass
from typing import Annotated, Any, Literal, Optional, TypedDict

import pytest
from pydantic import Field

from turnwright.envs.tools.tool_schema import InvalidArguments, ToolSchemaError, tool_signature


class Colour(enum.Enum):
    RED = "red"
    BLUE = "blue"


@dataclass
class Point:
    x: int
    y: float = 0.0


class Box(TypedDict, total=False):
    title: str
    at: Point


@dataclass
class Node:
    value: int
    next: Optional["Node"] = None


def calculator(expression: str) -> str:
    """Evaluate arithmetic.

    Args:
        expression: for example "(3 + 4) * 5".
    """
    return expression


def everything(
    word: str,
    count: int,
    share: float,
    flag: bool,
    way: Literal["up", "down"],
    colour: Colour,
    names: list[str],
    table: dict[str, int],
    point: Point,
    points: list[Point],
    box: Box,
    either: int | str,
    maybe: str | None = None,
    limit: int = 3,
    bounded: Annotated[int, Field(ge=1, le=5)] = 2,
    anything: Any = None,
    pair: tuple[int, int] = (1, 2),
) -> str:
    """Take one of each.

    It says so here too.

    Args:
        word (str): a word
            that goes on: here.
        count: how many.

    Returns:
        Nothing of use.
    """
    return ""


GOOD = {
    "word": "w", "count": 1, "share": 2, "flag": True, "way": "up", "colour": "blue", "names": ["a"], "table": {"a": 1},  # noqa: E501
    "point": {"x": 1}, "points": [{"x": 1, "y": 2}], "box": {"title": "t", "at": {"x": 3}}, "either": "e",  # noqa: E501
}  # fmt: skip


def test_the_house_s_calculator():
    assert tool_signature(calculator).schema == {
        "type": "function",
        "function": {
            "name": "calculator",
            "description": "Evaluate arithmetic.",
            "parameters": {
                "type": "object",
                "properties": {
                    "expression": {"type": "string", "description": 'for example "(3 + 4) * 5".'}
                },
                "required": ["expression"],
            },
        },
    }


def test_every_kind_of_hint():
    body = tool_signature(everything).schema["function"]
    assert body["description"] == "Take one of each. It says so here too."
    point = {
        "type": "object",
        "properties": {"x": {"type": "integer"}, "y": {"type": "number", "default": 0.0}},
        "required": ["x"],
    }
    box = {"type": "object", "properties": {"title": {"type": "string"}, "at": point}}
    assert body["parameters"]["properties"] == {
        "word": {"type": "string", "description": "a word that goes on: here."},
        "count": {"type": "integer", "description": "how many."},
        "share": {"type": "number"},
        "flag": {"type": "boolean"},
        "way": {"type": "string", "enum": ["up", "down"]},
        "colour": {"type": "string", "enum": ["red", "blue"]},
        "names": {"type": "array", "items": {"type": "string"}},
        "table": {"type": "object", "additionalProperties": {"type": "integer"}},
        "point": point,
        "points": {"type": "array", "items": point},
        "box": box,
        "either": {"type": ["integer", "string"]},
        "maybe": {"type": ["string", "null"]},
        "limit": {"type": "integer", "default": 3},
        "bounded": {"type": "integer", "minimum": 1, "maximum": 5, "default": 2},
        "anything": {},
        "pair": {
            "type": "array",
            "prefixItems": [{"type": "integer"}, {"type": "integer"}],
            "minItems": 2,
            "maxItems": 2,
            "default": [1, 2],
        },
    }
    assert body["parameters"]["required"] == list(GOOD)


def test_arguments_arrive_as_the_hints_say():
    read = tool_signature(everything).read(GOOD | {"maybe": None, "pair": [3, 4], "bounded": 5})
    assert read["colour"] is Colour.BLUE
    assert read["share"] == 2.0
    assert read["point"] == Point(1)
    assert read["points"] == [Point(1, 2.0)]
    assert read["box"]["at"] == Point(3)
    assert read["pair"] == (3, 4)
    assert "limit" not in read  # the function's own default holds


WRONG = [
    ({"wrod": "w"}, "everything has no argument 'wrod'; did you mean 'word'?"),
    ({"word": 3}, "argument 'word' of everything must be a string, not 3"),
    ({"count": "3"}, 'must be a whole number, not "3"'),
    ({"count": 3.5}, "must be a whole number, not 3.5"),
    ({"count": True}, "must be a whole number, not true"),
    ({"share": True}, "must be a number, not true"),
    ({"share": "2"}, 'must be a number, not "2"'),
    ({"flag": 1}, "must be true or false, not 1"),
    ({"flag": "true"}, 'must be true or false, not "true"'),
    ({"way": "left"}, 'must be one of "up", "down", not "left"'),
    ({"colour": "RED"}, 'must be one of "red", "blue", not "RED"'),
    ({"names": "a"}, 'must be a list, not "a"'),
    ({"names": ["a", 1]}, "at [1] must be a string, not 1"),
    ({"table": {"a": "b"}}, "at ['a'] must be a whole number, not \"b\""),
    ({"point": {"y": 1}}, "lacks 'x' (a whole number)"),
    ({"point": {"x": "1"}}, "at ['x'] must be a whole number"),
    ({"points": [{"x": 1}, {}]}, "at [1] lacks 'x'"),
    ({"either": [1]}, "must be a whole number or a string, not [1]"),
    ({"maybe": 1}, "must be a string or null, not 1"),
    ({"bounded": 6}, "less than or equal to 5"),
    ({"pair": [1]}, "argument 'pair'"),
    ({"word": None}, "must be a string, not null"),
    ({"word": ["x" * 500]}, "..."),
]


@pytest.mark.parametrize(("change", "said"), WRONG, ids=lambda value: str(value)[:30])
def test_a_wrong_argument_is_told_to_the_model(change, said):
    with pytest.raises(InvalidArguments) as caught:
        tool_signature(everything).read(GOOD | change)
    assert said in str(caught.value)
    assert "\n" not in str(caught.value)
    assert len(str(caught.value)) < 200


def test_a_missing_argument_is_told_to_the_model():
    with pytest.raises(
        InvalidArguments, match=r"calculator needs the argument 'expression' \(a string\)"
    ):
        tool_signature(calculator).read({})


def no_hint(x):
    """Do."""


def no_docstring(x: int): ...


def only_args(x: int):
    """
    Args:
        x: a number.
    """


def stars(*words: str):
    """Do."""


def double_stars(**words: str):
    """Do."""


def positional(x: int, /):
    """Do."""


def strange(x: Exception):
    """Do."""


def unresolved(x: "Nowhere"):  # noqa: F821
    """Do."""


def itself(node: Node):
    """Do."""


def misdescribed(expression: str):
    """Do.

    Args:
        expresion: what.
    """


FAULTS = [
    (no_hint, "parameter 'x' has no type hint"),
    (no_docstring, "no docstring"),
    (only_args, "no docstring"),
    (stars, r"\*words cannot be described to a model"),
    (double_stars, r"\*\*words cannot be described to a model"),
    (positional, "positional-only"),
    (strange, "'x' is a Exception, which JSON cannot express"),
    (unresolved, "a type hint cannot be resolved"),
    (itself, "Node contains itself"),
    (misdescribed, "describes 'expresion', which is no parameter; did you mean 'expression'"),
    (lambda x: x, "has no type hint"),
]


@pytest.mark.parametrize(
    ("function", "said"), FAULTS, ids=lambda value: getattr(value, "__name__", None)
)
def test_a_function_that_cannot_be_a_tool_says_why(function, said):
    with pytest.raises(ToolSchemaError, match=said) as caught:
        tool_signature(function)
    assert str(caught.value).startswith("tool ")
    assert "\n" not in str(caught.value)


OWN = {
    "name": "add",
    "parameters": {"type": "object", "properties": {"x": {"type": "integer"}}, "required": ["x"]},
}


def test_a_name_and_a_schema_of_one_s_own():
    assert tool_signature(calculator, name="calc").name == "calc"
    for schema in (OWN, {"type": "function", "function": OWN}):
        signature = tool_signature(no_hint, schema=schema)
        assert signature.schema == {"type": "function", "function": OWN}
        assert signature.read({"x": 1}) == {"x": 1}
        with pytest.raises(InvalidArguments, match="whole number"):
            signature.read({"x": "1"})
        with pytest.raises(InvalidArguments, match="has no argument 'y'"):
            signature.read({"x": 1, "y": 2})
    assert tool_signature(double_stars, schema=OWN).read({"x": 1}) == {"x": 1}
    assert tool_signature(no_hint, name="other", schema=OWN).name == "other"


@pytest.mark.parametrize(
    ("function", "kwargs", "said"),
    [
        (calculator, {"name": "two words"}, "cannot be a tool's name"),
        (no_hint, {"schema": {"parameters": {}}}, "OpenAI tool schema"),
        (no_hint, {"schema": {"name": "n"}}, "leaves out the parameter 'x'"),
        (no_hint, {"schema": {"name": "n", "parameters": {"type": "array"}}}, "of type object"),
        (stars, {"schema": OWN}, "cannot be described"),
        (calculator, {"schema": OWN}, "'x', which the function does not take"),
    ],
)
def test_a_wrong_name_or_schema_says_why(function, kwargs, said):
    with pytest.raises(ToolSchemaError, match=said):
        tool_signature(function, **kwargs)


def test_a_method_and_an_object_that_can_be_called():
    class Counter:
        def add(self, by: int = 1) -> int:
            """Count on."""
            return by

        def __call__(self, by: int) -> int:
            """Count on."""
            return by

    assert list(tool_signature(Counter().add).parameters["properties"]) == ["by"]
    with pytest.raises(ToolSchemaError, match="no docstring"):
        tool_signature(Counter(), name="count")
