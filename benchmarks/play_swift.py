"""ms-swift's plugins, documented examples and built-in names, for `play_trees.py`."""

from __future__ import annotations

import ast
import base64
import contextlib
import io
import json
import os
import re
import sys
import tempfile
import threading
from collections.abc import Iterator, Mapping
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

from play_trees import Example, Skip

PLUGIN = "examples/train/grpo/plugin/plugin.py"
DEEPEYES = "examples/train/grpo/plugin/deepeyes/deepeyes_plugin.py"
TREE = "examples/train/grpo/plugin/treepo/tree_rollout_plugin.py"
SUDOKU = "examples/train/grpo/plugin/openenv/sudoku_scheduler.py"
GSM8K = "examples/train/grpo/plugin/gsm8k/gsm8k_plugin.py"
LAKE = "examples/megatron/grpo/multi_turn/frozen_lake_plugin.py"
GUIDE = "docs/source_en/Instruction/GRPO/DeveloperGuide"
REGISTRIES = ("orms", "rm_plugins", "multi_turns", "envs", "loss_scale_map")
FLAGS = {"multi_turn_scheduler": "swift", "reward_funcs": "orms"}
"""Flags of launch scripts that name what ms-swift has built in or a plugin registers."""


def candidates(tree: Path) -> Iterator[str]:
    """Yield what plugins and complete blocks of the guides register, and the built-in names
    that launch scripts use."""
    registered = set()
    for path, source in sources(tree):
        for registry, name, target in registrations(source):
            registered.add((registry, name))
            yield f"{path}:{target}"
    for kind, name in sorted(built_in(tree)):
        if (kind.replace("swift", "multi_turns"), name) not in registered:
            yield f"{kind}:{name}"


def sources(tree: Path) -> Iterator[tuple[str, str]]:
    """Yield path and text of the examples, and of each block of the guides
    that is a user's file."""
    for path in sorted((tree / "examples").rglob("*.py")):
        yield str(path.relative_to(tree)), path.read_text()
    for path in sorted((tree / "docs/source_en").rglob("*.md")):
        for number, block in enumerate(
            re.findall(r"```python\n(.*?)```", path.read_text(), re.DOTALL)
        ):
            if "from swift" in block and not re.search(
                r"^\s+(# .*\n\s+)*\.\.\.$", block, re.MULTILINE
            ):
                yield f"{path.relative_to(tree).with_suffix('')}_{number}.py", block


def registrations(source: str) -> Iterator[tuple[str, str, str]]:
    """Yield registry, name and class of each class that a file registers; none of a
    text that is no Python."""
    with contextlib.suppress(SyntaxError):
        body = ast.parse(source).body
        own = {node.name for node in body if isinstance(node, ast.ClassDef)}
        for node in body:
            if (
                not isinstance(node, ast.Assign)
                or not isinstance(node.value, ast.Name)
                or node.value.id not in own
            ):
                continue
            for target in node.targets:
                if isinstance(target, ast.Subscript) and ast.unparse(target.value) in REGISTRIES:
                    yield ast.unparse(target.value), ast.literal_eval(target.slice), node.value.id


def built_in(tree: Path) -> set[tuple[str, str]]:
    """Return kind and name of each value of `FLAGS` in launch scripts."""
    found = set()
    for path in sorted((tree / "examples").rglob("*.sh")):
        text = path.read_text().replace("\\\n", " ")
        for flag, kind in FLAGS.items():
            for values in re.findall(rf"--{flag}((?: +[a-z]\w*)+)", text):
                found |= {(kind, value) for value in values.split()}
    return found


class Blocks(Mapping[str, str]):
    """Files of the guides' blocks, read from the tree when it is copied."""

    def __init__(self, *names: str) -> None:
        self.names = names

    def __getitem__(self, name: str) -> str:
        return dict(sources(Path(sys.argv[1]).resolve() / "swift"))[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self.names)

    def __len__(self) -> int:
        return len(self.names)


def user(text: str) -> list[dict[str, str]]:
    return [{"role": "user", "content": text}]


def rewards(file: str, *names: str, **columns: Any) -> dict[str, Any]:
    """Return fields of an example that plays one turn for rewards of a plugin."""
    args = {"external_plugins": [file], "reward_funcs": list(names)}
    return {
        "use": "swift:single_turn",
        "rows": [{"messages": user("Go."), **columns}],
        "args": args,
    }


def texts(found: Any, role: str = "user") -> list[str]:
    """Return the texts of a role in the conversation of the first episode's last turn."""
    last = len(found[0].turns) - 1
    return [message.text for message in found[0].conversation(last) if message.role == role]


def context(found: Any, turn: int) -> str:
    """Return the text of a context of the first episode, in bytes."""
    import turnwright as tw

    return str(tw.byte_renderer().decode(found[0].prompt_ids(turn)))


@contextlib.contextmanager
def modules(**found: dict[str, Any]) -> Iterator[None]:
    """Put modules of clients in place, by name with `__` for dots, and take them away again."""
    made: dict[str, ModuleType] = {}
    for name, content in found.items():
        parts = name.split("__")
        for count in range(1, len(parts) + 1):
            full = ".".join(parts[:count])
            module = made.setdefault(full, ModuleType(full))
            module.__path__ = []
            module.__spec__ = SimpleNamespace(
                name=full, loader=None, submodule_search_locations=[], parent=full
            )
            module.__dict__.update(content if count == len(parts) else {})
    before = {name: sys.modules.get(name) for name in made}
    sys.modules.update(made)
    try:
        yield
    finally:
        for name, old in before.items():
            sys.modules.pop(name, None)
            if old is not None:
                sys.modules[name] = old


@contextlib.contextmanager
def server(answer: Any, port: int = 0, **environment: str) -> Iterator[list[Any]]:
    """Serve JSON on this machine: `answer(path, body)`; variables of `environment`
    have the URL for `URL`."""
    seen: list[Any] = []

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self.do_POST()

        def do_POST(self) -> None:
            body = self.rfile.read(int(self.headers.get("Content-Length") or 0))
            given = json.loads(body) if body else None
            seen.append((self.path, given))
            made = json.dumps(answer(self.path, given)).encode()
            self.send_response(200)
            self.send_header("Content-Type", "application/json")
            self.send_header("Content-Length", str(len(made)))
            self.end_headers()
            self.wfile.write(made)

        def log_message(self, *_: Any) -> None: ...

    ThreadingHTTPServer.allow_reuse_address = True
    listener = ThreadingHTTPServer(("127.0.0.1", port), Handler)
    thread = threading.Thread(target=listener.serve_forever, daemon=True)
    thread.start()
    made = {
        key: value.replace("URL", f"http://127.0.0.1:{listener.server_port}")
        for key, value in environment.items()
    }
    before = {key: os.environ.get(key) for key in made}
    os.environ.update(made)
    try:
        yield seen
    finally:
        listener.shutdown()
        listener.server_close()
        for key, old in before.items():
            os.environ.pop(key)
            if old is not None:
                os.environ[key] = old


def judge(reply: str) -> Any:
    """Return the answers of an OpenAI server whose model gives one reply."""

    def answer(path: str, body: Any) -> Any:
        if path.endswith("/models"):
            return {
                "object": "list",
                "data": [{"id": "judge", "object": "model", "created": 0, "owned_by": "us"}],
            }
        choice = {
            "index": 0,
            "finish_reason": "stop",
            "message": {"role": "assistant", "content": reply},
        }
        return {
            "id": "x",
            "object": "chat.completion",
            "created": 0,
            "model": "judge",
            "choices": [choice],
        }

    return answer


def judge0(path: str, body: Any) -> Any:
    """Accept a program for the second of the test cases only."""
    given = body["language_id"], body["source_code"], body["expected_output"]
    return {
        "status": {
            "description": "Accepted" if given == (71, "print(1)\n", "1") else "Wrong Answer"
        }
    }


class Sandbox:
    """E2B's sandbox: a script runs here, in a process."""

    @classmethod
    async def create(cls, **_: Any) -> Sandbox:
        return cls()

    async def run_code(self, script: str, language: str, timeout: float) -> Any:
        import subprocess
        import textwrap

        lines = textwrap.dedent(script).strip().splitlines()
        program = "\n".join([*lines[:-1], f"print({lines[-1]})"])
        ran = subprocess.run(
            [sys.executable, "-c", program], capture_output=True, text=True, timeout=timeout
        )
        return SimpleNamespace(text=ran.stdout.strip())

    async def kill(self) -> None: ...


def e2b() -> Any:
    return modules(
        e2b={}, e2b_code_interpreter={"AsyncSandbox": Sandbox}, dotenv={"load_dotenv": lambda: None}
    )


class Session:
    """aiohttp's session for a host that is not ours: the score of a text is
    a tenth of its length."""

    async def __aenter__(self) -> Any:
        return self

    async def __aexit__(self, *_: Any) -> None: ...

    def post(self, url: str, json: Any) -> Any:
        self.sent = json["text"]
        return self

    async def json(self) -> Any:
        return {"score": len(self.sent) / 10}


def picture(width: int = 320, height: int = 240) -> str:
    from PIL import Image

    buffer = io.BytesIO()
    Image.new("RGB", (width, height), "gray").save(buffer, format="PNG")
    return "data:image/png;base64," + base64.b64encode(buffer.getvalue()).decode()


def vlm() -> Any:
    """Return the renderer of a tiny vision-language model."""
    sys.path.insert(0, str(Path(__file__).parents[1] / "tests"))
    from kit.vision import tiny_vlm_directory

    import turnwright as tw

    folder = Path(tempfile.mkdtemp())
    tiny_vlm_directory(folder, weights=False)
    return tw.load_renderer(folder)


@contextlib.contextmanager
def deepeyes() -> Iterator[None]:
    """A judge who agrees, and the fetching of an image that has its size already."""
    with (
        server(judge("Judgement: 1"), port=8000),
        modules(qwen_vl_utils={"fetch_image": lambda part: part["image"]}),
    ):
        yield


def zoom(box: list[int]) -> str:
    call = {"name": "image_zoom_in_tool", "arguments": {"bbox_2d": box}}
    return f"<think>closer</think><tool_call>{json.dumps(call)}</tool_call>"


def zoomed(found: Any) -> bool:
    """0.8 for the answer and 1.2 for the tool; the second picture is in the second context."""
    (one,) = found
    sizes = [
        (block.media.width, block.media.height)
        for block in one.media_placements(one.turns[1].prompt)
    ]
    said = texts(found)[1]
    return (
        abs(one.reward - 2.0) < 1e-9
        and len(sizes) == 2
        and "<tool_response>" in said
        and "Error" not in said
    )


def modelscope() -> Any:
    return modules(modelscope__preprocessors__templates__utils={"Messages": list})


def tree_rows(found: Any) -> bool:
    """Eight trajectories, each with the reward of its own answer; they share the first reply.

    A trajectory has all replies that are equal and answer the same messages: of those the
    loop's rows do not say which.
    """
    (one,) = found
    right = len(one.row_rewards) == 8
    for row in one.row_rewards:
        deepest = max(len(one.conversation(turn)) for turn in row.turns)
        answers = {
            one.turns[turn].reply.text
            for turn in row.turns
            if len(one.conversation(turn)) == deepest
        }
        right = (
            right
            and 0 in row.turns
            and len(answers) == 1
            and row.reward == float("boxed{4}" in answers.pop())
        )
    return right


def tree_reply(messages: Any, rng: Any) -> str:
    """No answer at first; then a right one or a wrong one."""
    if sum(message.role == "assistant" for message in messages) < 1:
        return "Let me think."
    return rng.choice(["It is \\boxed{4}.", "It is \\boxed{5}.", "Let me think again."])


BOARD = """
   C1 C2 C3   C4 C5 C6   C7 C8 C9
R1 5 3 . | . 7 . | . . .
R2 6 . . | 1 9 5 | . . .
R3 . 9 8 | . . . | . 6 .
- - - - - - - - - - - -
R4 8 . . | . 6 . | . . 3
R5 4 . . | 8 . 3 | . . 1
R6 7 . . | . 2 . | . . 6
- - - - - - - - - - - -
R7 . 6 . | . . . | 2 8 .
R8 . . . | 4 1 9 | . . 5
R9 . . . | . 8 . | . 7 9
"""


class OpenEnv:
    """OpenEnv's generic client of TextArena's Sudoku: messages grow; a place in the
    first free cell is right."""

    opened = 0

    def __init__(self, base_url: str) -> None:
        assert base_url == "http://127.0.0.1:8000"
        self.text = BOARD

    def sync(self) -> Any:
        return self

    def __enter__(self) -> Any:
        OpenEnv.opened += 1
        return self

    def __exit__(self, *_: Any) -> None:
        OpenEnv.opened -= 1

    def reset(self) -> Any:
        return self._state(0.0)

    def step(self, action: dict[str, Any]) -> Any:
        right = action["message"] == "[1 3 4]"
        self.text += (
            BOARD.replace("R1 5 3 .", "R1 5 3 4") if right else "\nInvalid move: the cell is taken."
        )
        return self._state(float(right))

    def _state(self, reward: float) -> Any:
        return SimpleNamespace(
            observation={"messages": [{"content": self.text}]}, reward=reward, done=False
        )


def openenv() -> Any:
    return modules(openenv__core__generic_client={"GenericEnvClient": OpenEnv})


def sudoku(found: Any) -> bool:
    """The last turn's total: cells (1 - 1 - 1) / 3, moves 1 / 3, repetition -2 / 3,
    progress 1 / 51, and no score.

    Of three turns the first is right, and the others place a number on the same taken cell.
    """
    total = -1 / 3 + 1 / 3 - 2 / 3 + 1 / 51
    said = texts(found)
    shown = (
        "MOVES ALREADY TRIED (do not repeat): [1 3 4]" in said[1]
        and "Step 1. Progress: 1" in said[1]
    )
    return all(abs(one.reward - total) < 1e-9 for one in found) and shown and OpenEnv.opened == 0


def lake(found: Any) -> bool:
    """Seed 0 of its map: the path to the goal, by its own code."""
    (one,) = found
    return one.reward == 1.0 and one.turns[-1].reward == 1.0 and "FrozenLake 4x4" in texts(found)[0]


def lake_reply(messages: Any, rng: Any) -> str:
    """Walk to the goal by the shortest way over what is shown."""
    grid = [
        line.split()
        for line in messages[-1].text.splitlines()
        if re.fullmatch(r"[SFHGP*]( [SFHGP*])+", line)
    ]
    places = {cell: (r, c) for r, row in enumerate(grid) for c, cell in enumerate(row)}
    ways = {"up": (-1, 0), "down": (1, 0), "left": (0, -1), "right": (0, 1)}
    left, seen = [(places["P"], "")], {places["P"]}
    while left:
        (row, column), first = left.pop(0)
        if grid[row][column] == "G":
            return f"<action>{first}</action>"
        for way, (down, right) in ways.items():
            place = row + down, column + right
            inside = 0 <= place[0] < len(grid) and 0 <= place[1] < len(grid)
            if inside and place not in seen and grid[place[0]][place[1]] != "H":
                seen.add(place)
                left.append((place, first or way))
    raise ValueError("no way")


def calculated(found: Any) -> bool:
    """The result is in the message that goes on, and is not trained; the
    call and the answer are."""
    (one,) = found
    (row,) = one.samples()
    trained = bytes(
        i for i, weight in zip(row.ids, row.weights, strict=True) if weight and i < 256
    ).decode()
    return (
        one.reward == 1.0
        and context(found, 1).endswith("Result: 4")
        and "Result" not in trained
        and "2+2" in trained
    )


CALL = '<tool_call>\n{"name": "add", "parameters": {"a": 1, "b": 2}}\n</tool_call>'
TOOLS = [
    "external_tooluse_format_reward",
    "external_tooluse_length_reward",
    "external_tooluse_correct_reward",
]
CODE = [
    {
        "language": "python",
        "test_cases": [{"input": "", "output": "2"}, {"input": "", "output": "1"}],
    }
]
PROGRAM = "<think>x</think><answer>```python\nprint(1)\n```</answer>"
REACT = "<think>x</think> Action: add\nAction Input: {}"
MULTI_TASK = f"{GUIDE}/multi_task_0.py"
ASYNC = f"{GUIDE}/reward_function_3.py"
WRONG, RIGHT = "<think>a</think><answer>5</answer>", "<think>b</think><answer>4</answer>"


EXAMPLES = [
    Example(
        **rewards(PLUGIN, "external_countdown", target=7, nums=[3, 4]),
        replies=["<answer>3+4 = 7</answer>"],
        reward=1.0,
        names=(f"{PLUGIN}:CountdownORM",),
    ),
    Example(
        **rewards(PLUGIN, "external_countdown", target=8, nums=[3, 4]),
        replies=["<answer>3+4</answer>"],
        reward=0.0,
    ),
    Example(
        **rewards(PLUGIN, "external_r1v_acc", "format", solution="<answer>a cat</answer>"),
        replies=["<think>x</think><answer>a cat</answer>"],
        reward=2.0,
        names=(f"{PLUGIN}:MultiModalAccuracyORM", "orms:format"),
    ),
    Example(
        "swift:thinking_tips_scheduler",
        [{"messages": user("2+2?"), "solution": "\\boxed{4}"}],
        [WRONG, RIGHT],
        {
            "external_plugins": [PLUGIN],
            "reward_funcs": ["thinking_tips"],
            "loss_scale": "last_round",
        },
        # Its reward is that of the last turn for both rows; the thoughts of the first are gone
        # from the second context.
        lambda found: (
            [row.reward for row in found[0].row_rewards] == [1.0, 1.0]
            and "recheck" in texts(found)[-1]
        ),
        names=(f"{PLUGIN}:MultiTurnThinkingTips", "swift:thinking_tips_scheduler"),
    ),
    Example(
        **rewards(PLUGIN, "external_code_reward", verification_info=CODE[0]),
        replies=[PROGRAM],
        reward=0.5,
        services=e2b,
        names=(f"{PLUGIN}:CodeReward",),
    ),
    Example(
        **rewards(PLUGIN, "external_code_format", verification_info=CODE[0]),
        replies=[PROGRAM],
        reward=1.0,
        names=(f"{PLUGIN}:CodeFormat",),
    ),
    Example(
        **rewards(PLUGIN, "external_code_reward_by_judge0", verification_info=CODE[0]),
        replies=[PROGRAM],
        reward=0.5,
        services=lambda: server(judge0, JUDGE0_ENDPOINT="URL"),
        names=(f"{PLUGIN}:CodeRewardByJudge0",),
    ),
    Example(
        **rewards(PLUGIN, "async_genrm"),
        replies=["Hello."],
        reward=0.7,
        services=lambda: server(judge("Good. [[7]]"), GENRM_API_BASE="URL/v1"),
        names=(f"{PLUGIN}:AsyncGenRMReward",),
    ),
    Example(
        **rewards(PLUGIN, *TOOLS, solution=f"<think>add</think>\n{CALL}"),
        replies=[f"<think>one two three</think>\n{CALL}"],
        # Format 1, length 3 / 512 on two digits, and 3 for the same call.
        check=lambda found: (
            found[0].rewards == dict(zip(TOOLS, (1.0, round(3 / 512, 2), 3.0), strict=True))
        ),
        names=(
            f"{PLUGIN}:ToolUseFormatReward",
            f"{PLUGIN}:ToolUseLengthReward",
            f"{PLUGIN}:ToolUseCorrectnessReward",
        ),
    ),
    Skip(f"{PLUGIN}:CustomizedRMPlugin", "a classifier that the trainer loads (--reward_model)"),
    Skip(f"{PLUGIN}:QwenLongPlugin", "a reward model that the trainer loads (--reward_model)"),
    Example(
        "swift:tool_call_scheduler",
        [{"messages": user("2+2?"), "solution": "\\boxed{4}"}],
        ["Action: calculator\nAction Input: 2+2\n", "So <answer>4</answer>"],
        {"external_plugins": [PLUGIN], "reward_funcs": ["accuracy"]},
        calculated,
        names=(f"{PLUGIN}:ToolCallScheduler", "orms:accuracy"),
    ),
    Skip(f"{PLUGIN}:CustomEnv", "an empty class: its methods are the reader's to write"),
    Example(
        f"{DEEPEYES}:VisualToolBoxScheduler",
        [
            {
                "messages": user("<image>What color?"),
                "images": [picture()],
                "reward_model": {"ground_truth": "gray"},
                "extra_info": {"question": "What color?"},
                "data_source": "vstar",
            }
        ],
        [zoom([0, 0, 160, 120]), "<think>gray</think><answer>gray</answer>"],
        {"reward_funcs": ["deepeyes_reward"]},
        zoomed,
        services=deepeyes,
        renderer=vlm,
        names=(f"{DEEPEYES}:DeepEyesReward",),
    ),
    Example(
        "swift:deepeyes_scheduler",
        [
            {
                "messages": user("<image>2+2?"),
                "images": [picture()],
                "reward_model": {"ground_truth": "4"},
                "extra_info": {"question": "2+2?"},
                "data_source": "thinklite_eureka",
            }
        ],
        [zoom([0, 0, 8, 8]), "\\boxed{4}"],
        {"external_plugins": [DEEPEYES], "reward_funcs": ["deepeyes_reward"]},
        # The box is too small, so the model reads of it; the answer is 1.2.
        lambda found: found[0].reward == 1.2 and "is too small" in texts(found)[1],
        services=deepeyes,
        renderer=vlm,
    ),
    Example(
        "swift:tree_rollout_scheduler",
        [{"messages": user("2+2?"), "solution": "\\boxed{4}"}],
        tree_reply,
        {"external_plugins": [TREE], "reward_funcs": ["accuracy"]},
        tree_rows,
        services=modelscope,
        limits={"turns": 200},
        names=(f"{TREE}:TreeRolloutScheduler",),
    ),
    Example(
        "swift:sudoku_scheduler",
        [
            {
                "messages": user("Play"),
                "env_config": {
                    "name": "openenv",
                    "base_url": "http://127.0.0.1:8000",
                    "reset_kwargs": {},
                },
            }
        ],
        ["[1 3 4]", "[1 1 9]", "[1 1 9]"],
        {"external_plugins": [SUDOKU], "use_gym_env": True},
        sudoku,
        services=openenv,
        limits={"turns": 3},
        samples=3,
        names=(f"{SUDOKU}:SudokuScheduler",),
    ),
    Example(
        **rewards(GSM8K, "gsm8k_accuracy", "gsm8k_format", solution="Two and two. #### 1,004"),
        replies=["So \\boxed{1004}"],
        reward=2.0,
        names=(f"{GSM8K}:GSM8KAccuracy", f"{GSM8K}:GSM8KFormat"),
    ),
    Example(
        "swift:gym_scheduler",
        [{"messages": user("<placeholder>"), "env_config": {"seed": 0}}],
        lake_reply,
        {"external_plugins": [LAKE], "gym_env": "frozen_lake", "use_gym_env": True},
        lake,
        names=(f"{LAKE}:FrozenLakeEnv", "swift:gym_scheduler"),
    ),
    Example(
        f"{LAKE}:FrozenLakeEnv",
        [{"messages": user("<placeholder>"), "env_config": {"seed": 3}}],
        lambda messages, rng: "no move",
        {"use_gym_env": True, "reward_funcs": ["format"], "reward_weights": [0.2, 1.0]},
        lambda found: (
            found[0].reward == 0.0
            and all("could not find a move" in text for text in texts(found)[1:])
        ),
        limits={"turns": 3},
    ),
    Example(
        **rewards(MULTI_TASK, "math_reward", task="math"),
        replies=["3"],
        check=lambda found: 0.0 <= found[0].reward < 1.0,
        files=Blocks(MULTI_TASK),
        names=(f"{MULTI_TASK}:MathRandomReward",),
    ),
    Example(
        **rewards(MULTI_TASK, "math_reward", "format", task="code"),
        replies=["<think>x</think><answer>3</answer>"],
        # None is no reward: that of the other function counts alone.
        check=lambda found: found[0].reward == 1.0 and found[0].rewards == {"format": 1.0},
        files=Blocks(MULTI_TASK),
    ),
    Skip(
        f"{MULTI_TASK}:CodeRandomReward",
        "the block reads a variable that it does not have (prompts)",
    ),
    Example(
        **rewards(ASYNC, "async_api"),
        replies=["Hello"],
        reward=0.5,
        services=lambda: modules(aiohttp={"ClientSession": Session}),
        files=Blocks(ASYNC),
        names=(f"{ASYNC}:AsyncAPIReward",),
    ),
    Example(
        "swift:math_tip_trick",
        [{"messages": user("2+2?"), "solution": "\\boxed{4}"}],
        [WRONG, RIGHT],
        {"reward_funcs": ["accuracy"]},
        lambda found: (
            found[0].reward == 1.0
            and context(found, 1).endswith("<think>aBut wait... It seems I made a mistake,")
        ),
        names=("swift:math_tip_trick",),
    ),
    Example(
        "swift:single_turn",
        [{"messages": user("1+2?"), "solution": "Action: add\nAction Input: {}"}],
        [REACT],
        {"reward_funcs": ["toolbench", "react_format"]},
        reward=2.0,
        names=("orms:toolbench", "orms:react_format"),
    ),
]
