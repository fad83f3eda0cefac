"""Datasets of Reasoning Gym and games of TextArena by id: all that their packages register
and that can run here."""

import functools
import os
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest

HOME = (
    Path(os.environ.get("TURNWRIGHT_COMPAT") or Path.home() / ".cache/turnwright/compat")
    / "registries"
)
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
        pip = [
            sys.executable,
            "-m",
            "pip",
            "install",
            "--quiet",
            "--disable-pip-version-check",
            "--upgrade",
        ]
        subprocess.run([*pip, "--target", str(site), *PACKAGES[name]], check=True)
        (site / "ready").touch()
    return site


SECONDS = {"reasoning_gym": 60, "textarena": 20}
"""Bound of each check in CPU time; the slowest that pass take 9 s and 8 s."""
TOTALS = {"reasoning_gym": (100, 100), "textarena": (150, 50)}
"""Fewest ids, and fewest different ones, that pass."""
CANNOT_RUN = {
    "reasoning_gym": {
        "composite": "Must specify at least one dataset",
    },
    "textarena": {
        **dict.fromkeys(
            ("GuessWho", "TwentyQuestions", "Debate", "ScenarioPlanning"),
            "OpenRouter API key not found",
        ),
        **dict.fromkeys(
            (
                "Hangman",
                "WordLadder",
                "Wordle",
                "WordSearch",
                "DontSayIt",
                "LetterAuction",
                "SpellingBee",
                "WordChains",
            ),
            "LookupError",  # a word list that nltk downloads
        ),
        "Codenames": "LookupError",
        **dict.fromkeys(
            ("Klondike", "Checkers", "Chess", "IteratedStagHunt", "ReverseTicTacToe"), "SyntaxError"
        ),  # Python 3.12
        "UltimateTexasHoldem": "SyntaxError",
        "UsedCarNegotiation": "No such file",
        "ScorableGames": "directory not found",
        "UsedCar": "No module named",
        "BabyAiText": "No module named",
        "CharacterConclave": "add_observation() missing",
        "Sokoban": "did not end",
    },
}
"""What may fail, by id without its version, and what the error says then."""


@functools.cache
def checked(name):
    """Return (id, seconds, error) of each id of a registry."""
    command = [sys.executable, str(RUNNER), name, str(installed(name)), str(SECONDS[name])]
    with tempfile.TemporaryDirectory() as folder:
        # A dataset writes files into the working directory.
        done = subprocess.run(
            command, cwd=folder, capture_output=True, text=True, check=True, timeout=3000
        )
    return [tuple(line.split("\t")) for line in done.stdout.splitlines() if line.count("\t") == 2]


def game(id):
    return id.partition("-v")[0]


@pytest.mark.parametrize("name", PACKAGES)
def test_registered_environments_pass_the_check(name):
    """Each id passes, but for those that are named above with their cause."""
    rows = checked(name)
    assert len(rows) > 100
    cause = CANNOT_RUN[name]
    unknown = [
        f"{id}: {error}"
        for id, _, error in rows
        if error and cause.get(game(id), error + "?") not in error
    ]
    assert unknown == []


@pytest.mark.parametrize("name", PACKAGES)
def test_enough_of_a_registry_passes(name, capsys):
    rows = checked(name)
    passed = [id for id, _, error in rows if not error]
    games = {game(id) for id in passed}
    with capsys.disabled():
        print(
            f"\n{name}: {len(passed)} of {len(rows)} ids ({len(games)} different ones) pass "
            "`turnwright check`"
        )
        for id, _, error in rows:
            if error:
                print(f"  {id}: {error[:160]}")
    assert len({id for id, _, _ in rows}) == len(rows)
    assert all(
        found >= least for found, least in zip((len(passed), len(games)), TOTALS[name], strict=True)
    )
