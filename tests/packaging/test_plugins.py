"""Packages of others add commands, reports and filters by entry points; one that is broken harms no other."""

from __future__ import annotations

import pytest

from turnwright import plugins
from turnwright.display.reports import reports_of
from turnwright.envs.foreign import adapt_group_filter
from turnwright.errors import ConfigError

MODULES = {
    "their_reports.py": """\
from pathlib import Path
from turnwright.cli.options import Command
from turnwright.envs.foreign import Framework
from turnwright.errors import ConfigError

def report(run, renew):
    if renew:
        raise ConfigError("no room for the report")
    return Path(run, "theirs.txt")

def group_filter(function):
    if function is print:
        raise ConfigError("print is no filter")

REPORTS = Command(lambda subparsers: None, report=report)
FILTERS = Framework("filters", lambda found: None, group_filter=group_filter)
""",
    "their_error.py": "raise RuntimeError('a part is missing')\n",
}
POINTS = """\
[turnwright.commands]
a_broken = their_error:COMMAND
reports = their_reports:REPORTS

[turnwright.frameworks]
a_broken = their_error:FRAMEWORK
filters = their_reports:FILTERS
"""


@pytest.fixture
def theirs(tmp_path, monkeypatch):
    """A package in a folder of the path: its modules, and its metadata with the entry points."""
    for name, code in MODULES.items():
        (tmp_path / name).write_text(code)
    metadata = tmp_path / "theirs-1.dist-info"
    metadata.mkdir()
    (metadata / "METADATA").write_text("Metadata-Version: 2.1\nName: theirs\nVersion: 1\n")
    (metadata / "entry_points.txt").write_text(POINTS)
    monkeypatch.syspath_prepend(tmp_path)
    plugins.installed.cache_clear()
    yield
    plugins.installed.cache_clear()


@pytest.mark.usefixtures("theirs")
@pytest.mark.parametrize("kind", ["commands", "frameworks"])
def test_what_cannot_be_imported_is_left_out_and_told_to_who_names_it(kind):
    assert len(list(plugins.loaded(kind))) == len(plugins.installed(kind)) - 1
    with pytest.raises(ConfigError, match=r"'a_broken' of their_error:\w+ cannot be imported \(a part is missing\)"):
        plugins.load(kind, "a_broken")


@pytest.mark.usefixtures("theirs")
def test_errors_of_what_is_used_are_told(tmp_path):
    """They are not those of a package that cannot be imported."""
    assert tmp_path / "theirs.txt" in reports_of(tmp_path, renew=False)
    with pytest.raises(ConfigError, match="no room for the report"):
        reports_of(tmp_path, renew=True)
    assert adapt_group_filter(len) is None
    with pytest.raises(ConfigError, match="print is no filter"):
        adapt_group_filter(print)
