"""Passes in which every row decodes, as CUDA graphs: Python launches such a pass more slowly than a
GPU computes it."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from turnwright.engines.local.attention import AttentionPlan, AttentionRun
from turnwright.engines.local.kv_cache import KVCache
from turnwright.engines.local.sampler import ROWS, padded_rows, round_up_rows

_log = logging.getLogger(__name__)
LENGTHS = (256, 1024)
"""Attended keys are rounded up to multiples of the first up to the second, from there on of the
second."""
Pass = Callable[[Tensor, AttentionPlan, Tensor], Tensor]
"""From a batch [3, rows] of ids, positions and slots, its attention and the rows wanted to
logits."""
MOST_GRAPHS = 32
"""Graphs that are kept, each with the memory of its pass; then the one recorded first is
dropped."""
_RECORDING = threading.Lock()
"""Engines of one process record one at a time."""


@dataclass(frozen=True, slots=True)
class Recorded:
    """A graph with the tensors that it reads and writes, which must live as long as it does."""

    graph: torch.cuda.CUDAGraph
    batch: Tensor
    """[3, rows] ids, positions and slots."""
    wanted: Tensor
    """[rows] 0, 1, ..."""
    logits: Tensor
    """[rows, vocabulary]."""


class DecodeGraphs:
    """Graphs by (rows, keys), recorded at their first use, for one content of the cache's storage.

    Rows are rounded up to a power of two, so that few graphs serve all numbers of them.
    """

    def __init__(self, cache: KVCache, device: torch.device) -> None:
        self._cache = cache
        self._device = device
        self._graphs: dict[tuple[int, int], Recorded] = {}
        """Graphs by their numbers of rows and keys, in the order of recording."""
        self._storage = -1
        """Number of the cache's storage that they write to."""
        self.usable = True
        """False once recording failed: the model's pass cannot be recorded."""

    def forward(
        self,
        compute: Pass,
        tokens: list[int],
        positions: list[int],
        slots: list[int],
        length: int,
        keep: list[int],
    ) -> Tensor | None:
        """Run a pass over rows of which row i decodes in slot i, over at most `length` keys.

        Return the logits [padded number of `keep`, vocabulary], which the next pass may overwrite;
        None if it cannot be recorded.
        """
        if self._storage != self._cache.storage:  # the graphs would write where the cache was
            self._graphs.clear()
            self._storage = self._cache.storage

        # Find a graph for these numbers of rows and keys, rounded up, or record it.
        rows = max(ROWS, 1 << (len(tokens) - 1).bit_length())
        step = LENGTHS[1] if length > LENGTHS[1] else LENGTHS[0]
        length = min(-(-length // step) * step, self._cache.capacity)
        batch = padded_rows(tokens, positions, slots, rows, self._cache.scratch)
        recorded = self._graphs.get((rows, length))
        if recorded is None:
            recorded = self._record(compute, batch, length)
            if recorded is None:
                return None
            if len(self._graphs) >= MOST_GRAPHS:
                self._graphs.pop(next(iter(self._graphs)))
            self._graphs[rows, length] = recorded

        # Replay it on this batch.
        recorded.batch.copy_(batch)
        recorded.graph.replay()
        if keep == list(range(len(keep))):
            return recorded.logits
        padding = [0] * (round_up_rows(len(keep)) - len(keep))
        wanted = torch.tensor([*keep, *padding], device=self._device)
        return recorded.logits.index_select(0, wanted)

    def _record(self, compute: Pass, batch: Tensor, length: int) -> Recorded | None:
        device_batch = batch.to(self._device)
        wanted = torch.arange(device_batch.shape[1], device=self._device)

        def run() -> Tensor:
            count = min(device_batch.shape[1], self._cache.slots + 1)
            attention = [AttentionRun(0, count, length)]
            plan = AttentionPlan(self._cache, device_batch[1], device_batch[2], attention, None)
            return compute(device_batch, plan, wanted)

        try:
            graph, logits = record(run, self._device)
        except RuntimeError as error:
            self.usable = False
            reason = " ".join(str(error).split())[:200]
            _log.warning(
                "local engine: passes cannot be recorded as CUDA graphs, decoding is slower: %s",
                reason,
            )
            return None
        return Recorded(graph, device_batch, wanted, logits)


def record(run: Callable[[], Tensor], device: torch.device) -> tuple[torch.cuda.CUDAGraph, Tensor]:
    """Record what a function computes, without other threads' work.

    Return the graph, and the result that replays overwrite.
    """
    with _RECORDING:
        # A first run lets libraries allocate their workspaces outside of the graph.
        stream = torch.cuda.Stream(device)
        stream.wait_stream(torch.cuda.current_stream(device))
        with torch.cuda.stream(stream):
            run()
        torch.cuda.current_stream(device).wait_stream(stream)

        graph = torch.cuda.CUDAGraph()
        # The trainer may allocate on its thread meanwhile.
        with torch.cuda.graph(graph, capture_error_mode="thread_local"):
            result = run()
    return graph, result
