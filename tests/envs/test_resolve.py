"""What a recipe may name, and what is said of what it may not."""

import asyncio
import importlib
import inspect
import pickle
import subprocess
import sys

import pytest

from turnwright import plugins
from turnwright.config import EnvConfig
from turnwright.envs import Env, Step, as_env_spec, resolve_env
from turnwright.errors import ConfigError, TaskError
from turnwright.types import Task
from turnwright_compat import verifiers_env

SOURCE = """
from dataclasses import dataclass
import turnwright.envs as tw
from turnwright.types import Task
import beside

LIMIT = 3

@dataclass
class Note:
    text: "str"

class Guess(tw.Env):
    max_turns = 7
    single_turn_best = 0.01
    def __init__(self, top: int, low: int = 1):
        self.top, self.low = top, low
    def reset(self, task, *, seed=None):
        self.secret = int(task.answer)
    def step(self, action):
        guess = int(action.text)
        if guess == self.secret:
            return tw.Step("yes", 1.0, True)
        return tw.Step("higher" if guess < self.secret else "lower")
    def tasks(self, split, n, seed):
        half = range(self.low + (split == "eval"), self.top + 1, 2)
        return [Task("guess", str(number)) for number in half][:n]
    def solver(self, messages, rng):
        low, high = self.low, self.top
        for said, answer in zip(messages[1::2], messages[2::2]):
            low, high = (int(said.text) + 1, high) if answer.text == "higher" else (low, int(said.text) - 1)
        return str((low + high) // 2)

class Plain:
    pass

class NoStep(tw.Env):
    def reset(self, task, *, seed=None):
        return "hi"

class Fails(tw.Env):
    def __init__(self):
        raise OSError("no display")
    def reset(self, task, *, seed=None): ...
    def step(self, action): ...

def make(top: int = 10):
    return Guess(top)

def helper(x):
    return x

def nothing():
    return 3

def rows(split):
    return [Task(f"{split} {i}", str(i)) for i in range(1, 4)]

async def play(task, model):
    return 1.0

async def lonely(task):
    return 1.0

async def crowded(task, model, settings):
    return 1.0

async def reward_func(args, sample):
    return 1.0

guess = Guess(10)
tools = tw.tool_env([beside.shout], max_turns=2)
"""  # noqa: E501


@pytest.fixture
def folder(tmp_path):
    (tmp_path / "beside.py").write_text(
        'def shout(word: str) -> str:\n    """Shout."""\n    return word.upper()\n'
    )
    (tmp_path / "mine.py").write_text(SOURCE)
    (tmp_path / "bad.py").write_text("import turnwright\n\nx = 1 +\n")
    (tmp_path / "raises.py").write_text("import os\n\n\nraise RuntimeError('no GPU')\n")
    (tmp_path / "exits.py").write_text("import sys\nsys.exit(2)\n")
    yield tmp_path
    sys.modules.pop("beside", None)


def test_a_class_with_its_arguments(folder):
    world = resolve_env(
        EnvConfig(use="mine.py:Guess", args={"top": 100}, name="guess", weight=2.0), base=folder
    )
    assert (world.name, world.weight, world.max_turns, world.single_turn_best) == (
        "guess",
        2.0,
        7,
        0.01,
    )
    assert world.factory().top == 100
    assert world.factory() is not world.factory()
    train, held = world.train_and_eval_tasks(100, 100)
    assert len(train) == len(held) == 50
    assert {task.env for task in train} == {"guess"}
    played = world.demonstrations(20)
    assert [episode.trajectory.reward for episode in played] == [1.0] * 20
    assert "higher" in world.texts(20)


def test_a_factory_a_tool_env_and_a_play_function(folder):
    assert resolve_env("mine.py:make", base=folder).factory().top == 10
    assert (
        resolve_env(EnvConfig(use="mine.py:make", args={"top": 5}), base=folder).factory().top == 5
    )
    tools = resolve_env(EnvConfig(use="mine.py:tools", tasks="mine.py:rows"), base=folder)
    assert tools.max_turns == 2
    assert [task.id for task in tools.tasks("eval")] == [
        Task(f"eval {i}", str(i)).id for i in (1, 2, 3)
    ]
    for world in (
        resolve_env(EnvConfig(use="mine.py:play", tasks="mine.py:rows"), base=folder),
        resolve_env(EnvConfig(tasks="mine.py:rows"), base=folder, play="mine.py:play"),
    ):
        assert inspect.iscoroutinefunction(world.agent_function)
        assert world.factory is None
        assert world.texts(2) == ["train 1", "train 2"]
    both = resolve_env(EnvConfig(use="hop"), base=folder, play="mine.py:play")
    assert both.agent_function is not None
    assert both.solver is not None


def test_one_file_is_executed_once(folder):
    first = resolve_env(EnvConfig(use="mine.py:Guess", args={"top": 3}), base=folder)
    second = resolve_env("mine.py:make", base=folder)
    assert type(first.factory()) is type(second.factory())
    assert str(folder) not in sys.path


def test_a_jsonl_file_is_found_from_the_recipe(folder):
    (folder / "rows.jsonl").write_text('{"prompt": "guess", "answer": "3"}\n')
    world = resolve_env(
        EnvConfig(use="mine.py:make", tasks="rows.jsonl", eval_tasks="mine.py:rows"), base=folder
    )
    assert [task.answer for task in world.tasks("train")] == ["3"]
    assert len(world.tasks("eval", 2)) == 2
    missing = resolve_env(EnvConfig(use="hop", tasks="row.jsonl"), base=folder)
    with pytest.raises(TaskError, match=r"no such file or directory; did you mean 'rows.jsonl'\?"):
        missing.tasks("train")


WRONG = [
    (
        "hopp",
        {},
        "unknown environment 'hopp'; did you mean 'hop'? Built in: hop, hop_json, calculator, ",
    ),
    ("zebra", {}, "unknown environment 'zebra'; Built in: hop, hop_json, calculator, search, "),
    ("mine.py", {}, "mine.py: which name of the file? Write mine.py:Name"),
    ("mine.py:", {}, "which name of the file? Write mine.py:Name"),
    ("mine:Guess", {}, "mine:Guess: no module 'mine' is installed; did you mean mine.py:Guess?"),
    (
        "a-b:Guess",
        {},
        "a-b:Guess: not of the form file.py:Name, package.module:Name or framework:id",
    ),
    (
        "json.decode:Guess",
        {},
        "json.decode:Guess: no module 'json.decode' is installed; write file.py:Name",
    ),
    (
        "json.decoder:JSONDecode",
        {},
        "json.decoder has no 'JSONDecode'; did you mean 'JSONDecoder'?",
    ),
    (
        "mine.py:crowded",
        {},
        "mine.py:crowded is called as play(task, model): missing a required argument: 'settings'",
    ),
    (
        "mine.py:reward_func",
        {},
        "mine.py:reward_func takes 'args' first, as functions of other frameworks do",
    ),
    (
        "gym:FrozenLake-v11",
        {},
        "gym:FrozenLake-v11: gym has no 'FrozenLake-v11'; did you mean 'FrozenLake-v1'?",
    ),
    ("gym:", {}, "gym has no ''; it has"),
    ("mien.py:Guess", {}, "mien.py: no such file; did you mean 'mine.py'?"),
    ("mine.py:Gues", {}, "mine.py has no 'Gues'; did you mean 'Guess'?"),
    ("bad.py:Guess", {}, "bad.py: line 3: SyntaxError"),
    ("raises.py:Guess", {}, "raises.py: line 4: RuntimeError: no GPU"),
    ("exits.py:Guess", {}, "exits.py: line 2: SystemExit: 2"),
    ("mine.py:Guess", {}, "mine.py:Guess needs the argument 'top'; give it under [env.args]"),
    ("mine.py:Guess", {"tpo": 3}, "mine.py:Guess has no argument 'tpo'; did you mean 'top'?"),
    (
        "mine.py:Guess",
        {"top": "ten"},
        "mine.py:Guess: argument 'top' must be a whole number, not \"ten\"",
    ),
    ("hop", {"rules": 1}, "hop: argument 'rules' must be true or false, not 1"),
    ("hop", {"depth": 3}, "hop has no argument 'depth'; known: rules"),
    ("mine.py:tools", {"depth": 3}, "mine.py:tools has no argument 'depth'; it takes none"),
    (
        "mine.py:play",
        {"depth": 3},
        "mine.py:play is a play function and takes no [env.args]; remove depth",
    ),
    (
        "mine.py:guess",
        {},
        "mine.py:guess is an instance of Guess, which every episode would share; name the class "
        "Guess",
    ),
    ("mine.py:Plain", {}, "mine.py:Plain is a class but no environment; write class Plain(tw.Env)"),
    ("mine.py:NoStep", {}, "mine.py:NoStep lacks step"),
    ("mine.py:Fails", {}, "mine.py:Fails cannot be made: OSError: no display"),
    (
        "mine.py:LIMIT",
        {},
        "mine.py:LIMIT is int; an environment is a tw.Env class or a factory of one",
    ),
    ("mine.py:helper", {}, "mine.py:helper needs the argument 'x'"),
    (
        "mine.py:helper",
        {"x": 1},
        "mine.py:helper is not a factory of environments: it returned int",
    ),
    ("mine.py:nothing", {}, "it returned int, not a tw.Env"),
]


@pytest.mark.parametrize(("use", "args", "said"), WRONG, ids=lambda value: str(value)[:30])
def test_what_cannot_be_resolved_says_why_in_one_line(folder, use, args, said):
    with pytest.raises(ConfigError) as caught:
        resolve_env(EnvConfig(use=use, args=args), base=folder)
    assert said in str(caught.value)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("config", "play", "said"),
    [
        (EnvConfig(), None, "names no environment"),
        (
            EnvConfig(use="hop"),
            "mine.py:nothing",
            "is not a play function; write async def nothing",
        ),
        (EnvConfig(use="hop"), "mine.py:lonely", r"is called as play\(task, model\)"),
        (EnvConfig(use="hop", tasks="mine.py"), None, "which function of the file"),
        (
            EnvConfig(use="hop", tasks="mine.py:LIMIT"),
            None,
            "mine.py:LIMIT is int; tasks come from a function or a list",
        ),
    ],
)
def test_other_mistakes(folder, config, play, said):
    with pytest.raises(ConfigError, match=said):
        resolve_env(config, base=folder, play=play)


class Quiz(Env):
    def reset(self, task, *, seed=None):
        return None

    def step(self, action):
        return Step(terminated=True)


def test_objects():
    world = as_env_spec(Quiz, tasks=[Task("a")])
    assert world.name == "Quiz"
    assert as_env_spec(world) is world
    assert world.tasks("train")[0].env == "Quiz"
    assert world.texts() == ["a"]
    with pytest.raises(ConfigError, match="Quiz has no demonstrations"):
        world.demonstrations(1)
    with pytest.raises(TaskError, match="Quiz has no train tasks"):
        as_env_spec(Quiz).tasks("train")
    with pytest.raises(ValueError, match="a split is"):
        world.tasks("test")
    with pytest.raises(ConfigError, match="an instance of Quiz"):
        as_env_spec(Quiz())


def test_installed_packages_convert_environments_of_other_libraries(tmp_path, monkeypatch):
    """A package in a folder of the path: a module, and its metadata with the entry point."""
    (tmp_path / "other_envs.py").write_text(
        "import turnwright as tw\nfrom turnwright.envs.foreign import Framework\nclass Theirs: "
        "pass\ndef convert(found):\n    if isinstance(found.target, Theirs):\n        return "
        "tw.tool_env([], max_turns=3, tasks=[{'prompt': f'Say {n}.'} for n in "
        "range(5)])\nFRAMEWORK = Framework('other', convert)\n"
    )
    (tmp_path / "other_envs-1.dist-info").mkdir()
    (tmp_path / "other_envs-1.dist-info/METADATA").write_text(
        "Metadata-Version: 2.1\nName: other-envs\nVersion: 1\n"
    )
    points = "[turnwright.frameworks]\nother = other_envs:FRAMEWORK\n"
    (tmp_path / "other_envs-1.dist-info/entry_points.txt").write_text(points)
    monkeypatch.syspath_prepend(tmp_path)
    plugins.installed.cache_clear()
    try:
        theirs = importlib.import_module("other_envs").Theirs()
        for target in (theirs, verifiers_env(theirs), verifiers_env(lambda: theirs)):
            spec = as_env_spec(target)
            assert isinstance(spec.factory(), Env)
            assert [task.messages[0].text for task in spec.tasks("eval")] == ["Say 3."]
        assert as_env_spec(theirs).max_turns == 3
        assert pickle.loads(pickle.dumps(verifiers_env(theirs)))().tools == ()
        with pytest.raises(ConfigError, match=r"an environment is a tw\.Env class or a factory"):
            as_env_spec(object())
    finally:
        plugins.installed.cache_clear()


def test_texts_of_one_s_own():
    class Own(Quiz):
        @staticmethod
        def texts(n, seed):
            return ["a b c"] * n

    assert as_env_spec(Own).texts(2) == ["a b c"] * 2


def test_demonstrations_where_a_loop_runs_already():
    async def notebook():
        return resolve_env("hop").demonstrations(3)

    assert len(asyncio.run(notebook())) == 3


def test_nothing_is_left_of_a_file_that_raises(folder):
    before = set(sys.modules)
    with pytest.raises(ConfigError):
        resolve_env("raises.py:X", base=folder)
    assert not {name for name in set(sys.modules) - before if name.startswith("turnwright_user")}


def test_faithful_is_refused_where_no_adapter_reads_it():
    with pytest.raises(ConfigError, match="faithful has no effect"):
        resolve_env(EnvConfig(use="hop", faithful=True))
    with pytest.raises(ConfigError, match="faithful has no effect"):
        resolve_env(EnvConfig(use="gym:FrozenLake-v1", faithful=True, args={"actions": ["left"]}))


def test_an_object_of_ours_imports_no_library_of_games():
    code = (
        "import sys, turnwright as tw\nasync def play(task, model): return "
        "1.0\ntw.as_env_spec(play, tasks=[tw.Task('x', id=str(n)) for n in range(5)])\ngames = "
        "('gymnasium', 'reasoning_gym')\nprint([name for name in sys.modules if "
        "name.startswith('turnwright_compat.') or name in games])\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert "turnwright_compat.skyrl.adapter" in done.stdout
    assert "gymnasium" not in done.stdout
    assert "'reasoning_gym'" not in done.stdout
