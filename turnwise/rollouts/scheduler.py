"""stub"""

from typing import Any

BatchScheduler: Any = None
