"""Imports of what needs torch.

Each case runs in an interpreter of its own: what other threads of a test session free would change
the count of frozen objects.
"""

from __future__ import annotations

import subprocess
import sys

import pytest

BODY = """
import gc
import sys

from turnwright.cli.options import import_training

on = sys.argv[1] == "on"
if not on:
    gc.disable()
before = gc.get_freeze_count()
import_training("imported")
assert sys.modules["imported"].collects is False
assert gc.isenabled() is on
frozen = gc.get_freeze_count()
assert frozen > before
import_training("imported")
assert gc.get_freeze_count() == frozen, "only what is imported is frozen"
try:
    import_training("of_no_package")
except ModuleNotFoundError:
    pass
else:
    raise AssertionError("a module that is not there was imported")
assert gc.isenabled() is on
"""


@pytest.mark.parametrize("collector", ["on", "off"])
def test_nothing_is_collected_during_the_imports_and_later_as_before(tmp_path, collector):
    (tmp_path / "imported.py").write_text("import gc\ncollects = gc.isenabled()\n")
    child = subprocess.run(
        [sys.executable, "-c", BODY, collector],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert child.returncode == 0, child.stderr
