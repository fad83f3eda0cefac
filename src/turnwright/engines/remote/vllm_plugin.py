"""vLLM plugin for weights by a torch process group, installed by
`turnwright engines start vllm --group`.

vLLM's own transfer uses raw NCCL: it needs GPUs on both sides and vLLM's communicator in the
trainer. It allows other transfer engines on the same routes. A torch process group works on CPUs
(gloo) and GPUs (nccl), and SGLang uses one too.
"""

from __future__ import annotations

MODULE = "turnwright_groups"
SOURCE = '''"""Weights by a process group of torch, for vLLM."""
import os
from dataclasses import dataclass
from datetime import timedelta

import torch
import torch.distributed as dist
from vllm.distributed.weight_transfer.base import WeightTransferEngine, WeightTransferInitInfo, WeightTransferUpdateInfo
from vllm.distributed.weight_transfer.factory import WeightTransferEngineFactory
from vllm.model_executor.model_loader.reload import finalize_layerwise_reload, initialize_layerwise_reload

LIMIT = timedelta(seconds=600)


@dataclass
class Meeting(WeightTransferInitInfo):
    master_address: str
    master_port: int
    rank_offset: int
    world_size: int
    group_name: str
    backend: str


@dataclass
class Bucket(WeightTransferUpdateInfo):
    names: list[str]
    dtype_names: list[str]
    shapes: list[list[int]]


class Engine(WeightTransferEngine):
    """Rank 0 is the trainer, which broadcasts; every worker receives all tensors and keeps its part.

    Tensors wait in host memory until the update is complete: a partially reloaded model ends vLLM at the next token and takes
    no further weights.
    """

    init_info_cls = Meeting
    update_info_cls = Bucket
    group = store = None

    def init_transfer_engine(self, info):
        self.shutdown()
        parallel = self.parallel_config
        rank = info.rank_offset + parallel.data_parallel_index * parallel.world_size + parallel.rank
        place = "cuda" if info.backend == "nccl" else "cpu"
        self.store = dist.TCPStore(
            info.master_address, info.master_port, info.world_size, False, LIMIT, wait_for_workers=False
        )
        store = dist.PrefixStore(info.group_name, self.store)
        store = dist.PrefixStore(f"{place}/", dist.PrefixStore(f"{info.group_name}/", store))
        if info.backend == "nccl":
            options = dist.ProcessGroupNCCL.Options()
            options._timeout = LIMIT
            os.environ["TORCH_NCCL_BLOCKING_WAIT"] = "1"  # a lost trainer raises an error instead of ending this process
            try:
                self.group = dist.ProcessGroupNCCL(store, rank, info.world_size, options)
            finally:
                del os.environ["TORCH_NCCL_BLOCKING_WAIT"]
        else:
            self.group = dist.ProcessGroupGloo(store, rank, info.world_size, LIMIT)
        self.place = self.device if info.backend == "nccl" else "cpu"

    def start_weight_update(self):
        self.rows = []

    def finish_weight_update(self):
        rows, self.rows = self.rows, []
        if rows:
            initialize_layerwise_reload(self.model)
            self.model.load_weights((name, tensor.to(self.device)) for name, tensor in rows)
            finalize_layerwise_reload(self.model, self.model_config)

    def receive_weights(self, info):
        options = dist.BroadcastOptions()
        options.rootRank, options.rootTensor = 0, 0
        rows, works = [], []
        for name, dtype, shape in zip(info.names, info.dtype_names, info.shapes, strict=True):
            tensor = torch.empty(shape, dtype=getattr(torch, dtype), device=self.place)
            works.append(self.group.broadcast([tensor], options))
            rows.append((name, tensor))
        for work in works:
            work.wait(LIMIT)
        self.rows += [(name, tensor.cpu()) for name, tensor in rows]

    def shutdown(self):
        self.group = self.store = None
        self.rows = []


WeightTransferEngineFactory.register_engine("turnwright", Engine)


class Extension:
    """Empty; naming it makes vLLM import this module in its workers."""
'''  # noqa: E501
