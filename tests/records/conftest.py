"""The play functions of the invariants are recorded here too."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1] / "invariants"))
