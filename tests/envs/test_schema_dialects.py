"""Schemas as authors write them: references, compositions, dialects, and schemas
that no tool can have."""

import asyncio
import json
import pickle
import subprocess
import sys
import time

import pytest
from hypothesis import given
from hypothesis import strategies as st
from jsonschema import Draft202012Validator

import turnwright as tw
from turnwright.envs.tools.mcp import McpTools
from turnwright.envs.tools.schema_check import schema_error
from turnwright.envs.tools.tool import Tools
from turnwright.envs.tools.tool_schema import (
    InvalidArguments,
    ToolSchemaError,
    ToolSignature,
    tool_signature,
)
from turnwright.renderers.parsers import PARSERS


def keep(**arguments):
    return arguments


def signature(parameters):
    return tool_signature(
        keep, schema={"name": "ship", "description": "Ship.", "parameters": parameters}
    )


def of_argument(schema, **root):
    """Make the schema of a tool with the one argument `zip`."""
    return signature({"type": "object", "properties": {"zip": schema}, "required": ["zip"], **root})


TEXT = {"type": "string"}
BEHIND = {
    "$defs": ({"$ref": "#/$defs/Zip"}, {"$defs": {"Zip": TEXT}}),
    "definitions": ({"$ref": "#/definitions/Zip"}, {"definitions": {"Zip": TEXT}}),
    "a property": (
        {"$ref": "#/properties/other"},
        {"properties": {"zip": {"$ref": "#/properties/other"}, "other": TEXT}},
    ),
    "an escaped name": ({"$ref": "#/$defs/a~1b%20c"}, {"$defs": {"a/b c": TEXT}}),
    "an anchor": ({"$ref": "#zip"}, {"$defs": {"Zip": {"$anchor": "zip", **TEXT}}}),
    "two references": ({"$ref": "#/$defs/A"}, {"$defs": {"A": {"$ref": "#/$defs/B"}, "B": TEXT}}),
    "OpenAPI's components": (
        {"$ref": "#/components/schemas/Zip"},
        {"components": {"schemas": {"Zip": TEXT}}},
    ),
    "allOf": ({"allOf": [TEXT, {"minLength": 1}]}, {}),
    "allOf with a reference": (
        {"allOf": [{"$ref": "#/$defs/Zip"}], "description": "d"},
        {"$defs": {"Zip": TEXT}},
    ),
    "oneOf": (
        {"oneOf": [{"type": "string", "minLength": 3}, {"type": "string", "maxLength": 2}]},
        {},
    ),
    "anyOf": ({"anyOf": [TEXT, {"type": "null"}]}, {}),
    "upper case": ({"type": "STRING"}, {}),
    "Python's name": ({"type": "str"}, {}),
    "nullable": ({"type": "string", "nullable": True}, {}),
    "nullable reference": ({"$ref": "#/$defs/Zip", "nullable": True}, {"$defs": {"Zip": TEXT}}),
    "choices": ({"enum": ["10001", "10002"]}, {}),
    "nulls of Parquet": (
        {"type": "string", "enum": None, "items": None, "anyOf": None, "const": None},
        {},
    ),
}


@pytest.mark.parametrize("name", BEHIND)
def test_a_text_is_a_text_however_its_schema_says_so(name):
    schema, root = BEHIND[name]
    read = of_argument(schema, **root).read
    assert read({"zip": "10001"}) == {"zip": "10001"}
    with pytest.raises(
        InvalidArguments, match=r"argument 'zip' of ship must .*, not 10001"
    ) as caught:
        read({"zip": 10001})
    assert caught.value.cause == "wrong_type"


FORMATS = {
    "qwen3_coder": "<tool_call>\n<function=ship>\n<parameter=zip>\n{}\n</parameter>\n</function>\n</tool_call>",  # noqa: E501
    "glm": "<tool_call>ship<arg_key>zip</arg_key><arg_value>{}</arg_value></tool_call>",
}


@pytest.mark.parametrize("parser", FORMATS)
@pytest.mark.parametrize("name", BEHIND)
def test_bare_text_has_the_type_of_the_resolved_schema(name, parser):
    schema, root = BEHIND[name]
    parameters = {"type": "object", "properties": {"zip": schema}, **root}
    tools = [{"type": "function", "function": {"name": "ship", "parameters": parameters}}]
    (call,) = PARSERS[parser].parse(FORMATS[parser].format("10001"), tools).tool_calls
    assert call.arguments == {"zip": "10001"}
    if name in ("anyOf", "nullable", "nullable reference"):
        (call,) = PARSERS[parser].parse(FORMATS[parser].format("null"), tools).tool_calls
        assert call.arguments == {"zip": None}


OF_THE_WHOLE = {
    "a branch": {
        "oneOf": [{"properties": {"zip": TEXT}, "required": ["zip"]}, {"required": ["city"]}]
    },
    "all of": {"allOf": [{"properties": {"zip": TEXT}}, {"properties": {"city": TEXT}}]},
    "a reference": {
        "$ref": "#/$defs/Place",
        "$defs": {"Place": {"type": "object", "properties": {"zip": TEXT}}},
    },
    "a condition": {
        "properties": {"city": TEXT},
        "if": {"required": ["city"]},
        "else": {"properties": {"zip": TEXT}},
    },
    "a pattern": {"patternProperties": {"^z": TEXT}},
    "any other": {"additionalProperties": TEXT},
}


@pytest.mark.parametrize("name", OF_THE_WHOLE)
def test_arguments_that_only_a_composition_names(name):
    parameters = {"type": "object", **OF_THE_WHOLE[name]}
    read = signature(parameters).read
    assert read({"zip": "10001"}) == {"zip": "10001"}
    with pytest.raises(InvalidArguments) as caught:
        read({"zip": 10001})
    assert caught.value.cause == "wrong_type"
    tools = [{"type": "function", "function": {"name": "ship", "parameters": parameters}}]
    (call,) = PARSERS["glm"].parse(FORMATS["glm"].format("10001"), tools).tool_calls
    assert call.arguments == {"zip": "10001"}


def test_an_unknown_argument_stays_unknown_where_nothing_allows_it():
    for name in set(OF_THE_WHOLE) - {"any other"}:
        with pytest.raises(InvalidArguments, match="ship has no argument 'izp'") as caught:
            signature({"type": "object", **OF_THE_WHOLE[name]}).read({"izp": "x"})
        assert caught.value.cause == "unknown_argument"
    with pytest.raises(InvalidArguments, match="did you mean 'zip'"):
        signature({"type": "object", **OF_THE_WHOLE["all of"]}).read({"zipp": "x"})
    open_branch = {"anyOf": [{"properties": {"zip": TEXT}}, {"additionalProperties": True}]}
    assert signature({"type": "object", **open_branch}).read({"izp": 1}) == {"izp": 1}


def test_the_error_is_of_the_alternative_that_was_meant():
    branches = [
        {"properties": {key: {"type": kind}}, "required": [key]}
        for key, kind in (("a", "string"), ("b", "integer"))
    ]
    read = signature({"type": "object", "oneOf": branches}).read
    assert read({"a": "x"}) == {"a": "x"}
    for arguments, said in [
        ({"b": "x"}, "argument 'b' of ship must be a whole number, not \"x\""),
        ({}, "ship needs the argument 'a' (a string) or 'b' (a whole number)"),
        ({"a": "x", "b": 1}, "the arguments object of ship must fit one alternative only"),
        ({"a": 1, "b": "x"}, "the arguments object of ship must fit one of 2 alternatives"),
    ]:
        with pytest.raises(InvalidArguments) as caught:
            read(arguments)
        assert said in str(caught.value)
    with pytest.raises(
        InvalidArguments, match=r'ship has no argument \'y\'; its arguments match "\^x_"'
    ):
        signature({"type": "object", "patternProperties": {"^x_": {}}}).read({"y": 1})


def test_what_a_composition_requires_is_missing():
    either = {"anyOf": [{"required": ["zip"]}, {"required": ["city"]}]}
    for parameters, said in [
        (
            {"properties": {"zip": TEXT, "city": TEXT}, **either},
            r"needs the argument 'zip' \(a string\) or 'city' \(a string\)",
        ),
        (
            {"allOf": [{"properties": {"zip": TEXT}, "required": ["zip"]}]},
            r"needs the argument 'zip' \(a string\)",
        ),
        (
            {
                "$ref": "#/$defs/P",
                "$defs": {"P": {"properties": {"zip": TEXT}, "required": ["zip"]}},
            },
            r"needs the argument 'zip'",
        ),
    ]:
        with pytest.raises(InvalidArguments, match=said) as caught:
            signature({"type": "object", **parameters}).read({})
        assert caught.value.cause == "missing_argument"


NODE = {
    "type": "object",
    "properties": {"v": {"type": "integer"}, "next": {"$ref": "#/$defs/N"}},
    "required": ["v"],
}
RANGE = {"type": "number", "minimum": 0, "exclusiveMinimum": True}

# Schema of the argument `zip`, keywords beside it, a value, and the value that
# arrives, or the error.
VERDICTS = [
    ({"type": "integer"}, {}, 3.0, 3),
    ({"type": "array", "items": {"type": "integer"}}, {}, [1, 2.0], [1, 2]),
    (
        {"type": "object", "properties": {"n": {"allOf": [{"type": "integer"}]}}},
        {},
        {"n": 4.0},
        {"n": 4},
    ),
    ({"type": "number"}, {}, 3.0, 3.0),
    ({"type": ["integer", "number"]}, {}, 3.0, 3.0),
    ({"type": "integer"}, {}, 3.5, "must be a whole number, not 3.5"),
    ({"type": "integer"}, {}, True, "must be a whole number, not true"),
    ({"type": "INTEGER", "nullable": True}, {}, None, None),
    ({"type": "string", "enum": ["a"], "nullable": True}, {}, None, None),
    ({"allOf": [{"$ref": "#/$defs/Z"}], "nullable": True}, {"$defs": {"Z": TEXT}}, None, None),
    ({"type": "string"}, {}, None, "must be a string, not null"),
    (
        {"type": "OBJECT", "properties": {"a": {"type": "ARRAY", "items": {"type": "BOOLEAN"}}}},
        {},
        {"a": [True]},
        {"a": [True]},
    ),
    (
        {"type": "OBJECT", "properties": {"a": {"type": "NUMBER"}}},
        {},
        {"a": "1"},
        "at ['a'] must be a number, not \"1\"",
    ),
    ({"type": "any"}, {}, [1], [1]),
    (RANGE, {}, 0, "must be greater than 0, not 0"),
    (
        {"type": "array", "items": [{"type": "string"}, {"type": "integer"}]},
        {},
        ["a", "b"],
        "at [1] must be a whole number",
    ),
    (
        {"$ref": "#/$defs/N"},
        {"$defs": {"N": NODE}},
        {"v": 1, "next": {"v": 2.0}},
        {"v": 1, "next": {"v": 2}},
    ),
    (
        {"$ref": "#/$defs/N"},
        {"$defs": {"N": NODE}},
        {"v": 1, "next": {}},
        "at ['next'] lacks 'v' (a whole number)",
    ),
    (
        {"$ref": "#/$defs/N"},
        {"$defs": {"N": NODE}},
        {"v": 1, "w": 1},
        "at ['w'] is not known there",
    ),
    ({"anyOf": [NODE, {"type": "null"}]}, {"$defs": {"N": NODE}}, {"next": {"v": 1}}, "lacks 'v'"),
    (
        {"oneOf": [{"type": "integer"}, {"type": "number"}]},
        {},
        3,
        "must fit one alternative only, not 3",
    ),
    ({"type": "array", "uniqueItems": True}, {}, [1, 1], "must have no item twice"),
    ({"type": "string", "pattern": "^a+$"}, {}, "b", 'must match the pattern "^a+$", not "b"'),
    ({"not": {"type": "string"}}, {}, "b", 'must be something else than "b"'),
    (
        {"type": "object", "additionalProperties": {"type": "integer"}},
        {},
        {"a": "b"},
        "at ['a'] must be a whole number",
    ),
    (
        {"type": "object", "patternProperties": {"^n": {"type": "integer"}}},
        {},
        {"n1": 2.0},
        {"n1": 2},
    ),
    (
        {"type": "object", "patternProperties": {"^n": {}}},
        {},
        {"m": 2},
        "at ['m'] is not known there",
    ),
    (
        {"type": "object", "properties": {"a": False}},
        {},
        {"a": 1},
        "at ['a'] must be left out, not 1",
    ),
    ({"type": "string", "required": True}, {}, "a", "a"),
]


@pytest.mark.parametrize(
    ("schema", "root", "value", "expected"), VERDICTS, ids=[str(row[0])[:40] for row in VERDICTS]
)
def test_values_and_their_verdicts(schema, root, value, expected):
    read = of_argument(schema, **root).read
    if isinstance(expected, str) and expected != value:
        with pytest.raises(InvalidArguments) as caught:
            read({"zip": value})
        assert expected in str(caught.value)
        assert str(caught.value).startswith("argument 'zip' of ship ")
    else:
        arrived = read({"zip": value})["zip"]
        assert json.dumps(arrived) == json.dumps(expected)  # 3 and 3.0 differ there


def deep(levels):
    schema = {"type": "integer"}
    for _ in range(levels):
        schema = {"type": "array", "items": schema}
    return schema


def laughs(levels):
    named = {f"L{n}": {"allOf": [{"$ref": f"#/$defs/L{n + 1}"}] * 3} for n in range(levels)}
    return {**named, f"L{levels}": TEXT}


UNUSABLE = [
    (
        {"$ref": "https://example.com/zip.json"},
        {},
        "refers to 'https://example.com/zip.json', which is not in the schema",
    ),
    ({"$ref": "other.json#/$defs/Zip"}, {"$defs": {"Zip": TEXT}}, "which is not in the schema"),
    ({"$ref": "file:///etc/passwd"}, {}, "nothing is fetched"),
    ({"$ref": "#/$defs/Zip"}, {}, "refers to '#/\\$defs/Zip', which the schema does not have"),
    ({"$ref": "#zip"}, {}, "does not have"),
    ({"$ref": "#/properties/zip"}, {}, "leads back to itself"),
    (
        {"$ref": "#/$defs/A"},
        {"$defs": {"A": {"anyOf": [{"$ref": "#/$defs/A"}, TEXT]}}},
        "leads back to itself",
    ),
    ({"type": "strnig"}, {}, "/properties/zip/type is 'strnig'; the types are"),
    ({"type": "array", "items": "string"}, {}, "/properties/zip/items is str, no JSON schema"),
    ({"type": "string", "minLength": "3"}, {}, "minLength of its schema is invalid"),
    ({"enum": "abc"}, {}, "enum of its schema is invalid"),
    (deep(5000), {}, "nested over 100 levels deep"),
    ({"$ref": "#/$defs/L0"}, {"$defs": laughs(30)}, "judge one value"),
    ({"type": "string", "pattern": "(a"}, {}, "is no regular expression"),
    ({"type": "string", "pattern": r"(?=x)(a+)+$"}, {}, "may take forever"),
    ({"type": "string", "pattern": r"^(a|a)*(?!b)$"}, {}, "may take forever"),
]


@pytest.mark.parametrize(
    ("schema", "root", "said"), UNUSABLE, ids=[row[2][:30] for row in UNUSABLE]
)
def test_a_schema_that_cannot_be_checked_is_refused_when_the_tool_is_made(schema, root, said):
    began = time.process_time()
    with pytest.raises(ToolSchemaError, match=said) as caught:
        of_argument(schema, **root)
    assert time.process_time() - began < 5
    assert "\n" not in str(caught.value)
    assert len(str(caught.value)) < 400


@pytest.mark.parametrize(
    "parameters", [[], {"properties": ["zip"]}, {"properties": {"zip": "string"}}, {"oneOf": {}}]
)
def test_parameters_of_another_shape_are_refused(parameters):
    with pytest.raises(ToolSchemaError):
        ToolSignature(
            {"type": "function", "function": {"name": "ship", "parameters": parameters or ["zip"]}},
            {},
        )


def test_a_server_s_unusable_schema_names_the_server_and_the_tool():
    class Listed:
        name, description = "ship", "Ship."
        input_schema = {  # noqa: RUF012
            "type": "object",
            "properties": {"zip": {"$ref": "https://example.com/zip"}},
        }

    source = McpTools("http://x/mcp", "post", "shared", None, "", {}, None, None, {}, 1.0, 1.0)
    with pytest.raises(
        ToolSchemaError,
        match=r"MCP server post: tool 'ship': /properties/zip refers to 'https://example",
    ):
        source.convert([Listed()], None)


def test_a_server_s_validators_are_made_once():
    class Listed:
        name, description = "ship", "Ship."
        input_schema = {"type": "object", "properties": {"zip": {"allOf": [TEXT], "title": "Zip"}}}  # noqa: RUF012

    source = McpTools("http://x/mcp", "post", "shared", None, "", {}, None, None, {}, 1.0, 1.0)
    first, second = (source.convert([Listed()], None)[0] for _ in range(2))
    assert first.signature is second.signature
    assert first.schema["function"]["parameters"]["properties"] == {"zip": {"allOf": [TEXT]}}


HOSTILE = [
    ({"type": "string", "pattern": "^(a+)+$"}, {}, "a" * 50_000 + "b"),
    ({"type": "object", "patternProperties": {"(x+x+)+y": {}}}, {}, {"x" * 5_000: 1}),
    ({"type": "string", "pattern": "^(?!x).*.*.*y"}, {}, "a" * 50_000),
    (
        {"$ref": "#/$defs/T"},
        {
            "$defs": {
                "T": {
                    "anyOf": [{"properties": {"n": {"$ref": "#/$defs/T"}}, "minProperties": 2}] * 3
                }
            }
        },
        {"n": {"n": {"n": {"n": {"n": {"n": {"n": {"n": {"n": {"n": {"n": {"n": {}}}}}}}}}}}}},
    ),
    (
        {"$ref": "#/$defs/N"},
        {"$defs": {"N": {"type": "array", "items": {"$ref": "#/$defs/N"}}}},
        None,
    ),
]


@pytest.mark.parametrize(
    ("schema", "root", "value"), HOSTILE, ids=["pattern", "keys", "ahead", "alternatives", "depth"]
)
def test_hostile_schemas_and_values_cost_bounded_time(schema, root, value):
    if value is None:
        value = []
        for _ in range(2000):
            value = [value]
    read = of_argument(schema, **root).read
    began = time.process_time()
    with pytest.raises(InvalidArguments) as caught:
        read({"zip": value})
    assert time.process_time() - began < 20
    assert caught.value.cause in ("wrong_type", "unknown_argument")
    assert len(str(caught.value)) < 300


def test_the_model_reads_the_schema_as_its_author_wrote_it():
    parameters = {
        "properties": {
            "zip": {"description": "d", "nullable": True, "type": "STRING"},
            "n": {"$ref": "#/$defs/N"},
        },
        "$defs": {"N": {"minimum": 1, "type": "INTEGER"}},
        "type": "OBJECT",
        "required": ["zip"],
    }
    made = signature(parameters)
    assert json.dumps(made.parameters) == json.dumps(parameters)
    assert made.read({"zip": None, "n": 2.0}) == {"zip": None, "n": 2}

    class Listed:
        name, description = "ship", "Ship."
        input_schema = parameters

    source = McpTools("http://x/mcp", "post", "shared", None, "", {}, None, None, {}, 1.0, 1.0)
    (tool,) = source.convert([Listed()], None)
    shown = tool.schema["function"]["parameters"]
    assert list(shown) == ["properties", "type", "required"]
    assert list(shown["properties"]["zip"]) == ["description", "nullable", "type"]
    assert json.dumps(shown["properties"]["n"]) == '{"minimum": 1, "type": "INTEGER"}'


def test_a_signature_survives_pickling():
    made = of_argument({"oneOf": [{"type": "integer"}, {"type": "boolean"}]})
    made.read({"zip": 1})
    again = pickle.loads(pickle.dumps(made))
    assert again == made
    assert again.read({"zip": 3.0}) == {"zip": 3}


def test_an_integer_reaches_the_function_as_one():
    @tw.tool
    def count(n: int, more: list[int]) -> str:
        """Count."""
        return f"{n!r} {more!r}"

    call = '<tool_call>{"name": "count", "arguments": {"n": 3.0, "more": [1, 2.0]}}</tool_call>'
    (trajectory,) = tw.rollout(
        tw.tool_env([count]), [tw.Task("Go.")], engine=tw.ScriptedEngine([call, "ok"])
    )
    assert [message.text for message in trajectory.messages if message.role == "tool"] == [
        "3 [1, 2]"
    ]


def test_simple_schemas_do_not_import_the_validator():
    code = (
        "import sys\n"
        "from turnwright.envs.tools.tool_schema import tool_signature\n"
        "def add(a: int, names: list[str]) -> str:\n    '''Add.'''\n"
        "tool_signature(add).read({'a': 1, 'names': ['x']})\n"
        "assert 'jsonschema' not in sys.modules\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


# Properties

SCALARS = st.sampled_from([None, True, False, 0, 1, 3.0, 2.5, -1, "", "a", "10", "red"])
VALUES = st.recursive(
    SCALARS,
    lambda inner: (
        st.lists(inner, max_size=3) | st.dictionaries(st.sampled_from("abc"), inner, max_size=2)
    ),
    max_leaves=5,
)
PLAIN = st.one_of(
    st.sampled_from(["string", "integer", "number", "boolean", "null", "array", "object"]).map(
        lambda kind: {"type": kind}
    ),
    st.lists(
        st.sampled_from(["string", "integer", "null"]), min_size=1, max_size=2, unique=True
    ).map(lambda t: {"type": t}),
    st.lists(SCALARS, min_size=1, max_size=3, unique_by=repr).map(
        lambda choices: {"enum": choices}
    ),
    SCALARS.map(lambda value: {"const": value}),
    st.sampled_from(
        [
            {"minimum": 1},
            {"maxLength": 1},
            {"minItems": 1},
            {"pattern": "^a"},
            {"multipleOf": 2},
            {},
            True,
            False,
        ]
    ),
    st.sampled_from("DE").map(lambda name: {"$ref": f"#/$defs/{name}"}),
)


def composed(inner):
    several = st.lists(inner, min_size=1, max_size=2)
    named = st.dictionaries(st.sampled_from("abc"), inner, max_size=2)
    return st.one_of(
        several.map(lambda members: {"allOf": members}),
        several.map(lambda members: {"anyOf": members}),
        several.map(lambda members: {"oneOf": members}),
        inner.map(lambda member: {"not": member}),
        inner.map(lambda member: {"type": "array", "items": member}),
        st.tuples(inner, inner).map(lambda pair: {"prefixItems": [pair[0]], "items": pair[1]}),
        st.tuples(named, st.sampled_from([[], ["a"]])).map(
            lambda pair: {"properties": pair[0], "required": pair[1]}
        ),
        st.tuples(named, inner).map(
            lambda pair: {"properties": pair[0], "additionalProperties": pair[1]}
        ),
        inner.map(lambda member: {"patternProperties": {"^[ab]$": member}}),
        st.tuples(inner, inner, inner).map(
            lambda three: dict(zip(("if", "then", "else"), three, strict=True))
        ),
    )


SCHEMAS = st.recursive(PLAIN, composed, max_leaves=5)


@given(
    SCHEMAS,
    st.sampled_from([TEXT, {"type": "integer"}, {"type": "array", "items": {"$ref": "#/$defs/E"}}]),
    VALUES,
)
def test_verdicts_are_those_of_the_validator(schema, definition, value):
    """Unknown keys apart, which are refused here.

    Whole floats stay valid as the integers that they become.
    """
    root = {
        "type": "object",
        "properties": {"zip": schema},
        "$defs": {
            "D": definition,
            "E": {"type": ["object", "string"], "properties": {"a": {"$ref": "#/$defs/D"}}},
        },
    }
    expected = Draft202012Validator(root).is_valid({"zip": value})
    arrived, problem = answer(signature(root), value)
    if problem:
        assert not expected or "is not known there" in problem
    else:
        assert expected
        assert arrived == value
        assert Draft202012Validator(root).is_valid({"zip": arrived})


def answer(made, value):
    """What arrives, and the error."""
    try:
        return made.read({"zip": value})["zip"], ""
    except InvalidArguments as error:
        return None, str(error)


@given(SCHEMAS, VALUES)
def test_null_and_upper_case_change_no_other_verdict(schema, value):
    def louder(node):
        if isinstance(node, list):
            return [louder(inner) for inner in node]
        if not isinstance(node, dict):
            return node
        changed = {
            key: inner if key in ("enum", "const") else louder(inner) for key, inner in node.items()
        }
        if isinstance(node.get("type"), str):
            changed["type"] = node["type"].upper()
        return changed

    root = {"$defs": {"D": TEXT, "E": {"type": "integer"}}}
    plain = of_argument(schema, **root)
    if isinstance(schema, dict):
        assert verdict(of_argument(louder(schema), **root), value) == verdict(plain, value)
        nullable = of_argument({**schema, "nullable": True}, **root)
        assert verdict(nullable, None)
        if value is not None:
            assert verdict(nullable, value) == verdict(plain, value)


def verdict(made, value):
    return not answer(made, value)[1]


@given(SCHEMAS, st.sampled_from(["10001", "null", "True", "[1]", "x", "3.0", '{"a": 1}', ""]))
def test_bare_text_is_never_typed_so_that_a_valid_text_becomes_invalid(schema, text):
    """What a format without types reads is valid wherever the text itself would be, if the
    schema is about texts only."""
    parameters = {
        "type": "object",
        "properties": {"zip": schema},
        "$defs": {"D": TEXT, "E": {"type": "integer"}},
    }
    tools = [{"type": "function", "function": {"name": "ship", "parameters": parameters}}]
    (call,) = PARSERS["glm"].parse(FORMATS["glm"].format(text), tools).tool_calls
    made = signature(parameters)
    only_texts = all(
        not verdict(made, value) for value in (None, True, 1, 1.5, [1], {"a": 1}, {}, [])
    )
    if (
        verdict(made, text)
        and only_texts
        and call.error is None
        and isinstance(schema, dict)
        and says_text(schema)
    ):
        assert call.arguments["zip"] == text


def says_text(schema):
    return schema in (TEXT, {"$ref": "#/$defs/D"}) or any(
        isinstance(schema.get(key), list)
        and all(isinstance(inner, dict) and says_text(inner) for inner in schema[key])
        for key in ("allOf", "anyOf", "oneOf")
    )


def test_the_error_of_a_call_and_of_a_setting():
    loud = {"name": "ship", "parameters": {"properties": {"zip": {"type": ["STRING", "NULL"]}}}}
    tools = Tools([tw.tool(schema=loud)(keep)])
    outcome = asyncio.run(tools.call(tw.ToolCall("ship", {"zip": 1})))
    assert outcome.error == "wrong_type"
    assert outcome.message.text == "Error: argument 'zip' of ship must be a string or null, not 1"
    integers = {"type": "array", "items": {"type": "integer"}}
    assert schema_error([1, "a"], integers) == 'at [1] must be a whole number, not "a"'
    assert schema_error([1, 2], integers) == ""
