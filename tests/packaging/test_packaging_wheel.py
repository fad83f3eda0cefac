"""The wheel, in an environment that holds the core's dependencies and nothing else; needs a
package index, so slow."""

from __future__ import annotations

import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest
from kit.type_checks import check, mypy

ROOT = Path(__file__).parents[2]

pytestmark = pytest.mark.slow


def run(*words: object, **more) -> str:
    done = subprocess.run([str(word) for word in words], capture_output=True, text=True, **more)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@pytest.fixture(scope="module")
def wheel(tmp_path_factory) -> Path:
    source = tmp_path_factory.mktemp("source")  # a copy: a build leaves files behind
    for name in ("src", "pyproject.toml", "README.md", "LICENSE"):
        path = ROOT / name
        ignore = shutil.ignore_patterns("__pycache__", "*.egg-info")
        shutil.copytree(path, source / name, ignore=ignore) if path.is_dir() else shutil.copy(
            path, source
        )
    out = tmp_path_factory.mktemp("wheel")
    run(sys.executable, "-m", "pip", "wheel", "--quiet", "--no-deps", "--wheel-dir", out, source)
    (found,) = out.glob("turnwright-*.whl")
    return found


def test_it_holds_the_package_and_its_data(wheel):
    names = set(zipfile.ZipFile(wheel).namelist())
    own = {
        str(path.relative_to(ROOT / "src"))
        for path in (ROOT / "src" / "turnwright").rglob("*")
        if path.suffix in (".py", ".jinja", ".typed")
    }
    assert own <= names
    assert not [name for name in names if name.startswith(("tests/", "docs/", "benchmarks/"))]


def test_the_core_installs_and_works_alone(wheel, tmp_path):
    run(sys.executable, "-m", "venv", tmp_path / "venv")
    python = tmp_path / "venv" / "bin" / "python"
    run(python, "-m", "pip", "install", "--quiet", "--constraint", ROOT / "constraints.txt", wheel)
    check(mypy(python), tmp_path)
    told = run(python, Path(__file__).parent / "core_alone.py", cwd=tmp_path)
    assert told.endswith("the core is enough\n")
    assert "train" in run(tmp_path / "venv" / "bin" / "turnwright", "--help")
    told = subprocess.run(
        [tmp_path / "venv" / "bin" / "turnwright", "train", "--env.use", "hop"],
        capture_output=True,
        text=True,
        cwd=tmp_path,
    )
    assert told.returncode != 0
    assert "turnwright[train]" in told.stderr, told.stderr
