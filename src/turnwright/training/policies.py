"""The trained policies of a run, and what each of them is trained on: the spans of its own
agents, and their rewards."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, fields, replace
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
from turnwright.training.credit import Credit, exclusion_reason
from turnwright.training.forward.batch import TrainingBatch
from turnwright.training.model.weight_export import Weights
from turnwright.training.trainer.trainer import StepResult, Trainer
from turnwright.training.untrained_reasons import FAILED
from turnwright.types import Group, RowReward, Trajectory

FROZEN = "frozen"
"""Reason of ids sampled by a policy that is not trained."""
COUNTS = ("tokens_", "trajectories", "groups_filtered", "optimizer_steps", "train_s")
"""Starts of the names of metrics that are summed over policies."""
AgentFits = Callable[[str], bool]


@dataclass(slots=True)
class AgentView(Trajectory):
    """Part of a trajectory: the spans and turns of some of its agents, with their reward. Agents
    share no spans, so it is a trajectory of its own."""

    numbers: tuple[int, ...] = ()
    """Indices of its spans in the trajectory."""
    agent: str = ""
    """Its agent; empty if it has those of a policy."""


def view_of(trajectory: Trajectory, fits: AgentFits, agent: str = "") -> Trajectory | None:
    """Return the part of a trajectory that belongs to the fitting agents; itself if that is all,
    and None if they sampled nothing in an episode that did not fail. With the name of one `agent`,
    the reward is that agent's."""
    numbers = [number for number, span in enumerate(trajectory.spans) if fits(span.agent)]
    if len(numbers) == len(trajectory.spans) and not agent:
        return trajectory
    if (
        not any(trajectory.spans[number].sampled for number in numbers)
        and exclusion_reason(trajectory) != FAILED
    ):
        return None
    spans = {old: new for new, old in enumerate(numbers)} | {-1: -1}
    turns = [number for number, turn in enumerate(trajectory.turns) if fits(turn.agent)]
    turn_at = {old: new for new, old in enumerate(turns)} | {-1: -1}
    rows = [
        RowReward(row.reward, own)
        for row in trajectory.row_rewards
        if (own := tuple(turn_at[number] for number in row.turns if number in turn_at))
        or not row.turns
    ]
    reward = trajectory.reward
    if trajectory.row_rewards and reward is not None:
        reward += _mean_of(rows) - _mean_of(trajectory.row_rewards)
    if agent and reward is not None:
        reward = trajectory.agent_rewards.get(agent, reward)
    own_parts = {
        "spans": [
            replace(span, parent=spans[span.parent])
            for span in map(trajectory.spans.__getitem__, numbers)
        ],
        "turns": [
            replace(
                turn,
                prompt=spans[turn.prompt],
                spans=tuple(spans[i] for i in turn.spans),
                parent=turn_at[turn.parent],
            )
            for turn in map(trajectory.turns.__getitem__, turns)
        ],
        "failed_turns": [],  # their spans are untrained roots, which need no turn
        "row_rewards": rows,
        "reward": reward,
    }
    given = {one.name: getattr(trajectory, one.name) for one in fields(Trajectory)}
    return AgentView(**given | own_parts, numbers=tuple(numbers), agent=agent)


def _mean_of(rows: Sequence[RowReward]) -> float:
    return math.fsum(row.reward for row in rows) / max(len(rows), 1)


def agents_of(trajectory: Trajectory) -> list[str]:
    """Return the agents that sampled something, by name."""
    return sorted({span.agent for span in trajectory.spans if span.sampled})


def comparable(groups: Sequence[Group], fits: AgentFits, *, by_agent: bool = False) -> list[Group]:
    """Return groups of what is compared of a policy's agents.

    An episode whose agents have rewards or groups of their own is compared agent by agent: with the
    same agent in the other episodes of the task, or within the episode with the agents of its group
    (`Model.generate(group=...)`); `by_agent` does so for all. Otherwise all agents of the policy
    are one trajectory, with the episode's reward.
    """
    found: list[Group] = []
    for group in groups:
        trajectories = group.trajectories
        if not by_agent and not any(t.agent_rewards or t.agent_groups for t in trajectories):
            views = [view for t in trajectories if (view := view_of(t, fits)) is not None]
            found += [Group(group.task, views)] if views else []
            continue
        parts: dict[tuple[str, ...], list[Trajectory]] = defaultdict(list)
        agents = sorted({agent for t in trajectories for agent in agents_of(t) if fits(agent)})
        for t in trajectories:
            for agent in agents:
                if (view := view_of(t, agent.__eq__, agent)) is not None:
                    named = t.agent_groups.get(agent)
                    parts[
                        ("", agent)
                        if named is None
                        else (named, str(t.key.sample), str(t.key.attempt))
                    ].append(view)
        found += [Group(group.task, parts[name]) for name in sorted(parts)]
    return found


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
        return list(
            dict.fromkeys(
                note for policy in self.trained for note in policy.trainer.objective.settings.notes
            )
        )

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
        return merged_metrics(
            {policy.name: policy.trainer.supervised(trajectories, lr=lr) for policy in self.trained}
        )

    @property
    def refill(self) -> int:
        """Number of times that groups without signal are replaced."""
        return self.trained[0].trainer.objective.settings.refill

    def tied_groups(self, groups: Sequence[Group]) -> set[str]:
        """Return task ids of the groups that dynamic sampling replaces: those without
        signal for every policy."""
        tied = {group.task.id for group in groups}
        for policy in self.trained:
            parts = self._parts(policy, groups)
            ties = without_signal(parts, policy.trainer.credit_settings)
            tied -= {part.task.id for part, is_tied in zip(parts, ties, strict=True) if not is_tied}
        return tied

    def step(
        self, trajectories: Sequence[Trajectory], *, step: int, steps: int, version: int | None
    ) -> tuple[dict[str, Any], list[Credit], list[TrainingBatch]]:
        """Train every policy that sampled something on a step's episodes; arguments and errors are
        those of `Trainer.step`.

        Returns metrics of all policies together, and the credits and batches of all. Counts
        are summed, a maximum is of all, others are means; `policy/NAME/` precedes a
        policy's own, unless it has no name. A policy that sampled nothing sits the step
        out, unless it is the only one.
        """
        groups = group_by_task(trajectories)
        made: dict[str, StepResult] = {}
        for policy in self.trained:
            parts = self._parts(policy, groups)
            sampled = any(
                span.sampled for part in parts for t in part.trajectories for span in t.spans
            )
            if sampled or len(self.trained) == 1:
                made[policy.name] = policy.trainer.step(
                    parts, step=step, steps=steps, version=version
                )
        credits = [credit for result in made.values() for credit in result.token_records[0]]
        batches = [batch for result in made.values() for batch in result.token_records[1]]
        metrics = merged_metrics({name: result.metrics for name, result in made.items()})
        names = {policy.name for policy in self.trained}
        frozen = sum(
            len(span.ids)
            for t in trajectories
            for span in t.spans
            if span.sampled and self._agents.of(span.agent) not in names
        )
        metrics["tokens_sampled"] = metrics.get("tokens_sampled", 0.0) + frozen
        return metrics | ({f"tokens_{FROZEN}": float(frozen)} if frozen else {}), credits, batches

    def _parts(self, policy: Policy, groups: Sequence[Group]) -> list[Group]:
        def fits(agent: str) -> bool:
            return self._agents.of(agent) == policy.name

        return comparable(groups, fits, by_agent=policy.trainer.credit_settings.by_agent)

    def state(self) -> dict[str, Any]:
        """Return the running baselines of the policies as JSON, for a checkpoint;
        empty if there are none."""
        found = {policy.name: policy.trainer.baselines.state() for policy in self.trained}
        return {"baselines": found} if any(found.values()) else {}

    def restore(self, cursor: Mapping[str, Any]) -> None:
        """Restore what `state` returned."""
        for policy in self.trained:
            policy.trainer.baselines.restore(cursor.get("baselines", {}).get(policy.name, []))


def merged_metrics(by_policy: Mapping[str, Mapping[str, Any]]) -> dict[str, Any]:
    """Return metrics of all policies together, and each one's under
    `policy/NAME/` if it has a name."""
    values: dict[str, list[float]] = defaultdict(list)
    for metrics in by_policy.values():
        for name, value in metrics.items():
            values[name].append(value)
    found: dict[str, Any] = {}
    for name, given in values.items():
        if len(given) == 1:
            found[name] = given[0]
        elif name.startswith(COUNTS) and name != "tokens_per_s":
            found[name] = sum(given)
        elif name.endswith("_max"):
            found[name] = max(given)
        else:
            found[name] = sum(given) / len(given)

    named = {policy: metrics for policy, metrics in by_policy.items() if policy}
    own = {
        f"policy/{policy}/{name}": value
        for policy, metrics in named.items()
        for name, value in metrics.items()
    }
    return found | own
