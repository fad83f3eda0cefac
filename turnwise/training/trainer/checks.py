"""Checks of a step: logprob mismatch, template identity, and a probe of weight updates.

The probe tests whether the engine samples with the last update. A fingerprint is the engine's own report, and a bound on
|dlogp| lets a small lost update pass. So the trainer records its distribution at a few positions of the last step's
trajectories, before and after the update, and the engine reports its most likely id there. The missing share of the update at a
position is ``(engine - after) / (before - after)`` of that id's logprob: 0 with the update, 1 with the old weights, anything if
rounding exceeds the update. Of 16 positions where rounding alone decides, 13 have a share from 0.5 to 1.5 once in 38 million
steps: a ratio of two independent centered normals is in there with a probability of at most 1/6, whatever their sizes.
"""

from __future__ import annotations

import asyncio
import json
import math
from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from turnwise.config import TrainConfig
from turnwise.engines import Engine, Generation, Request, Sampling
from turnwise.errors import ConfigError, SyncError, TraceError, TurnwiseError, UsageError
from turnwise.records import RunDir
from turnwise.renderers.chat_renderer import ChatRenderer
from turnwise.training.advantages import Credit
from turnwise.training.forward.batch import MicroBatch, TrainingBatch, TrainingRow, padded, rows_of
from turnwise.training.forward.head import LogitDistribution
from turnwise.training.loss import BANNED_LOGIT, logprob_mismatch
from turnwise.types import Trajectory


def mismatch_bound(config: TrainConfig, dtype: torch.dtype) -> float:
    """Return the maximum allowed |logprob of trainer - of engine|, in nats.

    The default is 1e-3 in float32 (a correct engine is within 1e-4). There is none in lower precision, where rounding alone
    reaches 0.2, nor with a correction, which is for engines that differ.
    """
    if config.max_mismatch is not None:
        return config.max_mismatch
    return math.inf if dtype in (torch.bfloat16, torch.float16) or config.correction != "none" else 1e-3


def divergence_bound(config: TrainConfig) -> float:
    """Return the maximum allowed KL(engine || trainer) per token, averaged over a batch, in nats.

    The default is 0.1: rounding stays far below in any precision, and a diverging run reaches it. None with `max_mismatch`,
    which declares the difference intended.
    """
    if config.max_mismatch_kl is not None:
        return config.max_mismatch_kl
    return 0.1 if config.max_mismatch is None else math.inf


def check_mismatch(
    batch: TrainingBatch,
    bound: float,
    *,
    distribution: LogitDistribution,
    banned: int,
    dtype: torch.dtype,
    divergence: float = math.inf,
) -> None:
    """Compare the trainer's logprobs before the first update with the engine's.

    Raises:
        TurnwiseError: when the trainer gives a sampled id no probability.
        SyncError: when one differs by more than `bound`, or the mean KL exceeds `divergence`.
    """
    assert batch.start_n is not None
    odd_n = ~(batch.start_n > 0.5 * BANNED_LOGIT)
    if bool(odd_n.any()):
        raise TurnwiseError(
            f"the trainer gives no probability to an id that was sampled in {_where(batch, int(odd_n.nonzero()[0]))}: it is a "
            "banned id, or the model's weights are not finite; check that the engine gets the same banned_ids"
        )
    gap_n = (batch.start_n - batch.engine_n).abs().nan_to_num(0.0)
    worst = int(gap_n.argmax())
    mismatch = logprob_mismatch(batch.start_n, batch.engine_n)
    check = (
        f"weights (version and fingerprint), samples at temperature {distribution.temperature:g} with top_p "
        f"{distribution.top_p:g} and top_k {distribution.top_k}, bans the same {banned} ids, and computes in "
        f"{str(dtype).removeprefix('torch.')}; if the difference is intended,"
    )
    if gap_n[worst] <= bound and mismatch.get("mismatch_kl", 0.0) > divergence:
        raise SyncError(
            f"engine and trainer sample from different policies: KL(engine || trainer) is {mismatch['mismatch_kl']:.3g} nats "
            f"per token, over train.max_mismatch_kl = {divergence:g}, effective sample size "
            f"{100 * mismatch['importance_ess']:.0f}%. "
            f"The weights are unchanged. Check that the engine has the newest {check} raise train.max_mismatch_kl or "
            "set train.correction"
        )
    if gap_n[worst] <= bound:
        return
    raise SyncError(
        f"engine and trainer disagree on sampled ids: |logprob of trainer - of engine| is {gap_n[worst]:.3g} at most, "
        f"{mismatch['mismatch_mean']:.3g} on average, and over train.max_mismatch = {bound:g} for {int((gap_n > bound).sum())} "
        f"of {batch.size} ids (worst in {_where(batch, worst)}: {batch.engine_n[worst]:.4f} in the engine, "
        f"{batch.start_n[worst]:.4f} in the trainer). The weights are unchanged. Check that the engine has the newest "
        f"{check} raise train.max_mismatch or set train.correction"
    )


def check_logprobs(batch: TrainingBatch, key: str = "train.old_logprobs = 'engine'", other: str = "trainer") -> None:
    """Check that the engine returned every logprob, for ratios that need them.

    Args:
        key: recipe key that needs them.
        other: value of that key that does not.

    Raises:
        ConfigError: when one is missing.
    """
    missing = int(torch.isnan(batch.engine_n).sum())
    if missing:
        raise ConfigError(
            f"{key} needs a logprob for every sampled id; {missing} of {batch.size} have none: set it to {other!r}"
        )


def check_finite(loss: float, norm: float, where: str) -> None:
    """Check that an update would not destroy the weights.

    Raises:
        TurnwiseError: when the loss or its gradient is not finite.
    """
    if not math.isfinite(norm) or not math.isfinite(loss):
        raise TurnwiseError(
            f"in {where} the loss is {loss} and its gradient norm {norm}; the weights are unchanged: lower the learning rate, "
            "and check this step's trajectories for extreme rewards or logprobs"
        )


def _where(batch: TrainingBatch, token: int) -> str:
    key = batch.trajectories[int(batch.trajectory_n[token])].key
    return f"task {key.task!r}, sample {key.sample}, step {key.step}"


_REMEDY = {
    "template": "restore the chat template (model.template, model.template_args, or the model directory's own)",
    "tokenizer": "restore the tokenizer (tokenizer.json of the model directory)",
    "settings": "restore the settings (stop ids of generation_config.json; another version of Turnwise may have others)",
}


def check_run_template(run: RunDir, renderer: ChatRenderer, *, resumed: bool) -> None:
    """Write the hashes of a run's template, tokenizer and settings into its `config.json`, or check a resumed run's.

    Raises:
        ConfigError: when a resumed run has others; the message names them and the remedy.
        TraceError: when `config.json` cannot be read or written.
    """
    now = {"hash": renderer.fingerprint, "origin": renderer.template.origin, **renderer.fingerprints}
    path = run.path / "config.json"
    try:
        row: dict[str, Any] = json.loads(path.read_text(encoding="utf-8")) if path.exists() else {}
    except (OSError, ValueError) as error:
        raise TraceError(f"{path}: cannot be read ({error}); restore it or start a new run") from error
    was = row.get("template")
    if not resumed or not isinstance(was, dict):  # a run that was killed early has none
        run.write_json("config.json", row | {"template": now})
        return
    if was.get("hash") == now["hash"]:
        return
    changed = [name for name in _REMEDY if was.get(name) != now[name]]
    raise ConfigError(
        f"--resume {run.path}: the run was started with another {_listed(changed) or 'renderer'} "
        f"(hash {was.get('hash')}, now {now['hash']}), so its episodes would differ from those sampled now; "
        f"{'; '.join(_REMEDY[name] for name in changed) or 'use the version of Turnwise that started it'}, or start a new run"
    )


def check_fingerprints(fingerprint: str, trajectories: Iterable[Trajectory], where: str) -> None:
    """Refuse trajectories whose ids come from another template, tokenizer or settings than the fingerprint's.

    Raises:
        UsageError: for the first of them.
    """
    for trajectory in trajectories:
        if trajectory.template and trajectory.template != fingerprint:
            key = trajectory.key
            name = f"{key.phase}/{key.step}/{key.task}/{key.sample}"
            raise UsageError(
                f"{where} has an episode ({name}) of another chat template, tokenizer or settings (hash "
                f"{trajectory.template}, here {fingerprint}), whose ids mean something else to this model: remove it, or "
                "train with the settings it was sampled with"
            )


def _listed(names: list[str]) -> str:
    return " and ".join(["chat template" if name == "template" else name for name in names])


TRAJECTORIES, POSITIONS = 4, 4
"""Trajectories of a step that are probed, and positions in each."""
NEAR = (0.5, 1.5)
"""Missing share that counts as the full update."""
MIN_POSITIONS, MAX_SHARE = 12, 0.8
"""The check fails only with at least so many positions, if this share of them lacks about the full update."""


@dataclass(slots=True)
class WeightSyncProbe:
    """Change of the trainer's distribution by an update, at K positions."""

    contexts: list[list[int]]
    micros: list[MicroBatch]
    before_kv: Tensor
    """Log-probabilities, on the CPU."""
    after_kv: Tensor | None = None

    @classmethod
    def before(
        cls, credits: Sequence[Credit], score: Callable[[MicroBatch], Tensor], device: torch.device
    ) -> WeightSyncProbe | None:
        """Record the distribution before an update; None if no text-only trajectory is trained.

        Args:
            score: returns log-probabilities (M, vocabulary) at the targets of a pass.
        """
        usable = [c for c in credits if c.reason is None and c.tokens and not any(s.media for s in c.trajectory.spans)]
        chosen = usable[:: max(1, len(usable) // TRAJECTORIES)][:TRAJECTORIES]
        rows = [_thinned(rows_of(credit.trajectory, 0, credit.weights)[0]) for credit in chosen]
        if not rows:
            return None
        micros = padded(rows, max(len(row.ids) for row in rows) * len(rows), device)
        contexts = [row.ids[:place] for row in rows for place in row.places]
        return cls(contexts, micros, _scored(micros, score, len(contexts)))

    def after(self, score: Callable[[MicroBatch], Tensor]) -> WeightSyncProbe:
        """Record the distribution after the update."""
        self.after_kv = _scored(self.micros, score, len(self.contexts))
        return self

    async def ask(self, engine: Engine, version: int, banned_ids: Collection[int], seconds: float) -> None:
        """Check that the engine has the update.

        Raises:
            SyncError: when it lacks a part of it.
            EngineError: when it does not answer.
        """
        requests = [
            Request(
                context,
                1,
                frozenset(),
                seed=0,
                session=f"probe/{version}/{number}",
                sampling=Sampling(temperature=0.0),
                banned_ids=frozenset(banned_ids),
                min_version=version,
            )
            for number, context in enumerate(self.contexts)
        ]
        try:
            pending = asyncio.gather(*(engine.generate(request) for request in requests))
            replies: list[Generation] = await asyncio.wait_for(pending, seconds)
        finally:
            for request in requests:
                engine.release(request.session)
        assert self.after_kv is not None
        found = []
        for number, reply in enumerate(replies):
            logprob = reply.logprobs[0] if reply.ids else None
            if logprob is not None:
                after = float(self.after_kv[number, reply.ids[0]])
                found.append((logprob - after, float(self.before_kv[number, reply.ids[0]]) - after))
        lost, positions = count_missing(found)
        if positions >= MIN_POSITIONS and lost >= MAX_SHARE * positions:
            gap, moved = (_mean(pair[side] for pair in found) for side in (0, 1))
            raise SyncError(
                f"the engine reports policy {version}, but at {lost} of {positions} positions of the last step's "
                f"trajectories its logprobs lack the last update: |logprob of engine - of trainer| is {gap:.3g} on average, "
                f"and the update changed them by {moved:.3g}. It has the old weights, or ignores the LoRA it received: check "
                "how it loads weights; nothing was trained on its episodes"
            )


def count_missing(found: Sequence[tuple[float, float]]) -> tuple[int, int]:
    """Count the positions where an engine lacks about the full update, and those where the update changed anything.

    Args:
        found: (engine - after, before - after) per position, in nats.
    """
    shares = [d / s for d, s in found if s and math.isfinite(d) and math.isfinite(s)]
    return sum(NEAR[0] < share < NEAR[1] for share in shares), len(shares)


def _mean(values: Iterable[float]) -> float:
    sizes = [abs(value) for value in values]
    return sum(sizes) / max(len(sizes), 1)


def _scored(micros: Sequence[MicroBatch], score: Callable[[MicroBatch], Tensor], positions: int) -> Tensor:
    parts = [(micro.tokens_m.cpu(), score(micro).cpu()) for micro in micros]
    found = parts[0][1].new_empty((positions, parts[0][1].shape[-1]))
    for tokens_m, logp_mv in parts:
        found[tokens_m] = logp_mv
    return found


def _thinned(row: TrainingRow) -> TrainingRow:
    """Reduce a row to a few of its targets, spread over it."""
    chosen = range(0, len(row.places), max(1, len(row.places) // POSITIONS))[:POSITIONS]
    places = [row.places[k] for k in chosen]
    return TrainingRow(
        ids=row.ids[: places[-1]],
        places=places,
        targets=[row.targets[k] for k in chosen],
        weights=[row.weights[k] for k in chosen],
        logprobs=[row.logprobs[k] for k in chosen],
        trajectory=0,
    )
