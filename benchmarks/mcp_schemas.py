"""Schemas of real MCP servers against the check of arguments.

Installs servers of the package indexes into `.cache/mcp_servers`, starts each over stdio as
`tw.mcp_tools` does, and reads its tools. For each tool a valid instance of its schema must be
accepted, and instances with an unknown, a missing and a wrong argument refused. Valid and wrong is
what `jsonschema` decides from the server's own schema, except that unknown arguments are refused
wherever the schema does not allow others.

    python benchmarks/mcp_schemas.py             # all that can be installed and started; minutes the first time
    python benchmarks/mcp_schemas.py time git    # some
"""  # noqa: E501

from __future__ import annotations

import asyncio
import json
import os
import subprocess
import sys
import tempfile
from collections import Counter
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from jsonschema import Draft202012Validator

import turnwright as tw
from turnwright.envs.tools.tool_schema import InvalidArguments, ToolSchemaError, ToolSignature
from turnwright.types.json_schema import read_schema

CACHE = Path(__file__).resolve().parents[1] / ".cache" / "mcp_servers"


@dataclass(frozen=True, slots=True)
class Server:
    """A server's package, and the command that starts it over stdio."""

    package: str
    command: tuple[str, ...]
    """After `python` for a package of PyPI, after `node` for one of npm;
    `{home}` is an empty folder."""
    npm: bool = False


SERVERS = {
    "time": Server("mcp-server-time", ("-m", "mcp_server_time")),
    "fetch": Server("mcp-server-fetch", ("-m", "mcp_server_fetch")),
    "git": Server("mcp-server-git", ("-m", "mcp_server_git")),
    "sqlite": Server(
        "mcp-server-sqlite",
        ("-c", "import mcp_server_sqlite as s; s.main()", "--db-path", "{home}/a.db"),
    ),
    "excel": Server("excel-mcp-server", ("-m", "excel_mcp", "stdio")),
    "word": Server(
        "office-word-mcp-server",
        ("-c", "from word_document_server.main import run_server; run_server()"),
    ),
    "calculator": Server("mcp-server-calculator", ("-m", "mcp_server_calculator")),
    "wikipedia": Server("wikipedia-mcp", ("-m", "wikipedia_mcp")),
    "arxiv": Server("arxiv-mcp-server", ("-m", "arxiv_mcp_server", "--storage-path", "{home}")),
    "filesystem": Server(
        "@modelcontextprotocol/server-filesystem", ("dist/index.js", "{home}"), npm=True
    ),
    "memory": Server("@modelcontextprotocol/server-memory", ("dist/index.js",), npm=True),
    "everything": Server(
        "@modelcontextprotocol/server-everything", ("dist/index.js", "stdio"), npm=True
    ),
    "github": Server("@modelcontextprotocol/server-github", ("dist/index.js",), npm=True),
}


def install(name: str, server: Server) -> tuple[list[str], dict[str, str]]:
    """Install a server once; return its command and environment.

    Raises `RuntimeError` with the reason.
    """
    target = CACHE / name
    home = tempfile.mkdtemp()
    arguments = [part.format(home=home) for part in server.command]
    if not (target / "installed").exists():
        target.mkdir(parents=True, exist_ok=True)
        if server.npm:
            command = ["npm", "install", "--silent", "--prefix", str(target), server.package]
        else:
            command = [
                sys.executable,
                "-m",
                "pip",
                "install",
                "--quiet",
                "--disable-pip-version-check",
            ]
            command += ["--target", str(target), server.package]
        done = subprocess.run(command, capture_output=True, text=True)
        if done.returncode:
            raise RuntimeError(f"not installed: {done.stderr.strip()[-200:]}")
        (target / "installed").touch()
    environment = {"PATH": os.environ["PATH"], "HOME": home}
    if server.npm:
        package = target / "node_modules" / server.package
        return ["node", str(package / arguments[0]), *arguments[1:]], environment
    return [sys.executable, *arguments], environment | {"PYTHONPATH": str(target)}


async def tools_of(command: list[str], environment: dict[str, str], name: str) -> list[Any]:
    """Return the tools that a server lists."""
    source = tw.mcp_tools(command, name=name, env=environment, connect_s=60.0)
    session = source.acquire()
    try:
        return await asyncio.wrap_future(session.ready)
    finally:
        source.release(session)


def instance_of(schema: Any, depth: int = 0) -> Any:
    """Make a value of a schema without references: all its keys, and the
    least of everything else."""
    if not isinstance(schema, dict) or depth > 8:
        return None
    if "const" in schema:
        return schema["const"]
    if schema.get("default") is not None:
        # Servers write null as the default of a text that must not be null.
        return schema["default"]
    if schema.get("enum"):
        return schema["enum"][0]
    for keyword in ("anyOf", "oneOf"):
        if schema.get(keyword):
            return instance_of(schema[keyword][0], depth + 1)
    if schema.get("allOf"):
        return instance_of(
            {**schema["allOf"][0], **{k: v for k, v in schema.items() if k != "allOf"}}, depth + 1
        )
    kind = schema.get("type", "string")
    kind = kind[0] if isinstance(kind, list) else kind
    if kind == "object":
        return {
            key: instance_of(inner, depth + 1)
            for key, inner in (schema.get("properties") or {}).items()
        }
    if kind == "array":
        return [
            instance_of(schema.get("items", {}), depth + 1)
            for _ in range(max(1, schema.get("minItems", 0)))
        ]
    if kind in ("integer", "number"):
        return max(1, schema.get("minimum", 1), schema.get("exclusiveMinimum", 0) + 1)
    texts = {
        "uri": "https://example.com",
        "date": "2026-01-01",
        "date-time": "2026-01-01T00:00:00Z",
    }
    text = texts.get(schema.get("format", ""), "text")
    return {"boolean": True, "null": None}.get(
        kind, text + "x" * max(0, schema.get("minLength", 0) - len(text))
    )


def inlined(schema: Any, root: Any, depth: int = 0) -> Any:
    """Replace references by what they mean, eight levels deep."""
    if isinstance(schema, list):
        return [inlined(item, root, depth) for item in schema]
    if not isinstance(schema, dict):
        return schema
    if isinstance(schema.get("$ref"), str) and depth < 8:
        target = root
        for part in schema["$ref"].removeprefix("#").split("/")[1:]:
            target = target[part]
        return inlined(target, root, depth + 1)
    return {key: inlined(inner, root, depth) for key, inner in schema.items() if key != "$ref"}


WRONG_VALUES = ({"no": {"such": "key"}}, 1.5, "no such text", [[]], True, None)


def verdict(signature: ToolSignature, arguments: dict[str, Any]) -> str:
    """Return the error of arguments; empty if they are accepted."""
    try:
        signature.read(arguments)
    except InvalidArguments as error:
        return str(error)
    return ""


def check_tool(
    listed: Any, signature: ToolSignature, counts: Counter[str], wrong: list[str]
) -> None:
    """Compare our verdicts on a tool's arguments with those of the server's schema."""
    schema = listed.input_schema
    validator = Draft202012Validator(schema)
    resolved = read_schema(schema)
    keys = resolved.keys([resolved.root])

    valid = instance_of(inlined(schema, schema))
    if not isinstance(valid, dict) or not validator.is_valid(valid):
        counts["without a generated instance"] += 1
        return
    counts["tools"] += 1
    if problem := verdict(signature, valid):
        wrong.append(f"{listed.name}: refused {valid}: {problem}")
    counts["valid accepted"] += not problem

    if keys.closed and not keys.others and not keys.patterns:
        refused = "has no argument" in verdict(signature, {**valid, "no_such_argument": 1})
        counts["unknown refused" if refused else "unknown accepted"] += 1
        if not refused:
            wrong.append(f"{listed.name}: accepted an unknown argument")

    for key in schema.get("required") or ():
        refused = "needs the argument" in verdict(
            signature, {other: valid[other] for other in valid if other != key}
        )
        counts["missing refused" if refused else "missing accepted"] += 1
        if not refused:
            wrong.append(f"{listed.name}: accepted without {key}")

    for key in valid:
        for value in WRONG_VALUES:
            changed = {**valid, key: value}
            if not validator.is_valid(changed):
                refused = bool(verdict(signature, changed))
                counts["wrong refused" if refused else "wrong accepted"] += 1
                if not refused:
                    wrong.append(f"{listed.name}: accepted {key} = {value!r}")


def main() -> None:
    """Check the servers named, or all, and print one line of JSON."""
    counts: Counter[str] = Counter()
    wrong: list[str] = []
    not_started: dict[str, str] = {}
    tools_by_server: dict[str, int] = {}
    for name in sys.argv[1:] or SERVERS:
        try:
            command, environment = install(name, SERVERS[name])
            listed = asyncio.run(tools_of(command, environment, name))
        except Exception as error:
            not_started[name] = str(error)[:300]
            print(f"{name}: {not_started[name]}", file=sys.stderr)
            continue
        tools_by_server[name] = len(listed)
        for tool in listed:
            source = tw.mcp_tools(
                ["unused"],
                name=name,
                rename={tool.name: "".join(c if c.isalnum() else "_" for c in tool.name)},
            )
            try:
                (made,) = source.made([tool], None)  # type: ignore[arg-type]
            except ToolSchemaError as error:
                wrong.append(str(error))
                continue
            check_tool(tool, made.signature, counts, wrong)
        print(f"{name}: {len(listed)} tools", file=sys.stderr)
    print(
        json.dumps(
            {
                "servers": tools_by_server,
                "not_started": sorted(not_started),
                **counts,
                "disagreements": wrong,
            }
        )
    )


if __name__ == "__main__":
    main()
