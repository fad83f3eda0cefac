"""The public API is typed: editors and checkers know its names, arguments and results."""

from __future__ import annotations

import subprocess
import sys

import pytest
from kit.type_checks import check, marked, mypy


def test_mypy_finds_five_mistakes_of_a_user_and_none_in_right_code(tmp_path):
    assert sorted(marked().values()) == ["1", "2", "3", "4", "5"]
    check(mypy(), tmp_path)


@pytest.mark.slow
def test_pyright_finds_them_too(tmp_path):
    subprocess.run([sys.executable, "-m", "venv", tmp_path / "venv"], check=True)
    pip = [tmp_path / "venv" / "bin" / "python", "-m", "pip", "install", "--quiet", "basedpyright"]
    subprocess.run(pip, check=True, stderr=subprocess.DEVNULL)
    pyright = tmp_path / "venv" / "bin" / "basedpyright"
    check([pyright, "--pythonpath", sys.executable, "--level", "error"], tmp_path)
