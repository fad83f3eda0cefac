"""Tools, interactions and rewards written for verl run unchanged, with our
stand-ins of its modules."""

import asyncio
import json
import shutil
import sys
from pathlib import Path

import pytest
from kit.rollouts import renderer
from kit.stand_ins import USERS
from kit.vision import tiny_vlm_directory

import turnwright as tw
from turnwright.envs.foreign import ForeignObject
from turnwright.envs.resolve import as_env_spec, load_object
from turnwright.errors import ConfigError
from turnwright.types import StopReason
from turnwright_compat.verl.adapter import FRAMEWORK

HOME = USERS / "verl"
LIMITS = tw.Limits(turns=6, turn_tokens=2000)


def call(name, **arguments):
    return f"<tool_call>{json.dumps({'name': name, 'arguments': arguments})}</tool_call>"


def made(faithful=False, base=HOME, **args):
    return as_env_spec(
        FRAMEWORK.find("tools"), where="verl:tools", args=args, base=base, faithful=faithful
    )


def play(spec, replies, row=None, limits=LIMITS, **kwargs):
    engine = tw.ScriptedEngine(replies)
    (found,) = tw.rollout(
        spec.factory, [tw.Task("Go.", info=row or {})], engine, limits=limits, **kwargs
    )
    assert found.error is None, found.error
    return found


def failure(spec, row):
    (found,) = tw.rollout(
        spec.factory, [tw.Task("Go.", info=row)], tw.ScriptedEngine(["x"]), limits=LIMITS
    )
    assert found.error is not None
    return f"{found.error.type}: {found.error.message}"


def results(trajectory):
    return [message.text for message in trajectory.messages if message.role == "tool"]


def create(**arguments):
    return {"tools_kwargs": {"count": {"create_kwargs": arguments}}}


def test_function_tools_of_a_file():
    spec = made(function_tool_path="functions.py")
    replies = [
        call("get_weather", city="Oslo") + call("calculator", expression="3+4"),
        call("rate", thing="tea", stars=3, tags=["hot"]),
        call("ping", n=2) + call("fail", reason="broken"),
        "done",
    ]
    trajectory = play(spec, replies)
    assert results(trajectory) == [
        '{"city": "Oslo", "temperature_c": 17.3}',
        "7",
        "tea: 3 None ['hot']",
        "pong pong ",
        "Error: RuntimeError: broken",
    ]
    assert trajectory.reward == 0.5
    assert trajectory.turns[1].info["stars"] == 3
    schema = next(one for one in spec.factory().tools if one["function"]["name"] == "rate")[
        "function"
    ]
    assert schema["parameters"]["properties"]["stars"] == {
        "type": "integer",
        "enum": [1, 2, 3],
        "description": "How good it is.",
    }
    assert schema["parameters"]["required"] == ["thing", "stars"]


def test_null_is_taken_where_a_function_takes_none():
    """The schema that verl makes of an `Optional` does not say so; the model reads
    that schema, as in verl."""
    spec = made(function_tool_path="functions.py")
    trajectory = play(
        spec,
        [
            call("rate", thing="tea", stars=1, note=None, tags=None),
            call("rate", thing=None, stars=1),
            "done",
        ],
    )
    assert results(trajectory) == [
        "tea: 1 None None",
        "Error: argument 'thing' of rate must be a string, not null",
    ]


def test_nullable_of_a_file_of_tools_is_kept(tmp_path):
    for name in ("counter.yaml", "counter_tool.py"):
        shutil.copy(HOME / name, tmp_path)
    text = (tmp_path / "counter.yaml").read_text()
    by = "              type: integer\n"
    assert by in text
    note = (
        f"{by}              description: How far.\n            note:\n              type: string\n"
    )
    text = text.replace(
        f"{by}              description: How far.\n", f"{note}              nullable: true\n"
    )
    (tmp_path / "counter.yaml").write_text(text)
    spec = made(tool_config_path="counter.yaml", base=tmp_path)
    trajectory = play(
        spec,
        [call("count", by=1, note=None), call("count", by=None), "done"],
        {"extra_info": create(start=3)},
    )
    first, second = results(trajectory)
    assert not first.startswith("Error")
    assert second == "Error: argument 'by' of count must be a whole number, not null"


def test_one_function_of_a_file():
    target = load_object("functions.py:evaluate", base=HOME)
    spec = as_env_spec(target, where="functions.py:evaluate")
    assert results(play(spec, [call("calculator", expression="1+1"), "2"])) == ["2"]


@pytest.mark.parametrize("lifetime", ["trajectory", "call"])
def test_a_tool_with_a_lifetime(lifetime):
    spec = made(tool_config_path="counter.yaml", lifetime=lifetime)
    log = sys.modules[type(spec.factory.kit.sources[0].tool).__module__].CounterTool.log
    log.clear()
    row = create(start=3, goal=9)
    trajectory = play(spec, [call("count", by=1), call("count", by=2), "done"], {"extra_info": row})
    if lifetime == "trajectory":
        assert trajectory.messages[0].text == "Go.\nThe counter is at 3."
        assert results(trajectory) == ["5 after 2 messages", "9 after 4 messages"]
        assert trajectory.reward == pytest.approx(1.2)
        assert log == ["create", "release"]
    else:
        assert trajectory.messages[0].text == "Go."
        assert results(trajectory) == [
            "The counter is at 3.\n5 after 2 messages",
            "The counter is at 3.\n7 after 4 messages",
        ]
        assert trajectory.reward == pytest.approx(0.2)
        assert log == ["create", "release"] * 2
    assert not spec.factory.kit.sources[0].tool._instances


def test_64_episodes_at_once_on_one_tool_equal_64_one_after_another():
    def replies(messages, rng):
        turn = sum(message.role == "assistant" for message in messages)
        return call("count", by=rng.randint(0, 9)) if turn < 3 else "done"

    def episodes(concurrency, environments):
        spec = made(tool_config_path="counter.yaml")
        tasks = [
            tw.Task(f"Go {n}.", id=f"t{n}", info=create(start=n, goal=3 * n)) for n in range(64)
        ]
        found = tw.rollout(
            spec.factory,
            tasks,
            tw.ScriptedEngine(replies),
            limits=LIMITS,
            concurrency=concurrency,
            environments=environments,
        )
        return [(results(one), one.reward, [list(s.ids) for s in one.samples()]) for one in found]

    at_once, in_order = episodes(64, 64), episodes(1, 1)
    assert at_once == in_order
    assert len({tuple(found) for found, _, _ in at_once}) > 32


def test_the_tool_of_word_problems_with_its_reward():
    row = {
        "tools_kwargs": {"calc_gsm8k_reward": {"create_kwargs": {"ground_truth": "72"}}},
        "need_tools_kwargs": True,
    }
    row = {
        "data_source": "toy",
        "reward_model": {"style": "rule", "ground_truth": "72"},
        "extra_info": row,
    }
    replies = [
        call("calc_gsm8k_reward", answer="7"),
        call("calc_gsm8k_reward", answer="72"),
        "#### 72",
    ]
    spec = made(tool_config_path="gsm8k.yaml")
    trajectory = play(spec, replies, row)
    assert results(trajectory) == [
        "Current parsed answer='7' reward=0.0",
        "Current parsed answer='72' reward=1.0",
    ]
    assert trajectory.reward == pytest.approx(0.95)
    faithful = play(made(True, tool_config_path="gsm8k.yaml"), replies, row)
    assert (faithful.reward, faithful.turns[0].info["tool_rewards"]) == (0.0, [-0.05])
    words = failure(spec, {"extra_info": {"need_tools_kwargs": True}})
    assert "need_tools_kwargs is set and there are no tools_kwargs; give the row some" in words


def test_a_tool_class_of_an_older_release():
    spec = as_env_spec(
        load_object("flat_tool.py:FlatTool", base=HOME), where="flat_tool.py:FlatTool"
    )
    row = {"tools_kwargs": {"check": {"create_kwargs": {"truth": "4"}}}}
    trajectory = play(spec, [call("check", answer="3"), call("check", answer="4"), "4"], row)
    assert (results(trajectory), trajectory.reward) == (["wrong", "right"], 1.0)


def test_an_interaction_named_by_the_row():
    spec = made(interaction_config_path="interactions.yaml")
    row = {"extra_info": {"interaction_kwargs": {"name": "hint", "ground_truth": "12"}}}
    trajectory = play(spec, ["is it 11?", "12"], row)
    assert [m.text for m in trajectory.messages if m.role == "user"] == [
        "Go.",
        "Think again. (2 messages)",
    ]
    assert (trajectory.reward, trajectory.stop) == (1.0, StopReason.DONE)
    assert trajectory.turns[1].info == {"tries": 2, "interaction_score": 1.0}
    row = {"extra_info": {"interaction_kwargs": {"name": "gsm8k", "ground_truth": "12"}}}
    trajectory = play(spec, ["#### 11", "#### 12"], row)
    assert trajectory.reward == 1.0
    assert not spec.factory.options.interactions["hint"].target.states
    words = failure(spec, {"extra_info": {"interaction_kwargs": {"name": "hints"}}})
    assert (
        "interaction_kwargs names 'hints', which is no interaction here; did you mean 'hint'"
        in words
    )


def test_tools_and_an_interaction_together():
    spec = made(
        tool_config_path="counter.yaml",
        interaction_config_path="interactions.yaml",
        max_user_turns=3,
    )
    row = {
        "extra_info": {
            "interaction_kwargs": {"name": "hint", "ground_truth": "5"},
            **create(start=1),
        }
    }
    trajectory = play(spec, [call("count", by=2), "4", "5"], row)
    assert results(trajectory) == ["5 after 2 messages"]
    assert trajectory.reward == pytest.approx(1.1)
    ended = play(spec, ["1", "2", "3", "4"], row)
    assert (ended.stop, len(ended.turns)) == (StopReason.ENV_TRUNCATED, 4)


def test_compute_score_reads_the_decoded_response():
    row = {
        "data_source": "toy",
        "reward_model": {"style": "rule", "ground_truth": "7"},
        "extra_info": {"index": 1},
    }
    spec = made(function_tool_path="functions.py", reward="score.py")
    task = tw.Task("Go.", "7", info=row)
    replies = [call("calculator", expression="3+4"), "#### 7"]
    (found,) = tw.rollout(spec.factory, [task], tw.ScriptedEngine(replies), limits=LIMITS)
    assert found.error is None, found.error
    assert (found.reward, found.rewards["turns"]) == (1.0, 4.0)
    assert (
        play(made(function_tool_path="functions.py", reward="score.py:plain"), replies).reward
        == 1.0
    )


def test_the_row_selects_tools():
    spec = made(tool_config_path="counter.yaml", function_tool_path="functions.py")
    trajectory = play(
        spec,
        [call("calculator", expression="3+4") + call("ping", n=1), "7"],
        {"extra_info": {"tool_selection": ["calculator"]}},
    )
    assert results(trajectory)[0] == "7"
    assert results(trajectory)[1].startswith("Error: no tool 'ping'")
    assert trajectory.messages[0].text == "Go."


@pytest.mark.parametrize("lifetime", ["trajectory", "call"])
def test_images_and_videos_of_create_and_execute(lifetime, tmp_path_factory):
    sees = tw.load_renderer(
        tiny_vlm_directory(tmp_path_factory.mktemp("vlm"), "qwen3_vl", weights=False)
    )
    spec = made(tool_config_path="zoom.yaml", lifetime=lifetime)
    trajectory = play(spec, [call("zoom"), "blue"], renderer=sees)
    (sample,) = trajectory.samples()
    assert len(sample.media) == 3
    content = trajectory.messages[0 if lifetime == "trajectory" else 2].content
    assert [type(part).__name__ for part in content if not isinstance(part, str)][:2] == [
        "ImageRef",
        "VideoRef",
    ]


def test_words_and_ends_of_verl_where_faithful():
    spec = made(
        True,
        tool_config_path="counter.yaml",
        function_tool_path="functions.py",
        max_tool_response_length=10,
    )
    replies = [
        call("nope") + call("calculator", expression="1+1"),
        call("calculator", formula="1"),
        call("fail", reason="broken"),
        call("ping", n=9),
        call("count", by=1),
        "<tool_call>{not json</tool_call>",
    ]
    limits = tw.Limits(turns=8, turn_tokens=2000)
    trajectory = play(spec, replies, create(start=3), limits)
    long = [
        "Unknown function 'nope'. Available tools: ['count', 'calculator', 'fail', 'get_weather', "
        "'ping', 'rate']",
        "Error executing tool 'calculator': evaluate() got an unexpected keyword argument "
        "'formula'",
        "Error executing tool 'fail': broken",
        "pong " * 9,
        "5 after 10 messages",
    ]
    assert results(trajectory) == [text[:5] + "...(truncated)..." + text[-5:] for text in long]
    assert (trajectory.stop, len(trajectory.turns)) == (StopReason.DONE, 6)
    assert trajectory.turns[0].info["tool_calls_dropped"] == 1
    last = play(
        spec, [call("count", by=1)] * 2, create(start=3), tw.Limits(turns=2, turn_tokens=2000)
    )
    assert (len(results(last)), last.stop) == (1, StopReason.ENV_TRUNCATED)


def test_ours_answers_the_same_calls_in_our_words():
    spec = made(function_tool_path="functions.py")
    trajectory = play(
        spec,
        [call("nope"), call("calculator", formula="1"), "<tool_call>{not json</tool_call>", "done"],
    )
    assert results(trajectory)[0].startswith("Error: no tool 'nope'")
    assert results(trajectory)[1].startswith("Error: calculator has no argument 'formula'")
    assert len(results(trajectory)) == 3


def write(folder: Path, **files: str) -> Path:
    for name, text in files.items():
        (folder / name.replace("__", ".")).write_text(text)
    return folder


HEAD = "from verl.tools.function_tool import function_tool\n@function_tool\n"


@pytest.mark.parametrize(
    ("args", "files", "words"),
    [
        ({}, {}, r"verl:tools has no tools; give tool_config_path or function_tool_path"),
        ({"tool_path": "a"}, {}, "verl:tools has no tools"),
        ({"tool_config_path": "none.yaml"}, {}, r"tool_config_path = 'none\.yaml': no such file"),
        (
            {"tool_config_path": "a.yaml"},
            {"a__yaml": "tools: {}"},
            r"a\.yaml: tools is dict; write a list",
        ),
        ({"tool_config_path": "a.yaml"}, {"a__yaml": "a: [b"}, r"cannot be read as YAML"),
        (
            {"tool_config_path": "a.yaml"},
            {"a__yaml": "tools: [{class_name: ''}]"},
            r"tools\[0\]: class_name is ''; write module\.Class",
        ),
        (
            {"tool_config_path": "a.yaml"},
            {"a__yaml": "tools: [{class_name: nothing.Tool}]"},
            r"nothing\.Tool cannot be imported \(ModuleNotFoundError: No module named 'nothing'\)",
        ),
        (
            {"tool_config_path": "a.yaml"},
            {"a__yaml": "tools: [{class_name: b.Tool}]", "b__py": "class Other: pass"},
            r"b\.py has no 'Tool'",
        ),
        (
            {"tool_config_path": "a.yaml"},
            {"a__yaml": "tools: [{class_name: b.Tool, config: {type: odd}}]", "b__py": ""},
            r"config\.type = 'odd'; write native or mcp",
        ),
        ({"function_tool_path": "f.py"}, {"f__py": "x = 1"}, r"f\.py has no @function_tool"),
        (
            {"function_tool_path": "f.py"},
            {"f__py": HEAD + "def many(*values: int):\n    '''Add.'''"},
            r"line 2: ValueError: the function tool 'many': \*values: int has no JSON schema",
        ),
        (
            {"function_tool_path": "f.py"},
            {"f__py": HEAD + "def bare(x: int):\n    return x"},
            r"DocstringParsingException",
        ),
        (
            {"function_tool_path": "f.py"},
            {"f__py": HEAD + "def bare(x):\n    '''Do.\n\n    Args:\n        x: a value\n    '''"},
            r"TypeHintParsingException",
        ),
        (
            {"function_tool_path": "f.py", "lifetme": "call"},
            {"f__py": HEAD + "def one():\n    '''Do.'''"},
            r"verl:tools has no argument 'lifetme'; did you mean 'lifetime'",
        ),
        (
            {"function_tool_path": "f.py", "max_parallel_calls": 0},
            {"f__py": HEAD + "def one():\n    '''Do.'''"},
            r"max_parallel_calls = 0; it is an integer of at least 1",
        ),
    ],
)
def test_what_cannot_be_used_is_one_line(tmp_path, args, files, words):
    write(tmp_path, **files)
    with pytest.raises(ConfigError, match=words) as raised:
        made(base=tmp_path, **args)
    assert "\n" not in str(raised.value).strip()


def test_two_tools_with_one_name(tmp_path):
    shutil.copytree(HOME, tmp_path / "users")
    write(
        tmp_path / "users",
        f__py=HEAD
        + "def count(by: int):\n    '''Count.\n\n    Args:\n        by: how far\n    '''",
    )
    with pytest.raises(
        ConfigError,
        match=r"two tools are called 'count', in .*counter\.yaml and .*f\.py; rename one",
    ):
        made(base=tmp_path / "users", tool_config_path="counter.yaml", function_tool_path="f.py")


def test_tools_of_an_mcp_server(tmp_path):
    server = Path(__file__).parents[1] / "envs/mcp_server.py"
    servers = {"mcpServers": {"files": {"command": sys.executable, "args": [str(server)]}}}
    write(
        tmp_path,
        servers__json=json.dumps(servers),
        mcp__yaml="tools:\n- class_name: verl.tools.mcp_base_tool.MCPBaseTool\n  config:\n    "
        "type: mcp\n    mcp:\n      mcp_servers_config_path: servers.json\n",
    )
    spec = made(base=tmp_path, tool_config_path="mcp.yaml")
    names = []

    async def look():
        env = spec.factory()
        await env.reset(tw.Task("Go."))
        names.extend(tool["function"]["name"] for tool in env.tools)
        await env.close()

    asyncio.run(look())
    assert names


def test_a_yaml_file_is_an_environment_itself():
    found = FRAMEWORK.adapt(ForeignObject(HOME / "counter.yaml", "counter.yaml", {}, HOME))
    assert repr(found) == "verl:tools(count)"
    found = FRAMEWORK.adapt(
        ForeignObject(HOME / "interactions.yaml", "interactions.yaml", {}, HOME)
    )
    assert repr(found) == "verl:tools(hint, gsm8k)"


def test_a_row_names_a_tool_that_there_is_not():
    spec = made(tool_config_path="counter.yaml")
    words = failure(spec, {"tools_kwargs": {"counts": {"create_kwargs": {}}}})
    assert words.startswith("TaskError")
    assert "names 'counts', which is no tool of this environment; did you mean 'count'" in words


def test_contexts_are_those_of_our_tool_environment():
    trajectory = play(
        made(function_tool_path="functions.py"),
        [call("calculator", expression="1+2"), "3"],
        renderer=renderer("bpe"),
    )
    (sample,) = trajectory.samples()
    assert "<|im_start|>tool\n3<|im_end|>" in renderer("bpe").decode(sample.ids)
