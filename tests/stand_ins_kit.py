"""Stand-ins of frameworks are importable in tests as they are for user code, and user files of tests."""

import importlib.abc
import importlib.util
import sys
from pathlib import Path

import pytest

STAND_INS = Path(__file__).parents[1] / "turnwise/compat/stand_ins"
USERS = Path(__file__).parent / "compat/users"


class Finder(importlib.abc.MetaPathFinder):
    """Finds the stand-ins of frameworks that are not installed."""

    def find_spec(self, fullname, path=None, target=None):
        place = STAND_INS.joinpath(*fullname.split("."))
        if (package := place / "__init__.py").is_file():
            return importlib.util.spec_from_file_location(fullname, package, submodule_search_locations=[str(place)])
        module = place.with_suffix(".py")
        return importlib.util.spec_from_file_location(fullname, module) if module.is_file() else None


@pytest.fixture(autouse=True, scope="module")
def stand_ins():
    """Install the finder for the tests of a module."""
    finder = Finder()
    sys.meta_path.append(finder)
    yield
    sys.meta_path.remove(finder)
