"""Our rollouts as SkyRL's generator: a real tokenizer and model behind a stub
of its engine client."""

from types import SimpleNamespace

import pytest
from kit.outbound import LIMITS, Letters, Server, check_row, forks, make_model, run
from transformers import AutoTokenizer

import turnwright as tw
from turnwright.errors import EngineError, TaskError, UsageError
from turnwright_compat.episodes import TASK
from turnwright_compat.skyrl.rollout import SkyRLEpisodes, TurnwrightGenerator


@pytest.fixture(scope="module")
def path(tmp_path_factory):
    return make_model(tmp_path_factory.mktemp("model") / "m")


class Client:
    """SkyRL's inference engine client over a model of ours."""

    def __init__(self, server):
        self.server, self.finished, self.fault, self.without = server, [], None, ""

    async def generate(self, input_batch, model=None):
        if self.fault is not None:
            raise self.fault
        found = []
        for ids, session in zip(
            input_batch["prompt_token_ids"], input_batch["session_ids"], strict=True
        ):
            params = input_batch["sampling_params"]
            assert params["logprobs"] is not None
            found.append(
                await self.server.sample(
                    session,
                    ids,
                    params["max_tokens"],
                    params["stop_token_ids"],
                    params["temperature"],
                    params.get("stop") or (),
                )
            )
        output = {
            "responses": ["" for _ in found],
            "response_ids": [ids for ids, _, _ in found],
            "response_logprobs": [logprobs for _, logprobs, _ in found],
            "stop_reasons": [finish for _, _, finish in found],
        }
        return {**output, self.without: None} if self.without else output

    async def finish_session(self, session):
        self.finished.append(session)


def config(path, **given):
    sampling = SimpleNamespace(
        max_generate_length=12,
        temperature=1.0,
        top_p=1.0,
        top_k=-1,
        min_p=0.0,
        logprobs=1,
        stop=None,
        additional_kwargs=None,
    )
    generator = {
        "max_turns": 2,
        "max_input_length": 256,
        "step_wise_trajectories": False,
        "sampling_params": sampling,
        **given,
    }
    policy = SimpleNamespace(model=SimpleNamespace(path=str(path)))
    return SimpleNamespace(
        generator=SimpleNamespace(**generator), trainer=SimpleNamespace(policy=policy)
    )


def generator_of(path, play, **given):
    client = Client(Server(path))
    return TurnwrightGenerator(
        play, config(path, **given), AutoTokenizer.from_pretrained(path), client
    ), client


def batch_of(rows, samples=2, params=True, phase="train", step=3):
    """What SkyRL's trainer makes of rows of its dataset."""
    repeated = [(row, number) for row in rows for number in range(samples)]
    sampling = {
        "temperature": 1.0,
        "top_p": 1.0,
        "top_k": -1,
        "max_tokens": 12,
        "logprobs": 1,
        "stop": None,
    }
    return {
        "prompts": [row["prompt"] for row, _ in repeated],
        "env_classes": [row.get("env_class", "") for row, _ in repeated],
        "env_extras": [
            {key: value for key, value in row.items() if key != "prompt"} for row, _ in repeated
        ],
        "sampling_params": sampling if params else None,
        "trajectory_ids": [
            SimpleNamespace(instance_id=str(id(row)), repetition_id=number)
            for row, number in repeated
        ],
        "batch_metadata": SimpleNamespace(global_step=step, training_phase=phase),
    }


@pytest.mark.parametrize("params", [True, False])
def test_a_batch_is_trained_on_what_the_engine_sampled(path, params):
    play = SkyRLEpisodes(Letters, n_tasks=3, limits=LIMITS)
    generator, client = generator_of(path, play)
    found = run(generator.generate(batch_of(play.rows(), params=params)))
    assert [one.task.id for one in play.last] == ["0", "0", "1", "1", "2", "2"]
    assert {one.key.step for one in play.last} == {3}
    rows = zip(
        *(
            found[key]
            for key in (
                "prompt_token_ids",
                "response_ids",
                "loss_masks",
                "rollout_logprobs",
                "rewards",
            )
        ),
        strict=True,
    )
    for number, (prompt, response, mask, logprobs, rewards) in enumerate(rows):
        calls = check_row(client.server.calls, prompt, response, mask, logprobs)
        assert len(calls) == 2
        assert 0 in mask, "the observation is not trained"
        trajectory = play.last[number]
        ends = [
            len(context) + len(ids) - 1 - len(prompt)
            for _, context, ids, _ in sorted(calls, key=lambda call: len(call[1]))
        ]
        assert {at: value for at, value in enumerate(rewards) if value} == {
            at: turn.reward for at, turn in zip(ends, trajectory.turns, strict=True) if turn.reward
        }
        assert sum(rewards) == pytest.approx(trajectory.reward)
    assert len({tuple(ids) for ids in found["response_ids"]}) == 6
    assert len(client.finished) == len(set(client.finished)) == 6
    assert found["is_last_step"] is None
    assert found["rollout_metrics"]["turnwright/turns"] == 2.0


def test_the_trainers_lengths_are_the_limits_unless_some_are_given(path):
    play = SkyRLEpisodes(Letters, n_tasks=1)
    generator_of(path, play)
    assert (play.limits.turns, play.limits.turn_tokens, play.limits.context) == (2, 12, 268)
    play = SkyRLEpisodes(Letters, n_tasks=1, limits={"turns": 1})
    generator_of(path, play)
    assert (play.limits.turns, play.limits.turn_tokens) == (1, 12)


def test_stop_texts_reach_the_engine_and_its_own_do_not(path):
    play = SkyRLEpisodes(Letters, n_tasks=1, limits=LIMITS, stop=["a"])
    generator, client = generator_of(path, play)
    batch = batch_of(play.rows(), samples=8)
    batch["sampling_params"]["stop"] = ["theirs"]
    found = run(generator.generate(batch))
    stop = tw.StopText(["a"], client.server.renderer.decode)
    ends = [(stop.first_completion(ids), len(ids)) for _, _, ids, _ in client.server.calls.found]
    assert any(first == length for first, length in ends)
    assert all(first in (0, length) for first, length in ends)
    assert {request.stop_text.texts for request in client.server.asked} == {("a",)}
    for columns in zip(
        *(
            found[key]
            for key in ("prompt_token_ids", "response_ids", "loss_masks", "rollout_logprobs")
        ),
        strict=True,
    ):
        check_row(client.server.calls, *columns)


def test_rows_of_skyrls_own_dataset_are_tasks_too(path):
    class Asks(tw.Env):
        """Rewards a column and the answer of the row."""

        def reset(self, task, *, seed=None):
            self.task = task

        def step(self, action):
            return tw.Step(
                reward=float(self.task.answer) + self.task.info["extra_info"]["bonus"],
                terminated=True,
            )

    rows = [
        {
            "prompt": [{"role": "user", "content": "Write letters."}],
            "env_class": "gsm8k",
            "reward_spec": {"method": "rule", "ground_truth": "2"},
            "extra_info": {"bonus": 0.5},
            "max_turns": 4,
        }
    ]
    play = SkyRLEpisodes(Asks, [tw.Task("Another.")], limits=LIMITS)
    generator, _ = generator_of(path, play)
    found = run(generator.generate(batch_of(rows)))
    assert [sum(rewards) for rewards in found["rewards"]] == [2.5, 2.5]
    assert "max_turns" not in play.last[0].task.info
    with pytest.raises(TaskError, match="prompt 0 of SkyRL's batch"):
        run(generator.generate(batch_of([{"prompt": [], "env_class": "x"}])))
    with pytest.raises(UsageError, match="n_tasks, n_eval and seed"):
        run(
            generator.generate(
                batch_of([{"prompt": [{"role": "user", "content": "a"}], TASK: "77"}])
            )
        )


def test_several_rows_need_step_wise_training(path):
    play = SkyRLEpisodes(forks, [tw.Task("Write.", id="0")], limits=LIMITS)
    generator, client = generator_of(path, play)
    with pytest.raises(UsageError, match=r"an episode of 2 rows.*step_wise_trajectories takes one"):
        run(generator.generate(batch_of(play.rows())))
    generator, client = generator_of(path, play, step_wise_trajectories=True)
    batch = batch_of(play.rows())
    found = run(generator.generate(batch))
    assert found["is_last_step"] == [False, True, False, True]
    assert found["trajectory_ids"] == [batch["trajectory_ids"][n] for n in (0, 0, 1, 1)]
    assert [sum(rewards) for rewards in found["rewards"]] == [0.0, 1.0, 0.0, 1.0]
    for columns in zip(
        *(
            found[key]
            for key in ("prompt_token_ids", "response_ids", "loss_masks", "rollout_logprobs")
        ),
        strict=True,
    ):
        check_row(client.server.calls, *columns)


def test_a_failed_episode_is_not_trained_and_a_failed_engine_is_the_trainers(path):
    tasks = [tw.Task("Write.", id="fine"), tw.Task("Write.", id="broken")]
    play = SkyRLEpisodes(Letters, tasks, limits=LIMITS)
    generator, client = generator_of(path, play)
    found = run(generator.generate(batch_of(play.rows(), samples=1)))
    assert sum(found["loss_masks"][0]) > 0
    assert found["loss_masks"][1] == [0]
    assert found["rewards"][1] == [0.0]
    assert found["rollout_metrics"]["turnwright/without_reward"] == 0.5
    client.without = "response_logprobs"
    with pytest.raises(
        EngineError, match=r"no logprobs for \d+ ids; set generator.sampling_params.logprobs = 1"
    ):
        run(generator.generate(batch_of(play.rows(), samples=1)))
    client.fault = RuntimeError("engine died")
    with pytest.raises(EngineError, match="engine died"):
        run(generator.generate(batch_of(play.rows(), samples=1)))


def test_a_control_token_that_the_engine_samples_ends_the_episode_untrained(path):
    play = SkyRLEpisodes(Letters, n_tasks=8, limits=LIMITS)
    client = Client(Server(path, bans=False))
    generator = TurnwrightGenerator(play, config(path), AutoTokenizer.from_pretrained(path), client)
    found = run(generator.generate(batch_of(play.rows())))
    banned, hit = client.server.renderer.banned_ids, 0
    for response, mask in zip(found["response_ids"], found["loss_masks"], strict=True):
        at = next((at for at, one in enumerate(response) if one in banned), None)
        if at is not None:
            hit += 1
            assert mask[at:] == [0] * (len(mask) - at)
    assert hit


def test_group_rewards_compare_the_episodes_of_a_batch(path):
    class Compared(Letters):
        @staticmethod
        def group_reward(trajectories):
            return [float(number) for number, _ in enumerate(trajectories)]

    play = SkyRLEpisodes(Compared, n_tasks=2, limits=LIMITS)
    generator, _ = generator_of(path, play)
    found = run(generator.generate(batch_of(play.rows(), samples=3)))
    own = [sum(turn.reward for turn in one.turns) for one in play.last]
    assert [sum(rewards) for rewards in found["rewards"]] == pytest.approx(
        [a + n for a, n in zip(own, [0, 1, 2] * 2, strict=True)]
    )
