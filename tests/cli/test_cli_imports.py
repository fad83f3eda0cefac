"""Imports of what needs torch."""

from __future__ import annotations

import gc
import sys
import threading

import pytest

from turnwright.cli.options import import_training


@pytest.mark.parametrize("on", [True, False])
def test_nothing_is_collected_during_the_imports_and_later_as_before(tmp_path, monkeypatch, on):
    name = f"imported_{on}".lower()
    (tmp_path / f"{name}.py").write_text("import gc\ncollects = gc.isenabled()\n")
    monkeypatch.syspath_prepend(tmp_path)
    for thread in threading.enumerate():  # of earlier tests; one that ends meanwhile frees frozen objects
        if thread.name.startswith("turnwright"):
            thread.join(20)
    try:
        if not on:
            gc.disable()
        before = gc.get_freeze_count()
        import_training(name)
        assert sys.modules[name].collects is False
        assert gc.isenabled() is on
        frozen = gc.get_freeze_count()
        assert frozen > before
        import_training(name)
        assert gc.get_freeze_count() == frozen  # only what is imported is frozen
        with pytest.raises(ModuleNotFoundError):
            import_training("of_no_package")
        assert gc.isenabled() is on
    finally:
        gc.enable()
