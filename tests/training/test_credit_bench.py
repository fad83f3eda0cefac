"""The bench of credit assignment: its worlds, what it takes for the truth, and a tiny cell."""

import asyncio
import json
import math
import random
from dataclasses import replace

import credit
import numpy as np
import pytest
from credit import Cell, Player, make_histories, make_model, make_renderer, make_trainer
from credit_tables import Results, print_tables, spearman
from credit_truth import Estimates, Histories, Visits, gradient_of, true_values
from credit_worlds import PRACTICE, WORLDS, Outcome, State, World, ends

from turnwright.types import EpisodeKey, Group, Message, Task, Trajectory, Turn

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


class Two(World):
    """Turn 1 leads by chance to a good or a bad place, or ends; turn 2 pays by the place."""

    name = "two"
    turns = 2
    choices = "ab"
    openings = ("go",)

    def start(self, opening):
        return State(1, ())

    def outcomes(self, state, choice):
        if state.turn == 1 and choice == "b":
            return ends(0.5)
        if state.turn == 1:
            good, bad = State(2, ("good",)), State(2, ("bad",))
            return (Outcome(0.25, 0.1, "good", good), Outcome(0.75, 0.0, "bad", bad))
        return ends({"good a": 1.0, "bad b": 0.2}.get(f"{state.facts[0]} {choice}", 0.0))


def test_true_advantages_of_a_world_of_two_turns():
    histories = Histories(Two(), make_renderer(Two()))
    assert [state.facts for state in histories.states] == [(), ("good",), ("bad",)]
    policy_nc = np.array([[0.6, 0.4], [0.7, 0.3], [0.5, 0.5]])
    truth = histories.truth(policy_nc)

    good, bad = 0.7 * 1.0, 0.5 * 0.2
    going = 0.25 * (0.1 + good) + 0.75 * bad
    start = 0.6 * going + 0.4 * 0.5
    np.testing.assert_allclose(truth.value_n, [start, good, bad])
    np.testing.assert_allclose(truth.q_nc, [[going, 0.5], [1.0, 0.0], [0.0, 0.2]])
    np.testing.assert_allclose(
        truth.advantage_nc, [[going - start, 0.5 - start], [0.3, -0.7], [-0.1, 0.1]]
    )
    np.testing.assert_allclose(truth.reach_n, [1.0, 0.6 * 0.25, 0.6 * 0.75])
    assert math.isclose(truth.value, start)


def count(world, state):
    """Histories from a state on in which the policy chooses."""
    following = [
        outcome.state
        for choice in world.choices
        for outcome in world.outcomes(state, choice)
        if outcome.state is not None
    ]
    return 1 + sum(count(world, after) for after in following)


@by_world
def test_histories_are_listed_once_and_have_the_values_of_their_states(world):
    histories = make_histories(world)
    assert len(histories.index) == len(histories)
    sizes = [count(world, world.start(opening)) for opening in world.openings]
    assert len(histories) == sum(sizes)
    assert max(sizes) < 20_000

    # The random policy, and the best one, which is found by going back through the histories.
    choices = len(world.choices)
    uniform = histories.truth(np.full((len(histories), choices), 1 / choices))
    assert math.isclose(uniform.value, world.random)
    assert math.isclose(uniform.reach_n[histories.turn_n == 1].sum(), 1.0)
    assert (uniform.reach_n > 0).all()
    best_nc = uniform.policy_nc
    for turn in range(world.turns, 0, -1):
        best_n = histories.truth(best_nc).q_nc.argmax(-1)
        at_turn = histories.turn_n == turn
        best_nc = np.where(at_turn[:, None], np.eye(choices)[best_n], best_nc)
    assert math.isclose(histories.truth(best_nc).value, world.optimum)


def test_the_gradient_by_logits_is_that_of_the_value():
    histories = make_histories(PRACTICE)
    rng = np.random.default_rng(0)
    logits_nc = rng.normal(size=(len(histories), 3))

    def truth_of(logits_nc):
        exp_nc = np.exp(logits_nc)
        return histories.truth(exp_nc / exp_nc.sum(-1, keepdims=True))

    truth = truth_of(logits_nc)
    assert np.abs((truth.policy_nc * truth.advantage_nc).sum(-1)).max() < 1e-12
    for place in [(0, 0), (5, 2), (histories.roots[1], 1)]:
        moved_nc = logits_nc.copy()
        moved_nc[place] += 1e-6
        slope = (truth_of(moved_nc).value - truth.value) / 1e-6
        assert math.isclose(slope, truth.gradient_nc[place], rel_tol=1e-3, abs_tol=1e-9)


@pytest.fixture(scope="module")
def played():
    """A model, and 20 steps that a rollout played of a world with chance."""
    world = WORLDS["exit"]
    model = make_model(make_renderer(world).codec.vocab_size, seed=3)
    player = Player(world, model, seed=3)

    async def play():
        steps = [await player.play(step) for step in range(20)]
        await player.engine.close()
        return steps

    return world, model, asyncio.run(play())


def test_the_truth_is_that_of_a_rollout(played):
    world, model, steps = played
    truth = true_values(world, model, make_renderer(world))
    assert np.abs((truth.policy_nc * truth.advantage_nc).sum(-1)).max() < 1e-12
    assert truth.policy_nc.min() > 0.1

    # Its value is the mean reward, and its probabilities are those of the engine.
    histories = make_histories(world)
    trajectories = [t for groups in steps for group in groups for t in group.trajectories]
    rewards = [trajectory.reward for trajectory in trajectories]
    error = np.std(rewards) / math.sqrt(len(rewards))
    assert abs(np.mean(rewards) - truth.value) < 4 * error
    for trajectory in trajectories[:20]:
        for number, turn in enumerate(trajectory.turns):
            (logprob,) = trajectory.spans[turn.spans[0]].logprobs
            place = histories.turn_of(trajectory, number)
            assert math.isclose(math.exp(logprob), truth.policy_nc[place], rel_tol=1e-4)
            if number:
                state = histories.states[place[0]]
                assert trajectory.turns[number - 1].info["state"] == state.name


def test_what_a_trainer_gives_to_each_turn(played):
    world, model, steps = played
    histories = make_histories(world)
    truth = true_values(world, model, make_renderer(world))
    (groups, *_) = steps
    trainer = make_trainer("rloo", world, model)
    visits, advantage_m, weight_m = credit.advantages_of(trainer, histories, groups)
    assert len(advantage_m) == sum(len(t.turns) for t in credit.episodes_of(groups))

    expected = []
    for group in sorted(groups, key=lambda group: group.task.id):
        for own in sorted(group.trajectories, key=lambda t: t.key.sample):
            others = [t.reward for t in group.trajectories if t is not own]
            expected += [own.reward - np.mean(others)] * len(own.turns)
    np.testing.assert_allclose(advantage_m, expected, atol=1e-12)
    np.testing.assert_allclose(weight_m, weight_m[0])

    # The gradient of the logits, one turn at a time.
    gradient_nc = np.zeros_like(truth.policy_nc)
    for number, (history, choice) in enumerate(zip(visits.history_m, visits.choice_m, strict=True)):
        pull = weight_m[number] * advantage_m[number]
        gradient_nc[history] += pull * (np.eye(4)[choice] - truth.policy_nc[history])
    np.testing.assert_allclose(
        gradient_of(truth, visits, advantage_m, weight_m), gradient_nc, atol=1e-12
    )


def sampled(histories, truth, rng, episodes=48):
    """Visits of episodes that are drawn from the histories themselves."""
    world = histories.world
    following = {(edge[0], edge[1]): [] for edge in histories._edges}
    for history, choice, chance, _, after in histories._edges:
        following[history, choice].append((chance, after))
    visits, turns = [], []
    for _ in range(episodes):
        history = rng.choice(histories.roots)
        first = len(visits)
        while history >= 0:
            (choice,) = rng.choices(range(len(world.choices)), truth.policy_nc[history])
            visits.append((history, choice))
            chances, afters = zip(*following[history, choice], strict=True)
            (history,) = rng.choices(afters, chances)
        turns.append(len(visits) - first)
    history_m, choice_m = np.array(visits).T
    return Visits(history_m, choice_m, turns)


@pytest.mark.parametrize("error", ["none", "noise", "shift", "bias"])
def test_the_error_of_advantages_is_told_apart(error):
    histories = make_histories(PRACTICE)
    truth = histories.truth(np.tile([0.5, 0.3, 0.2], (len(histories), 1)))
    estimates = Estimates(truth, histories.turn_n)
    rng = random.Random(0)
    noise = np.random.default_rng(0)
    deviation = math.sqrt(float((truth.gradient_nc * truth.advantage_nc).sum()) / PRACTICE.turns)
    # A shift is larger where few episodes come.
    shift_n = np.where(truth.reach_n < 0.01, 3.0, 0.5) * deviation
    shift_square = float((truth.reach_n * shift_n**2).sum()) / PRACTICE.turns
    shift_share = shift_square / (shift_square + 4.0 * deviation**2)
    for _ in range(150):
        visits = sampled(histories, truth, rng)
        advantage_m = 2.0 * truth.advantage_nc[visits.history_m, visits.choice_m]
        if error == "noise":
            advantage_m = advantage_m + noise.normal(size=len(advantage_m)) * 2.0 * deviation
        if error == "shift":
            advantage_m = advantage_m + shift_n[visits.history_m]
        if error == "bias":
            advantage_m = advantage_m + np.where(visits.choice_m == 2, 4.0, 0.0) * deviation
        estimates.add(visits, advantage_m, np.ones(len(advantage_m)))

    figures = estimates.figures()
    shares = [figures[name] for name in ("explained", "shift", "bias", "noise")]
    assert math.isclose(sum(shares), 1.0)
    if error == "none":
        np.testing.assert_allclose(shares, [1, 0, 0, 0], atol=1e-9)
        assert math.isclose(figures["slope"], 2.0)
        assert math.isclose(figures["correlation"], 1.0)
    if error in ("noise", "shift"):
        expected = [0.5, 0, 0, 0.5] if error == "noise" else [1 - shift_share, shift_share, 0, 0]
        np.testing.assert_allclose(shares, expected, atol=0.05)
        assert abs(figures["bias"]) < 4 * figures["bias_error"] + 0.01
    if error == "bias":
        assert figures["bias"] > 0.1
        assert figures["cosine_expected"] < 0.9
    else:
        assert figures["cosine_expected"] > 0.95
    assert figures["cosine"] < figures["cosine_expected"]


def trajectory(name, rewards):
    reply = Message("assistant", "a")
    turns = [Turn("main", 0, 1, (0,), (), reply, reward=reward) for reward in rewards]
    found = Trajectory(Task("t"), EpisodeKey("train", 0, "t", name))
    found.turns = turns
    found.reward = sum(rewards)
    return found


def test_a_control_deals_rewards_to_other_episodes():
    rewards = [[0.0, 1.0, 0.5], [2.0], [0.25, 0.0], [0.0, 0.0, 0.0, 4.0]]
    group = Group(Task("t"), [trajectory(number, row) for number, row in enumerate(rewards)])
    (dealt,) = credit.shuffled([group], "0")
    assert sorted(t.reward for t in dealt.trajectories) == [0.25, 1.5, 2.0, 4.0]
    assert [t.reward for t in dealt.trajectories] != [t.reward for t in group.trajectories]
    for twin, original in zip(dealt.trajectories, group.trajectories, strict=True):
        assert len(twin.turns) == len(original.turns)
        assert math.isclose(sum(turn.reward for turn in twin.turns), twin.reward)
    assert [[turn.reward for turn in t.turns] for t in group.trajectories] == rewards


def test_rank_correlation():
    assert spearman([1, 2, 3], [10, 30, 20]) == 0.5
    assert math.isclose(spearman([1, 1, 2], [3, 3, 9]), 1.0)
    assert spearman([1, 1, 1], [1, 2, 3]) is None


def test_cells_measurements_and_tables(tmp_path, monkeypatch, capsys):
    """All of a run at its smallest: a world learns, the true advantages agree with themselves, and
    what is done is skipped."""
    monkeypatch.setattr(credit, "POLICY_LEVELS", (0.0,))
    monkeypatch.setitem(WORLDS, "match", PRACTICE)
    monkeypatch.setitem(credit.METHODS, "running", replace(credit.METHODS["running"], fit=2))
    methods = ["truth", "grpo", "running"]
    cells = [Cell(method=method, world="match", seed=0, steps=8) for method in methods]
    for cell in (*cells, Cell(method="grpo", world="match", seed=0, steps=4, shuffled=True)):
        assert not credit.is_done(tmp_path, cell)
        credit.play_cell(cell, tmp_path)
        assert credit.is_done(tmp_path, cell)
    credit.play_measure("match", methods, 10, tmp_path)
    assert credit.is_measured(tmp_path, "match", "running", 10)
    assert not credit.is_measured(tmp_path, "match", "running", 20)

    results = Results.read(tmp_path, methods)
    (row,) = results.of("truth", "match")
    assert [point["episodes"] for point in row["curve"]] == [0, 192, 384]
    assert row["level"] > row["curve"][0]["level"] + 0.02
    assert row["curve"][0]["correlation"] > 0.999
    assert row["episodes_to_90"] is None
    assert results.figure("truth", "match", "explained") > 0.999
    assert results.figure("grpo", "match", "cosine") < results.figure("truth", "match", "cosine")

    print_tables(results)
    summary = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert summary["methods"] == methods
    assert summary["table"]["grpo"]["match"]["episodes"] == 384
    assert summary["best_vs_grpo_episodes"] == 1.0


def test_methods_that_are_not_known_are_named_with_the_reason(monkeypatch):
    monkeypatch.setitem(credit.METHODS, "later", credit.Method({"algorithm": "later"}))
    monkeypatch.setitem(credit.METHODS, "keyed", credit.Method({"no_such_key": 1}))
    reasons = credit.unknown_methods(["grpo", "later", "keyed"])
    assert "later" in reasons["later"]
    assert "no_such_key" in reasons["keyed"]
    assert "grpo" not in reasons
