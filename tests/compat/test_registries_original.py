"""Datasets of Reasoning Gym and games of TextArena by id: all that their packages register and that can run here."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

HOME = Path(os.environ.get("TURNWISE_COMPAT") or Path.home() / ".cache/turnwise/compat") / "registries"
PACKAGES = {
    "reasoning_gym": ["reasoning-gym==0.1.25"],
    "textarena": [
        "--no-deps",
        "textarena==0.7.4",
        "nltk",
        "regex",
        "joblib",
        "click",
        "chess",
        "rich",
        "python-dotenv",
        "websockets",
        "requests",
        "urllib3",
        "idna",
        "certifi",
        "charset_normalizer",
    ],
}
RUNNER = Path(__file__).with_name("check_registry.py")

pytestmark = pytest.mark.compat


def installed(name):
    site = HOME / name
    if not (site / "ready").exists():
        pip = [sys.executable, "-m", "pip", "install", "--quiet", "--disable-pip-version-check", "--upgrade"]
        subprocess.run([*pip, "--target", str(site), *PACKAGES[name]], check=True)
        (site / "ready").touch()
    return site


@pytest.mark.parametrize(("name", "at_least"), [("reasoning_gym", 100), ("textarena", 50)])
def test_registered_environments_pass_the_check(name, at_least, capsys):
    command = [sys.executable, str(RUNNER), name, str(installed(name)), "90", "0"]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    rows = [line.split("\t") for line in done.stdout.splitlines() if line.count("\t") == 2]
    failed = [(id, error) for id, _, error in rows if error]
    games = {id.partition("-v")[0] for id, _, error in rows if not error}
    with capsys.disabled():
        print(f"\n{name}: {len(rows) - len(failed)} of {len(rows)} ids ({len(games)} different ones) pass `turnwise check`")
        for id, error in failed:
            print(f"  {id}: {error[:160]}")
    assert len(games) >= at_least, f"{len(games)} different ones pass"
