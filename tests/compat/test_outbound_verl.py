"""Our rollouts as verl's agent loop: a real tokenizer and model behind a stub
of its server client."""

import asyncio
from types import SimpleNamespace

import pytest
from kit.outbound import LIMITS, Letters, Server, check_row, forks, make_model, run
from transformers import AutoTokenizer

import turnwright as tw
from turnwright.errors import EngineError, UsageError
from turnwright_compat.common import attribute_config
from turnwright_compat.verl.rollout import TurnwrightAgentLoop, VerlEpisodes


@pytest.fixture(scope="module")
def path(tmp_path_factory):
    return make_model(tmp_path_factory.mktemp("model") / "m")


class Client:
    """verl's server client over a model of ours."""

    def __init__(self, server):
        self.server, self.requests, self.images, self.aborts, self.logprobs = (
            server,
            [],
            [],
            0,
            True,
        )
        self.most = 1000

    async def generate(
        self, request_id, *, prompt_ids, sampling_params, image_data=None, video_data=None, **kwargs
    ):
        assert sampling_params["logprobs"] is True
        self.requests.append(request_id)
        self.images.append(image_data)
        wanted = sampling_params["max_tokens"]
        most = 3 if self.aborts else wanted
        ids, logprobs, finish = await self.server.sample(
            request_id,
            prompt_ids,
            min(most, wanted, self.most),
            sampling_params["stop_token_ids"],
            sampling_params["temperature"],
            sampling_params.get("stop") or (),
        )
        reason = "completed"
        if self.aborts and finish != "stop":
            self.aborts, reason = self.aborts - 1, "aborted"
        step = len(self.requests)
        return SimpleNamespace(
            token_ids=ids,
            log_probs=logprobs if self.logprobs else None,
            stop_reason=reason,
            num_preempted=0,
            extra_fields={"global_steps": step, "min_global_steps": step, "max_global_steps": step},
        )


def config(path, **given):
    rollout = {"prompt_length": 64, "response_length": 64, "full_determinism": False, **given}
    model = {"path": str(path), "local_path": str(path)}
    return SimpleNamespace(
        config=attribute_config({"actor_rollout_ref": {"rollout": rollout, "model": model}})
    )


def loop_of(path, client, play, tokenizer, **given):
    """A loop as verl makes it: one for each episode."""
    names = ("dataset_cls", "data_config", "hf_model_type", "tools", "processor")
    return TurnwrightAgentLoop(
        trainer_config=config(path, **given),
        server_manager=client,
        tokenizer=tokenizer,
        **dict.fromkeys(names),
        **({"episodes": play} if isinstance(play, VerlEpisodes) else play),
    )


def play_rows(path, client, play, rows, **given):
    tokenizer = AutoTokenizer.from_pretrained(path)
    params = {
        "temperature": 1.0,
        "top_p": 1.0,
        "top_k": -1,
        "repetition_penalty": 1.0,
        "logprobs": False,
    }

    async def work():
        loops = [loop_of(path, client, play, tokenizer, **given) for _ in rows]
        return await asyncio.gather(
            *(
                loop.run(
                    params,
                    raw_prompt=row["prompt"],
                    index=0,
                    **{key: row[key] for key in row if key != "prompt"},
                )
                for loop, row in zip(loops, rows, strict=True)
            )
        )

    return run(work())


def test_episodes_are_trained_on_what_the_servers_sampled(path):
    client, play = Client(Server(path)), VerlEpisodes(Letters, n_tasks=3, limits=LIMITS)
    found = play_rows(path, client, play, [row for row in play.rows() for _ in range(2)])
    for output in found:
        calls = check_row(
            client.server.calls,
            output.prompt_ids,
            output.response_ids,
            output.response_mask,
            output.response_logprobs,
        )
        assert len(calls) == 2
        assert 0 in output.response_mask
        assert output.reward_score == pytest.approx(sum(output.extra_fields["turn_scores"]))
        assert output.num_turns == 4
        fields = output.extra_fields
        assert fields["min_global_steps"] < fields["max_global_steps"]
        assert fields["turnwright_stop"]
    assert len(set(client.requests)) == 6, "the calls of an episode are one session"
    assert len({tuple(output.response_ids) for output in found}) == 6
    assert all(shared.stream is None for shared in play._streams.values()), (
        "the last episode closes what all shared"
    )


def test_an_environment_of_the_file_of_agent_loops_is_shared_by_all_loops(path):
    settings = {
        "name": "turnwright",
        "env": "hop",
        "n_tasks": 4,
        "seed": 3,
        "limits": attribute_config({"turns": 2, "turn_tokens": 12}),
    }
    client = Client(Server(path))
    rows = VerlEpisodes("hop", n_tasks=4, seed=3).rows()
    found = play_rows(path, client, settings, rows, prompt_length=512, response_length=128)
    assert len(found) == 4
    for output in found:
        check_row(
            client.server.calls,
            output.prompt_ids,
            output.response_ids,
            output.response_mask,
            output.response_logprobs,
        )
    tokenizer = AutoTokenizer.from_pretrained(path)
    one, other = (loop_of(path, client, settings, tokenizer) for _ in range(2))
    assert one.episodes is other.episodes
    with pytest.raises(UsageError, match="write env: NAME"):
        loop_of(path, client, {}, tokenizer)


def test_an_aborted_call_is_continued(path):
    client, play = Client(Server(path)), VerlEpisodes(Letters, n_tasks=1, limits=LIMITS)
    client.aborts = 2
    (output,) = play_rows(path, client, play, play.rows())
    calls = check_row(
        client.server.calls,
        output.prompt_ids,
        output.response_ids,
        output.response_mask,
        output.response_logprobs,
    )
    assert len(calls) > 2
    assert len(play.last[0].turns) == 2


def test_rows_of_verls_own_dataset_are_tasks_too(path):
    class Asks(tw.Env):
        def reset(self, task, *, seed=None):
            self.task = task

        def step(self, action):
            return tw.Step(
                reward=float(self.task.answer) + self.task.info["extra_info"]["bonus"],
                terminated=True,
            )

    row = {
        "prompt": [{"role": "user", "content": "Write letters."}],
        "data_source": "openai/gsm8k",
        "reward_model": {"style": "rule", "ground_truth": "2"},
        "extra_info": {"bonus": 0.5, "tools_kwargs": {}},
        "tools_kwargs": {},
    }
    play = VerlEpisodes(Asks, [tw.Task("Another.")], limits=LIMITS)
    (output,) = play_rows(path, Client(Server(path)), play, [row])
    assert output.reward_score == 2.5


def test_what_cannot_be_given_to_verl_is_named(path):
    client = Client(Server(path))
    play = VerlEpisodes(forks, [tw.Task("Write.", id="0")], limits=LIMITS)
    with pytest.raises(UsageError, match=r"an episode of 2 rows.*verl takes one"):
        play_rows(path, client, play, play.rows())
    play = VerlEpisodes(Letters, n_tasks=1, limits=LIMITS)
    with pytest.raises(UsageError, match=r"a prompt of \d+ ids, and data.max_prompt_length is 8"):
        play_rows(path, client, play, play.rows(), prompt_length=8)
    play = VerlEpisodes(Letters, n_tasks=1, limits=LIMITS)
    with pytest.raises(
        UsageError, match=r"beyond the first 14 of the response; set limits.episode_tokens"
    ):
        play_rows(path, client, play, play.rows(), response_length=14)
    client.most = 1  # as at an end token that only the servers know
    with pytest.raises(
        EngineError, match=r"stopped after id \d+, which is no end token of the renderer"
    ):
        play_rows(path, client, play, play.rows())
    client.most, client.logprobs = 1000, False
    with pytest.raises(EngineError, match="calculate_log_probs=True"):
        play_rows(path, client, play, play.rows())

    class Compared(Letters):
        @staticmethod
        def group_reward(trajectories):
            return [0.0] * len(trajectories)

    with pytest.raises(UsageError, match="group_reward compares episodes"):
        loop_of(
            path, client, VerlEpisodes(Compared, n_tasks=1), AutoTokenizer.from_pretrained(path)
        )


def test_the_response_is_within_the_trainers_length_by_default(path):
    play = VerlEpisodes(Letters, n_tasks=8, limits={"turns": 2, "on_turn_length": "continue"})
    client = Client(Server(path))
    found = play_rows(path, client, play, play.rows(), response_length=24)
    assert {len(output.response_ids) for output in found} <= set(range(1, 25))
    for output in found:
        check_row(
            client.server.calls,
            output.prompt_ids,
            output.response_ids,
            output.response_mask,
            output.response_logprobs,
        )


def test_the_context_is_that_of_the_servers(path):
    play = VerlEpisodes(Letters, n_tasks=8)
    server = Server(path)
    play_rows(path, Client(server), play, play.rows(), max_model_len=40)
    assert {len(request.ids) + request.max_tokens for request in server.asked} == {40}


def test_a_failed_episode_is_not_trained(path):
    play = VerlEpisodes(Letters, [tw.Task("Write.", id="broken")], limits=LIMITS)
    (output,) = play_rows(path, Client(Server(path)), play, play.rows())
    assert (output.response_mask, output.reward_score) == ([0], 0.0)
    assert output.extra_fields["turnwright_stop"] == "env_error"
