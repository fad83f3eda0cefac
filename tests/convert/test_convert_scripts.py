"""The settings of launch scripts that the systems ship, by name: each is in a table.

`shipped_scripts.json` has the names of a script's settings, by what `turnwright convert` made of
them; scripts themselves are not here.
"""

import json
from fnmatch import fnmatchcase
from pathlib import Path

import pytest

from turnwright_compat.launch_scripts import SYSTEMS

HERE = Path(__file__).parent
SHIPPED = json.loads((HERE / "shipped_scripts.json").read_text())
SCRIPTS = [(system, script) for system, scripts in SHIPPED.items() for script in scripts]
KINDS = ("mapped", "machine", "none")
SYSTEM_OF = {
    "slime": "slime",
    "Miles": "slime",
    "SkyRL": "skyrl",
    "verl": "verl",
    "ms-swift": "swift",
}


@pytest.mark.parametrize(("system", "script"), SCRIPTS)
def test_every_setting_of_a_shipped_script_is_in_a_table(system, script):
    table = SYSTEMS[SYSTEM_OF[system]]
    listed = {kind: SHIPPED[system][script][kind].split() for kind in KINDS}
    patterns = [one for one, _ in table.patterns]
    ruled = {
        key
        for key in listed["mapped"]
        if key in table.rules or any(fnmatchcase(key, one) for one in patterns)
    }
    assert sorted({*listed["mapped"]} - ruled) == []
    known = {*table.rules, *table.none}
    assert [
        key
        for key in listed["none"]
        if key not in known and not any(fnmatchcase(key, one) for one in patterns)
    ] == []
    dropped = [
        key for key in listed["machine"] if any(fnmatchcase(key, one) for one in table.machine)
    ]
    assert dropped == listed["machine"]
