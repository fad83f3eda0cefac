"""Write docs/reference/metrics.md: every name in metrics.jsonl, from the table of the code."""

from __future__ import annotations

from pathlib import Path

from turnwright.records.episode_metrics import METRIC_GROUPS

PAGE = Path(__file__).parents[2] / "docs" / "reference" / "metrics.md"
HEAD = """# Every metric

Written by `python tests/docs/metric_tables.py` from `METRIC_GROUPS` of `src/turnwright/records/episode_metrics.py`.

"""  # noqa: E501


def page() -> str:
    """Return the page, one table per group."""
    parts = []
    for title, docs in METRIC_GROUPS.items():
        lines = [
            f"## {title}",
            "",
            "| name | unit | meaning | what to do when it moves |",
            "|---|---|---|---|",
        ]
        lines += [f"| `{doc.name}` | {doc.unit} | {doc.meaning} | {doc.advice} |" for doc in docs]
        parts.append("\n".join(lines))
    return HEAD + "\n\n".join(parts) + "\n"


if __name__ == "__main__":
    PAGE.write_text(page(), encoding="utf-8")
