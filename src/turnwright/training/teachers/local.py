"""Teachers in this process: another model, or the policy itself with a hint.

`LocalTeacher.score` packs the rows that the teacher reads and runs its model over them; a
`SelfTeacher` does so in the policy's own model. A model with another tokenizer is an
`AlignedTeacher` (`aligned.py`).
"""

from __future__ import annotations

from copy import deepcopy
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from turnwright.config import TeacherConfig
from turnwright.config.schema import Batching
from turnwright.errors import ConfigError
from turnwright.training.forward.batch import TeacherScores, TrainingBatch
from turnwright.training.forward.divergence import TeacherTargets
from turnwright.training.forward.forward import FittedHead, ForwardPass, target_stats
from turnwright.training.forward.packing import BatchPacker
from turnwright.training.forward.passes import MicroBatch
from turnwright.training.score_ids import top_logprobs
from turnwright.training.teachers.teacher import Hint, TaughtPolicy, Teacher, no_answer


def _keep(kept: dict[str, Tensor], name: str, values_m: Tensor, index_m: Tensor, size: int) -> None:
    """Put values of tokens `index_m` into a tensor for all tokens of a batch."""
    if name not in kept:
        kept[name] = values_m.new_zeros((size, *values_m.shape[1:]))
    kept[name][index_m] = values_m


class LocalTeacher(Teacher):
    """Another model in this process; it reads exactly the ids that the policy received."""

    def __init__(
        self,
        config: TeacherConfig,
        name: str,
        policy: TaughtPolicy,
        hint: Hint | None,
        forward: ForwardPass,
        batching: Batching,
    ) -> None:
        super().__init__(config, name, policy, hint)
        self.forward = forward
        packer = BatchPacker("rows" if batching == "rows" else "auto", forward.decoder)
        self._pack = packer.pack
        self._start = packer.start_step
        if config.signal == "loss" and config.top is None and forward.head is None:
            raise ConfigError(
                f"teacher {name}: the logits of this model are not a function of its last hidden "
                "states that is known here, so a divergence over the vocabulary is not possible; "
                "set teacher.top"
            )

    @property
    def context(self) -> int | None:
        config: Any = getattr(self.forward.model, "config", None)
        if config is None:
            return None
        positions = getattr(config.get_text_config(), "max_position_embeddings", None)
        return positions if isinstance(positions, int) else None

    def score(self, batch: TrainingBatch) -> TeacherScores:
        policy = self.policy
        vision = None if policy.pixels is None else policy.pixels.vision
        rows, tokens_k = self.rows(batch)
        device = batch.weights_n.device
        self._start()

        def packed(limit: int) -> list[MicroBatch]:
            return self._pack(rows, limit, device, vision)

        # The batch as the teacher reads it, with passes of its own.
        view = replace(
            batch,
            micros=packed(policy.micro_tokens),
            packed=packed,
            max_positions=policy.micro_tokens,
        )
        logp_n = torch.full_like(batch.weights_n, torch.nan)
        known_n = torch.zeros_like(batch.weights_n, dtype=torch.bool)
        known_n[tokens_k] = True

        if policy.distribution.truncates and batch.support is None and rows:
            raise no_answer(self.name)
        kept: dict[str, Tensor] = {}

        def work() -> None:
            with torch.no_grad():
                for micro in view.micros:
                    self._score_pass(batch, micro, tokens_k[micro.tokens_m], logp_n, kept)

        if rows:
            policy.run(view, work)
        return TeacherScores(self.config, self.name, logp_n, self._targets(known_n, kept))

    def _score_pass(
        self,
        batch: TrainingBatch,
        micro: MicroBatch,
        index_m: Tensor,
        logp_n: Tensor,
        kept: dict[str, Tensor],
    ) -> None:
        """Score one pass, whose targets are tokens `index_m` of the batch."""
        config = self.config
        law = self.policy.distribution
        features_md, own_head = self.forward.features(micro, self.policy.pixels)
        head = FittedHead(own_head.module, own_head.shape, self.policy.vocabulary)
        support = None if batch.support is None else batch.support.take(index_m)
        stats = target_stats(features_md, head, micro.targets_m, law, support, entropy=False)
        logp_n[index_m] = stats.logprobs_m.double()

        if config.top is not None:
            top_mk, top_logp_mk = top_logprobs(
                features_md, head, micro.targets_m, law, support, config.top
            )
            _keep(kept, "top_mk", top_mk, index_m, batch.size)
            _keep(kept, "top_logp_mk", top_logp_mk, index_m, batch.size)
        elif config.signal == "loss":
            _keep(kept, "hidden_md", features_md, index_m, batch.size)

    def _targets(self, known_n: Tensor, kept: dict[str, Tensor]) -> TeacherTargets | None:
        if self.config.signal != "loss":
            return None

        head = None
        own_head = self.forward.head
        if "hidden_md" in kept and own_head is not None:
            module = self.kept_module(own_head.module)
            head = FittedHead(module, own_head.shape, self.policy.vocabulary)
        return TeacherTargets(self.config.divergence, known_n, head=head, **kept)

    def kept_module(self, head: nn.Module) -> nn.Module:
        """Return the head of kept hidden states, which stays as it is during the step's updates."""
        return head


class SelfTeacher(LocalTeacher):
    """The reference policy, in the policy's own model, after a hint."""

    def score(self, batch: TrainingBatch) -> TeacherScores:
        with self.policy.as_reference():
            return super().score(batch)

    def kept_module(self, head: nn.Module) -> nn.Module:
        return deepcopy(head).requires_grad_(False)
