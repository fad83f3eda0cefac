"""The true advantage of every choice of a policy in a world, and how near estimates of it are.

`Histories` lists every history in which the policy chooses, as the ids that a rollout would send to
the engine. `Histories.truth` asks the model for its probabilities at all of them, and computes by
backward induction, in float64::

    Q(h, a) = sum over outcomes o of  chance(o) * (reward(o) + V(h a o))
    V(h)    = sum over choices a of   pi(a | h) * Q(h, a)
    A(h, a) = Q(h, a) - V(h)

`Estimates` takes the advantages that a method gives to the turns of many sampled batches, and says
how they compare with these. Arrays end in a suffix for each axis: `_n` the N histories, `_c` the C
choices, `_m` the sampled turns of a batch.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from credit_worlds import State, World

from turnwright.renderers.chat_renderer import ChatRenderer
from turnwright.training.credit import StepCredits
from turnwright.training.forward.batch import LossDenominator
from turnwright.training.forward.forward import ForwardPass, LogitDistribution
from turnwright.training.forward.packing import BatchPacker
from turnwright.training.forward.passes import MicroBatch
from turnwright.training.forward.training_rows import TrainingRow
from turnwright.types import Message, Trajectory

Array = np.ndarray[Any, Any]

PASS_TOKENS = 8192
"""Positions of a forward pass over histories."""


@dataclass(frozen=True, slots=True)
class Truth:
    """Values of one policy at the histories of a world."""

    policy_nc: Array
    """Probability of each choice."""
    reach_n: Array
    """Probability that an episode of a random task has the history."""
    value_n: Array
    q_nc: Array
    value: float
    """Expected reward, mean over tasks."""

    @property
    def advantage_nc(self) -> Array:
        """Q - V."""
        advantage_nc: Array = self.q_nc - self.value_n[:, None]
        return advantage_nc

    @property
    def gradient_nc(self) -> Array:
        """Gradient of the expected reward by the logit of each choice at each history."""
        gradient_nc: Array = self.reach_n[:, None] * self.policy_nc * self.advantage_nc
        return gradient_nc


class Histories:
    """Every history of a world in which the policy chooses, from all tasks.

    Args:
        renderer: writes the ids of a history; its banned ids leave the world's choices.
    """

    def __init__(self, world: World, renderer: ChatRenderer) -> None:
        self.world = world
        self._renderer = renderer
        self.choice_ids = [renderer.codec.encode(choice)[0] for choice in world.choices]
        self._tails: dict[str, list[int]] = {}

        # The histories, each after the one that it continues.
        self.ids: list[list[int]] = []
        """Ids of the prompt."""
        self.states: list[State] = []
        self._edges: list[tuple[int, int, float, float, int]] = []
        """History, choice, chance, reward, and the history that follows; -1 at the end."""
        self.roots: list[int] = []
        """The first history of each task."""
        for opening in world.openings:
            self.roots.append(len(self.ids))
            prompt = renderer.open([Message("user", opening)])
            self._add(list(prompt.ids), world.start(opening))
        self.index = {tuple(ids): number for number, ids in enumerate(self.ids)}
        """Number of a history by its ids."""
        self.turn_n = np.array([state.turn for state in self.states])
        """Turn of each history, from 1."""
        self._choice_numbers = {id_: number for number, id_ in enumerate(self.choice_ids)}

        # The edges by the turn of their history, for the recursions.
        columns = [np.array(column) for column in zip(*self._edges, strict=True)]
        turn_e = self.turn_n[columns[0]]
        self._by_turn = []
        for turn in range(1, world.turns + 1):
            self._by_turn.append([column[turn_e == turn] for column in columns])
        self._passes: list[MicroBatch] = []

    def __len__(self) -> int:
        return len(self.ids)

    def _add(self, ids: list[int], state: State) -> None:
        """Add a history and all that continue it."""
        number = len(self.ids)
        self.ids.append(ids)
        self.states.append(state)
        for choice, choice_id in enumerate(self.choice_ids):
            for outcome in self.world.outcomes(state, self.world.choices[choice]):
                following = -1
                if outcome.state is not None:
                    following = len(self.ids)
                    tail = self._tail(outcome.message)
                    self._add([*ids, choice_id, *tail], outcome.state)
                edge = (number, choice, outcome.chance, outcome.reward, following)
                self._edges.append(edge)

    def _tail(self, message: str) -> list[int]:
        """Return the ids between a choice and the next one: the end of the reply, a message, and
        what opens the next reply."""
        if message not in self._tails:
            choice = self.world.choices[0]
            before = [Message("user", self.world.openings[0])]
            after = [*before, Message("assistant", choice), Message("user", message)]
            first, second = (
                self._renderer.template.render(messages, generation_prompt=True)
                for messages in (before, after)
            )
            assert second.startswith(first + choice)
            text = second.removeprefix(first + choice)
            self._tails[message] = self._renderer.codec.encode(text)
        return self._tails[message]

    def turn_of(self, trajectory: Trajectory, number: int) -> tuple[int, int]:
        """Return the history of a turn, and the choice that was sampled there."""
        history = self.index[tuple(trajectory.prompt_ids(number))]
        (span,) = trajectory.turns[number].spans
        (choice_id,) = trajectory.spans[span].ids
        return history, self._choice_numbers[choice_id]

    def policy(self, model: torch.nn.Module) -> Array:
        """Return a model's probabilities of the choices at every history, (N, C), float64."""
        forward = ForwardPass(model)
        # This also makes the model's attention follow trees.
        packer = BatchPacker("tree", forward.decoder)
        if not self._passes:
            self._passes = self._pack(packer)
        distribution = LogitDistribution(1.0, self._renderer.banned_ids)

        logprobs_nc = torch.empty(len(self), len(self.choice_ids), dtype=torch.float64)
        with torch.no_grad():
            for micro in self._passes:
                logprobs_mv = forward.full_logprobs(micro, None, distribution)
                logprobs_nc[micro.tokens_m] = logprobs_mv[:, self.choice_ids].double()
        # Exactly normalized: float32 leaves a difference of 1e-7.
        policy_nc: Array = torch.softmax(logprobs_nc, -1).numpy()
        return policy_nc

    def _pack(self, packer: BatchPacker) -> list[MicroBatch]:
        """Return the passes that compute every history once: a row for each of those that no other
        continues, with the prefixes that no earlier row has."""
        last = np.ones(len(self), dtype=bool)
        for history, _, _, _, following in self._edges:
            if following >= 0:
                last[history] = False

        rows = []
        row_numbers: list[int] = []
        open_numbers: list[int] = []
        for number in range(len(self)):
            open_numbers.append(number)
            if not last[number]:
                continue
            places = [len(self.ids[covered]) for covered in open_numbers]
            rows.append(
                TrainingRow(
                    ids=self.ids[number],
                    places=places,
                    targets=[self.choice_ids[0]] * len(places),
                    weights=[1.0] * len(places),
                    logprobs=[math.nan] * len(places),
                    trajectory=0,
                )
            )
            row_numbers += open_numbers
            open_numbers = []

        # Histories are numbered depth first, and so are the targets of the rows.
        assert row_numbers == list(range(len(self)))
        return packer.pack(rows, PASS_TOKENS, "cpu", None)

    def truth(self, policy_nc: Array) -> Truth:
        """Return the values of a policy."""
        q_nc = np.zeros_like(policy_nc)
        value_n = np.zeros(len(self))
        for history, choice, chance, reward, following in reversed(self._by_turn):
            later = np.where(following >= 0, value_n[following], 0.0)
            np.add.at(q_nc, (history, choice), chance * (reward + later))
            value_n[history] = (policy_nc[history] * q_nc[history]).sum(-1)

        reach_n = np.zeros(len(self))
        reach_n[self.roots] = 1.0 / len(self.roots)
        for history, choice, chance, _, following in self._by_turn:
            goes_on = following >= 0
            reached = reach_n[history] * policy_nc[history, choice] * chance
            reach_n[following[goes_on]] = reached[goes_on]

        value = float(value_n[self.roots].mean())
        return Truth(policy_nc, reach_n, value_n, q_nc, value)


def true_values(world: World, model: torch.nn.Module, renderer: ChatRenderer) -> Truth:
    """Return the values of a model at every history of a world."""
    histories = Histories(world, renderer)
    return histories.truth(histories.policy(model))


@dataclass(frozen=True, slots=True)
class Visits:
    """The turns of a batch of episodes, in the order of the credits."""

    history_m: Array
    choice_m: Array
    turns: list[int]
    """Turns of each episode."""

    @classmethod
    def of(cls, histories: Histories, trajectories: Sequence[Trajectory]) -> Visits:
        """Find the turns of trajectories among the histories of their world."""
        visits = []
        for trajectory in trajectories:
            for number in range(len(trajectory.turns)):
                visits.append(histories.turn_of(trajectory, number))
        history_m, choice_m = np.array(visits).T
        return cls(history_m, choice_m, [len(t.turns) for t in trajectories])


def by_turn(step_credits: StepCredits, scale: LossDenominator) -> tuple[Array, Array]:
    """Return the advantage of each turn's id, and its weight in the loss.

    Episodes without signal have advantages of 0; each of the others must have one.
    """
    advantages: list[float] = []
    weights: list[float] = []
    for credit in step_credits.credits:
        assert credit.counted, f"{credit.trajectory.key} was not compared: {credit.reason}"
        slots = [(turn.spans[0], 0) for turn in credit.trajectory.turns]
        if credit.advantage is None:
            advantages += [0.0] * len(slots)
        else:
            advantages += credit.advantages_of(slots)
        weights += [scale.token_weight(credit.tokens)] * len(slots)
    return np.array(advantages), np.array(weights)


def gradient_of(truth: Truth, visits: Visits, advantage_m: Array, weight_m: Array) -> Array:
    """Return the gradient that a batch's advantages give, by the logit of each choice at each
    history, (N, C)."""
    gradient_nc = np.zeros_like(truth.policy_nc)
    pull_m = weight_m * advantage_m
    np.add.at(gradient_nc, (visits.history_m, visits.choice_m), pull_m)
    np.add.at(gradient_nc, visits.history_m, -pull_m[:, None] * truth.policy_nc[visits.history_m])
    return gradient_nc


def cosine(left: Array, right: Array) -> float:
    """Return the cosine of two arrays of one shape; 0 where one is 0."""
    norm = math.sqrt(float((left * left).sum()) * float((right * right).sum()))
    return float((left * right).sum()) / norm if norm else 0.0


BLOCKS = 10
"""Parts of the batches, for estimates without the bias of their own noise, and their errors."""


@dataclass
class Estimates:
    """Advantages that a method gave to the turns of many batches of one policy."""

    truth: Truth
    turn_n: Array
    """Turn of each history, from 1."""
    cosines: list[float] = field(default_factory=list)
    correlations: list[float] = field(default_factory=list)

    def __post_init__(self) -> None:
        shape = (BLOCKS, *self.truth.policy_nc.shape)
        self._counts_bnc = np.zeros(shape)
        self._sums_bnc = np.zeros(shape)
        self._gradients_bnc = np.zeros(shape)
        self._squares = 0.0
        self._batches = 0

    def add(self, visits: Visits, advantage_m: Array, weight_m: Array) -> None:
        """Add a batch."""
        block = self._batches % BLOCKS
        self._batches += 1
        places = (visits.history_m, visits.choice_m)
        np.add.at(self._counts_bnc[block], places, 1.0)
        np.add.at(self._sums_bnc[block], places, advantage_m)
        self._squares += float((advantage_m**2).sum())

        gradient_nc = gradient_of(self.truth, visits, advantage_m, weight_m)
        self._gradients_bnc[block] += gradient_nc
        self.cosines.append(cosine(gradient_nc, self.truth.gradient_nc))
        self.correlations.append(correlation(advantage_m, self.truth.advantage_nc[places]))

    def figures(self) -> dict[str, Any]:
        """Return what the batches say of the method.

        - `correlation`: Pearson's, of a batch's advantages with the true ones, mean over batches;
        - `slope`: of the regression on the true ones, without an intercept;
        - `explained`, `shift`, `bias`, `noise`: shares of the mean square of the advantages, which
          sum to 1: what the true ones explain; an expected error that all choices of a history
          share, which costs variance alone; one that differs between choices, which turns the
          gradient; the rest. Shift and bias are estimated without their noise, so they may be
          negative;
        - `cosine`: of a batch's gradient (by the logits) with the true one, mean over batches;
        - `cosine_expected`: of the expected gradient;
        - `by_turn`: mean over the visits of a turn of advantage - slope * true one, with its error.
        """
        sums_nc, counts_nc = self._sums_bnc.sum(0), self._counts_bnc.sum(0)
        true_nc = self.truth.advantage_nc
        visits = counts_nc.sum()

        # Moments over all visits; both advantages are errors around 0.
        square = self._squares / visits
        true_square = (counts_nc * true_nc**2).sum() / visits
        product = (sums_nc * true_nc).sum() / visits
        slope = product / true_square if true_square else 0.0
        explained = slope * product / square if square else 0.0

        everything = np.ones(BLOCKS, dtype=bool)
        without_each = [self._systematic(slope, ~block) for block in np.eye(BLOCKS, dtype=bool)]
        unit = square or 1.0
        shift, bias = (part / unit for part in self._systematic(slope, everything))
        shift_error, bias_error = _jackknife_error(np.array(without_each)) / unit
        return {
            "batches": self._batches,
            "turns": int(visits),
            "correlation": float(np.mean(self.correlations)),
            "correlation_error": standard_error(self.correlations),
            "slope": float(slope),
            "explained": float(explained),
            "shift": float(shift),
            "shift_error": float(shift_error),
            "bias": float(bias),
            "bias_error": float(bias_error),
            "noise": float(1.0 - explained - shift - bias) if square else 0.0,
            "cosine": float(np.mean(self.cosines)),
            "cosine_error": standard_error(self.cosines),
            "cosine_expected": self._expected_cosine(),
            "by_turn": self._by_turn(slope),
        }

    def _systematic(self, slope: float, kept_b: Array) -> tuple[float, float]:
        """Return the squared expected error that the choices of a history share, and that in which
        they differ, means over visits."""
        halves = [kept_b & (np.arange(BLOCKS) % 2 == half) for half in (0, 1)]
        errors, episodes = [], []
        for half in halves:
            counts_nc = self._counts_bnc[half].sum(0)
            expected_nc = slope * self.truth.advantage_nc * counts_nc
            errors.append(self._sums_bnc[half].sum(0) - expected_nc)
            episodes.append(float(counts_nc[self.turn_n == 1].sum()))

        reach_nc = self.truth.reach_n[:, None] * self.truth.policy_nc
        turns = self.truth.reach_n.sum()
        total = _mean_square(errors, episodes, reach_nc) / turns
        shared = [error_nc.sum(-1) for error_nc in errors]
        shift = _mean_square(shared, episodes, self.truth.reach_n) / turns
        return shift, total - shift

    def _expected_cosine(self) -> float:
        """Return the cosine of the expected gradient with the true one, its length estimated
        without noise; at most 1 but for chance."""
        even_nc, odd_nc = (self._gradients_bnc[half::2].sum(0) for half in (0, 1))
        square = float((even_nc * odd_nc).sum())
        true_nc = self.truth.gradient_nc
        if square <= 0.0:
            return 0.0
        dot = float(((even_nc + odd_nc) * true_nc).sum()) / 2
        return dot / math.sqrt(square * float((true_nc * true_nc).sum()))

    def _by_turn(self, slope: float) -> list[tuple[float, float]]:
        """Return the mean error of each turn, and its standard error over blocks."""
        errors_bnc = self._sums_bnc - slope * self.truth.advantage_nc * self._counts_bnc
        rows = []
        for turn in range(1, int(self.turn_n.max()) + 1):
            errors_b = errors_bnc[:, self.turn_n == turn].sum((1, 2))
            counts_b = self._counts_bnc[:, self.turn_n == turn].sum((1, 2))
            if (counts_b > 0).all():
                means = errors_b / counts_b
                rows.append((float(means.mean()), standard_error(means)))
        return rows


def _mean_square(sums: Sequence[Array], episodes: Sequence[float], chance: Array) -> float:
    """Return an unbiased estimate of the sum of ``chance * mean ** 2`` over places.

    `sums` are those of what was seen at each place in two halves of the episodes, which are
    independent: its mean is ``episodes * chance * mean`` in each.
    """
    visited = (sums[0] != 0) & (sums[1] != 0)
    products = sums[0][visited] * sums[1][visited] / chance[visited]
    return float(products.sum()) / (episodes[0] * episodes[1])


def _jackknife_error(values: Array) -> Array:
    """Return the standard error of estimates by what they are without each block."""
    blocks = len(values)
    spread: Array = ((values - values.mean(0)) ** 2).sum(0)
    return np.sqrt(spread * (blocks - 1) / blocks)


def correlation(left: Array, right: Array) -> float:
    """Return Pearson's correlation; 0 where one does not vary."""
    return cosine(left - left.mean(), right - right.mean())


def standard_error(values: Sequence[float] | Array) -> float:
    """Return the standard error of a mean; 0 for a single value."""
    if len(values) < 2:
        return 0.0
    return float(np.std(values, ddof=1) / math.sqrt(len(values)))


TRUE_ADVANTAGE = "true_advantage"
"""Key of a turn's info with its true advantage, for `told_advantages`."""


def tell_advantages(histories: Histories, truth: Truth, trajectories: Sequence[Trajectory]) -> None:
    """Write the true advantage of each turn into its info."""
    for trajectory in trajectories:
        for number, turn in enumerate(trajectory.turns):
            place = histories.turn_of(trajectory, number)
            turn.info = {**turn.info, TRUE_ADVANTAGE: float(truth.advantage_nc[place])}


def told_advantages(trajectories: Sequence[Trajectory], returns: object) -> list[list[float]]:
    """Return the true advantages of a group, as a function for `train.advantage`."""
    return [[turn.info[TRUE_ADVANTAGE] for turn in trajectory.turns] for trajectory in trajectories]
