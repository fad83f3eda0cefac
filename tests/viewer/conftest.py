from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent))

from view_kit import write_run


@pytest.fixture
def make_run() -> Callable[..., Path]:
    return write_run
