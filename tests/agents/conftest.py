"""Real programs reach nothing but this machine: they run where there is no other network."""

from __future__ import annotations

from pathlib import Path

import pytest


@pytest.fixture(scope="session", autouse=True)
def _no_network() -> None:
    rows = Path("/proc/net/dev").read_text().splitlines()[2:]
    others = [name for row in rows if (name := row.partition(":")[0].strip()) != "lo"]
    if others:
        pytest.fail(
            f"these tests run real programs and need a namespace without {', '.join(others)}: run "
            "make test-agents"
        )
