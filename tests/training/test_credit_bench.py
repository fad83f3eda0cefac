"""The bench of credit assignment: its worlds, what it takes for the truth, and a tiny cell."""

import math

import pytest
from credit_worlds import PRACTICE, WORLDS

BENCH = [*WORLDS.values(), PRACTICE]
by_world = pytest.mark.parametrize("world", BENCH, ids=lambda world: world.name)


def reachable(world, opening):
    """All states of a task."""
    states = {world.start(opening)}
    todo = list(states)
    while todo:
        state = todo.pop()
        for choice in world.choices:
            for outcome in world.outcomes(state, choice):
                if outcome.state is not None and outcome.state not in states:
                    states.add(outcome.state)
                    todo.append(outcome.state)
    return states


@by_world
def test_outcomes_are_a_distribution_that_the_policy_can_tell_apart(world):
    assert len(set(world.openings)) == len(world.openings) > 1
    for opening in world.openings:
        states = reachable(world, opening)
        assert len({state.name for state in states}) == len(states)
        assert max(state.turn for state in states) == world.turns

        for state in states:
            for choice in world.choices:
                outcomes = world.outcomes(state, choice)
                assert math.isclose(sum(outcome.chance for outcome in outcomes), 1.0)
                assert all(outcome.chance > 0 for outcome in outcomes)
                assert len({outcome.message for outcome in outcomes}) == len(outcomes)
                for outcome in outcomes:
                    assert outcome.state is None or outcome.state.turn == state.turn + 1


OPTIMA = {"key": 1.14, "repair": 1, "fatal": 1, "luck": 1, "distraction": 1, "exit": 1, "match": 1}


@by_world
def test_optimum_and_random_level(world):
    assert math.isclose(world.optimum, OPTIMA[world.name])
    assert world.random < 0.5 * world.optimum
    assert world.level(world.random) == 0.0
    assert world.level(world.optimum) == 1.0
    # No task can be played without reading: always the same choice is far from the optimum.
    for choice in range(len(world.choices)):
        fixed = world._mean(lambda values, choice=choice: values[choice])
        assert world.level(fixed) < 0.5


def test_a_later_choice_is_worth_what_the_world_says():
    key = WORLDS["key"]
    values = [key.value("kp", max), key.value("kp", lambda values: values[0])]
    assert math.isclose(values[0], 1.14)
    # Always a: the right key, and the coins of the turns whose sign is p.
    coins = sum(key._sign(turn, "p") == "p" for turn in range(2, 9))
    assert math.isclose(values[1], 1.0 + key.coin * coins)

    # Leaving is worth what going on at random is worth, so that only a better policy goes on.
    leave = WORLDS["exit"]
    start = leave.start("0p")
    (further, _) = leave.outcomes(start, "a")
    assert further.state.turn == 2

    def random_value(state):
        values = []
        for choice in leave.choices:
            outcomes = leave.outcomes(state, choice)
            values.append(
                sum(
                    o.chance * (o.reward + (random_value(o.state) if o.state else 0.0))
                    for o in outcomes
                )
            )
        return sum(values) / len(values)

    assert math.isclose(random_value(further.state), leave.leave, abs_tol=1e-4)
