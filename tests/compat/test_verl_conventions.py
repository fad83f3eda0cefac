"""User code of verl by its conventions: what tools, loops and reward functions may
return, take and read."""

import json
import textwrap

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import turnwright as tw
from turnwright.config.schema import EnvConfig
from turnwright.envs.resolve import resolve_env
from turnwright.errors import ConfigError

ROW = {
    "prompt": [{"role": "user", "content": "2+5?"}],
    "data_source": "sums",
    "reward_model": {"style": "rule", "ground_truth": "7"},
    "extra_info": {"index": 3},
}


def played(
    folder,
    source,
    use,
    replies,
    *,
    row=None,
    faithful=False,
    samples=1,
    error=False,
    sampling=None,
    limits=None,
    **args,
):
    (folder / "user.py").write_text(textwrap.dedent(source))
    (folder / "rows.jsonl").write_text(json.dumps(row or ROW))
    use = use if ":" in use else f"user.py:{use}"
    spec = resolve_env(
        EnvConfig(use=use, args=args, tasks="rows.jsonl", faithful=faithful), base=folder
    )
    found = tw.rollout(
        spec.agent_function or spec.factory,
        spec.tasks("train"),
        tw.ScriptedEngine(list(replies)),
        samples=samples,
        renderer=tw.byte_renderer(),
        limits=limits or tw.Limits(turns=8, turn_tokens=400),
        **({} if sampling is None else {"sampling": sampling}),
    )
    if error:
        return found[0].error
    assert [one.error for one in found] == [None] * samples, found[0].error
    return found[0] if samples == 1 else found


def call(name, **arguments):
    return f"<tool_call>\n{json.dumps({'name': name, 'arguments': arguments})}\n</tool_call>"


def heard(found):
    return [message.text for message in found.messages if message.role == "tool"]


TOOL = """
from typing import Any, Optional
from uuid import uuid4

from verl.tools.base_tool import BaseTool
from verl.tools.schemas import OpenAIFunctionToolSchema, ToolResponse

SCHEMA = {"type": "function", "function": {"name": "run", "description": "Run.", "parameters": {
    "type": "object", "properties": {"code": {"type": "string", "description": "Code."}}, "required": ["code"]}}}


class Tool(BaseTool):
    def __init__(self, config, tool_schema):
        super().__init__(config, tool_schema or OpenAIFunctionToolSchema.model_validate(SCHEMA))
        self.outputs = {}

    async def create(self, instance_id: Optional[str] = None, **kwargs):
        instance_id = instance_id or str(uuid4())
        self.outputs[instance_id] = []
        return instance_id, ToolResponse()

    async def execute(self, instance_id, parameters, **kwargs):
        self.outputs[instance_id].append(parameters["code"])
        return ToolResponse(text="7"), REWARD, None

    async def calc_reward(self, instance_id, **kwargs):
        return CALCULATED

    async def release(self, instance_id, **kwargs):
        del self.outputs[instance_id]


def compute_score(solution_str, ground_truth, **kwargs):
    return float(ground_truth in solution_str)
"""  # noqa: E501


@pytest.mark.parametrize("lifetime", ["trajectory", "call"])
@pytest.mark.parametrize(
    ("calculated", "added"),
    [
        ("self.outputs[instance_id]", 0.0),
        ("['a', 'b']", 0.0),
        ("{'score': 1.0}", 0.0),
        ("'text'", 0.0),
        ("0.25", 0.25),
        ("1", 1.0),
    ],
)
def test_calc_reward_may_return_what_verl_never_reads(lifetime, calculated, added, tmp_path):
    source = TOOL.replace("CALCULATED", calculated).replace("REWARD", "None")
    found = played(
        tmp_path,
        source,
        "Tool",
        [call("run", code="2+5"), "It is 7"],
        reward="user.py",
        lifetime=lifetime,
    )
    assert found.reward == 1.0 + (added if lifetime == "trajectory" else 0.0)
    assert heard(found) == ["7"]


@pytest.mark.parametrize("reward", ["None", "0.0", "0.5", "1"])
def test_the_reward_of_a_call_may_be_none(reward, tmp_path):
    source = TOOL.replace("CALCULATED", "0.0").replace("REWARD", reward)
    found = played(tmp_path, source, "Tool", [call("run", code="2+5"), "It is 7"], reward="user.py")
    assert found.reward == 1.0 + float(eval(reward) or 0.0)


FUNCTIONS = """
from typing import Literal, Optional

from verl.tools.function_tool import function_tool


@function_tool
def search(query: str, top: Optional[int] = None, place: str | None = None):
    '''Search.

    Args:
        query: The query.
        top: How many.
        place: Where.
    '''
    return f"{query} {top} {place}"
"""


@pytest.mark.parametrize(
    ("arguments", "answer"),
    [
        ({"query": "a"}, "a None None"),
        ({"query": "a", "top": None}, "a None None"),
        ({"query": "a", "top": 3, "place": None}, "a 3 None"),
        ({"query": "a", "place": "b"}, "a None b"),
    ],
)
@pytest.mark.parametrize("faithful", [False, True])
def test_optional_arguments_of_a_tool_may_be_null_or_left_out(
    arguments, answer, faithful, tmp_path
):
    found = played(
        tmp_path, FUNCTIONS, "search", [call("search", **arguments), "done"], faithful=faithful
    )
    assert heard(found) == [answer]


LOOP = """
from typing import Optional
from uuid import uuid4

from verl.experimental.agent_loop.agent_loop import AgentLoopBase, AgentLoopMetrics, AgentLoopOutput


class Base(AgentLoopBase):
    score = None
    turns = 2

    async def once(self, messages, sampling_params):
        ids = await self.apply_chat_template(messages)
        out = await self.server_manager.generate(uuid4().hex, prompt_ids=ids, sampling_params=sampling_params)
        return AgentLoopOutput(
            prompt_ids=ids, response_ids=out.token_ids, response_mask=[1] * len(out.token_ids), num_turns=self.turns,
            reward_score=self.score, metrics=AgentLoopMetrics(), extra_fields=self.fields(),
        ), self.tokenizer.decode(out.token_ids, skip_special_tokens=True)

    def fields(self):
        return {}

    async def run(self, sampling_params, **kwargs):
        self.kwargs, self.params = kwargs, sampling_params
        return (await self.once(list(kwargs["raw_prompt"]), sampling_params))[0]


def compute_score(data_source, solution_str, ground_truth, extra_info):
    return 0.125 * extra_info["num_turns"] + float(ground_truth in solution_str) + extra_info.get("bonus", 0.0)
"""  # noqa: E501


def test_a_loops_reward_reads_its_turns_and_extra_fields(tmp_path):
    source = LOOP + textwrap.dedent("""

    class Turns(Base):
        turns = 4

        def fields(self):
            return {"bonus": 2.0, "index": 9}
    """)
    assert played(tmp_path, source, "Base", ["7"], reward="user.py").reward == 1.25
    assert played(tmp_path, source, "Turns", ["7"], reward="user.py").reward == 3.5


CONSTRUCTORS = (
    LOOP
    + """

class Any(Base):
    def __init__(self, *args, **kwargs):
        super().__init__(*args, **kwargs)
        self.score = 0.5


class Keyword(Base):
    def __init__(self, *args, budget: Optional[int] = None, tools=None, **kwargs):
        super().__init__(*args, **kwargs)
        assert tools.tools == []
        self.score = 0.25 if budget is None else float(budget)


class Twice(Keyword):
    def __init__(self, *args, scale: Optional[float] = 2.0, **kwargs):
        super().__init__(*args, **kwargs)
        self.score *= scale
"""
)


@pytest.mark.parametrize(
    ("use", "args", "reward"),
    [
        ("Any", {}, 0.5),
        ("Keyword", {}, 0.25),
        ("Keyword", {"budget": 3}, 3.0),
        ("Twice", {}, 0.5),
        ("Twice", {"budget": 3, "scale": 0.5}, 1.5),
    ],
)
def test_a_loop_may_pass_its_arguments_on(use, args, reward, tmp_path):
    assert played(tmp_path, CONSTRUCTORS, use, ["7"], **args).reward == reward


def test_run_gets_how_the_run_samples(tmp_path):
    source = LOOP + textwrap.dedent("""

    class Reads(Base):
        async def run(self, sampling_params, **kwargs):
            assert sampling_params["logprobs"] is True and sampling_params["repetition_penalty"] == 1.0
            found = [sampling_params[key] for key in ("temperature", "top_p", "top_k")]
            assert found == [0.5, 0.9, -1], found
            self.score = 1.0
            return (await self.once(list(kwargs["raw_prompt"]), {**sampling_params, "temperature": 0.25}))[0]


    class Passes(Base):
        score = 1.0
    """)  # noqa: E501
    sampling = tw.Sampling(temperature=0.5, top_p=0.9)
    for use, temperature in (("Reads", 0.25), ("Passes", 0.5)):
        (row,) = played(tmp_path, source, use, ["7"], sampling=sampling).samples()
        assert (row.sampling.temperature, row.sampling.top_p) == (temperature, 0.9)


SEVERAL = (
    LOOP
    + """

class Several(Base):
    '''Asks anew as often as the row says, each a conversation of its own, and returns all.'''

    async def run(self, sampling_params, **kwargs):
        outputs = []
        for number in range(kwargs["extra_info"]["rounds"]):
            output, text = await self.once([{"role": "user", "content": f"round {number}"}], sampling_params)
            output.reward_score = SCORE
            outputs.append(output)
        return outputs
"""  # noqa: E501
)


@given(rounds=st.integers(1, 4), scored=st.booleans(), last=st.sampled_from(["7", "8"]))
@settings(max_examples=12, deadline=None)
def test_a_loop_may_return_several_outputs(rounds, scored, last, tmp_path_factory):
    row = {**ROW, "extra_info": {"rounds": rounds}}
    replies = [*["7"] * (rounds - 1), last]
    source = SEVERAL.replace("SCORE", "float(number)" if scored else "None")
    found = played(
        tmp_path_factory.mktemp("several"), source, "Several", replies, row=row, reward="user.py"
    )
    # verl scores the last output, and that score is every output's.
    assert found.reward == (rounds - 1.0 if scored else 0.25 + float(last == "7"))
    assert len(found.turns) == rounds
    rows = list(found.samples())
    assert len(rows) == rounds
    assert sum(sum(1 for weight in row.weights if weight) for row in rows) == found.sampled_tokens


@pytest.mark.parametrize("returned", ["[]", "None", "[None]", "'text'"])
def test_no_output_is_named(returned, tmp_path):
    source = (
        LOOP
        + "\n\nclass Nothing(Base):\n    async def run(self, sampling_params, **kwargs):\n        "
        f"return {returned}\n"
    )
    assert (
        "return an AgentLoopOutput" in played(tmp_path, source, "Nothing", [], error=True).message
    )


WITH_TOOLS = (
    LOOP
    + """
import json
import re


class WithTools(Base):
    def __init__(self, *args, tools=None, **kwargs):
        super().__init__(*args, **kwargs)
        self.tools = {tool.name: tool for tool in tools.tools}

    async def run(self, sampling_params, **kwargs):
        messages = list(kwargs["raw_prompt"])
        output, text = await self.once(messages, sampling_params)
        name, argument = text.split()
        tool = self.tools[name]
        schema = tool.tool_schema.model_dump(exclude_unset=True, exclude_none=True)
        assert schema["function"]["name"] == name, schema
        if hasattr(tool, "create"):
            instance, _ = await tool.create(create_kwargs={})
            answer = (await tool.execute(instance, {"code": argument}))[0].text
            await tool.release(instance)
        else:
            answer = await tool.call({"query": argument})
        output.reward_score = float(len(answer))
        return output
"""
)


@pytest.mark.parametrize(("reply", "reward"), [("run x", 1.0), ("search abc", 13.0)])
def test_a_loop_has_the_tools_of_the_paths(reply, reward, tmp_path):
    (tmp_path / "functions.py").write_text(FUNCTIONS)
    (tmp_path / "native.py").write_text(TOOL.replace("CALCULATED", "0.0").replace("REWARD", "None"))
    (tmp_path / "tools.yaml").write_text(
        'tools:\n  - class_name: "native.Tool"\n    config: {type: native}\n'
    )
    args = {"tool_config_path": "tools.yaml", "function_tool_path": "functions.py"}
    assert played(tmp_path, WITH_TOOLS, "WithTools", [reply], **args).reward == reward


REWARDS = """
import functools


def compute_score(data_source, solution_str, ground_truth, extra_info=None):
    assert (data_source, extra_info["index"], extra_info["num_turns"]) == ("sums", 3, 2), (data_source, extra_info)
    return float(ground_truth in solution_str)


async def later(data_source, solution_str, ground_truth, extra_info, **kwargs):
    return {"score": float(ground_truth in solution_str), "acc": True, "why": "text"}


def scaled(solution_str, ground_truth, scale=1.0, **kwargs):
    return scale * float(ground_truth in solution_str)


async def judged(data_source, solution_str, ground_truth, extra_info, reward_router_address, reward_model_tokenizer):
    assert reward_router_address == "127.0.0.1:1" and reward_model_tokenizer is None
    return 0.75


def strict(solution_str, ground_truth):
    return 1.0
"""  # noqa: E501


@pytest.mark.parametrize(
    ("use", "args", "reward"),
    [
        ("compute_score", {}, 1.0),
        ("later", {}, 1.0),
        ("scaled", {}, 1.0),
        ("scaled", {"reward_kwargs": {"scale": 0.5}}, 0.5),
        ("judged", {"reward_kwargs": {"reward_router_address": "127.0.0.1:1"}}, 0.75),
        ("strict", {}, 1.0),
    ],
)
def test_a_reward_function_alone_is_an_environment_of_one_reply(use, args, reward, tmp_path):
    found = played(tmp_path, REWARDS, use, ["It is 7"], **args)
    assert (found.reward, len(found.turns)) == (reward, 1)
    found = played(tmp_path, REWARDS, "verl:tools", ["It is 7"], reward=f"user.py:{use}", **args)
    assert (found.reward, len(found.turns)) == (reward, 1)


def test_a_reply_that_is_cut_is_rewarded_by_a_reward_function_alone(tmp_path):
    found = played(
        tmp_path,
        REWARDS,
        "strict",
        ["a reply that is long"],
        limits=tw.Limits(turns=2, turn_tokens=5),
    )
    assert found.reward == 1.0
    assert found.sampled_tokens == 5


@pytest.mark.parametrize(
    ("use", "args", "message"),
    [
        ("strict", {"reward_kwargs": {"scael": 1.0}}, r"reward_kwargs: .*solution_str"),
        ("scaled", {"reward_kwargs": 3}, r"reward_kwargs is int"),
        ("verl:tools", {}, r"has no tools; give .*or a reward"),
    ],
)
def test_wrong_arguments_of_rewards_are_named(use, args, message, tmp_path):
    with pytest.raises(ConfigError, match=message):
        played(tmp_path, REWARDS, use, ["7"], **args)


POOL = """
import concurrent.futures
import multiprocessing

from scores_of_tree.inner import score


def local(text):
    return 2.0 * float("7" in text)


def pooled(function, text):
    context = multiprocessing.get_context(METHOD)
    with concurrent.futures.ProcessPoolExecutor(1, mp_context=context) as pool:
        return pool.submit(function, text).result(60)


def of_module(solution_str, ground_truth):
    return pooled(score, solution_str)


def of_file(solution_str, ground_truth):
    return pooled(local, solution_str)
"""


@pytest.mark.parametrize("method", ["spawn"])
def test_functions_of_user_files_go_to_processes_that_user_code_starts(method, tmp_path):
    (tmp_path / "scores_of_tree").mkdir()
    (tmp_path / "scores_of_tree" / "__init__.py").write_text("")
    (tmp_path / "scores_of_tree" / "inner.py").write_text(
        "def score(text):\n    return float('7' in text)\n"
    )
    source = POOL.replace("METHOD", repr(method))
    assert played(tmp_path, source, "of_module", ["It is 7"]).reward == 1.0
    assert played(tmp_path, source, "of_file", ["It is 7"]).reward == 2.0


def test_function_tools_of_a_tree_with_its_own_verl(tmp_path):
    (tmp_path / "verl" / "tools").mkdir(parents=True)
    for folder in ("verl", "verl/tools"):
        (tmp_path / folder / "__init__.py").write_text("")
    own = """
    FUNCTION_TOOL_REGISTRY = {}


    class Entry:
        def __init__(self, fn):
            self.fn, self.name = fn, fn.__name__
            properties = {"query": {"type": "string", "description": "Q."}}
            parameters = {"type": "object", "properties": properties, "required": ["query"]}
            function = {"name": fn.__name__, "description": "Search.", "parameters": parameters}
            self.tool_schema = {"type": "function", "function": function}


    def function_tool(fn):
        FUNCTION_TOOL_REGISTRY[fn.__name__] = Entry(fn)
        return fn
    """
    (tmp_path / "verl" / "tools" / "function_tool.py").write_text(textwrap.dedent(own))
    found = played(
        tmp_path,
        FUNCTIONS,
        "verl:tools",
        [call("search", query="a"), "done"],
        function_tool_path="user.py",
    )
    assert heard(found) == ["a None None"]
