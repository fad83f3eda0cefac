"""Write docs/reference/keys.md: every key of a recipe, from the docstrings of the schema."""

from __future__ import annotations

from pathlib import Path

from turnwright.config import RunConfig
from turnwright.config.dump import toml_value
from turnwright.config.fields import field_docs, field_type, table_lists
from turnwright.config.recipe import flatten
from turnwright.config.values import describe_type

PAGE = Path(__file__).parents[2] / "docs" / "reference" / "keys.md"
HEAD = """# Every key of a recipe

Written by `python tests/docs/recipe_keys.py` from the docstrings of `src/turnwright/config/schema.py`.
`turnwright train --keys` prints the same.

"""  # noqa: E501


def tables() -> str:
    """Return one table per section, in the schema's order."""
    docs = field_docs()
    sections: dict[str, list[str]] = {}
    for key, value in flatten(
        RunConfig(**{name: (kind(),) for name, kind in table_lists().items()})
    ):
        plain = key.replace(".0.", ".")
        section, _, name = plain.rpartition(".")
        kind = describe_type(field_type(key)).replace("|", "\\|")
        meaning = docs[plain].replace("|", "\\|")
        sections.setdefault(section, []).append(
            f"| `{name}` | {kind} | `{toml_value(value)}` | {meaning} |"
        )
    lines: list[str] = []
    for section, rows in sections.items():
        head = (
            "At the top"
            if not section
            else f"`[[{section}]]`"
            if section in table_lists()
            else f"`[{section}]`"
        )
        about = docs.get(section, "") if section else ""
        lines += [
            f"## {head}",
            "",
            *([about, ""] if about else []),
            "| key | value | default | meaning |",
            "|---|---|---|---|",
        ]
        lines += [*rows, ""]
    return "\n".join(lines)


def page() -> str:
    """Return the page."""
    return HEAD + tables()


if __name__ == "__main__":
    PAGE.write_text(page(), encoding="utf-8")
