"""Tools and `tool_env`: every call has an answer, and a model's mistake is never an exception."""

import asyncio
import os
import random
import subprocess
import sys
import threading
import time

import pytest
from hypothesis import given
from hypothesis import strategies as st

from turnwright.envs import (
    Action,
    ToolFailure,
    arithmetic,
    as_env_spec,
    play_scripted,
    read_reply,
    tool,
    tool_env,
)
from turnwright.envs.threads import run_in_thread
from turnwright.envs.tools.results import ResultLimit
from turnwright.envs.tools.tool import Tools
from turnwright.envs.tools.tool_schema import ToolSchemaError
from turnwright.errors import ConfigError, EnvError
from turnwright.types import ImageRef, Message, Task, ToolCall


def counts(info):
    """What a turn counted, without the log of its calls, whose seconds differ each time."""
    return {name: value for name, value in info.items() if name != "tool_log"}


def calculator(expression: str) -> str:
    """Evaluate arithmetic.

    Args:
        expression: for example "(3 + 4) * 5".
    """
    return str(arithmetic(expression))


def correct(trajectory):
    return float(trajectory.final_text.strip() == trajectory.task.answer)


ENV = tool_env(tools=[calculator], reward=correct, max_turns=6)
TASK = Task("What is 6 * 7?", answer="42")


def play(factory, task, *replies, turns=8):
    left = list(replies)
    return asyncio.run(
        play_scripted(
            factory(), task, lambda messages, rng: left.pop(0), random.Random(0), turns=turns
        )
    ).trajectory


def call(tools, name, /, **arguments):
    return asyncio.run(Tools(tools).call(ToolCall(name, arguments, "call_0")))


def test_the_house_s_calculator():
    assert play(ENV, TASK, "42").reward == 1.0
    assert play(ENV, TASK, "41").reward == 0.0
    told = '<tool_call>{"name": "calculator", "arguments": {"expression": "6 * 7"}}</tool_call>'
    trajectory = play(ENV, TASK, told, " 42\n")
    assert trajectory.reward == 1.0
    assert trajectory.turns[1].messages == (
        Message("tool", "42", tool_call_id="call_0", name="calculator"),
    )
    assert ENV.max_turns == 6
    assert repr(ENV) == "tool_env(tools=[calculator], reward=correct, max_turns=6)"
    assert [schema["function"]["name"] for schema in ENV().tools] == ["calculator"]


def test_an_environment_is_fresh_each_time():
    assert ENV() is not ENV()


MALFORMED = {
    '<tool_call>{"name": "calculator", "arguments": {"expression": "1"': "truncated",
    '<tool_call>{"name": "calculator", "arguments": '
    '{"expression": "1",}}</tool_call>': "trailing_comma",
    "<tool_call>calculator(1)</tool_call>": "not_json",
    '{"name": "calculator", "arguments": {"expression": "1"}}</tool_call>': "unopened",
    '{"name": "calculator", "arguments": {"expression": "1"}}': "unopened",
    '<tool_call>{"name": "calculator", "arguments": {"expression": 1e999}}</tool_call>': "not_json",
    "<tool_call></tool_call>": "not_json",
    "<tool_call>[]</tool_call>": "not_a_call",
    '<tool_call>{"arguments": {}}</tool_call>': "not_a_call",
    '<tool_call>{"name": "calculator", "arguments": "1 + 1"}</tool_call>': "arguments_not_object",
    "<tool_call>" + "[" * 5000 + "</tool_call>": "too_deep",
    '<tool_call>{"name": "calculater", "arguments": '
    '{"expression": "1"}}</tool_call>': "unknown_tool",
    '<tool_call>{"name": "", "arguments": {}}</tool_call>': "unknown_tool",
    '<tool_call>{"name": "calculator"}</tool_call>': "missing_argument",
    '<tool_call>{"name": "calculator", "arguments": '
    '{"expresion": "1"}}</tool_call>': "unknown_argument",
    '<tool_call>{"name": "calculator", "arguments": {"expression": 1}}</tool_call>': "wrong_type",
    '<tool_call>{"name": "calculator", "arguments": {"expression": "1", "precision": '
    "3}}</tool_call>": "unknown_argument",
    '<tool_call>{"name": "calculator", "arguments": '
    '{"expression": "\\ud800"}}</tool_call>': "wrong_type",
    '<tool_call>{"name": "calculator", "arguments": {"expression": "1/0"}}</tool_call>': "raised",
    '<tool_call>{"name": "calculator", "arguments": {"expression": '
    "\"__import__('os')\"}}</tool_call>": "raised",
}


@pytest.mark.parametrize("reply", MALFORMED, ids=lambda text: text[:60])
def test_a_malformed_call_is_an_observation_that_is_counted(reply):
    trajectory = play(ENV, TASK, reply, "42")
    assert trajectory.reward == 1.0
    assert counts(trajectory.turns[0].info) == {
        "tool_calls": 1,
        "tool_errors": 1,
        f"tool_errors/{MALFORMED[reply]}": 1,
    }
    (message,) = trajectory.turns[1].messages
    assert message.role == "tool"
    assert message.tool_call_id == "call_0"
    assert message.text.startswith("Error: ")
    assert len(message.text) < 250


def test_two_calls_one_bad_are_both_answered_in_order():
    good = '<tool_call>{"name": "calculator", "arguments": {"expression": "6*7"}}</tool_call>'
    trajectory = play(ENV, TASK, f"First. {good}\n<tool_call>oops</tool_call>{good}", "42")
    assert [message.text[:6] for message in trajectory.turns[1].messages] == ["42", "Error:", "42"]
    assert [message.tool_call_id for message in trajectory.turns[1].messages] == [
        "call_0",
        "call_1",
        "call_2",
    ]
    assert trajectory.turns[0].info["tool_errors"] == 1


def test_a_call_inside_thinking_is_not_run():
    reply = (
        '<think><tool_call>{"name": "calculator", "arguments": {"expression": '
        '"1"}}</tool_call></think>42'
    )
    trajectory = play(ENV, TASK, reply)
    assert (len(trajectory.turns), trajectory.reward) == (1, 1.0)


def test_what_a_tool_returns_becomes_content():
    image = ImageRef("0" * 64)

    def give(kind: str):
        """Give."""
        return {
            "text": "é",
            "dict": {"a": [1, "é"]},
            "number": 3,
            "none": None,
            "list": [1, 2],
            "image": image,
            "parts": ["see", image],
            "message": Message("tool", ("x", image)),
            "verl": ("text", None, None),
            "verl3": ({"a": 1}, 0.5, {"hits": 2}),
            "odd": {"when": time},
        }[kind]

    def content(kind):
        return call([give], "give", kind=kind).message.content

    assert content("text") == "é"
    assert content("dict") == '{"a": [1, "é"]}'
    assert content("number") == "3"
    assert content("none") == ""
    assert content("list") == "[1, 2]"
    assert content("image") == (image,)
    assert content("parts") == ("see", image)
    assert content("message") == ("x", image)
    assert content("verl") == "text"
    assert "module" in content("odd")
    outcome = call([give], "give", kind="verl3")
    assert (outcome.message.content, outcome.reward, outcome.metrics) == (
        '{"a": 1}',
        0.5,
        {"hits": 2},
    )


def test_a_tool_s_reward_and_metrics_reach_the_step():
    def score(x: float):
        """Score."""
        return "ok", x, {"scored": 1}

    reply = '<tool_call>{"name": "score", "arguments": {"x": 0.25}}</tool_call>'
    trajectory = play(tool_env([score]), TASK, reply + reply, "done")
    assert trajectory.reward == 0.5
    assert counts(trajectory.turns[0].info) == {"tool_calls": 2, "scored": 2}


@pytest.mark.parametrize(
    ("error", "said"),
    [
        (ValueError("too big"), "Error: too big"),
        (KeyError("k"), "Error: KeyError: 'k'"),
        (RuntimeError(), "Error: RuntimeError"),
        (StopIteration(), "Error: RuntimeError: StopIteration"),
        (SystemExit(3), "Error: RuntimeError: SystemExit: 3"),
        (TimeoutError("slow"), "Error: TimeoutError: slow"),
    ],
    ids=repr,
)
def test_an_exception_of_a_tool_is_an_observation(error, said):
    def fail():
        """Fail."""
        raise error

    async def fail_async():
        """Fail."""
        raise error

    outcome = call([fail], "fail")
    assert (outcome.message.text, outcome.error) == (said, "raised")
    if not isinstance(error, StopIteration):
        calls = [ToolCall("fail_async", {})] * 2
        outcomes = asyncio.run(Tools([fail_async]).call_all(calls))
        assert [outcome.error for outcome in outcomes] == ["raised"] * 2


@pytest.mark.parametrize("is_async", [False, True])
def test_a_tool_failure_passes_through(is_async):
    def broken():
        """Break."""
        raise ToolFailure("the search service is down")

    async def broken_async():
        """Break."""
        raise ToolFailure("the search service is down")

    with pytest.raises(ToolFailure, match="is down"):
        call([tool(name="broken")(broken_async if is_async else broken)], "broken")


def test_a_sync_tool_runs_off_the_loop_and_an_async_one_on_it():
    def where_sync() -> str:
        """Where."""
        return threading.current_thread().name

    async def where_async() -> str:
        """Where."""
        return threading.current_thread().name

    assert call([where_sync], "where_sync").message.text == "turnwright-tool"
    assert call([where_async], "where_async").message.text == "MainThread"


def test_sleeping_tools_do_not_wait_for_each_other():
    together = threading.Barrier(64)

    def sleep() -> str:
        """Sleep until all do."""
        together.wait(60)
        return "done"

    tools = Tools([sleep])

    async def all_at_once():
        return await asyncio.gather(*(tools.call(ToolCall("sleep", {})) for _ in range(64)))

    assert [outcome.error for outcome in asyncio.run(all_at_once())] == [None] * 64


def test_a_tool_that_hangs_can_be_left_behind_and_the_process_still_ends():
    code = (
        "import asyncio, threading\n"
        "from turnwright.envs.threads import run_in_thread\n"
        "async def main():\n"
        "    try:\n"
        "        await asyncio.wait_for(run_in_thread(threading.Event().wait, {}), 0.05)\n"
        "    except TimeoutError:\n"
        "        print('left behind')\n"
        "asyncio.run(main())\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=20)
    assert (done.stdout, done.returncode, done.stderr) == ("left behind\n", 0, "")


def test_calls_one_after_another_share_a_thread_and_calls_at_once_do_not():
    def count(calls, at_once):
        together = threading.Barrier(at_once)

        def look():
            together.wait(60)
            return threading.get_ident()

        async def main():
            made = [
                await asyncio.gather(*(run_in_thread(look, {}) for _ in range(at_once)))
                for _ in range(calls)
            ]
            return [len(set(found)) for found in made], len(
                {one for found in made for one in found}
            )

        return asyncio.run(main())

    assert count(20, 1) == ([1] * 20, 1)
    assert count(5, 8) == ([8] * 5, 8)


def test_idle_threads_end_also_while_others_are_taken(monkeypatch):
    monkeypatch.setattr("turnwright.envs.threads.IDLE_S", 1e-4)

    async def main():
        for number in range(300):
            assert await run_in_thread(lambda number=number: number, {}) == number
            time.sleep(number % 7 * 1e-4)

    before = threading.active_count()
    asyncio.run(main())
    deadline = time.monotonic() + 30
    while threading.active_count() > before and time.monotonic() < deadline:
        time.sleep(0.01)
    assert threading.active_count() <= before


@pytest.mark.skipif(not hasattr(os, "fork"), reason="this system does not fork processes")
def test_a_forked_process_has_threads_of_its_own():
    code = (
        "import asyncio, os\n"
        "from turnwright.envs.threads import run_in_thread\n"
        "asyncio.run(run_in_thread(print, {}))\n"
        "child = os.fork()\n"
        "if not child:\n"
        "    asyncio.run(run_in_thread(os._exit, {'status': 7}))\n"
        "print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))\n"
    )
    # Later versions warn of forks beside threads.
    command = [
        sys.executable,
        "-W",
        "ignore",
        "-c",
        code,
    ]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60)
    assert (done.stdout, done.stderr) == ("\n7\n", "")


def test_decorated_tools():
    @tool
    def one(x: int) -> int:
        """One."""
        return x

    @tool("deux")
    def two(x: int) -> int:
        """Two."""
        return x

    @tool(
        name="three",
        schema={
            "name": "three",
            "parameters": {"type": "object", "properties": {"x": {"type": "integer"}}},
        },
    )
    def three(x):
        return x

    assert [made.name for made in Tools([one, two, three])] == ["one", "deux", "three"]
    assert one(3) == 3
    assert repr(two) == "<tool deux>"
    assert call([one, two, three], "three", x=4).message.text == "4"


def test_two_tools_of_one_name_are_an_error():
    @tool("calculator")
    def other(x: int) -> int:
        """Other."""
        return x

    with pytest.raises(
        ToolSchemaError,
        match=r"two tools are called 'calculator': .*calculator and .*other; rename one",
    ):
        tool_env([calculator, other])


@pytest.mark.parametrize("thing", ["calculator", 3, None], ids=repr)
def test_what_is_no_function_is_no_tool(thing):
    with pytest.raises(ToolSchemaError, match="is not a tool"):
        tool_env([thing])
    with pytest.raises(ToolSchemaError, match="int has no public method that could be a tool"):
        tool_env([int])


def test_async_calls_of_one_turn_run_at_once_and_sync_ones_in_order():
    log = []

    async def slow(n: int) -> str:
        """Slow."""
        log.append(f"begin {n}")
        async with asyncio.timeout(60):
            await together.wait()
        await asyncio.sleep(0.02 - n / 500)
        return f"slow {n}"

    def plain(n: int) -> str:
        """Plain."""
        log.append(f"plain {n}")
        return f"plain {n}"

    order = ["slow", "plain", "slow", "nothing", "plain", "slow"]
    calls = [ToolCall(name, {"n": n}, f"call_{n}") for n, name in enumerate(order)]
    together = asyncio.Barrier(3)
    outcomes = asyncio.run(Tools([slow, plain]).call_all(calls))
    assert [o.message.tool_call_id for o in outcomes] == [call.id for call in calls]
    assert [o.message.text.partition(";")[0] for o in outcomes] == [
        "slow 0",
        "plain 1",
        "slow 2",
        "Error: no tool 'nothing'",
        "plain 4",
        "slow 5",
    ]
    assert [entry for entry in log if entry.startswith("plain")] == ["plain 1", "plain 4"]
    assert {entry for entry in log if entry.startswith("begin")} == {
        "begin 0",
        "begin 2",
        "begin 5",
    }


def test_a_tool_failure_cancels_the_calls_beside_it():
    ended = []

    async def hang() -> str:
        """Hang."""
        try:
            await asyncio.Event().wait()
        finally:
            ended.append(True)

    async def broken() -> str:
        """Break."""
        raise ToolFailure("the search service is down")

    with pytest.raises(ToolFailure, match="is down"):
        asyncio.run(
            Tools([hang, broken]).call_all(
                [ToolCall("hang", {}), ToolCall("broken", {}), ToolCall("hang", {})]
            )
        )
    assert ended == [True, True]


@pytest.mark.parametrize(
    ("keeps", "said"),
    [
        ("start", "abcd\n[cut: 4 of 10 characters shown]"),
        ("end", "[cut: 4 of 10 characters shown]\nghij"),
        ("ends", "ab\n[cut: 4 of 10 characters shown]\nij"),
    ],
)
def test_a_long_result_is_cut_with_a_mark_and_counted(keeps, said):
    def give(fail: bool) -> str:
        """Give."""
        if fail:
            raise ValueError("abcdefghij" * 5)
        return "abcdefghij"

    env = tool_env([give], result_chars=4, result_keeps=keeps)
    reply = '<tool_call>{"name": "give", "arguments": {"fail": %s}}</tool_call>'
    trajectory = play(env, TASK, reply % "false", reply % "true", "42")
    assert trajectory.turns[1].messages[0].text == said
    assert counts(trajectory.turns[0].info) == {"tool_calls": 1, "tool_results_cut": 1}
    assert "[cut: 4 of 57 characters shown]" in trajectory.turns[2].messages[0].text
    assert (
        play(tool_env([give], result_chars=None), TASK, reply % "false", "42")
        .turns[1]
        .messages[0]
        .text
        == "abcdefghij"
    )


@given(
    st.lists(st.text(max_size=9) | st.just(ImageRef("0" * 64)), max_size=5),
    st.integers(1, 20),
    st.sampled_from(["start", "ends", "end"]),
)
def test_a_cut_result_keeps_its_images_and_as_many_characters(parts, most, keeps):
    content = tuple(parts)
    text = "".join(part for part in parts if isinstance(part, str))
    made, cut = ResultLimit(most, keeps)(content)
    assert cut is (len(text) > most)
    images = [part for part in made if isinstance(part, ImageRef)]
    assert images == [part for part in parts if isinstance(part, ImageRef)]
    if cut:
        mark = f"[cut: {most} of {len(text)} characters shown]"
        before: list = []
        for part in parts:  # every image stays behind the same text
            before += [part] if isinstance(part, ImageRef) else list(part)
        kept = {"start": (most, 0), "end": (0, most), "ends": (most - most // 2, most // 2)}[keeps]
        at, wanted, told = 0, [], False
        for part in before:
            if isinstance(part, str):
                at += 1
                if at > kept[0] and not told:
                    wanted, told = [*wanted, mark], True
                wanted += [part] if at <= kept[0] or at > len(text) - kept[1] else []
            else:
                if at > kept[0] and not told:
                    wanted, told = [*wanted, mark], True
                wanted.append(part)
        said = "".join("\0" if isinstance(part, ImageRef) else part for part in made)
        expected = "".join("\0" if isinstance(part, ImageRef) else part for part in wanted)
        assert said.replace("\n", "") == expected.replace("\n", "")
    else:
        assert made == content


def test_a_result_that_cannot_be_read_is_the_tool_s_fault_not_the_model_s():
    def give(kind: str):
        """Give."""
        return ("x", 1.0, [1]) if kind == "metrics" else {"found": [ImageRef("0" * 64)]}

    with pytest.raises(EnvError, match="returned the metrics"):
        call([give], "give", kind="metrics")
    with pytest.raises(EnvError, match="nested in other data"):
        call([give], "give", kind="image")


def test_rewards_of_every_shape():
    async def slow(trajectory, task):
        await asyncio.sleep(0)
        return float(task.answer == "42")

    def lenient(trajectory, tolerance=0.5):
        return tolerance

    for reward, expected in [
        (slow, 1.0),
        (lenient, 0.5),
        (lambda t: None, None),
        (None, 0.0),
        (lambda *a: len(a), 1),
    ]:
        assert play(tool_env([calculator], reward=reward), TASK, "42").reward == expected


@pytest.mark.parametrize(
    ("kwargs", "said"),
    [
        ({"reward": 1.0}, "reward is float"),
        ({"reward": lambda: 0}, "is called as"),
        ({"reward": lambda a, b, c: 0}, "is called as"),
        ({"max_turns": 0}, "max_turns is 0"),
        ({"lifetime": "turn"}, "lifetime = 'turn'"),
        ({"result_chars": 0}, "result_chars is 0"),
        ({"result_keeps": "middle"}, "result_keeps = 'middle'"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_a_wrong_setting_says_why(kwargs, said):
    with pytest.raises(ConfigError, match=said):
        tool_env([calculator], **kwargs)


def test_a_system_message_for_tasks_that_have_none():
    env = tool_env([calculator], system="Be exact.")
    assert play(env, TASK, "42").messages[0] == Message("system", "Be exact.")
    own = Task([{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Hi"}])
    assert [message.text for message in play(env, own, "Hi").messages] == ["Be brief.", "Hi", "Hi"]


def test_its_world_has_what_the_factory_was_given():
    env = tool_env(
        [calculator],
        reward=correct,
        max_turns=3,
        tasks=[TASK],
        solver=lambda messages, rng: "42",
        single_turn_best=1.0,
    )
    world = as_env_spec(env, name="calc")
    assert (world.max_turns, world.single_turn_best) == (3, 1.0)
    assert world.tasks("train") == [Task("What is 6 * 7?", answer="42", id=TASK.id, env="calc")]
    assert world.demonstrations(2)[1].trajectory.reward == 1.0
    assert any("calculator" in text for text in world.texts(1))


def test_parsed_calls_reach_the_tools_verbatim():
    reply = read_reply(
        '<tool_call>{"name": "calculator", "arguments": {"expression": "6*7"}}</tool_call>',
        ENV().tools,
    )
    assert Action(reply.text, reply).tool_calls == (
        ToolCall("calculator", {"expression": "6*7"}, "call_0"),
    )


def test_importing_worlds_is_light():
    heavy = "('pydantic', 'torch', 'jinja2', 'pyarrow', 'numpy')"
    code = f"import sys, turnwright.envs; print([m for m in {heavy} if m in sys.modules])"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=20)
    assert done.stdout == "[]\n", done.stderr
