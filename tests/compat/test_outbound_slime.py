"""Our rollouts as the custom generate function of slime and Miles: `turnwright serve` over a
socket, by SGLang's format."""

import asyncio
import importlib
import inspect
import json
import sys
import urllib.request
from argparse import Namespace
from dataclasses import dataclass, field
from enum import Enum
from types import ModuleType

import pytest
from kit.outbound import LIMITS, Calls, Letters, check_row, forks, make_model, run
from transformers import AutoTokenizer

import turnwright as tw
from turnwright.errors import EngineError, UsageError
from turnwright.renderers import load_renderer
from turnwright_compat.episodes import TASK
from turnwright_compat.slime.rollout import ROUTING_KEY, SlimeEpisodes, make_generate
from turnwright_serve import make_service
from turnwright_serve.server import JsonHttpServer


@dataclass
class Sample:
    """What of slime's sample a generate function reads and writes."""

    index: int = 0
    rollout_id: int | None = None
    prompt: object = ""
    label: str | None = None
    metadata: dict = field(default_factory=dict)
    tokens: list = field(default_factory=list)
    response: str = ""
    response_length: int = 0
    reward: object = None
    loss_mask: list | None = None
    rollout_log_probs: list | None = None
    weight_versions: list = field(default_factory=list)
    multimodal_train_inputs: dict | None = None
    remove_sample: bool = False

    class Status(Enum):
        PENDING = "pending"
        COMPLETED = "completed"
        TRUNCATED = "truncated"
        ABORTED = "aborted"
        FAILED = "failed"

    status: Status = Status.PENDING


@pytest.fixture(scope="module")
def path(tmp_path_factory):
    return make_model(tmp_path_factory.mktemp("model") / "m")


@pytest.fixture(params=["slime", "miles"])
def posted(request, monkeypatch):
    """A package with the two modules that matter here; returns what was posted."""
    calls = []

    def send(url, payload, headers):
        data = json.dumps(payload).encode()
        asked = urllib.request.Request(url, data, {"Content-Type": "application/json", **headers})
        with urllib.request.urlopen(asked) as found:
            return json.loads(found.read())

    async def post(url, payload, max_retries=60, headers=None):
        found = await asyncio.to_thread(send, url, payload, headers)
        calls.append((payload, headers, found))
        return found

    modules = {
        name: ModuleType(name)
        for name in (request.param, f"{request.param}.utils", f"{request.param}.utils.http_utils")
    }
    modules[f"{request.param}.utils.http_utils"].post = post
    for name, module in modules.items():
        monkeypatch.setitem(sys.modules, name, module)
    monkeypatch.setattr(Sample, "__module__", f"{request.param}.utils.types")
    return calls


def play(path, generate, samples, *, bans=True, evaluation=False, params=None, **given):
    """Call the function for all samples at once, beside a server of SGLang's format."""
    renderer = load_renderer(path)
    sampling = {
        "temperature": 1.0,
        "top_p": 1.0,
        "top_k": -1,
        "max_new_tokens": 64,
        "stop": None,
        "stop_token_ids": None,
        "skip_special_tokens": False,
        "no_stop_trim": True,
        "spaces_between_special_tokens": False,
        **(params or {}),
    }

    async def work():
        app, engine = make_service(path, context=512, device="cpu")
        if bans:  # keeps a model that was not trained from sampling control tokens
            sample = engine.generate

            def generate_without(request):
                request.banned_ids = frozenset(renderer.invalid_ids)
                return sample(request)

            engine.generate = generate_without
        # Its client sends no key.
        server = JsonHttpServer(app.routes("sglang"), host="127.0.0.1", port=0, keyless=True)
        await server.start()
        args = Namespace(
            sglang_router_ip="127.0.0.1",
            sglang_router_port=server.port,
            hf_checkpoint=str(path),
            rollout_max_response_len=64,
            rollout_max_context_len=None,
            reward_key=None,
            **given,
        )
        try:
            return await asyncio.gather(
                *(generate(args, one, dict(sampling), evaluation=evaluation) for one in samples)
            )
        finally:
            await server.close()
            await engine.close()

    return run(work())


def calls_of(posted):
    calls = Calls()
    for payload, headers, found in posted:
        rows = found["meta_info"]["output_token_logprobs"]
        calls.add(
            headers[ROUTING_KEY],
            payload["input_ids"],
            [row[1] for row in rows],
            [row[0] for row in rows],
        )
    return calls


def samples_of(episodes, number=1):
    rows = [row for row in episodes.rows() for _ in range(number)]
    return [
        Sample(index=at, prompt=row["prompt"], label=row["label"], metadata=row["metadata"])
        for at, row in enumerate(rows)
    ]


def check(sample, posted):
    start = len(sample.tokens) - sample.response_length
    return check_row(
        calls_of(posted),
        sample.tokens[:start],
        sample.tokens[start:],
        sample.loss_mask,
        sample.rollout_log_probs,
    )


def test_a_sample_is_trained_on_what_the_server_sampled(path, posted):
    episodes = SlimeEpisodes(Letters, n_tasks=3, limits=LIMITS)
    generate = make_generate(episodes)
    assert list(inspect.signature(generate).parameters) == [
        "args",
        "sample",
        "sampling_params",
        "evaluation",
    ]
    found = play(path, generate, samples_of(episodes, 2))
    tokenizer = AutoTokenizer.from_pretrained(path)
    for sample in found:
        assert len(check(sample, posted)) == 2
        assert 0 in sample.loss_mask
        assert sample.response == tokenizer.decode(sample.tokens[-sample.response_length :])
        assert sample.reward == pytest.approx(sum(sample.metadata["turnwright"]["rewards"]))
        assert sample.status in (Sample.Status.COMPLETED, Sample.Status.TRUNCATED)
        assert sample.weight_versions == ["default", "default"]
        assert sample.remove_sample is False
    assert len({headers[ROUTING_KEY] for _, headers, _ in posted}) == 6
    assert len({tuple(sample.tokens) for sample in found}) == 6
    assert episodes.limits is LIMITS


def test_lengths_of_the_trainer_and_reward_keys(path, posted):
    episodes = SlimeEpisodes(Letters, n_tasks=1, limits={"turns": 2})
    (sample,) = play(
        path,
        make_generate(episodes),
        samples_of(episodes),
        reward_key_other=None,
        eval_reward_key="score",
    )
    assert (episodes.limits.episode_tokens, episodes.limits.turn_tokens) == (64, 64)
    assert sample.response_length <= 64
    assert sample.reward == {"score": episodes.last[0].reward}
    assert {payload["sampling_params"]["max_new_tokens"] for payload, _, _ in posted} <= set(
        range(1, 65)
    )


def test_rows_of_the_trainers_own_dataset_are_tasks_too(path, posted):
    class Asks(tw.Env):
        def reset(self, task, *, seed=None):
            self.task = task

        def step(self, action):
            return tw.Step(
                reward=float(self.task.answer) + self.task.info["bonus"], terminated=True
            )

    episodes = SlimeEpisodes(Asks, [tw.Task("Another.")], limits=LIMITS)
    sample = Sample(
        prompt=[{"role": "user", "content": "Write letters."}], label="2", metadata={"bonus": 0.5}
    )
    (found,) = play(path, make_generate(episodes), [sample])
    assert found.reward == 2.5
    with pytest.raises(UsageError, match=r"sample 0: turnwright_task = '77' is no task"):
        play(path, make_generate(episodes), [Sample(metadata={TASK: "77"})])


def test_an_episode_of_several_rows_is_refused_or_fans_out(path, posted):
    episodes = SlimeEpisodes(forks, [tw.Task("Write.", id="0")], limits=LIMITS)
    with pytest.raises(
        UsageError, match=r"an episode of 2 rows.*slime without fan_out=True takes one"
    ):
        play(path, make_generate(episodes), samples_of(episodes))
    (found,) = play(path, make_generate(episodes, fan_out=True), samples_of(episodes))
    assert len(found) == 2
    for sample in found:
        assert len(check(sample, posted)) == 1
        assert (sample.reward, sample.rollout_id) == (1.0, 0)


def test_a_failed_episode_is_removed_and_a_failed_server_is_the_trainers(path, posted):
    episodes = SlimeEpisodes(Letters, [tw.Task("Write.", id="broken")], limits=LIMITS)
    (sample,) = play(path, make_generate(episodes), samples_of(episodes))
    assert (sample.status, sample.remove_sample, sample.reward) == (Sample.Status.FAILED, True, 0.0)
    assert sample.loss_mask == [0]

    async def lost(url, payload, headers=None):
        raise ConnectionError("no route")

    episodes = SlimeEpisodes(Letters, n_tasks=1, limits=LIMITS)
    with pytest.raises(EngineError, match="no route"):
        play(path, make_generate(episodes, post=lost), samples_of(episodes))

    async def bare(url, payload, headers=None):
        return {"text": "a", "meta_info": {"finish_reason": {"type": "stop"}}}

    with pytest.raises(EngineError, match="output_token_logprobs"):
        play(path, make_generate(episodes, post=bare), samples_of(episodes))


def test_an_engine_that_stops_at_an_id_of_its_own_is_an_error(path, posted):
    async def post(url, payload, headers=None):
        return {
            "text": "a",
            "meta_info": {
                "finish_reason": {"type": "stop"},
                "output_token_logprobs": [[-0.5, 40, None]],
            },
        }

    episodes = SlimeEpisodes(Letters, n_tasks=1, limits=LIMITS)
    with pytest.raises(
        EngineError,
        match=r"stopped after id 40, which is no end token of the renderer.*eos_token_id",
    ):
        play(path, make_generate(episodes, post=post), samples_of(episodes))


def test_without_the_packages_own_function_it_is_asked_for(path, posted, monkeypatch):
    package = Sample.__module__.partition(".")[0]
    monkeypatch.delattr(importlib.import_module(f"{package}.utils.http_utils"), "post")
    episodes = SlimeEpisodes(Letters, n_tasks=1, limits=LIMITS)
    with pytest.raises(UsageError, match=rf"{package}.utils.http_utils has no post.*post="):
        play(path, make_generate(episodes), samples_of(episodes))
