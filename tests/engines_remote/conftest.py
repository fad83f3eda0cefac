"""Nobody but these tests imports remote_kit."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))
