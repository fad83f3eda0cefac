"""Two ranks, forked once torch is imported: they meet, part, and tell at the very end whether
their group is there."""

from __future__ import annotations

import atexit
import json
import os
import sys
from pathlib import Path

import torch
import torch.distributed as dist

from turnwright.training.distributed import ProcessRanks


def tell() -> None:
    Path(sys.argv[1], os.environ["RANK"]).write_text("there" if dist.is_initialized() else "ended")


if __name__ == "__main__":
    torch.set_num_threads(1)
    ranks = []
    for places in json.loads(sys.argv[2]):
        if not (rank := os.fork()):
            os.environ |= places
            break
        ranks.append(rank)
    else:  # only waits, and ends with the worst status
        os._exit(max(os.waitstatus_to_exitcode(os.waitpid(rank, 0)[1]) != 0 for rank in ranks))
    atexit.register(tell)  # before the others, so it runs after them
    joined = ProcessRanks()
    joined.sum_(torch.ones(3))
    if joined.rank:
        assert joined.receive() is None
    else:
        joined.stop_workers()
