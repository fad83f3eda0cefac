"""Helpers of the tests of the local engine and of the trainer."""

import sys
from pathlib import Path

TESTS = Path(__file__).resolve().parents[1]
sys.path += [str(TESTS / "engines_local"), str(TESTS / "training"), str(TESTS / "run")]
