"""Tools of users under verl's own package: our episodes against those of its
`ToolAgentLoop`. `make test-compat`."""

import asyncio
import json
from types import SimpleNamespace

import pytest
from kit import originals
from kit.rollouts import bpe, renderer
from kit.stand_ins import USERS

import turnwright as tw
from turnwright.envs.resolve import as_env_spec, load_object
from turnwright.renderers import CHATML
from turnwright_compat.verl.adapter import FRAMEWORK

pytestmark = pytest.mark.compat
HOME = USERS / "verl"


@pytest.fixture(scope="module")
def verl():
    """verl's loop and the loader of its tools."""
    originals.use()
    from omegaconf import OmegaConf
    from verl.experimental.agent_loop.agent_loop import DictConfigWrap, ToolListWrap
    from verl.experimental.agent_loop.tool_agent_loop import ToolAgentLoop
    from verl.tools.function_tool import FUNCTION_TOOL_REGISTRY
    from verl.tools.tool_registry import load_all_tools
    from verl.workers.rollout.replica import TokenOutput

    found = OmegaConf, DictConfigWrap, ToolListWrap, ToolAgentLoop, load_all_tools, TokenOutput
    return SimpleNamespace(registry=FUNCTION_TOOL_REGISTRY, **{one.__name__: one for one in found})


@pytest.fixture(scope="module")
def tokenizer():
    """Our tokenizer as one of transformers."""
    from transformers import PreTrainedTokenizerFast

    made = PreTrainedTokenizerFast(
        tokenizer_object=bpe(), eos_token="<|im_end|>", pad_token="<|im_end|>"
    )
    made.chat_template = CHATML
    return made


def call(name, **arguments):
    return f"<tool_call>\n{json.dumps({'name': name, 'arguments': arguments})}\n</tool_call>"


class Server:
    """Answers verl's loop with the replies of a script, and keeps the contexts."""

    def __init__(self, verl, replies):
        self.verl, self.replies, self.contexts = verl, replies, []

    async def generate(self, request_id, *, prompt_ids, sampling_params, **media):
        self.contexts.append(list(prompt_ids))
        ids = renderer("bpe").encode_reply(self.replies[len(self.contexts) - 1])
        return self.verl.TokenOutput(token_ids=list(ids), log_probs=[0.0] * len(ids))


def theirs(verl, tokenizer, replies, row, *, turns, settings, paths, monkeypatch):
    monkeypatch.syspath_prepend(str(HOME))  # verl imports class_name from the path
    multi_turn = {
        "max_user_turns": None,
        "max_assistant_turns": turns,
        "max_parallel_calls": 1,
        "max_tool_response_length": 256,
        "tool_response_truncate_side": "middle",
        "format": "hermes",
        **settings,
    }
    rollout = {
        "prompt_length": 4096,
        "response_length": 4096,
        "multi_turn": multi_turn,
        "full_determinism": False,
    }
    config = verl.OmegaConf.create({"actor_rollout_ref": {"rollout": rollout}})
    verl.registry.clear()  # which refuses the names of another file
    tools = verl.load_all_tools(*(str(HOME / path) if path else None for path in paths))
    server = Server(verl, replies)

    async def run():
        loop = verl.ToolAgentLoop(
            trainer_config=verl.DictConfigWrap(config),
            server_manager=server,
            tokenizer=tokenizer,
            processor=None,
            dataset_cls=None,
            data_config=verl.DictConfigWrap(verl.OmegaConf.create({})),
            hf_model_type="qwen3",
            tools=verl.ToolListWrap(tools),
        )
        prompt = [{"role": "user", "content": "Go."}]
        return await loop.run(
            {}, raw_prompt=prompt, tools_kwargs=row.get("tools_kwargs", {}), extra_info=row
        )

    return asyncio.run(run()), server.contexts


def ours(replies, row, *, turns, settings, paths, faithful):
    names = ("tool_config_path", "function_tool_path")
    args = {name: path for name, path in zip(names, paths, strict=True) if path} | settings
    spec = as_env_spec(
        FRAMEWORK.find("tools"), where="verl:tools", args=args, base=HOME, faithful=faithful
    )
    (found,) = tw.rollout(
        spec.factory,
        [tw.Task("Go.", info={"extra_info": row})],
        tw.ScriptedEngine(replies),
        renderer=renderer("bpe"),
        limits=tw.Limits(turns=turns, turn_tokens=2048),
    )
    assert found.error is None, found.error
    return found


def both(
    verl, tokenizer, monkeypatch, replies, paths, row=None, *, turns=8, faithful=True, **settings
):
    """Play both; compare ids, mask and contexts."""
    row = row or {}
    out, contexts = theirs(
        verl,
        tokenizer,
        replies,
        row,
        turns=turns,
        settings=settings,
        paths=paths,
        monkeypatch=monkeypatch,
    )
    found = ours(replies, row, turns=turns, settings=settings, paths=paths, faithful=faithful)
    (sample,) = found.samples()
    opening = found.turns[0].context
    assert [found.prompt_ids(n) for n in range(len(found.turns))] == contexts
    assert out.prompt_ids == sample.ids[:opening]
    assert out.response_ids == sample.ids[opening:]
    assert out.response_mask == sample.mask[opening:]
    return found, out


def test_function_tools_two_calls_and_types(verl, tokenizer, monkeypatch):
    replies = [
        call("get_weather", city="Oslo") + call("calculator", expression="3+4"),
        call("rate", thing="tea", stars=3, tags=["hot"]),
        call("ping", n=2),
        "done",
    ]
    found, out = both(
        verl,
        tokenizer,
        monkeypatch,
        replies,
        (None, "functions.py"),
        max_parallel_calls=2,
        faithful=False,
    )
    assert found.reward == 0.5
    assert out.extra_fields["tool_rewards"] == [0.0, 0.0, 0.5, 0.0]


def test_words_of_verl_and_its_dropped_calls(verl, tokenizer, monkeypatch):
    replies = [
        call("nope") + call("calculator", expression="1+1"),
        call("calculator", formula="1"),
        call("fail", reason="broken"),
        call("ping", n=90),
        call("rate", thing="tea", stars=1),
        "<tool_call>{not json</tool_call>",
    ]
    found, out = both(verl, tokenizer, monkeypatch, replies, (None, "functions.py"))
    assert len(found.turns) == 6
    assert [
        one for turn in found.turns for one in turn.info.get("tool_rewards", ())
    ] == out.extra_fields["tool_rewards"]


@pytest.mark.parametrize("side", ["left", "right", "middle"])
def test_truncated_responses(verl, tokenizer, monkeypatch, side):
    replies = [call("ping", n=9), "done"]
    settings = {"max_tool_response_length": 11, "tool_response_truncate_side": side}
    both(verl, tokenizer, monkeypatch, replies, (None, "functions.py"), **settings)


def test_a_tool_created_for_each_call_with_the_row(verl, tokenizer, monkeypatch):
    row = {"tools_kwargs": {"count": {"create_kwargs": {"start": 3, "goal": 9}}}}
    replies = [call("count", by=1), call("count", by=2), "done"]
    found, out = both(verl, tokenizer, monkeypatch, replies, ("counter.yaml", None), row)
    assert out.extra_fields["tool_rewards"] == [0.1, 0.1]
    assert found.reward == 0.0


def test_both_kinds_in_one_prompt_and_a_selection_of_them(verl, tokenizer, monkeypatch):
    replies = [call("count", by=1), call("calculator", expression="2+3"), "done"]
    both(verl, tokenizer, monkeypatch, replies, ("counter.yaml", "functions.py"))
    row = {"tool_selection": ["rate", "calculator", "count"]}
    replies = [call("calculator", expression="2+3"), call("ping", n=1), "done"]
    both(verl, tokenizer, monkeypatch, replies, ("counter.yaml", "functions.py"), row)


def test_the_last_turn_executes_no_tool(verl, tokenizer, monkeypatch):
    replies = [call("calculator", expression="2+3")] * 2
    found, _ = both(verl, tokenizer, monkeypatch, replies, (None, "functions.py"), turns=2)
    assert len(found.turns) == 2


def stubs(folder):
    """Write the YAML form of the stub tools that verl's own tests have."""
    tools = [("StubSearchTool", "search", "query_list"), ("StubCrawlTool", "crawler", "url_list")]
    rows = [
        {
            "class_name": f"tests.tools._stub_search_tools.{name}",
            "config": {"type": "native"},
            "tool_schema": {
                "type": "function",
                "function": {
                    "name": tool,
                    "description": "Stub.",
                    "parameters": {
                        "type": "object",
                        "properties": {argument: {"type": "array", "description": "A list."}},
                        "required": [argument],
                    },
                },
            },
        }
        for name, tool, argument in tools
    ]
    (folder / "stubs.yaml").write_text(json.dumps({"tools": rows}))  # JSON is YAML
    return folder / "stubs.yaml"


def test_files_of_verls_own_package_unedited(verl, tokenizer, monkeypatch, tmp_path):
    examples = (
        originals.folder() / "packages/tests/experimental/agent_loop/function_tool_examples.py"
    )
    replies = [
        call("calculator", expression="(3+4)*5") + call("get_weather", city="Oslo"),
        call("search", query_list=["amber", "salt"]) + call("crawler", url_list=["http://a"]),
        call("calculator", expression="1/0"),
        "35",
    ]
    paths = (stubs(tmp_path), examples)
    found, _ = both(
        verl,
        tokenizer,
        monkeypatch,
        replies,
        paths,
        max_parallel_calls=2,
        max_tool_response_length=4000,
    )
    texts = [message.text for message in found.messages if message.role == "tool"]
    assert texts[0] == "35"
    assert texts[2:4] == ["hits-for:amber; hits-for:salt", "crawled:http://a"]


def test_verls_own_score_of_word_problems(verl):
    args = {
        "function_tool_path": "functions.py",
        "reward": "verl.utils.reward_score.gsm8k:compute_score",
    }
    spec = as_env_spec(FRAMEWORK.find("tools"), where="verl:tools", args=args, base=HOME)
    for reply, reward in (("so #### 1,234", 1.0), ("so #### 12", 0.0), ("nothing", 0.0)):
        task = tw.Task("Go.", "1234", info={"data_source": "openai/gsm8k"})
        (found,) = tw.rollout(
            spec.factory, [task], tw.ScriptedEngine([reply]), limits=tw.Limits(turn_tokens=999)
        )
        assert (found.error, found.reward) == (None, reward)


def test_a_video_file_of_a_tool_is_decoded(verl, tmp_path):
    import av
    from PIL import Image
    from turnwright.envs.stand_ins.verl.utils.dataset.vision_utils import process_video

    with av.open(tmp_path / "clip.mp4", "w") as container:
        stream = container.add_stream("mpeg4", rate=10)
        stream.width = stream.height = 32
        for n in range(20):
            frame = av.VideoFrame.from_image(Image.new("RGB", (32, 32), (10 * n, 0, 0)))
            container.mux(stream.encode(frame))
        container.mux(stream.encode())
    video = process_video({"video": f"file://{tmp_path}/clip.mp4", "fps": 4})
    assert (len(video.frames), video.fps) == (8, 4.0)
    reds = [frame.getpixel((16, 16))[0] for frame in video.frames]
    assert reds == sorted(reds)
    assert reds[-1] > 150


@pytest.mark.parametrize(
    "use",
    [
        "guess_loop.py:GuessLoop",
        "verl.experimental.agent_loop.single_turn_agent_loop:SingleTurnAgentLoop",
    ],
)
def test_loops_on_verls_own_base_class_with_a_real_model(verl, use, tmp_path):
    from kit.outbound import make_model

    from turnwright.config import ModelConfig
    from turnwright.config.schema import EnvConfig
    from turnwright.engines.local import LocalEngine
    from turnwright.envs.resolve import resolve_env
    from turnwright.training import load_model_and_renderer

    model, own = load_model_and_renderer(*[make_model(tmp_path / "m")] * 2, ModelConfig())
    args = {"hf_model_type": "qwen3"} | (
        {} if use.startswith("guess") else {"reward": "plain_loop.py:compute_score"}
    )
    spec = resolve_env(EnvConfig(use=use, args=args), base=HOME)
    row = {"reward_model": {"ground_truth": "100"}, "data_source": "guess", "extra_info": {}}
    found = tw.rollout(
        spec.agent_function,
        [tw.Task(f"Guess {number}.", "100", info=row) for number in range(16)],
        LocalEngine(model, renderer=own),
        renderer=own,
        limits=tw.Limits(turns=3, turn_tokens=24, on_turn_length="continue"),
    )
    assert [one.error for one in found] == [None] * 16
    assert any(len(one.turns) > 1 and one.reward is not None for one in found) == use.startswith(
        "guess"
    )
    for trajectory in found:
        (sample,) = trajectory.samples()
        end = trajectory.turns[0].context + 3 * 24  # where the loop cuts its response
        assert sum(sample.weights) == sum(sample.mask[:end]) or trajectory.reward is None, (
            "it ended by a control token"
        )


# Conventions: several samples over one tool object, replies that are cut, how a score is
# called, pictures of tools


def test_several_samples_over_one_object_of_a_tool(verl, tokenizer, monkeypatch):
    """verl plays all samples of a step with the same tool objects; what a tool
    keeps is by instance."""
    row = {"tools_kwargs": {"count": {"create_kwargs": {"start": 3, "goal": 9}}}}
    replies = [call("count", by=1), call("count", by=2), "done"]
    single = {"settings": {}, "paths": ("counter.yaml", None), "turns": 8}
    out, contexts = theirs(verl, tokenizer, replies, row, monkeypatch=monkeypatch, **single)
    spec = as_env_spec(
        FRAMEWORK.find("tools"),
        where="verl:tools",
        args={"tool_config_path": "counter.yaml"},
        base=HOME,
        faithful=True,
    )
    found = tw.rollout(
        spec.factory,
        [tw.Task("Go.", info={"extra_info": row})],
        tw.ScriptedEngine(replies),
        samples=3,
        renderer=renderer("bpe"),
        limits=tw.Limits(turns=8, turn_tokens=2048),
    )
    for one in found:
        assert one.error is None, one.error
        (sample,) = one.samples()
        assert [one.prompt_ids(n) for n in range(len(one.turns))] == contexts
        assert (out.response_ids, out.response_mask) == (
            sample.ids[one.turns[0].context :],
            sample.mask[one.turns[0].context :],
        )


@pytest.mark.parametrize("size", [1, 4, 9])
def test_a_reply_that_is_cut(verl, tokenizer, monkeypatch, size):
    """A cut reply has no call, so verl's loop ends with it; it is scored and
    trained like any other."""

    class Cuts(Server):
        async def generate(self, *args, **kwargs):
            out = await super().generate(*args, **kwargs)
            return self.verl.TokenOutput(token_ids=out.token_ids[:size], log_probs=[0.0] * size)

    monkeypatch.setattr("test_verl_original.Server", Cuts)
    replies = ["#### 12 and then much more to say"]
    out, contexts = theirs(
        verl,
        tokenizer,
        replies,
        {},
        turns=8,
        settings={},
        paths=(None, "functions.py"),
        monkeypatch=monkeypatch,
    )
    args = {
        "function_tool_path": "functions.py",
        "reward": "verl.utils.reward_score.gsm8k:compute_score",
    }
    spec = as_env_spec(
        FRAMEWORK.find("tools"), where="verl:tools", args=args, base=HOME, faithful=True
    )
    (found,) = tw.rollout(
        spec.factory,
        [tw.Task("Go.", "12", info={"extra_info": {}})],
        tw.ScriptedEngine(replies),
        renderer=renderer("bpe"),
        limits=tw.Limits(turns=8, turn_tokens=size),
    )
    assert found.error is None, found.error
    (sample,) = found.samples()
    opening = found.turns[0].context
    assert [found.prompt_ids(0)] == contexts
    assert (out.response_ids, out.response_mask) == (sample.ids[opening:], sample.mask[opening:])
    from verl.utils.reward_score import gsm8k

    text = renderer("bpe").decode(out.response_ids)
    assert found.reward == gsm8k.compute_score(text, "12")


SCORE = """
SEEN = []


def compute_score(data_source, solution_str, ground_truth, extra_info=None, scale=1.0):
    SEEN.append((data_source, solution_str, ground_truth, dict(extra_info), scale))
    return {"score": scale * float(ground_truth in solution_str), "acc": True, "text": "t"}


async def later(data_source, solution_str, ground_truth, extra_info, **kwargs):
    SEEN.append((data_source, solution_str, ground_truth, dict(extra_info), kwargs.get("scale", 1.0)))
    return 0.5
"""  # noqa: E501


@pytest.mark.parametrize("name", ["compute_score", "later"])
@pytest.mark.parametrize("scale", [None, 0.25])
def test_a_score_is_called_as_by_verls_reward_manager(verl, tokenizer, tmp_path, name, scale):
    import functools
    import inspect

    import numpy as np
    import torch
    from verl.experimental.reward_loop.reward_manager.naive import NaiveRewardManager
    from verl.protocol import DataProto

    from turnwright.config.schema import EnvConfig
    from turnwright.envs.resolve import resolve_env

    (tmp_path / "scores.py").write_text(SCORE)
    (tmp_path / "rows.jsonl").write_text(
        json.dumps(
            {
                "prompt": [{"role": "user", "content": "2+5?"}],
                "data_source": "sums",
                "reward_model": {"ground_truth": "7"},
                "extra_info": {"index": 3, "split": "train"},
            }
        )
    )
    args = {} if scale is None else {"reward_kwargs": {"scale": scale}}
    spec = resolve_env(
        EnvConfig(use=f"scores.py:{name}", args=args, tasks="rows.jsonl"), base=tmp_path
    )
    (found,) = tw.rollout(
        spec.factory,
        spec.tasks("train"),
        tw.ScriptedEngine(["It is 7"]),
        renderer=renderer("bpe"),
        limits=tw.Limits(turns=2, turn_tokens=99),
    )
    assert found.error is None, found.error
    (sample,) = found.samples()
    response = sample.ids[found.turns[0].context :]

    space: dict = {}
    exec(SCORE, space)  # the same text as verl's loader would execute it
    function = space[name]
    if scale is not None:
        function = functools.partial(function, scale=scale)
    data = DataProto.from_dict(
        tensors={
            "responses": torch.tensor([response]),
            "attention_mask": torch.ones(1, len(sample.ids), dtype=torch.long),
        },
        non_tensors={
            "data_source": np.array(["sums"], dtype=object),
            "reward_model": np.array([{"ground_truth": "7"}], dtype=object),
            "extra_info": np.array([{"index": 3, "split": "train"}], dtype=object),
            "__num_turns__": np.array([2], dtype=object),
        },
    )

    async def scored():
        manager = NaiveRewardManager({}, tokenizer, function)
        manager.is_async_reward_score = inspect.iscoroutinefunction(space[name])
        return await manager.run_single(data)

    out = asyncio.run(scored())
    assert found.reward == out["reward_score"]
    ours_seen = load_object("scores.py:SEEN", base=tmp_path)
    (ours_call,), (their_call,) = ours_seen, space["SEEN"]
    assert ours_call[:3] == their_call[:3]
    assert ours_call[4] == their_call[4]
    assert {
        key: value for key, value in ours_call[3].items() if key in their_call[3]
    } == their_call[3]
    assert set(ours_call[3]) - set(their_call[3]) == {"tool_rewards", "turn_scores"}, (
        "what verl's tool loop adds"
    )
