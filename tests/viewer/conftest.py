from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
from kit.viewing import write_run


@pytest.fixture
def make_run() -> Callable[..., Path]:
    return write_run
