"""What runs below this process."""

from __future__ import annotations

import os
from pathlib import Path


def children(root: int | None = None) -> set[int]:
    """Ids of the processes that descend from one, by default this one."""
    found, todo = set(), [root or os.getpid()]
    parents: dict[int, list[int]] = {}
    for entry in Path("/proc").iterdir():
        if entry.name.isdecimal():
            try:
                parents.setdefault(
                    int((entry / "stat").read_text().rpartition(")")[2].split()[1]), []
                ).append(int(entry.name))
            except OSError:
                continue
    while todo:
        mine = parents.get(todo.pop(), [])
        found.update(mine)
        todo += mine
    return found
