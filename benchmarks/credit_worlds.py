"""Worlds for `credit.py`, small enough that every history of an episode can be listed.

A world is a rule: `outcomes(state, choice)` says what may follow, each with its chance, its reward
and the next state. What follows depends on nothing else, so the tree of histories can be enumerated
and the value of every choice computed (`credit.py`). A state names only what the future depends on.

A reply is one letter. Messages are a digit and a letter or two: the turn, then a sign. The signs
p, q and r call for the choices a, b and c; x says that something is broken or lost.

- `key` pays at turn 8 for the choice of turn 1, and on the way little for others;
- `repair` has mistakes that one choice repairs, at the cost of a turn;
- `fatal` has mistakes that nothing repairs, and the episode goes on to its end;
- `luck` pays by chance more than by two choices;
- `distraction` asks in eight turns, and counts the answers of two;
- `exit` can be left at each of ten turns for little, and ends at a wrong turn.

`key`, `luck` and `repair` pay when something is earned (`luck` in part), the others at the end.
`match`, which is no part of the bench, is for choosing learning rates.
"""

from __future__ import annotations

import random
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import cache, cached_property
from typing import ClassVar, NamedTuple

from turnwright.envs import Action, Env, Step
from turnwright.envs.spec import EnvSpec
from turnwright.types import Task

SIGNS = "pqr"
"""What a message may call for."""
LOST = "x"
"""Sign of a broken machine, or of an episode that cannot succeed any more."""


class State(NamedTuple):
    """All that the future depends on, as the number of the next turn, from 1, and what is so."""

    turn: int
    facts: tuple[str | int, ...]

    @property
    def name(self) -> str:
        """A text that no other state of the world has."""
        return " ".join(map(str, (self.turn, *self.facts)))


class Outcome(NamedTuple):
    """What may follow a choice."""

    chance: float
    reward: float
    message: str
    """Opens the next turn; at the end nobody reads it."""
    state: State | None
    """Of the next turn; None at the end."""


def ends(reward: float) -> tuple[Outcome, ...]:
    """Return the certain end of an episode."""
    return (Outcome(1.0, reward, "", None),)


def called_for(sign: str) -> str:
    """Return the choice that a sign calls for."""
    return "abc"[SIGNS.index(sign)]


class World(ABC):
    """Tasks by their openings, and what follows each choice."""

    name: ClassVar[str]
    turns: ClassVar[int]
    choices: ClassVar[str] = "abc"
    openings: ClassVar[tuple[str, ...]]
    """The first message of each task."""

    @abstractmethod
    def start(self, opening: str) -> State:
        """Return the state of the first turn."""

    @abstractmethod
    def outcomes(self, state: State, choice: str) -> tuple[Outcome, ...]:
        """Return what may follow; each outcome has another message, so that the policy can tell
        them apart."""

    def value(self, opening: str, over: Callable[[Sequence[float]], float]) -> float:
        """Return the expected reward of a task by dynamic programming over states.

        `over` makes the value of a state of those of its choices: `max` for the optimum.
        """

        @cache
        def value_of(state: State) -> float:
            values = []
            for choice in self.choices:
                expected = 0.0
                for outcome in self.outcomes(state, choice):
                    later = 0.0 if outcome.state is None else value_of(outcome.state)
                    expected += outcome.chance * (outcome.reward + later)
                values.append(expected)
            return over(values)

        return value_of(self.start(opening))

    @cached_property
    def optimum(self) -> float:
        """Expected reward of the best policy, mean over tasks."""
        return self._mean(max)

    @cached_property
    def random(self) -> float:
        """Expected reward of the policy that chooses with equal probabilities."""
        return self._mean(lambda values: sum(values) / len(values))

    def _mean(self, over: Callable[[Sequence[float]], float]) -> float:
        return sum(self.value(opening, over) for opening in self.openings) / len(self.openings)

    def level(self, value: float) -> float:
        """Return how far an expected reward is from the random policy's, 0, to the optimum, 1."""
        return (value - self.random) / (self.optimum - self.random)


class Key(World):
    """The opening shows which of three keys opens the door at turn 8; it pays 1.

    Between are seven turns with a coin of 0.02 for the choice that the sign calls for.
    """

    name = "key"
    turns = 8
    openings = ("kp", "kq", "kr")
    coin: ClassVar[float] = 0.02

    def start(self, opening: str) -> State:
        return State(1, (opening[1], "no key"))

    def outcomes(self, state: State, choice: str) -> tuple[Outcome, ...]:
        shown, key = state.facts
        if state.turn == 1:
            key = "right key" if choice == called_for(str(shown)) else "wrong key"
            return self._next(state, key, 0.0)

        coin = self.coin if choice == called_for(self._sign(state.turn, str(shown))) else 0.0
        if state.turn == self.turns:
            return ends(coin + float(key == "right key"))
        return self._next(state, key, coin)

    def _next(self, state: State, key: str | int, reward: float) -> tuple[Outcome, ...]:
        shown = str(state.facts[0])
        turn = state.turn + 1
        message = f"{turn}{self._sign(turn, shown)}"
        return (Outcome(1.0, reward, message, State(turn, (shown, key))),)

    def _sign(self, turn: int, shown: str) -> str:
        return SIGNS[(turn + SIGNS.index(shown)) % 2]


class Repair(World):
    """A machine makes a piece, worth 1/7, in each of seven turns in which it is served by the side
    that the sign calls for: a or b.

    The other side breaks it. It stays broken, and makes nothing, until the choice c.
    """

    name = "repair"
    turns = 7
    openings = ("1pu", "1qv", "1pw")
    plans: ClassVar[dict[str, str]] = {"u": "ppqpqqp", "v": "qqpqppq", "w": "pqpqqpp"}

    def start(self, opening: str) -> State:
        return State(1, (opening[2], "runs"))

    def outcomes(self, state: State, choice: str) -> tuple[Outcome, ...]:
        plan, machine = state.facts
        reward = 0.0
        if machine == "broken":
            machine = "runs" if choice == "c" else "broken"
        elif choice != "c":
            is_right = choice == called_for(self.plans[str(plan)][state.turn - 1])
            reward = is_right / self.turns
            machine = "runs" if is_right else "broken"

        if state.turn == self.turns:
            return ends(reward)
        turn = state.turn + 1
        sign = self.plans[str(plan)][turn - 1] if machine == "runs" else LOST
        return (Outcome(1.0, reward, f"{turn}{sign}", State(turn, (plan, machine))),)


class Fatal(World):
    """Seven answers, of which the share of right ones is paid at the end, unless one was fatal.

    In turns 2, 4 and 6 the choice after the right one (a after c) is fatal: from there on the sign
    is x, and the end pays 0 whatever is chosen.
    """

    name = "fatal"
    turns = 7
    openings = ("1pu", "1qv", "1rw")
    plans: ClassVar[dict[str, str]] = {"u": "pqrpqrp", "v": "qprrpqp", "w": "rrqpqpr"}
    gates: ClassVar[tuple[int, ...]] = (2, 4, 6)

    def start(self, opening: str) -> State:
        return State(1, (opening[2], 0))

    def outcomes(self, state: State, choice: str) -> tuple[Outcome, ...]:
        plan, points = state.facts
        if points != "lost":
            right = SIGNS.index(self.plans[str(plan)][state.turn - 1])
            if choice == "abc"[right]:
                points = int(points) + 1
            elif state.turn in self.gates and choice == "abc"[(right + 1) % 3]:
                points = "lost"

        if state.turn == self.turns:
            return ends(0.0 if points == "lost" else int(points) / self.turns)
        turn = state.turn + 1
        sign = LOST if points == "lost" else self.plans[str(plan)][turn - 1]
        return (Outcome(1.0, 0.0, f"{turn}{sign}", State(turn, (plan, points))),)


class Luck(World):
    """The wind pays 0.5 or takes it, with equal chances, after turns 1, 3, 5 and 6.

    The choice of turn 2 has to follow the wind of turn 1 (p or q), that of turn 4 the sign of the
    opening; each right one pays 0.5 at the end. The other choices have no effect.
    """

    name = "luck"
    turns = 6
    openings = ("1p", "1q", "1r")
    windy: ClassVar[tuple[int, ...]] = (1, 3, 5, 6)
    wind: ClassVar[float] = 0.5
    prize: ClassVar[float] = 0.5

    def start(self, opening: str) -> State:
        return State(1, (opening[1], "-", 0))

    def outcomes(self, state: State, choice: str) -> tuple[Outcome, ...]:
        shown, blown, won = state.facts
        if state.turn == 2:
            won = int(won) + (choice == called_for(str(blown)))
        if state.turn == 4:
            won = int(won) + (choice == called_for(str(shown)))

        if state.turn == self.turns:
            paid = self.prize * int(won)
            return (
                Outcome(0.5, paid + self.wind, "p", None),
                Outcome(0.5, paid - self.wind, "q", None),
            )

        turn = state.turn + 1
        winds: tuple[tuple[float, float, str], ...] = ((1.0, 0.0, "-"),)
        if state.turn in self.windy:
            winds = ((0.5, self.wind, "p"), (0.5, -self.wind, "q"))
        outcomes = []
        for chance, reward, sign in winds:
            # The wind matters in turn 2 only; later states forget it.
            facts = (shown, sign if turn == 2 else "-", won)
            outcomes.append(Outcome(chance, reward, f"{turn}{sign}", State(turn, facts)))
        return tuple(outcomes)


class Distraction(World):
    """Eight signs, of which the two with an exclamation mark count.

    The end pays 1 for two right answers, 0.25 for one. Where the two are depends on the task.
    """

    name = "distraction"
    turns = 8
    openings = ("1.pu", "1.qv", "1.rw")
    plans: ClassVar[dict[str, str]] = {"u": "pqprqrpq", "v": "qrpqprqp", "w": "rpqprqrp"}
    counted: ClassVar[dict[str, tuple[int, int]]] = {"u": (2, 6), "v": (3, 7), "w": (4, 8)}
    pays: ClassVar[tuple[float, ...]] = (0.0, 0.25, 1.0)

    def start(self, opening: str) -> State:
        return State(1, (opening[3], 0))

    def outcomes(self, state: State, choice: str) -> tuple[Outcome, ...]:
        plan, right = str(state.facts[0]), int(state.facts[1])
        if state.turn in self.counted[plan]:
            right += choice == called_for(self.plans[plan][state.turn - 1])
        if state.turn == self.turns:
            return ends(self.pays[right])

        turn = state.turn + 1
        mark = "!" if turn in self.counted[plan] else "."
        message = f"{turn}{mark}{self.plans[plan][turn - 1]}"
        return (Outcome(1.0, 0.0, message, State(turn, (plan, right))),)


class Exit(World):
    """A way of ten turns, each by the choice that the sign calls for; its end pays 1.

    A wrong turn ends the episode with 0.05 for each turn before it; d leaves for 0.1 more. The next
    sign is one of the two others, by chance. By random choices, going on is worth no more than
    leaving.
    """

    name = "exit"
    turns = 10
    choices = "abcd"
    openings = ("0p", "0q", "0r")
    step: ClassVar[float] = 0.05
    leave: ClassVar[float] = 0.1

    def start(self, opening: str) -> State:
        return State(1, (opening[1],))

    def outcomes(self, state: State, choice: str) -> tuple[Outcome, ...]:
        sign = str(state.facts[0])
        gone = self.step * (state.turn - 1)
        if choice == "d":
            return ends(gone + self.leave)
        if choice != called_for(sign):
            return ends(gone)
        if state.turn == self.turns:
            return ends(1.0)

        turn = state.turn + 1
        outcomes = []
        for other in SIGNS.replace(sign, ""):
            outcomes.append(Outcome(0.5, 0.0, f"{turn - 1}{other}", State(turn, (other,))))
        return tuple(outcomes)


class Match(World):
    """Six signs; the share of right answers is paid at the end. For choosing learning rates."""

    name = "match"
    turns = 6
    openings = ("1pu", "1qv", "1rw")
    plans: ClassVar[dict[str, str]] = {"u": "pqrrpq", "v": "qrppqr", "w": "rpqqrp"}

    def start(self, opening: str) -> State:
        return State(1, (opening[2], 0))

    def outcomes(self, state: State, choice: str) -> tuple[Outcome, ...]:
        plan, points = str(state.facts[0]), int(state.facts[1])
        points += choice == called_for(self.plans[plan][state.turn - 1])
        if state.turn == self.turns:
            return ends(points / self.turns)
        turn = state.turn + 1
        message = f"{turn}{self.plans[plan][turn - 1]}"
        return (Outcome(1.0, 0.0, message, State(turn, (plan, points))),)


WORLDS: dict[str, World] = {
    world.name: world for world in (Key(), Repair(), Fatal(), Luck(), Distraction(), Exit())
}
PRACTICE = Match()


@dataclass
class WorldEnv(Env):
    """An episode of a world, for a rollout: one sampled letter a turn."""

    world: World
    on_turn_length = "continue"  # a reply is cut after its letter, and goes on
    luck: random.Random = field(default_factory=random.Random)
    state: State | None = None

    async def reset(self, task: Task, *, seed: int | None = None) -> str:
        opening = task.messages[0].text
        self.luck = random.Random(seed)
        self.state = self.world.start(opening)
        return opening

    async def step(self, action: Action) -> Step:
        """Draw an outcome; the info names the state of the next turn."""
        assert self.state is not None
        outcomes = self.world.outcomes(self.state, action.text)
        chances = [outcome.chance for outcome in outcomes]
        (outcome,) = self.luck.choices(outcomes, chances)

        self.state = outcome.state
        if outcome.state is None:
            return Step(outcome.message or None, outcome.reward, terminated=True)
        return Step(outcome.message, outcome.reward, info={"state": outcome.state.name})


def env_spec(world: World) -> EnvSpec:
    """Return a world's specification for a rollout."""
    return EnvSpec(world.name, factory=lambda: WorldEnv(world))
