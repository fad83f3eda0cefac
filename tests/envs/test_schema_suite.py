"""JSON Schema's own test suite, which the source of the package `jsonschema` carries; it is no
part of this repository.

Each schema of the suite is the schema of a tool's argument. What the suite says is valid is
accepted, and what it says is invalid is refused, apart from what is named here.
"""

import json
import os
import tarfile
from collections import Counter
from pathlib import Path

import pytest
from kit.packages import download

from turnwright.envs.tools.tool_schema import InvalidArguments, ToolSchemaError, tool_signature

CACHE = Path(
    os.environ.get("TURNWRIGHT_SCHEMA_SUITE")
    or Path(__file__).parents[2] / ".cache" / "schema_suite"
)

# References to other documents are refused, so these files, which are about
# them, have nothing for us.
REMOTE = {"refRemote.json", "vocabulary.json", "defs.json", "definitions.json"}

# Schemas that are refused when the tool is made: they refer to documents outside them, or
# declare a metaschema there.
REFUSED_AT_ONCE = {
    "remote ref, containing refs itself",
    "$ref to $dynamicRef finds detached $dynamicAnchor",
    "strict-tree schema, guards against misspelled properties",
    "tests for implementation dynamic anchor and reference link",
    "$ref and $dynamicAnchor are independent of order - $defs first",
    "$ref and $dynamicAnchor are independent of order - $ref first",
}


@pytest.fixture(scope="module")
def suite() -> Path:
    """The folder of the suite's drafts, fetched once."""
    found = list(CACHE.glob("jsonschema-*/json/tests"))
    if not found:
        CACHE.mkdir(parents=True, exist_ok=True)
        fault = download("jsonschema==4.26.0", CACHE, "--no-binary", ":all:")
        assert not fault, f"the suite could not be fetched: {fault}"
        (archive,) = CACHE.glob("*.tar.gz")
        with tarfile.open(archive) as source:
            source.extractall(CACHE, filter="data")
        found = list(CACHE.glob("jsonschema-*/json/tests"))
    return found[0]


def names_keys(schema) -> bool:
    """Whether a schema names keys anywhere: we refuse others there, where
    JSON Schema allows them."""
    text = json.dumps(schema)
    return '"properties"' in text or '"patternProperties"' in text


@pytest.mark.slow
@pytest.mark.parametrize("draft", ["draft2020-12", "draft2019-09", "draft7"])
def test_what_the_suite_accepts_and_refuses(suite, draft):
    verdicts: Counter[str] = Counter()
    wrong: list[tuple[str, ...]] = []
    for file in sorted((suite / draft).glob("*.json")):
        if file.name in REMOTE:
            continue
        for case in json.loads(file.read_text(encoding="utf-8")):
            check_case(draft, file.name, case, verdicts, wrong)
    print(draft, dict(verdicts))
    assert not wrong, "\n".join(map(str, wrong[:40]))
    assert verdicts["agree"] > 700


def check_case(draft, file, case, verdicts, wrong):
    schema = case["schema"]
    if isinstance(schema, dict):
        dialects = {"draft7": "http://json-schema.org/draft-07/schema#"}
        schema = {"$schema": dialects.get(draft, ""), **schema}
    given = {"name": "f", "parameters": schema_of_argument(schema)}
    try:
        signature = tool_signature(lambda **arguments: arguments, name="f", schema=given)
    except ToolSchemaError as error:
        verdicts["refused as a schema"] += 1
        if case["description"] not in REFUSED_AT_ONCE:
            wrong.append((file, case["description"], str(error)))
        return
    for test in case["tests"]:
        try:
            signature.read({"value": test["data"]})
            valid, said = True, ""
        except InvalidArguments as error:
            valid, said = False, str(error)
        if valid == test["valid"]:
            verdicts["agree"] += 1
        elif not valid and "is not known there" in said and names_keys(schema):
            verdicts["unknown keys"] += 1
        else:
            wrong.append(
                (
                    file,
                    case["description"],
                    test["description"],
                    json.dumps(test["data"])[:60],
                    said,
                )
            )


def schema_of_argument(schema):
    """Make the schema of a tool with one argument; what references in it mean must stay, so the
    root is its own resource."""
    if not isinstance(schema, dict):
        return {"type": "object", "properties": {"value": schema}}
    dialect = {"$schema": schema["$schema"]} if schema.get("$schema") else {}
    inner = {
        "$id": "http://localhost/argument",
        **{key: value for key, value in schema.items() if key != "$schema"},
    }
    return {**dialect, "type": "object", "properties": {"value": inner}}
