"""SkyRL's examples, for `play_trees.py`: environments of SkyRL-Gym, generators, and the
code of its documentation."""

from __future__ import annotations

import ast
import base64
import contextlib
import http.server
import importlib.util
import io
import json
import os
import re
import sys
import tempfile
import threading
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from types import ModuleType
from typing import Any
from unittest import mock

from play_trees import Example, Skip

import turnwright as tw

FOLDERS = ("examples", "integrations", "skyrl-gym", "skyrl-agent", "tests")
"""Folders of the tree with code that a user writes, or would copy."""
BASES = ("BaseTextEnv", "GeneratorInterface", "SkyRLGymGenerator")
DOCS = re.compile(r"^```python\n(.*?)^```", re.MULTILINE | re.DOTALL)


def candidates(tree: Path) -> list[str]:
    """Return `file.py:Class` of each class at the top level of a file that is an
    environment or a generator."""
    classes: list[tuple[str, str, list[str]]] = []
    for folder in FOLDERS:
        for path in sorted((tree / folder).rglob("*.py")):
            classes += [
                (str(path.relative_to(tree)), name, bases)
                for name, bases in _classes(path.read_text("utf-8"))
            ]
    for path in sorted((tree / "docs").rglob("*.mdx")):
        for block in DOCS.findall(path.read_text("utf-8")):
            classes += [
                (str(path.relative_to(tree)), name, bases) for name, bases in _classes(block)
            ]

    known = set(BASES)
    size = 0
    while size != len(known):
        size = len(known)
        known |= {name for _, name, bases in classes if known & set(bases)}
    found = [f"{path}:{name}" for path, name, bases in classes if known & set(bases)]
    return [one for one in dict.fromkeys(found) if not one.endswith("base_text_env.py:BaseTextEnv")]


def _classes(source: str) -> list[tuple[str, list[str]]]:
    try:
        tree = ast.parse(source)
    except SyntaxError:
        return []
    return [
        (node.name, [ast.unparse(base).partition("[")[0].rpartition(".")[2] for base in node.bases])
        for node in tree.body
        if isinstance(node, ast.ClassDef)
    ]


class Server:
    """Answers POST requests of a test on a free port of this machine, by a
    function of their JSON."""

    def __init__(self, answer: Callable[[Any], Any]) -> None:
        class Handler(http.server.BaseHTTPRequestHandler):
            def do_POST(self) -> None:
                data = self.rfile.read(int(self.headers.get("Content-Length") or 0))
                body = json.dumps(answer(json.loads(data or b"null"))).encode()
                self.send_response(200)
                self.send_header("Content-Type", "application/json")
                self.send_header("Content-Length", str(len(body)))
                self.end_headers()
                self.wfile.write(body)

            def log_message(self, *args: Any) -> None:
                pass

        self._server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self._server.daemon_threads = True
        self.url = f"http://127.0.0.1:{self._server.server_address[1]}"

    @contextlib.contextmanager
    def __call__(self, **variables: str) -> Iterator[None]:
        thread = threading.Thread(target=self._server.serve_forever, daemon=True)
        thread.start()
        try:
            with mock.patch.dict(os.environ, variables):
                yield
        finally:
            self._server.shutdown()


@contextlib.contextmanager
def modules(**made: ModuleType | Any) -> Iterator[None]:
    """Replace modules that are not installed, by their names with `__` for a dot."""
    named = {name.replace("__", "."): value for name, value in made.items()}
    with mock.patch.dict(sys.modules, named):
        yield


def module(name: str, **values: Any) -> ModuleType:
    made = ModuleType(name)
    made.__dict__.update(values, __path__=[])
    return made


def needs(*packages: str) -> Callable[[Example], Example | Skip]:
    """Play an example where the packages that it imports are installed."""
    missing = [one for one in packages if importlib.util.find_spec(one) is None]

    def given(example: Example) -> Example | Skip:
        if not missing:
            return example
        return Skip(
            example.use,
            f"it imports {', '.join(missing)}; install {'it' if len(missing) == 1 else 'them'}",
            example.names,
        )

    return given


def heard(one: tw.Trajectory) -> list[str]:
    """Return the texts of what an environment answered."""
    return [
        message.text
        for message in one.messages[one.turns[0].context and len(one.turns[0].messages) :]
        if message.role == "user"
    ]


def answers(reward: float, *texts: str) -> Callable[[Sequence[tw.Trajectory]], bool]:
    """Check the reward, and the answers of the environment: in full, or up to `...`."""

    def same(text: str, expected: str) -> bool:
        return text.startswith(expected[:-3]) if expected.endswith("...") else text == expected

    def check(found: Sequence[tw.Trajectory]) -> bool:
        for one in found:
            given = heard(one)
            if one.reward is None or abs(one.reward - reward) > 1e-9 or len(given) != len(texts):
                return False
            if not all(map(same, given, texts)):
                return False
        return True

    return check


def row(truth: Any, text: str = "Go.", **columns: Any) -> dict[str, Any]:
    return {
        "prompt": [{"role": "user", "content": text}],
        "reward_spec": {"method": "rule", "ground_truth": truth},
        **columns,
    }


def png() -> str:
    from PIL import Image

    buffer = io.BytesIO()
    Image.new("RGB", (84, 56), "green").save(buffer, format="PNG")
    return "data:image/png;base64," + base64.b64encode(buffer.getvalue()).decode()


def vlm() -> tw.Renderer:
    """Return the renderer of a small model that sees."""
    tests = Path(__file__).parent.parent / "tests"
    if str(tests) not in sys.path:
        sys.path.append(str(tests))
    from kit.vision import tiny_vlm_directory

    folder = Path(tempfile.mkdtemp())
    tiny_vlm_directory(folder)
    return tw.load_renderer(folder)


def pictures(number: int) -> Callable[[Sequence[tw.Trajectory]], bool]:
    """Check how many pictures the last context has."""

    def check(found: Sequence[tw.Trajectory]) -> bool:
        return all(len(one.media_placements(one.turns[-1].prompt)) == number for one in found)

    return check


def both(
    *checks: Callable[[Sequence[tw.Trajectory]], bool],
) -> Callable[[Sequence[tw.Trajectory]], bool]:
    return lambda found: all(check(found) for check in checks)


OF_SKYRL = ("loguru", "httpx", "omegaconf", "cloudpathlib", "pybase64")
"""Packages that SkyRL's own generators import."""
GYM = "skyrl-gym/skyrl_gym/envs/"
TRAIN = "examples/train/"
INTEGRATIONS = "examples/train_integrations/"


# Services


def judged(request: Any) -> Any:
    """Answer as a judge that compares the number at the end of both solutions."""
    text = request["messages"][0]["content"]
    gold = text.partition("GOLD SOLUTION:\n")[2].partition("\n\nPREDICTED")[0].strip()
    predicted = text.partition("PREDICTED SOLUTION:\n")[2].partition("\n\nAnswer:")[0]
    score = int(predicted.strip().endswith(f"#### {gold}"))
    return {
        "id": "1",
        "object": "chat.completion",
        "created": 0,
        "model": request["model"],
        "choices": [
            {
                "index": 0,
                "finish_reason": "stop",
                "message": {"role": "assistant", "content": f"### Final Score: {score}"},
            }
        ],
    }


JUDGE = Server(judged)
SEARCH = Server(
    lambda request: {"result": [[{"document": {"contents": f"about {request['query']}"}}]]}
)


@contextlib.contextmanager
def rubric() -> Iterator[None]:
    """Answer the judge that the evidence environments ask with `httpx`: precision 9, recall 7."""

    class Answer:
        def raise_for_status(self) -> None:
            pass

        def json(self) -> Any:
            return {
                "choices": [
                    {"message": {"content": json.dumps({"precision_score": 9, "recall_score": 7})}}
                ]
            }

    class Client:
        def __init__(self, timeout: float) -> None:
            pass

        def __enter__(self) -> Client:
            return self

        def __exit__(self, *error: object) -> None:
            pass

        def post(self, url: str, headers: Any, json: Any) -> Answer:
            assert url == "https://api.openai.com/v1/chat/completions", url
            return Answer()

    with (
        modules(httpx=module("httpx", Client=Client)),
        mock.patch.dict(os.environ, {"OPENAI_API_KEY": "key"}),
    ):
        yield


@contextlib.contextmanager
def python_312() -> Iterator[None]:
    """Give the tree's own modules what they have of Python 3.12: a
    TypedDict that pydantic takes."""
    import typing

    import typing_extensions

    with mock.patch.object(typing, "TypedDict", typing_extensions.TypedDict):
        yield


@contextlib.contextmanager
def openenv() -> Iterator[None]:
    """Replace OpenEnv's clients, whose environments are container images, by
    two that answer here."""

    class Echo:
        @classmethod
        def from_docker_image(cls, name: str) -> Echo:
            assert name == "echo_env:latest", name
            return cls()

        def reset(self) -> None:
            pass

        def step(self, action: Any) -> Any:
            observation = {"echoed_message": action.message, "length": [0] * 30}
            return module(
                "Result", observation=observation, reward=0.1 * len(action.message), done=False
            )

        def close(self) -> None:
            pass

    class Action:
        def __init__(self, **fields: Any) -> None:
            self.__dict__.update(fields)

    names = {
        "echo_env": ("EchoEnv", "EchoAction"),
        "coding_env": ("CodingEnv", "CodeAction"),
        "openspiel_env": ("OpenSpielEnv", "OpenSpielAction"),
        "atari_env": ("AtariEnv", "AtariAction"),
        "sumo_rl_env": ("SumoRLEnv", "SumoAction"),
        "finrl_env": ("FinRLEnv", "FinRLAction"),
    }
    made = {
        f"envs.{name}": module(name, **{env: Echo, action: Action})
        for name, (env, action) in names.items()
    }
    with mock.patch.dict(sys.modules, {"envs": module("envs"), **made}):
        yield


@contextlib.contextmanager
def openreward() -> Iterator[None]:
    """Replace the client of OpenReward by one whose tool counts."""

    class Session:
        def __enter__(self) -> Session:
            return self

        def __exit__(self, *error: object) -> None:
            pass

        def call_tool(self, tool_name: str, input: Any) -> Any:
            block = module("block", type="text", text=f"{tool_name} of {input}")
            return module(
                "output",
                blocks=[block],
                finished=input.get("last", False),
                reward=input.get("reward"),
            )

    class OpenReward:
        def __init__(self) -> None:
            session = module("environment", session=lambda split, index: Session())
            self.environments = module("environments", get=lambda name: session)

        def close(self) -> None:
            pass

    messages = ("AssistantMessage", "SystemMessage", "ToolCall", "ToolResult", "UserMessage")
    base = module("openreward.api.rollouts.serializers.base", **dict.fromkeys(messages, dict))
    names = ("openreward.api", "openreward.api.rollouts", "openreward.api.rollouts.serializers")
    made = {name: module(name) for name in names} | {base.__name__: base}
    with mock.patch.dict(
        sys.modules, {"openreward": module("openreward", OpenReward=OpenReward), **made}
    ):
        yield


@contextlib.contextmanager
def maze() -> Iterator[None]:
    """Replace VisGym, which is no package, by a world of three cells."""
    import numpy

    class Maze:
        def __init__(self, relaxed: bool = False) -> None:
            self.cell = 0
            self.action_space = module("space", get_function_names=lambda: ["move", "stop"])

        def reset(self, seed: int | None = None) -> Any:
            assert seed == 3, seed
            return None, {}

        def get_prompt(self) -> str:
            return "Go right twice, then stop."

        def render(self) -> Any:
            return numpy.full((56, 84, 3), 60 * self.cell, numpy.uint8)

        def step(self, action: str) -> Any:
            name, value = ast.literal_eval(action)
            if name == "stop":
                return None, float(self.cell == 2), True, False, {}
            self.cell += value == 0
            return None, 0.0, False, False, {"env_feedback": f"cell {self.cell}"}

        def close(self) -> None:
            pass

    def make(name: str, **options: Any) -> Maze:
        assert name == "maze_2d/easy", name
        return Maze(**options)

    with modules(gymnasium=module("gymnasium", make=make)):
        yield


@contextlib.contextmanager
def database(folder: Path) -> Iterator[None]:
    import sqlite3

    path = folder / "spider/database/shop/shop.sqlite"
    path.parent.mkdir(parents=True, exist_ok=True)
    path.unlink(missing_ok=True)
    with contextlib.closing(sqlite3.connect(path)) as connection:
        connection.executescript(
            "create table items (name text, price int); insert into items values ('tea', 3), "
            "('pot', 9);"
        )
    yield


DATABASES = Path(tempfile.mkdtemp())
SHOP = str(DATABASES / "spider/database/shop/shop.sqlite")


def call(answer: Any) -> str:
    return f'<tool_call>{{"name": "calc_score", "arguments": {{"answer": "{answer}"}}}}</tool_call>'


PAPERS = json.dumps(
    {"p1": "### PAPER: One\n<abstract>\nshort\n</abstract>\nThe speed is 5. It grows."}
)
EVIDENCE = {
    "prompt": [{"role": "user", "content": "How fast?"}],
    "env_class": "evidence_rlm",
    "reward_spec": {
        "ground_truth": None,
        "evidence": [{"paperId": "p1", "selections": [{"text": "The speed is 5."}]}],
    },
    "extra_info": {"context_text": PAPERS},
}
LOOK = '```repl\ns = search(context, "speed", window=40)\n```'
FINAL = "```repl\nFINAL_VAR([s[0]])\n```"


def evidence(reward: float) -> Callable[[Sequence[tw.Trajectory]], bool]:
    """Check that the prompt of a turn is in that turn's context alone, as SkyRL's
    own generator has it."""
    decode = tw.byte_renderer().decode

    def check(found: Sequence[tw.Trajectory]) -> bool:
        for one in found:
            first, second = (decode(one.prompt_ids(number)) for number in range(2))
            if one.reward is None or abs(one.reward - reward) > 1e-9 or len(one.turns) != 2:
                return False
            if "You have not interacted" not in first or "You have not interacted" in second:
                return False
            places = [
                second.find(text)
                for text in ("Your context is a dict", LOOK, "Code executed:", "The history before")
            ]
            if -1 in places or places != sorted(places):
                return False
        return True

    return check


EXAMPLES: list[Example | Skip] = [
    Example(
        f"{TRAIN}multiply/env.py:MultiplyEnv",
        [row("6", env_class="multiply")],
        ["2 times 3", r"\boxed{5}", r"\boxed{6}"],
        check=answers(
            1.0,
            r"Please provide your answer in the format \boxed{your_answer}.",
            "Your answer '5' is incorrect. Please try again.",
        ),
    ),
    Example(
        f"{TRAIN}geometry3k/env.py:Geometry3kEnv",
        [
            row("5", env_class="geometry3k")
            | {
                "prompt": [
                    {
                        "role": "user",
                        "content": [
                            {"type": "image_url", "image_url": {"url": png()}},
                            {"type": "text", "text": "x?"},
                        ],
                    }
                ]
            }
        ],
        ["no, " + call(4), call(5)],
        renderer=vlm,
        check=both(
            answers(
                1.0,
                "calc_score result: 0.0. Parsed answer '4' does not match the reference. Your "
                "answer is wrong. You may need to reason in a different way. Don't repeat your "
                "answer unless necessary.",
            ),
            pictures(1),
        ),
    ),
    Example(
        f"{TRAIN}llm_as_a_judge/llm_judge_env.py:GSM8kLLMJudgeEnv",
        [row("7", env_class="llm_as_a_judge")],
        ["so #### 7"],
        args={"base_url": f"{JUDGE.url}/v1", "model": "judge"},
        services=lambda: JUDGE(OPENAI_API_KEY="key"),
        reward=1.0,
    ),
    Example(
        f"{TRAIN}visgym/env_instruct.py:VisGymEnv",
        [
            {
                "prompt": [{"role": "user", "content": "placeholder"}],
                "visgym_env_id": "maze_2d/easy",
                "seed": 3,
            }
        ],
        ["<action>right</action>", "hm", "<action>right</action>", "<action>stop</action>"],
        services=maze,
        renderer=vlm,
        check=both(
            answers(
                1.0,
                "cell 1",
                "Action parsing failed. Could not find a valid action in your response....",
                "cell 2",
            ),
            pictures(4),
        ),
    ),
    Example(
        f"{TRAIN}visgym/env_sft.py:VisGymEnv",
        [
            {
                "prompt": [{"role": "user", "content": "placeholder"}],
                "visgym_env_id": "maze_2d/easy",
                "seed": 3,
            }
        ],
        [
            "<observation>o</observation><justification>j</justification><action>('move', "
            "0)</action>",
            "('move', 0)",
            "(stop, 'stop')",
        ],
        services=maze,
        renderer=vlm,
        check=both(answers(0.8 + 0.2 / 3, "cell 1", "cell 2"), pictures(3)),
    ),
    Example(
        f"{INTEGRATIONS}openenv/env.py:OpenEnv",
        [
            {
                "prompt": [{"role": "user", "content": "Echo."}],
                "env_class": "openenv",
                "env_name": "echo_env",
            }
        ],
        ["<action>ab</action>", "<action>abc</action>"],
        services=openenv,
        limits={"turns": 2},
        check=answers(
            0.2 + 0.1 * 3,
            f"echoed_message: ab\nlength: {[0] * 20} ... (len=30)\n given this information, try "
            "again.",
        ),
    ),
    needs("loguru")(
        Example(
            f"{INTEGRATIONS}openreward/env.py:OpenRewardEnv",
            [
                {
                    "prompt": [{"role": "user", "content": "Count."}],
                    "env_name": "a/b",
                    "split": "train",
                    "task_index": 2,
                }
            ],
            [
                '<tool_call>{"name": "count", "arguments": {"reward": 0.5}}</tool_call>',
                "<tool_call>{</tool_call>",
                '<tool_call>{"name": "count", "arguments": {"reward": 1.0, "last": '
                "true}}</tool_call>",
            ],
            services=openreward,
            check=answers(
                1.5,
                "<tool_response>\ncount of {'reward': 0.5}\n</tool_response>",
                "<tool_response>\nError parsing tool call: ...",
            ),
        )
    ),
    Example(
        "integrations/arctic_rl/envs/bird.py:BirdEnv",
        [
            {
                "prompt": [{"role": "user", "content": "How many items?"}],
                "env_class": "bird_sql",
                "data_source": "bird",
                "reward_model": {"ground_truth": "select count(*) from items"},
                "extra_info": {"db_path": SHOP},
            }
        ],
        ["<think>count</think>\n```sql\nselect count(name) from items\n```"],
        services=lambda: database(DATABASES),
        reward=1.0,
    ),
    Skip(
        "integrations/arctic_rl/generator.py:ArcticGenerator",
        "its engine is the Arctic RL platform: the constructor takes that platform's client in "
        "place of SkyRL's",
    ),
    needs(*OF_SKYRL)(
        Example(
            f"{TRAIN}rlm/rlm_generator.py:RLMGymGenerator",
            [EVIDENCE],
            [LOOK, FINAL],
            args={"generator_cfg": {"step_wise_trajectories": True}},
            services=rubric,
            check=evidence(0.8),
        )
    ),
    needs("loguru")(
        Example(
            f"{TRAIN}rlm/multi_paper_env/evidence_rlm_env.py:EvidenceRLMEnv",
            [EVIDENCE],
            [LOOK, FINAL],
            services=rubric,
            check=evidence(0.8),
        )
    ),
    needs("loguru")(
        Example(
            f"{TRAIN}rlm/multi_paper_env/evidence_rlm_env.py:MultipaperEvidenceRLMEnv",
            [EVIDENCE | {"env_class": "multipaper_evidence_rlm"}],
            [LOOK, FINAL],
            services=rubric,
            check=evidence(0.8),
        )
    ),
    Example(f"{GYM}gsm8k/env.py:GSM8kEnv", [row("12")], ["so #### 12"], reward=1.0),
    Example(
        f"{GYM}gsm8k/multi_turn_env.py:GSM8kMultiTurnEnv",
        [row("7", extra_info={})],
        ["is it #### 3", "or no number", "it is #### 7"],
        check=answers(
            1.0 + 0.2 / 8,
            *[
                "Please provide your step-by-step reasoning, and also include a tentative numeric "
                "answer at the end in..."
            ]
            * 2,
        ),
    ),
    Example(
        f"{GYM}aime/env.py:AIMEEnv",
        [{"prompt": [{"role": "user", "content": "?"}], "reward_model": {"ground_truth": "12"}}],
        ["so Answer: 12"],
        reward=1.0,
    ),
    needs("pandas")(
        Example(
            f"{GYM}lcb/env.py:LCBEnv",
            [row(json.dumps([{"input": "2\n", "output": "4\n", "testtype": "stdin"}]))],
            ["```python\nprint(int(input()) * 2)\n```"],
            reward=1.0,
        )
    ),
    needs("pandas", "requests", "omegaconf")(
        Example(
            f"{GYM}search/env.py:SearchEnv",
            [row({"target": "Paris"})],
            ["<search>capital</search>", "no", "<answer>Paris</answer>"],
            args={"search_url": f"{SEARCH.url}/retrieve"},
            services=SEARCH,
            check=answers(
                1.0,
                '\n<information>{"result": "Doc 1: about capital\\n"}</information>\n',
                "\n<information></information>\n",
            ),
        )
    ),
    needs("pandas", "requests")(
        Example(
            f"{GYM}searchcode/env.py:SearchCodeEnv",
            [row("4")],
            [
                "<tool><python>print(2 + 2)</python></tool>",
                "<tool><nothing></tool>",
                "<solution>#### 4</solution>",
            ],
            check=answers(1.0, "4", "No valid inner tool tag found inside <tool> block."),
        )
    ),
    needs("pandas", "requests", "func_timeout", "omegaconf")(
        Example(
            f"{GYM}sql/env.py:SQLEnv",
            [row("select name from items where price > 5", db_id="shop", data="spider")],
            [
                "<think>a</think><sql>select max(price) from items</sql>",
                "<think>b</think><solution>select name from items where price > 5</solution>",
            ],
            args={"db_path": str(DATABASES)},
            services=lambda: database(DATABASES),
            check=answers(
                1.0,
                "\n\n<observation> 0\n 9\n<reminder>You have 7 turns left to complete the "
                "task.</reminder></observation>\n\n",
            ),
        )
    ),
    Example(
        f"{GYM}rlm/env.py:BaseRLMEnv",
        [EVIDENCE],
        [
            "```repl\nx = len(context)\nprint(x)\n```",
            "nothing",
            "```repl\nprint('so')\n```\nFINAL(102)",
        ],
        check=answers(
            1.0,
            "Code executed:\n```python\nx = len(context)\nprint(x)\n```\n\nREPL output:...",
            "[No ```repl``` code block found. Wrap your code in ```repl\\n...\\n``` blocks.]",
            "The history before is your previous interactions with the REPL environment. ...",
        ),
    ),
    Example(
        "skyrl-gym/tests/test_rlm.py:_TestRLMEnv",
        [EVIDENCE],
        ["```repl\nx = len(context)\nprint(x)\n```", "```repl\nFINAL_VAR(x)\n```"],
        reward=1.0,
    ),
    needs(*OF_SKYRL)(
        Example(
            "tests/train/generators/test_skyrl_gym_generator_chat_templating.py:CPUTestEnv",
            [{"prompt": [{"role": "user", "content": "a"}]}],
            ["b", "c", "d"],
            services=python_312,
            check=answers(0.0, "1", "2"),
        )
    ),
    needs(*OF_SKYRL)(
        Example(
            "tests/train/generators/test_skyrl_vlm_generator.py:CPUVLMTestEnv",
            [{"prompt": [{"role": "user", "content": "a"}]}],
            ["b", "c", "d"],
            services=python_312,
            check=answers(1.0, "1", "2"),
        )
    ),
    needs(*OF_SKYRL, "ray", "vllm")(
        Example(
            "tests/backends/skyrl_train/gpu/gpu_ci/test_skyrl_gym_generator.py:TestEnv",
            [{"prompt": [{"role": "user", "content": "a"}]}],
            ["b", "c", "d"],
            services=python_312,
            check=answers(0.0, "give me another solution 1", "give me another solution 2"),
        )
    ),
    needs(*OF_SKYRL, "ray", "vllm")(
        Example(
            "tests/backends/skyrl_train/gpu/gpu_ci/test_skyrl_vlm_gym_generator.py:ColorSquareEnv",
            [{"prompt": [{"role": "user", "content": "Look."}]}],
            ["Red.", "blue"],
            services=python_312,
            renderer=vlm,
            check=both(
                answers(1.0, "What color is this square? Answer with just the color name."),
                pictures(2),
            ),
        )
    ),
    Skip(
        "tests/train/test_eval.py:DummyGenerator",
        "it answers with the output that its test gives it, without a model",
    ),
    Skip(
        "docs/content/docs/tutorials/new_env.mdx:MultiplyEnv",
        "an excerpt without imports and constructor",
    ),
    Skip(
        "docs/content/docs/tutorials/tools_guide.mdx:MyEnvironment",
        "a sketch: it imports `skygym`, which is no package, and has no step",
        ("docs/content/docs/tutorials/tools_guide.mdx:AdvancedEnvironment",),
    ),
    Skip(
        "docs/content/docs/examples/openenv.mdx:OpenEnv",
        "an excerpt of the example's class, without its imports",
    ),
    Skip(
        f"{TRAIN}mini_swe_agent/mini_swe_generator.py:MiniSweAgentGenerator",
        "mini-swe-agent runs each task in its container image",
        ("docs/content/docs/examples/mini_swe_agent.mdx:MiniSweAgentGenerator",),
    ),
    Skip(
        f"{INTEGRATIONS}harbor/harbor_generator.py:HarborGenerator",
        "a Harbor trial runs its task in a container image",
    ),
    Skip(
        f"{TRAIN}thunder_agent/skyrl_integration/generator.py:ThunderAgentHarborGenerator",
        "it imports HarborAgentOutput, which the tree's harbor_generator.py no longer has",
    ),
    Skip(
        f"{INTEGRATIONS}verifiers/verifiers_generator.py:VerifiersGenerator",
        "it imports ProcessedOutputs of `verifiers` and calls process_env_results_vllm, which its "
        "release 0.4.0 does not have",
    ),
    Skip(
        "skyrl-agent/skyrl_agent/integrations/skyrl_train/skyrl_train_main.py:SkyRLAgentGenerator",
        "it hands over to skyrl-agent, whose tasks run in container images (OpenHands) and with "
        "closed search services",
    ),
]
