"""The settings that docs/agents.md gives for real programs are those that
`make test-agents` runs."""

from __future__ import annotations

import tomllib

from blocks import ROOT, blocks
from kit.programs import AGENTS, MINI, MINI_ENV

import turnwright as tw
from tests.agents.real_programs import NODE_PACKAGES, PACKAGES

PAGE = ROOT / "docs/agents.md"


def test_the_commands_and_variables_are_those_of_the_tests() -> None:
    recipes = [tomllib.loads(block.text) for block in blocks(PAGE) if block.language == "toml"]
    tables = [
        recipe["env"][0]["args"] for recipe in recipes if recipe["env"][0]["use"] == "program"
    ]
    shown = {
        table["command"][0]: (tuple(table["command"]), table.get("env", {})) for table in tables
    }
    for name, agent in AGENTS.items():
        assert shown[name] == (agent.command, agent.env)
    assert shown["mini"] == (MINI, MINI_ENV)


def test_the_settings_file_of_opencode_is_that_of_the_tests() -> None:
    (code,) = [block.text for block in blocks(PAGE) if block.file == "scores.py"]
    found: dict[str, object] = {}
    exec(code, found)
    assert found["opencode"](tw.Task("x")) == AGENTS["opencode"].files  # type: ignore[operator]


def test_the_versions_are_the_pinned_ones() -> None:
    text = PAGE.read_text("utf-8")
    pinned = dict(one.rsplit("@", 1) for one in NODE_PACKAGES) | dict(
        one.split("==") for one in PACKAGES
    )
    names = {
        "@openai/codex": "Codex",
        "opencode-ai": "OpenCode",
        "smolagents[openai]": "smolagents",
    }
    names |= {"mini-swe-agent": "mini-swe-agent", "openai-agents": "openai-agents"}
    names["pydantic-ai-slim[openai,anthropic]"] = "pydantic-ai"
    for package, name in names.items():
        assert f"**{name}** {pinned[package].rpartition('.')[0]}" in text, name
