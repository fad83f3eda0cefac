"""Write the key tables of docs/recipes.md, generated from the schema."""

from __future__ import annotations

import re
from pathlib import Path

from turnwise.config import EnvConfig, RunConfig
from turnwise.config.dump import toml_value
from turnwise.config.fields import describe_type, field_docs, field_type
from turnwise.config.load import flatten

PAGE = Path(__file__).parents[2] / "docs" / "recipes.md"
BEGIN, END = "<!-- keys: begin (written by tests/docs/recipe_keys.py) -->", "<!-- keys: end -->"


def tables() -> str:
    """Return one table per section, in the schema's order."""
    docs = field_docs()
    sections: dict[str, list[str]] = {}
    for key, value in flatten(RunConfig(env=(EnvConfig(),))):
        plain = key.replace("env.0.", "env.")
        section, _, name = plain.rpartition(".")
        kind = describe_type(field_type(key)).replace("|", "\\|")
        meaning = docs[plain].replace("|", "\\|")
        sections.setdefault(section, []).append(f"| `{name}` | {kind} | `{toml_value(value)}` | {meaning} |")
    lines: list[str] = []
    for section, rows in sections.items():
        head = "At the top" if not section else "`[[env]]`" if section == "env" else f"`[{section}]`"
        about = docs.get(section, "") if section else ""
        lines += [
            f"### {head}",
            "",
            *([about, ""] if about else []),
            "| key | value | default | meaning |",
            "|---|---|---|---|",
        ]
        lines += [*rows, ""]
    return "\n".join(lines)


def with_tables(page: str) -> str:
    """Return the page with its tables replaced."""
    pattern = re.compile(re.escape(BEGIN) + ".*?" + re.escape(END), re.DOTALL)
    assert pattern.search(page), f"{PAGE.name} has lost its markers"
    return pattern.sub(lambda _: f"{BEGIN}\n\n{tables()}\n{END}", page)


if __name__ == "__main__":
    PAGE.write_text(with_tables(PAGE.read_text(encoding="utf-8")), encoding="utf-8")
