"""Meets, parts, and tells at the very end of the process whether its group is there still."""

from __future__ import annotations

import atexit
import sys
from pathlib import Path

import torch
import torch.distributed as dist

from turnwise.training.distributed import ProcessRanks

RANK: list[int] = []


@atexit.register  # before the others, so it runs behind them
def tell() -> None:
    (Path(sys.argv[1]) / str(RANK[0])).write_text("there" if dist.is_initialized() else "ended")


if __name__ == "__main__":
    torch.set_num_threads(1)
    joined = ProcessRanks()
    RANK.append(joined.rank)
    joined.sum_(torch.ones(3))
    if joined.rank:
        assert joined.receive() is None
    else:
        joined.stop_workers()
