"""Where Python processes that this one starts find modules."""

from __future__ import annotations

import os
import sys

_STARTED_IN = os.getcwd()
"""The working directory, before any code of a user could change it."""


def python_path() -> str:
    """Return a `PYTHONPATH` by which a child process finds what this process finds, from any working directory."""
    entries = [os.path.join(_STARTED_IN, entry) for entry in sys.path]
    return os.pathsep.join(dict.fromkeys(entries))
