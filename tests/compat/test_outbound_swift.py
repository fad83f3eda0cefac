"""Our rollouts as a scheduler of ms-swift: a real tokenizer and model behind a stub of its engine,
which takes messages."""

import asyncio
import sys
from dataclasses import dataclass, field
from types import ModuleType, SimpleNamespace

import pytest
from kit.outbound import LIMITS, Letters, Server, check_row, forks, make_model, run
from transformers import AutoTokenizer

import turnwright as tw
from turnwright.errors import EngineError, UsageError
from turnwright_compat.episodes import TASK
from turnwright_compat.swift.rollout import SwiftEpisodes, make_scheduler


@dataclass
class Config:
    max_tokens: int = 600
    temperature: float = 1.0
    top_k: int | None = None
    top_p: float | None = None
    min_p: float | None = None
    stop: list = field(default_factory=list)
    logprobs: bool = False
    return_details: bool = False


@dataclass
class InferRequest:
    messages: list
    data_dict: dict
    uuid: str
    images: list = field(default_factory=list)


class MultiTurnScheduler:
    def __init__(self, infer_engine=None, max_turns=None):
        self.infer_engine, self.max_turns, self.tokenizer = (
            infer_engine,
            max_turns,
            infer_engine.tokenizer,
        )


@pytest.fixture(scope="module")
def path(tmp_path_factory):
    return make_model(tmp_path_factory.mktemp("model") / "m")


@pytest.fixture(autouse=True)
def swift(monkeypatch):
    """ms-swift's modules: the base class, and what a scheduler returns."""
    names = (
        "swift",
        "swift.rollout",
        "swift.rollout.multi_turn",
        "swift.infer_engine",
        "swift.infer_engine.protocol",
    )
    modules = {name: ModuleType(name) for name in names}
    modules["swift.rollout.multi_turn"].MultiTurnScheduler = MultiTurnScheduler
    for name in (
        "RolloutOutput",
        "ChatCompletionResponse",
        "ChatCompletionResponseChoice",
        "ChatMessage",
    ):
        setattr(modules["swift.infer_engine.protocol"], name, SimpleNamespace)
    modules["swift.infer_engine.protocol"].UsageInfo = lambda *numbers: numbers
    for name, module in modules.items():
        monkeypatch.setitem(sys.modules, name, module)


class Engine:
    """ms-swift's engine: renders messages, in which a reply is its ids, and closes it with the one
    end token that it knows."""

    def __init__(self, path, **other):
        self.server, self.tokenizer, self.model_dir = (
            Server(path),
            AutoTokenizer.from_pretrained(path),
            str(path),
        )
        self.server.banned |= self.server.renderer.stop_ids - {self.tokenizer.eos_token_id}
        self.template = SimpleNamespace(template_meta=SimpleNamespace(suffix=["<|im_end|>\n"]))
        self.system, self.details, self.configs = (
            other.get("system", ""),
            other.get("details", True),
            [],
        )

    def render(self, messages):
        ids = self.tokenizer.encode(self.system, add_special_tokens=False)
        for message in messages:
            if isinstance(message["content"], str):
                text = f"<|im_start|>{message['role']}\n{message['content']}<|im_end|>\n"
                ids += self.tokenizer.encode(text, add_special_tokens=False)
            else:
                ids += (
                    self.tokenizer.encode("<|im_start|>assistant\n", add_special_tokens=False)
                    + message["content"]
                )
                ended = message["content"][-1] == self.tokenizer.eos_token_id
                ids += self.tokenizer.encode(
                    "\n" if ended else "<|im_end|>\n", add_special_tokens=False
                )
        return ids + self.tokenizer.encode("<|im_start|>assistant\n", add_special_tokens=False)

    async def infer_async(self, infer_request, request_config, **kwargs):
        self.configs.append(request_config)
        ids = self.render(infer_request.messages)
        found, logprobs, finish = await self.server.sample(
            infer_request.uuid,
            ids,
            request_config.max_tokens,
            {self.tokenizer.eos_token_id},
            texts=request_config.stop,
        )
        message = SimpleNamespace(content=self.tokenizer.decode(found, skip_special_tokens=True))
        content = (
            {"content": [{"logprob": one} for one in logprobs]} if request_config.logprobs else None
        )
        choice = SimpleNamespace(
            message=message, finish_reason=finish, logprobs=content, token_ids=found
        )
        return SimpleNamespace(choices=[choice], prompt_token_ids=ids if self.details else None)


def outputs(engine, play, rows, config=None):
    scheduler = make_scheduler(play)(infer_engine=engine, max_turns=2)

    def request(number, row):
        data = {key: value for key, value in row.items() if key != "messages"}
        return InferRequest(row["messages"], data, str(number))

    async def work():
        given = config or Config()
        return await asyncio.gather(
            *(scheduler.run(request(number, row), given) for number, row in enumerate(rows))
        )

    return run(work())


def test_a_request_is_trained_on_what_the_engine_sampled(path):
    engine, play = Engine(path), SwiftEpisodes(Letters, n_tasks=6)
    config, turns = Config(), []
    for number, output in enumerate(outputs(engine, play, play.rows(), config)):
        contents = iter(output.response_token_ids)
        messages = [
            {**one, "content": next(contents)} if one["role"] == "assistant" else one
            for one in output.messages
        ]
        assert next(contents, None) is None
        prompt = engine.render(messages[:1])
        last = output.response_token_ids[-1]
        ids = engine.render(messages[:-1]) + last
        mask, logprobs = [0] * (len(ids) - len(prompt)), [0.0] * (len(ids) - len(prompt))
        start = 0
        for reply, own, values in zip(
            output.response_token_ids,
            output.response_loss_mask,
            output.rollout_logprobs,
            strict=True,
        ):
            start = next(
                at
                for at in range(start, len(mask))
                if ids[len(prompt) + at :][: len(reply)] == reply
            )
            mask[start : start + len(reply)] = own
            logprobs[start : start + len(reply)] = values
            start += len(reply)
        turns.append(
            len(check_row(engine.server.calls, prompt, ids[len(prompt) :], mask, logprobs))
        )
        assert output.messages[0]["content"] == f"Write letters {number}."
        assert output.rollout_infos["num_turns"] == turns[-1]
        assert output.rollout_infos["total_reward"] == output.rollout_infos["turnwright_reward"]
    assert turns.count(2) > 2
    assert (play.limits.turns, play.limits.turn_tokens) == (2, 600)
    assert (config.logprobs, config.return_details) == (False, False), (
        "the request's own configuration stays"
    )


def test_rows_of_ms_swifts_own_dataset_are_tasks_without_their_reference_answer(path):
    class Asks(tw.Env):
        def reset(self, task, *, seed=None):
            assert [message.role for message in task.messages] == ["user"]
            self.task = task

        def step(self, action):
            return tw.Step(reward=float(self.task.answer), terminated=True)

    row = {
        "messages": [
            {"role": "user", "content": "Write letters."},
            {"role": "assistant", "content": "abc"},
        ],
        "solution": "2",
    }
    (output,) = outputs(Engine(path), SwiftEpisodes(Asks, [tw.Task("Another.")]), [row])
    assert output.rollout_infos["total_reward"] == 2.0
    with pytest.raises(
        UsageError, match="a request of ms-swift: turnwright_task = '77' is no task"
    ):
        outputs(
            Engine(path),
            SwiftEpisodes(Letters, n_tasks=1),
            [{"messages": row["messages"], TASK: "77"}],
        )


def test_what_ms_swift_would_not_train_as_it_was_sampled_is_refused(path):
    play = SwiftEpisodes(Letters, n_tasks=1)
    with pytest.raises(
        EngineError, match=r"ms-swift's template renders \d+ ids.*differ from id 1 on.*--template"
    ):
        outputs(Engine(path, system="<|im_start|>system\nBe kind.<|im_end|>\n"), play, play.rows())
    with pytest.raises(EngineError, match="returned no prompt_token_ids"):
        outputs(Engine(path, details=False), play, play.rows())
    play = SwiftEpisodes(Letters, n_tasks=1, limits=LIMITS)
    with pytest.raises(
        UsageError, match=r'a reply without an end token.*limits.on_turn_length = "stop"'
    ):
        outputs(Engine(path), play, play.rows())
    play = SwiftEpisodes(forks, [tw.Task("Write.", id="0")], limits=LIMITS)
    with pytest.raises(UsageError, match=r"an episode of 2 rows.*ms-swift takes one"):
        outputs(Engine(path), play, play.rows())

    class Tagged(Letters):
        def reset(self, task, *, seed=None):
            super().reset(task)
            return "Look: <image>"

    play = SwiftEpisodes(Tagged, n_tasks=1)
    with pytest.raises(EngineError, match="a message contains '<image>'"):
        outputs(Engine(path), play, play.rows())


def test_a_failed_episode_is_not_trained(path):
    play = SwiftEpisodes(Letters, [tw.Task("Write.", id="broken")])
    (output,) = outputs(Engine(path), play, play.rows())
    assert output.response_loss_mask == [[0]]
    assert output.rollout_infos["turnwright_reward"] is None
    assert output.rollout_infos["total_reward"] == 0.0
    assert output.messages[-1]["role"] == "assistant"
