"""The core works, and is quick, without torch, transformers and numpy."""

from __future__ import annotations

import os
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

import turnwright
from turnwright import plugins

ROOT = Path(__file__).parents[2]
ALONE = Path(__file__).parent / "core_alone.py"


def python(*words: object, **more) -> subprocess.CompletedProcess[str]:
    env = os.environ | {"PYTHONPATH": str(ROOT / "src")}
    return subprocess.run(
        [sys.executable, *map(str, words)], capture_output=True, text=True, env=env, **more
    )


def test_the_core_needs_nothing_heavy():
    done = python(ALONE, "--block", cwd=ROOT)
    assert done.returncode == 0, done.stderr
    assert done.stdout.endswith("the core is enough\n")


@pytest.mark.parametrize(
    "words", [("-c", "import turnwright"), ("-m", "turnwright.cli.main", "--help")]
)
def test_the_first_answer_imports_nothing_but_the_standard_library(words):
    """So it takes about a tenth of a second; what each of them costs is this test's subject, not
    what the machine does."""
    done = python("-X", "importtime", *words)
    assert done.returncode == 0
    named = {
        line.rpartition("|")[2].strip().partition(".")[0]
        for line in done.stderr.splitlines()
        if "|" in line
    }
    bare = python(
        "-X", "importtime", "-c", "pass"
    ).stderr  # what an installation itself imports at start
    named -= {
        line.rpartition("|")[2].strip().partition(".")[0]
        for line in bare.splitlines()
        if "|" in line
    }
    jython = {"org"}  # which the module `copy` looks for
    assert named - sys.stdlib_module_names - jython - {"turnwright", *plugins.PACKAGES} == set()
    assert sum("turnwright" in line for line in done.stderr.splitlines()) < 40


def test_one_version():
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    assert project["version"] == turnwright.__version__
    assert f"## {turnwright.__version__}" in (ROOT / "CHANGELOG.md").read_text(encoding="utf-8")


def test_what_an_installation_says_is_missing_is_what_the_packages_add():
    """Entry points of a package that was removed are gone with it, so the core has
    the list a second time."""
    points = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"][
        "entry-points"
    ]
    added = {
        group.removeprefix("turnwright."): {
            name: value.partition(".")[0] for name, value in values.items()
        }
        for group, values in points.items()
    }
    assert added == plugins.OURS


def test_the_pins_cover_what_is_asked_for():
    """`constraints.txt` holds an exact version of every direct dependency."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    pins = [
        line
        for line in (ROOT / "constraints.txt").read_text().splitlines()
        if line and not line.startswith("#")
    ]
    pinned = {line.partition("==")[0].lower().replace("_", "-") for line in pins}
    assert all("==" in line and "+" not in line for line in pins)
    extras = project["optional-dependencies"]
    for asked in (*project["dependencies"], *extras["train"], *extras["dev"]):
        assert asked.partition(">=")[0].lower() in pinned, asked


def test_the_license_is_apache_2_and_nobodys_else():
    lines = (ROOT / "LICENSE").read_text(encoding="utf-8").strip().splitlines()
    assert lines[0].strip() == "Apache License"
    assert lines[1].strip().startswith("Version 2.0")
