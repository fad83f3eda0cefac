"""The trained policies of a run.

What each of them is trained on, the spans of its own agents and their rewards, is cut out of the
episodes by `agent_views.py`.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from turnwright.engines import SupportsWeightUpdate
from turnwright.engines.local.weights import fingerprint
from turnwright.engines.policy_engine import AgentPolicies
from turnwright.engines.protocols import SharesMemory
from turnwright.envs.spec import EnvSpec
from turnwright.errors import ConfigError, SyncError, UsageError
from turnwright.records.episode_metrics import group_by_task
from turnwright.training.advantages import without_signal
from turnwright.training.agent_views import comparable
from turnwright.training.credit import Credit
from turnwright.training.forward.batch import TrainingBatch
from turnwright.training.model.weight_export import Weights
from turnwright.training.trainer.trainer import StepResult, Trainer
from turnwright.types import Group, Trajectory

FROZEN = "frozen"
"""Reason of ids sampled by a policy that is not trained."""
COUNTS = ("tokens_", "trajectories", "groups_filtered", "optimizer_steps", "train_s")
"""Starts of the names of metrics that are summed over policies."""


@dataclass(slots=True)
class Policy:
    """A trained policy of a run."""

    name: str
    """Its name; empty for the policy of a run without `[[policy]]`."""
    trainer: Trainer
    engine: SupportsWeightUpdate
    adapter_alone: bool = False
    """Whether weight updates carry only the LoRA adapter."""
    source: Path | None = None
    """Model directory that it started from, with its tokenizer; None is the run's."""

    def weights(self) -> Weights:
        """Return the trainer's weights in the form that the engine takes."""
        if self.adapter_alone:
            return self.trainer.adapter_weights()
        # An engine of this process copies what it receives before the next step.
        return self.trainer.weights(copy=not isinstance(self.engine, SharesMemory))

    async def send(self, version: int) -> None:
        """Send the weights to the engine; raise `SyncError` unless the fingerprint that
        it returns is theirs."""
        self.trainer.release_gradients()  # room for the engine's copy and its cache
        merged = self.trainer.adapter is not None and not self.adapter_alone
        at_once = not merged or not isinstance(self.engine, SharesMemory)
        weights = list(self.weights()) if at_once else MadeAnew(self.weights)
        arrived = await self.engine.update(weights, version)
        if arrived != fingerprint(weights) or self.engine.version != version:
            whose = f" for policy {self.name}" if self.name else ""
            raise SyncError(
                f"the engine holds other weights than the trainer sent{whose} (policy {version}, "
                f"the engine reports {self.engine.version}): it would sample from a policy that is "
                "not being trained"
            )


@dataclass(frozen=True, slots=True)
class MadeAnew:
    """Weights that are made one at a time, each time that they are iterated over: adapters are
    merged, and no copy of all merged weights is kept."""

    make: Callable[[], Weights]

    def __iter__(self) -> Weights:
        return self.make()


class Policies:
    """The trained policies of a run, at least one.

    A step trains each on its own agents' part of the episodes.
    """

    def __init__(self, trained: Sequence[Policy], agents: AgentPolicies) -> None:
        """`agents` maps agents to policies, those that are not trained too."""
        self.trained = list(trained)
        self._agents = agents

    def __iter__(self) -> Iterator[Policy]:
        return iter(self.trained)

    def check_agents(self, env_specs: Sequence[EnvSpec]) -> None:
        """Raise `ConfigError` if no policy plays an agent that is known before anything is played:
        `main` of an environment, and those of a play function's attribute `agents`."""
        for spec in env_specs:
            default = ("main",) if spec.agent_function is None else ()
            for agent in getattr(spec.agent_function, "agents", default):
                try:
                    self._agents.of(agent)
                except UsageError as error:
                    raise ConfigError(f"{spec.name}: {error}; name it in policy.agents") from None

    def saved_parts(self) -> Iterator[tuple[str, Trainer, Path | None]]:
        """Yield the directory of each policy in a checkpoint, its trainer, and the model directory
        that it started from."""
        yield from ((policy.name, policy.trainer, policy.source) for policy in self.trained)

    @property
    def notes(self) -> list[str]:
        """Notes on the settings of all policies, each once."""
        notes: list[str] = []
        for policy in self.trained:
            notes += policy.trainer.objective.settings.notes
        return list(dict.fromkeys(notes))

    def reference(self) -> None:
        """Keep the current weights of each policy as the reference of its KL term."""
        for policy in self.trained:
            policy.trainer.reference()

    def reset_optimizer(self) -> None:
        """Reset the optimizers' moments for a new phase."""
        for policy in self.trained:
            policy.trainer.reset_optimizer()

    def supervised(self, trajectories: Sequence[Trajectory], *, lr: float) -> dict[str, Any]:
        """Train each policy one step on demonstrations; metrics as of `step`."""
        metrics = {}
        for policy in self.trained:
            metrics[policy.name] = policy.trainer.supervised(trajectories, lr=lr)
        return merged_metrics(metrics)

    @property
    def refill(self) -> int:
        """Number of times that groups without signal are replaced."""
        return self.trained[0].trainer.objective.settings.refill

    def tied_groups(self, groups: Sequence[Group]) -> set[str]:
        """Return task ids of the groups that dynamic sampling replaces: those without signal for
        every policy."""
        tied = {group.task.id for group in groups}
        for policy in self.trained:
            parts = self._parts(policy, groups)
            ties = without_signal(parts, policy.trainer.credit_settings)
            for part, is_tied in zip(parts, ties, strict=True):
                if not is_tied:
                    tied.discard(part.task.id)
        return tied

    def step(
        self, trajectories: Sequence[Trajectory], *, step: int, steps: int, version: int | None
    ) -> tuple[dict[str, Any], list[Credit], list[TrainingBatch]]:
        """Train every policy that sampled something on a step's episodes; arguments and errors are
        those of `Trainer.step`.

        Returns metrics of all policies together, and the credits and batches of all. Counts are
        summed, a maximum is of all, others are means; `policy/NAME/` precedes a policy's own,
        unless it has no name. A policy that sampled nothing sits the step out, unless it is the
        only one.
        """
        groups = group_by_task(trajectories)
        results: dict[str, StepResult] = {}
        for policy in self.trained:
            parts = self._parts(policy, groups)
            if _has_samples(parts) or len(self.trained) == 1:
                results[policy.name] = policy.trainer.step(
                    parts, step=step, steps=steps, version=version
                )

        credits: list[Credit] = []
        batches: list[TrainingBatch] = []
        for result in results.values():
            step_credits, step_batches = result.token_records
            credits += step_credits
            batches += step_batches

        metrics = merged_metrics({name: result.metrics for name, result in results.items()})
        frozen = self._frozen_tokens(trajectories)
        metrics["tokens_sampled"] = metrics.get("tokens_sampled", 0.0) + frozen
        if frozen:
            metrics[f"tokens_{FROZEN}"] = float(frozen)
        return metrics, credits, batches

    def _frozen_tokens(self, trajectories: Sequence[Trajectory]) -> int:
        """Count the ids that policies sampled which are not trained."""
        trained = {policy.name for policy in self.trained}
        count = 0
        for trajectory in trajectories:
            for span in trajectory.spans:
                if span.sampled and self._agents.of(span.agent) not in trained:
                    count += len(span.ids)
        return count

    def _parts(self, policy: Policy, groups: Sequence[Group]) -> list[Group]:
        def fits(agent: str) -> bool:
            return self._agents.of(agent) == policy.name

        return comparable(
            groups, fits, by_agent=policy.trainer.credit_settings.has_running_baseline
        )

    def state(self) -> dict[str, Any]:
        """Return the running baselines of the policies as JSON, for a checkpoint; empty if there
        are none."""
        baselines = {policy.name: policy.trainer.baselines.state() for policy in self.trained}
        return {"baselines": baselines} if any(baselines.values()) else {}

    def restore(self, cursor: Mapping[str, Any]) -> None:
        """Restore what `state` returned."""
        baselines = cursor.get("baselines", {})
        for policy in self.trained:
            policy.trainer.baselines.restore(baselines.get(policy.name, []))


def _has_samples(groups: Sequence[Group]) -> bool:
    return any(
        span.sampled
        for group in groups
        for trajectory in group.trajectories
        for span in trajectory.spans
    )


def merged_metrics(by_policy: Mapping[str, Mapping[str, Any]]) -> dict[str, Any]:
    """Return metrics of all policies together, and each one's under `policy/NAME/` if it has a
    name."""
    values: dict[str, list[float]] = defaultdict(list)
    for metrics in by_policy.values():
        for name, value in metrics.items():
            values[name].append(value)
    merged: dict[str, Any] = {name: _merged(name, numbers) for name, numbers in values.items()}

    for policy, metrics in by_policy.items():
        if policy:
            for name, value in metrics.items():
                merged[f"policy/{policy}/{name}"] = value
    return merged


def _merged(name: str, numbers: Sequence[float]) -> float:
    """Return one number of all policies: counts are summed, a maximum is of all, others are
    means."""
    if len(numbers) == 1:
        return numbers[0]
    if name.startswith(COUNTS) and name != "tokens_per_s":
        return sum(numbers)
    if name.endswith("_max"):
        return max(numbers)
    return sum(numbers) / len(numbers)
