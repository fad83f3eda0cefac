"""Tools that live: created, used, asked for a reward, and released exactly
once whatever happens."""

import asyncio
import functools
import json
import re
import threading
import time
from collections import Counter

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import turnwright as tw
from turnwright.envs.tools.tool_schema import ToolSchemaError
from turnwright.errors import ConfigError

LIMITS = tw.Limits(turns=6, turn_tokens=2000)


def call(name, **arguments):
    return f"<tool_call>{json.dumps({'name': name, 'arguments': arguments})}</tool_call>"


def play(env, replies, info=None, task="Go.", limits=LIMITS, **kwargs):
    asked = tw.Task(task, info=info or {})
    (trajectory,) = tw.rollout(
        env, [asked], engine=tw.ScriptedEngine(replies), limits=limits, **kwargs
    )
    return trajectory


class Ledger:
    """What happened to the objects of a class."""

    def __init__(self):
        self.events = []
        self._kept = []
        """The objects, so that no later one is given the place, and so the id, of one before it."""

    def __call__(self, what, who):
        self._kept.append(who)
        self.events.append((what, id(who)))

    def count(self, what):
        return sum(event == what for event, _ in self.events)


def counter(ledger, is_async=False):
    class Counter(tw.StatefulTool):
        def create(self, start: int = 0):
            ledger("create", self)
            self.n = start
            return f"It stands at {start}." if start else None

        def execute(self, step: int, times: int = 1) -> str:
            """Count on.

            Args:
                step: how far.
            """
            ledger("execute", self)
            self.n += step * times
            return str(self.n)

        def calc_reward(self, scale: float = 1.0):
            ledger("calc_reward", self)
            return self.n * scale

        def release(self, note: str = ""):
            ledger(f"release{note}", self)

    if not is_async:
        return Counter

    class AsyncCounter(Counter):
        name = "counter"

        async def create(self, start: int = 0):
            await asyncio.sleep(0)
            return Counter.create(self, start)

        async def execute(self, step: int, times: int = 1) -> str:
            """Count on."""
            await asyncio.sleep(0)
            return Counter.execute(self, step, times)

        async def calc_reward(self, scale: float = 1.0):
            return Counter.calc_reward(self, scale)

        async def release(self, note: str = ""):
            await asyncio.sleep(0)
            return Counter.release(self, note)

    return AsyncCounter


@pytest.mark.parametrize("is_async", [False, True])
def test_one_object_lives_as_long_as_the_episode(is_async):
    ledger = Ledger()
    env = tw.tool_env([counter(ledger, is_async)], reward=lambda t: 0.5)
    info = {
        "tools_kwargs": {
            "counter": {
                "create_kwargs": {"start": 3},
                "calc_reward_kwargs": {"scale": 0.1},
                "release_kwargs": {"note": "d"},
            }
        }
    }
    trajectory = play(
        env,
        [call("counter", step=2) + call("counter", step=5), call("counter", step=-1), "done"],
        info,
    )
    assert trajectory.error is None
    assert [m.text for m in trajectory.messages if m.role == "tool"] == ["5", "10", "9"]
    assert trajectory.messages[0].text == "Go.\nIt stands at 3."
    assert trajectory.reward == pytest.approx(0.5 + 0.9)
    assert [event for event, _ in ledger.events] == [
        "create",
        *["execute"] * 3,
        "calc_reward",
        "released",
    ]
    assert len({who for _, who in ledger.events}) == 1


def test_each_episode_has_its_own():
    ledger = Ledger()
    env = tw.tool_env([counter(ledger)])
    tasks = [
        tw.Task(f"{n}", info={"tools_kwargs": {"counter": {"create_kwargs": {"start": n}}}})
        for n in range(20)
    ]
    trajectories = tw.rollout(
        env, tasks, engine=tw.ScriptedEngine([call("counter", step=1), "x"]), samples=2
    )
    assert [t.reward for t in trajectories] == [float(n + 1) for n in range(20) for _ in range(2)]
    assert ledger.count("create") == ledger.count("release") == 40


@pytest.mark.parametrize("is_async", [False, True])
def test_an_object_per_call_by_name(is_async):
    ledger = Ledger()
    env = tw.tool_env([counter(ledger, is_async)], lifetime="call")
    info = {"tools_kwargs": {"counter": {"create_kwargs": {"start": 7}}}}
    trajectory = play(
        env,
        [call("counter", step=1), call("counter", step="x"), call("counter", step=2), "done"],
        info,
    )
    assert [m.text for m in trajectory.messages if m.role == "tool"][::2] == [
        "It stands at 7.\n8",
        "It stands at 7.\n9",
    ]
    assert trajectory.messages[0].text == "Go."
    assert trajectory.reward == 0.0
    assert [event for event, _ in ledger.events] == ["create", "execute", "release"] * 2


class Notebook:
    """Keeps notes."""

    def __init__(self, first: str = ""):
        self.notes = [first] if first else []
        self.released = 0

    def add(self, text: str, loud: bool = False) -> str:
        """Add a note.

        Args:
            text: the note.
        """
        self.notes.append(text.upper() if loud else text)
        return f"{len(self.notes)} notes"

    async def read(self) -> dict:
        """Read all notes."""
        return {"notes": self.notes}

    @staticmethod
    def length(text: str) -> int:
        """Count the characters of a text."""
        return len(text)

    def calc_reward(self):
        return float(len(self.notes))

    def _secret(self):
        raise AssertionError


def test_the_public_methods_of_a_class_are_tools():
    env = tw.tool_env([Notebook])
    assert [schema["function"]["name"] for schema in env().tools] == ["add", "read", "length"]
    assert list(env().tools[0]["function"]["parameters"]["properties"]) == ["text", "loud"]
    info = {"tools_kwargs": {"Notebook": {"create_kwargs": {"first": "zero"}}}}
    trajectory = play(
        env, [call("add", text="one"), call("read") + call("length", text="four"), "done"], info
    )
    assert [m.text for m in trajectory.messages if m.role == "tool"] == [
        "2 notes",
        '{"notes": ["zero", "one"]}',
        "4",
    ]
    assert trajectory.reward == 2.0
    bound = tw.tool_env([functools.partial(Notebook, first="one")])
    assert play(bound, ["done"]).reward == 1.0


def test_where_methods_are_marked_only_those_are_tools():
    class Box:
        def helper(self) -> int:
            """Help."""
            return 3

        @tw.tool("lift")
        def raise_it(self, by: int) -> int:
            """Lift the box."""
            return self.helper() + by

    trajectory = play(tw.tool_env([Box]), [call("lift", by=4), "done"])
    assert [schema["function"]["name"] for schema in tw.tool_env([Box])().tools] == ["lift"]
    assert [m.text for m in trajectory.messages if m.role == "tool"] == ["7"]
    with pytest.raises(
        ToolSchemaError,
        match=r"'lift' is a method without its object; give the class, or object\.lift",
    ):
        tw.tool_env([Box.raise_it])


class Bare(tw.StatefulTool):
    def create(self):
        pass


class NoHint(tw.StatefulTool):
    def execute(self, x):
        """X."""


class Stars:
    def act(self, *args: int):
        """Act."""


class Undocumented:
    def act(self, x: int):
        pass


class Odd(tw.StatefulTool):
    lifetime = "turn"

    def execute(self, x: int):
        """X."""


@pytest.mark.parametrize(
    ("tools", "said"),
    [
        ([Bare], "Bare has no execute"),
        ([NoHint], "parameter 'x' has no type hint"),
        ([Stars], r"\*args cannot be described to a model; name each parameter"),
        ([Undocumented], "no docstring"),
        ([Odd], "lifetime = 'turn'"),
        ([Odd()], r"Odd\(\) is an object, which every episode would share; give the class Odd"),
        ([Notebook, Notebook], r"two tools are called 'add': .*Notebook and .*Notebook"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_a_class_that_cannot_be_a_tool_says_why(tools, said):
    with pytest.raises(ToolSchemaError, match=said):
        tw.tool_env(tools)


def read(name: str) -> str:
    """Read a file."""
    return name


def test_two_sources_of_one_name_are_both_named():
    with pytest.raises(
        ToolSchemaError,
        match=r"two tools are called 'read': .*test_lifetime.read and .*Notebook; rename",
    ):
        tw.tool_env([read, Notebook])


# What a row may say


@tw.tool(from_row=["root", "limit"])
def search(query: str, root: str, limit: int = 3) -> str:
    """Search files.

    Args:
        query: what to look for.
        root: where, of the row.
    """
    return f"{query} in {root}, {limit}"


def test_a_row_gives_arguments_that_the_model_does_not_see():
    env = tw.tool_env([search])
    assert list(env().tools[0]["function"]["parameters"]["properties"]) == ["query"]
    info = {
        "extra_info": {
            "tools_kwargs": {
                "search": {"execute_kwargs": {"root": "/a", "other": None}, "release_kwargs": None}
            }
        }
    }
    trajectory = play(
        env, [call("search", query="x"), call("search", query="x", root="/etc"), "done"], info
    )
    said = [m.text for m in trajectory.messages if m.role == "tool"]
    assert said[0] == "x in /a, 3"
    assert said[1].startswith("Error: search has no argument 'root'")


def test_a_row_chooses_the_tools():
    ledger = Ledger()
    env = tw.tool_env([Notebook, counter(ledger)])

    def told(column):
        made = env()
        asyncio.run(made.reset(tw.Task("Go.", info={"tools": column})))
        asyncio.run(made.close())
        return [schema["function"]["name"] for schema in made.tools]

    assert told(None) == ["add", "read", "length", "counter"]
    assert told(["read"]) == ["read"]
    assert told(["Notebook"]) == ["add", "read", "length"]
    assert told([{"type": "function", "function": {"name": "add"}}, "counter"]) == [
        "add",
        "counter",
    ]
    assert told([]) == []
    assert ledger.count("create") == ledger.count("release") == 2  # who is not chosen is not made
    trajectory = play(env, [call("counter", step=1), "done"], {"tools": ["read"]})
    assert trajectory.turns[1].messages[0].text.startswith("Error: no tool 'counter'")


@pytest.mark.parametrize(
    ("info", "said"),
    [
        ({"tools": "read"}, "the column tools is a list of names of tools, not 'read'"),
        ({"tools": [3]}, "the column tools is a list"),
        (
            {"tools": ["reed"]},
            r"the column tools names 'reed', which is no tool of this environment; did you mean 'read'",  # noqa: E501
        ),
        ({"tools_kwargs": []}, "tools_kwargs is {tool: "),
        ({"tools_kwargs": {"counter": 3}}, "that of 'counter' is 3"),
        (
            {"tools_kwargs": {"counter": {"create": {}}}},
            "'counter' has 'create'; did you mean 'create_kwargs'",
        ),
        (
            {"tools_kwargs": {"countr": {"create_kwargs": {"start": 1}}}},
            "tools_kwargs names 'countr'.* did you mean 'counter'",
        ),
        (
            {"tools_kwargs": {"counter": {"create_kwargs": {"stat": 1}}}},
            "'stat' is not taken; did you mean 'start'",
        ),
        (
            {"tools_kwargs": {"counter": {"execute_kwargs": {"step": 1}}}},
            "'step' is the model's to give; name",
        ),
        ({"tools_kwargs": {"counter": {"execute_kwargs": {"x": 1}}}}, "'x' is no parameter of it"),
        (
            {"tools_kwargs": {"Notebook": {"release_kwargs": {"x": 1}}}},
            "'x' is not taken; it takes none",
        ),
        (
            {"tools_kwargs": {"search": {}}},
            r"tools_kwargs\['search'\]\['execute_kwargs'\] lacks 'root'",
        ),
    ],
    ids=str,
)
@pytest.mark.parametrize("lifetime", ["trajectory", "call"])
def test_a_row_that_is_wrong_is_an_error_that_says_so(info, said, lifetime):
    ledger = Ledger()
    tools = [Notebook, counter(ledger)] + ([search] if "search" in str(info) else [])
    trajectory = play(
        tw.tool_env(tools, lifetime=lifetime), [call("counter", step=1), "done"], info
    )
    assert trajectory.error is not None
    assert trajectory.error.type == "TaskError"
    assert re.search(said, trajectory.error.message), trajectory.error.message
    assert ledger.count("create") == ledger.count("release")


# Released exactly once

FAULTS = ("none", "raise", "down", "exit", "hang", "hang_thread", "failure")
PHASES = ("init", "create", "execute", "calc_reward", "release")


class Fault:
    """Does the wrong thing in one phase of an object's life."""

    def __init__(self, phase, fault, is_async, seconds=0.25):
        self.phase, self.fault = phase, fault
        self.for_ever = is_async and fault == "hang"
        self.seconds = seconds
        self.returns = threading.Event()
        """Set by a test that waits no longer for what hangs."""
        self.threads = []
        """Those in which it hung."""

    def act(self, here):
        raised = {
            "raise": KeyError(here),
            "down": ConnectionError(here),
            "exit": SystemExit(3),
            "failure": tw.ToolFailure(here),
        }
        if here == self.phase and self.fault in raised:
            raise raised[self.fault]
        if here == self.phase and self.fault.startswith("hang") and not self.for_ever:
            self.threads.append(threading.current_thread())
            self.returns.wait(self.seconds)

    async def wait(self, here):
        if here == self.phase and self.for_ever:
            await asyncio.Event().wait()
        self.act(here)


def faulty(ledger, phase, fault, is_async):
    """A tool with a fault."""
    return with_fault(ledger, Fault(phase, fault, is_async), is_async)


def with_fault(ledger, planted, is_async=False):
    act, await_ = planted.act, planted.wait

    class Faulty(tw.StatefulTool):
        def __init__(self):
            ledger("try", self)
            act("init")
            ledger("made", self)

        def create(self):
            act("create")

        def execute(self) -> str:
            """Act."""
            act("execute")
            return "acted"

        def calc_reward(self):
            act("calc_reward")
            return 1.0

        def release(self):
            ledger("release", self)
            act("release")

    if not is_async:
        return Faulty

    class AsyncFaulty(Faulty):
        name = "faulty"

        async def create(self):
            await await_("create")

        async def execute(self) -> str:
            """Act."""
            await await_("execute")
            return "acted"

        async def calc_reward(self):
            await await_("calc_reward")
            return 1.0

        async def release(self):
            ledger("release", self)
            await await_("release")

    return AsyncFaulty


@settings(max_examples=60, deadline=None)
@given(
    st.sampled_from(PHASES),
    st.sampled_from(FAULTS),
    st.booleans(),
    st.sampled_from(["trajectory", "call"]),
    st.sampled_from([("faulty",), ("good", "faulty"), ("faulty", "good")]),
    st.integers(0, 3),
)
def test_whatever_breaks_each_object_that_was_made_is_released_exactly_once(
    phase, fault, is_async, lifetime, order, calls
):
    ledgers = {"faulty": Ledger(), "good": Ledger()}

    class Good(tw.StatefulTool):
        def __init__(self):
            ledgers["good"]("made", self)

        def execute(self) -> str:
            """Act."""
            return "well"

        def release(self):
            ledgers["good"]("release", self)

    classes = {"faulty": faulty(ledgers["faulty"], phase, fault, is_async), "good": Good}
    env = tw.tool_env([classes[name] for name in order], lifetime=lifetime)
    reply = "".join(call(name) for name in order)
    limits = tw.Limits(turns=6, turn_tokens=2000, env_s=0.1, reward_s=0.1)
    trajectory = play(env, [*[reply] * calls, "done"], limits=limits)
    for _ in range(100):  # what was left in a thread comes back by itself here
        if all(ledger.count("made") == ledger.count("release") for ledger in ledgers.values()):
            break
        time.sleep(0.01)
    for name, ledger in ledgers.items():
        released = Counter(who for event, who in ledger.events if event == "release")
        assert set(released.values()) <= {1}, f"{name} was released twice"
        assert ledger.count("made") == ledger.count("release"), f"{name} was made and not released"
    if fault == "none" or (phase == "execute" and not calls):
        # On a machine that is very busy.
        assert trajectory.error is None or trajectory.error.type == "TimeoutError"


@pytest.mark.parametrize(
    ("phase", "said", "made"),
    [
        ("create", ["faulty: create"], 1),
        ("execute", ["execute"], 1),
        ("release", ["release"], 1),
        ("none", [], 1),
    ],
)
def test_a_thread_that_hangs_is_left_once_and_named(phase, said, made):
    ledger, envs, planted = Ledger(), [], Fault(phase, "hang", False, seconds=60)
    factory = tw.tool_env([with_fault(ledger, planted)])

    def make():
        envs.append(factory())
        return envs[-1]

    limits = tw.Limits(turns=6, turn_tokens=2000, env_s=0.1)
    (trajectory,) = tw.rollout(
        make, [tw.Task("Go.")], engine=tw.ScriptedEngine([call("faulty"), "done"]), limits=limits
    )
    assert envs[0].abandoned == said
    assert [thread.name for thread in planted.threads] == [
        f"turnwright-tool abandoned in {name}" for name in said
    ]
    assert (trajectory.error is None) is (phase == "none")
    planted.returns.set()
    for _ in range(1000):
        if ledger.count("release") == made:
            break
        time.sleep(0.01)
    assert ledger.count("release") == made


def test_the_end_of_a_cancelled_run_releases_too():
    ledger = Ledger()
    env = tw.tool_env([counter(ledger)])

    class Stuck(tw.ScriptedEngine):
        async def generate(self, request):
            await asyncio.Event().wait()

    async def main():
        work = asyncio.create_task(
            tw.arollout(env, [tw.Task("Go.")], engine=Stuck(["x"]), samples=3)
        )
        while ledger.count("create") < 3:
            await asyncio.sleep(0.01)
        work.cancel()
        with pytest.raises(asyncio.CancelledError):
            await work

    asyncio.run(main())
    assert ledger.count("release") == 3


def test_what_a_lifetime_raises_is_a_tool_failure_that_names_it():
    for phase in ("create", "release"):
        trajectory = play(tw.tool_env([faulty(Ledger(), phase, "down", True)]), ["done"])
        said = f"faulty: {phase} raised ConnectionError: {phase}"
        assert (trajectory.error.type, trajectory.error.message) == ("ToolFailure", said)
    assert (
        play(tw.tool_env([faulty(Ledger(), "create", "down", False)]), ["x"]).stop
        == tw.StopReason.TOOL_ERROR
    )
    bug = play(tw.tool_env([faulty(Ledger(), "create", "raise", False)]), ["x"]).error
    # A mistake in its code is one, wherever it stands.
    assert (bug.type, bug.kind) == (
        "KeyError",
        "user_bug",
    )
    for phase in ("create", "release"):  # and never the model's
        env = tw.tool_env([faulty(Ledger(), phase, "raise", False)], lifetime="call")
        assert (
            play(env, [call("faulty"), "x"]).error.message
            == f"faulty: {phase} raised KeyError: '{phase}'"
        )


def test_a_reward_that_a_tool_did_not_compute_is_none():
    class Unsure(tw.StatefulTool):
        def execute(self) -> str:
            """Act."""
            return ""

        def calc_reward(self):
            return None

    assert play(tw.tool_env([Unsure], reward=lambda t: 1.0), ["done"]).reward is None
    with pytest.raises(ConfigError, match="lifetime"):
        tw.tool_env([Unsure], lifetime="ever")


def test_images_that_create_shows_stand_in_the_opening():
    image = tw.ImageRef("0" * 64)

    class Screen(tw.StatefulTool):
        def create(self):
            return ["The screen:", image]

        def execute(self) -> str:
            """Look."""
            return "dark"

    async def opening(task):
        env = tw.tool_env([Screen])()
        try:
            return await env.reset(task)
        finally:
            await env.close()

    (message,) = asyncio.run(opening(tw.Task("Go.")))
    assert message.content == ("Go.\nThe screen:", image)
    said = asyncio.run(
        opening(tw.Task([{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]))
    )
    assert [m.role for m in said] == ["user", "assistant", "user"]
