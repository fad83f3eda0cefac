"""TRL's example scripts, for `play_trees.py`: each script runs up to its trainer, and what it gives
the trainer is played."""

from __future__ import annotations

import ast
import base64
import contextlib
import io
import json
import os
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

from play_trees import Example, Skip

SCRIPTS = "examples/scripts"
ROWS = 120
"""Rows of a data set: scripts hold 100 of them out."""
TRAINERS = ("GRPOTrainer", "AsyncGRPOTrainer", "RLOOTrainer")


def candidates(tree: Path) -> Iterator[str]:
    """Yield the scripts that make a trainer of agents."""
    for path in sorted((tree / SCRIPTS).rglob("*.py")):
        for node in ast.walk(ast.parse(path.read_text())):
            if (
                isinstance(node, ast.Call)
                and isinstance(node.func, ast.Name)
                and node.func.id in TRAINERS
            ):
                yield f"{path.relative_to(tree)}:{node.func.id}"


def call(name: str, **arguments: Any) -> str:
    """Return the text of a tool call."""
    return f"<tool_call>\n{json.dumps({'name': name, 'arguments': arguments})}\n</tool_call>"


@contextlib.contextmanager
def modules(**found: dict[str, Any]) -> Iterator[None]:
    """Put modules of clients in place, by name with `__` for dots, and take them away again."""
    made = {}
    for name, content in found.items():
        parts = name.split("__")
        for count in range(1, len(parts) + 1):
            full = ".".join(parts[:count])
            made.setdefault(full, ModuleType(full)).__dict__.update(
                {"__path__": []}, **(content if count == len(parts) else {})
            )
    before = {name: sys.modules.get(name) for name in made}
    sys.modules.update(made)
    try:
        yield
    finally:
        for name, module in before.items():
            sys.modules.pop(name, None)
            if module is not None:
                sys.modules[name] = module


class Action(SimpleNamespace):
    """What a client sends."""


def result(reward: float = 0.0, done: bool = False, **observation: Any) -> SimpleNamespace:
    """Return an answer of an environment's server."""
    return SimpleNamespace(
        observation=SimpleNamespace(done=done, reward=reward, **observation),
        reward=reward,
        done=done,
    )


class Catch:
    """OpenSpiel's Catch on ten rows and five columns: a ball falls in column 4, the
    paddle begins in column 3."""

    def __init__(self, base_url: str) -> None:
        self.ball, self.paddle, self.row = 3, 2, 0

    def reset(self) -> Any:
        self.__init__("")
        return self._state()

    def step(self, action: Action) -> Any:
        self.paddle = min(4, max(0, self.paddle + action.action_id - 1))
        self.row += 1
        return self._state()

    def _state(self) -> Any:
        cells = [0.0] * 50
        if self.row < 9:
            cells[self.row * 5 + self.ball] = 1.0
        cells[45 + self.paddle] = 1.0
        done = self.row >= 9
        return result(
            (1.0 if self.paddle == self.ball else -1.0) if done else 0.0, done, info_state=cells
        )

    def close(self) -> None: ...


class Wordle:
    """TextArena's Wordle with the word `crane`: the text grows with each guess."""

    def __init__(self, base_url: str) -> None:
        self.text = "Guess a word."

    def reset(self) -> Any:
        return self._state(0.0, False)

    def step(self, action: Action) -> Any:
        right = action.message == "[crane]"
        self.text += f"\n{action.message}: {'G G G G G' if right else 'X X X X X'}"
        return self._state(float(right), right)

    def _state(self, reward: float, done: bool) -> Any:
        return result(reward, done, messages=[SimpleNamespace(content=self.text)])

    def close(self) -> None: ...


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


class Sudoku(Wordle):
    """TextArena's Sudoku: a place in the first free cell is right."""

    def __init__(self, base_url: str) -> None:
        self.text = BOARD

    def step(self, action: Action) -> Any:
        right = action.message == "[1 3 4]"
        self.text += (
            BOARD.replace("R1 5 3 .", "R1 5 3 4") if right else "\nInvalid move: the cell is taken."
        )
        return self._state(float(right), False)


class Echo:
    """The echo environment: the reward is a tenth of the text's length."""

    def __init__(self, base_url: str) -> None: ...

    def step(self, action: Action) -> Any:
        return result(len(action.message) / 10, echoed_message=action.message)


def jpeg() -> str:
    from PIL import Image

    buffer = io.BytesIO()
    Image.new("RGB", (320, 240), "gray").save(buffer, format="JPEG")
    return base64.b64encode(buffer.getvalue()).decode()


class Carla:
    """A car that drives at 40 km/h; a change of lane to the right is worth 1."""

    def __init__(self, base_url: str, **options: Any) -> None:
        self.reward = 0.0

    def reset(self, scenario_name: str) -> Any:
        self.reward = 0.0
        return self._state()

    def step(self, action: Action) -> Any:
        if action.action_type == "lane_change":
            self.reward = float(action.lane_direction == "right")
        return self._state(jpeg() if action.action_type == "capture_image" else None)

    def _state(self, image: str | None = None) -> Any:
        actors = [{"type": "pedestrian", "distance": 12}]
        known = {
            "speed_kmh": 40.0,
            "nearby_actors": actors,
            "collision_detected": False,
            "collided_with": None,
        }
        return result(rubric_reward=self.reward, camera_image=image, **known)


class Browser:
    """A page with one button; a click on it ends the task."""

    _ws = None

    def __init__(self, base_url: str) -> None: ...

    def connect(self) -> None: ...

    def reset(self, task_name: str) -> Any:
        return self._state(False)

    def step(self, action: Action) -> Any:
        return self._state(action.action_str == "click('13')")

    def _state(self, done: bool) -> Any:
        page = {
            "goal": "Click the button.",
            "axtree_txt": "[13] button 'Click Me!'",
            "url": "https://a.test",
        }
        known = {
            "last_action_error": False,
            "error": "",
            "screenshot": [[[200, 200, 200]] * 64] * 48,
            "pruned_html": "",
        }
        return result(float(done), done, **page, **known, text="", chat_messages=[], metadata={})

    def close(self) -> None: ...


def openspiel() -> Any:
    games = {"OpenSpielEnv": Catch, "OpenSpielAction": Action}
    runtime = {"LocalDockerProvider": object}
    return modules(
        openspiel_env=games,
        openspiel_env__models=games,
        openenv__core__containers__runtime=runtime,
        textarena_env={"TextArenaEnv": Wordle, "TextArenaAction": Action},
    )


def textarena(game: type) -> Any:
    names = {"TextArenaEnv": game, "TextArenaAction": Action}
    return lambda: modules(
        textarena_env=names, openenv__core__containers__runtime={"LocalDockerProvider": object}
    )


def echo() -> Any:
    return modules(echo_env={"EchoEnv": Echo}, echo_env__models={"EchoAction": Action})


def carla() -> Any:
    return modules(carla_env={"CarlaEnv": Carla, "CarlaAction": Action})


def browser() -> Any:
    return modules(browsergym_env={"BrowserGymEnv": Browser, "BrowserGymAction": Action})


def vlm() -> Any:
    """Return the renderer of a tiny vision-language model."""
    sys.path.insert(0, str(Path(__file__).parents[1] / "tests"))
    from kit.vision import tiny_vlm_directory

    import turnwright as tw

    folder = Path(tempfile.mkdtemp())
    tiny_vlm_directory(folder, weights=False)
    return tw.load_renderer(folder)


@contextlib.contextmanager
def dataset(*rows: dict[str, Any]) -> Iterator[None]:
    """Answer `load_dataset` with rows of the columns that the script reads."""
    import datasets

    made = datasets.Dataset.from_list([*rows] * ROWS)
    before = datasets.load_dataset

    def load(*args: Any, split: Any = None, **options: Any) -> Any:
        if isinstance(split, list):
            return [made for _ in split]
        return made if split else datasets.DatasetDict(train=made, test=made)

    datasets.load_dataset = load
    try:
        yield
    finally:
        datasets.load_dataset = before


@contextlib.contextmanager
def biogrid() -> Iterator[None]:
    """Work in a folder of its own, where the script writes its database."""
    before = Path.cwd()
    with tempfile.TemporaryDirectory() as folder:
        os.chdir(folder)
        try:
            yield
        finally:
            os.chdir(before)


def tools_said(found: Any) -> list[str]:
    """Return the texts of the tools' answers in the first episode."""
    return [message.text for message in found[0].messages if message.role == "tool"]


def pictures(found: Any) -> int:
    """Return the number of pictures that the model saw in the first episode."""
    return sum(len(message.media) for message in found[0].messages)


def openenv(name: str, trainer: str = "GRPOTrainer") -> str:
    return f"{SCRIPTS}/openenv/{name}.py:{trainer}"


SMALL = {"argv": ["--dataset-size", "2"]}
URLS = {"argv": ["--env-urls", "http://one.test"]}
LEFT_RIGHT = [call("move", direction="right"), *[call("stay")] * 8, "Caught."]
SQL = "SELECT * FROM interactions WHERE Alt_IDs_Interactor_A = 'JNKK'"
BIOGRID = {
    "question": "Does the gene JNKK?",
    "answer": "yes",
    "Alt IDs Interactor A": "JNKK",
    "Alt IDs Interactor B": "MAPK8",
}
ANSWER = "<think>\nTwo and two.\n</think>\nSo it is $\\boxed{4}$."


def math_rows() -> Any:
    return dataset(
        {"messages": [{"role": "user", "content": "2+2?"}], "problem": "2+2?", "solution": "$4$"}
    )


def gsm8k_rows() -> Any:
    return dataset({"question": "2+2?", "answer": "Two and two. #### 4"})


def image_rows() -> Any:
    from PIL import Image

    return dataset({"image": Image.new("RGB", (64, 64)), "problem": "How many?", "solution": "$4$"})


EXAMPLES = [
    Example(
        openenv("catch"),
        [],
        LEFT_RIGHT,
        {"argv": ["--env-mode", "space", "--dataset-size", "2"]},
        lambda found: found[0].reward == 1.0 and "RIGHT of the paddle" in found[0].messages[0].text,
        services=openspiel,
        limits={"turns": 12},
        faithful=True,
    ),
    Example(
        openenv("echo"),
        [],
        [call("echo", message="Hello"), "Done."],
        {},
        None,
        0.5,
        services=echo,
        faithful=True,
    ),
    Example(
        openenv("wordle"),
        [],
        [call("guess", guess="[slate]"), call("guess", guess="[crane]"), "Found."],
        SMALL,
        lambda found: (
            found[0].reward == 1.0
            and tools_said(found) == ["\n[slate]: X X X X X", "\n[crane]: G G G G G"]
        ),
        services=textarena(Wordle),
        faithful=True,
    ),
    Example(
        openenv("multi_env"),
        [],
        lambda messages, rng: (
            LEFT_RIGHT[min(sum(m.role == "assistant" for m in messages), 9)]
            if "Ball" in messages[0].text
            else [call("guess", guess="[crane]"), "Found."][
                min(1, sum(m.role == "assistant" for m in messages))
            ]
        ),
        {},
        lambda found: (
            {one.reward for one in found} == {1.0} and len({len(one.turns) for one in found}) == 2
        ),
        services=openspiel,
        limits={"turns": 12},
        faithful=True,
    ),
    Example(
        openenv("sudoku"),
        [],
        [call("place", row=1, col=3, number=4), call("place", row=1, col=1, number=9), "Enough."],
        {"argv": ["--dataset-size", "2", "--api-delay", "0"]},
        # The second place is on a taken cell: empty cells 0, valid moves 0.5, no repetition, 1 of
        # 51 cells, and no score.
        lambda found: (
            abs(found[0].reward - (0.0 + 0.5 + 0.0 + 1 / 51 + 0.0)) < 1e-9
            and "valid" in tools_said(found)[0]
        ),
        services=textarena(Sudoku),
        files={f"{SCRIPTS}/openenv/sudoku_prompt.txt": "Play."},
        faithful=True,
    ),
    Example(
        openenv("carla"),
        [],
        [call("observe"), call("lane_change", direction="right"), "Safe."],
        URLS,
        lambda found: (
            all(one.reward == 1.0 for one in found) and "pedestrian at 12m" in tools_said(found)[0]
        ),
        services=carla,
        samples=3,
        faithful=True,
    ),
    *(
        Example(
            openenv(name),
            [],
            [call("observe"), call("lane_change", direction="right"), "Safe."],
            URLS,
            lambda found: found[0].reward == 1.0 and pictures(found) == 2,
            services=carla,
            renderer=vlm,
            faithful=True,
        )
        for name in ("carla_vlm", "carla_vlm_gemma")
    ),
    Example(
        openenv("browsergym"),
        [],
        [call("noop"), call("click", bid="13"), "Done."],
        SMALL,
        lambda found: (
            found[0].reward == 1.0
            and pictures(found) == 2
            and "Click Me" in found[0].messages[1].text
        ),
        services=browser,
        renderer=vlm,
        faithful=True,
    ),
    Example(
        openenv("browsergym_llm"),
        [],
        [call("noop"), call("click", bid="13"), "Done."],
        SMALL,
        lambda found: found[0].reward == 1.0 and "Click Me" in tools_said(found)[0],
        services=browser,
        faithful=True,
    ),
    Example(
        f"{SCRIPTS}/grpo_2048.py:GRPOTrainer",
        [],
        [call("move", direction=way) for way in ("left", "down", "left", "down", "right", "down")]
        + ["Stop."],
        {},
        lambda found: f"score={found[0].reward}\n" in tools_said(found)[-1],
        faithful=True,
    ),
    Example(
        f"{SCRIPTS}/grpo_agent.py:GRPOTrainer",
        [],
        [call("query_biogrid", sql_command=SQL), "It does: *yes*"],
        {},
        # Right 0.6, structure 0.1; the query 0.4 for WHERE and -1.5, since TRL hands on results
        # as text, not as a list.
        lambda found: (
            abs(found[0].reward - (0.6 + 0.1 + 0.4 - 1.5)) < 1e-9
            and "MAPK8" in tools_said(found)[0]
        ),
        services=lambda: _both(biogrid(), dataset(BIOGRID)),
        faithful=True,
    ),
    *(
        Example(
            f"{SCRIPTS}/{name}:{trainer}",
            [],
            [ANSWER],
            {},
            None,
            reward,
            services=math_rows,
            faithful=True,
        )
        for name, trainer, reward in (
            ("gspo.py", "GRPOTrainer", 2.0),
            ("rloo.py", "RLOOTrainer", 2.0),
        )
    ),
    Example(
        f"{SCRIPTS}/async_grpo.py:AsyncGRPOTrainer",
        [],
        [ANSWER],
        {},
        None,
        1.0,
        services=gsm8k_rows,
        faithful=True,
    ),
    *(
        Example(
            f"{SCRIPTS}/{name}.py:{trainer}",
            [],
            [ANSWER],
            {},
            lambda found: found[0].reward == 2.0 and pictures(found) == 1,
            services=image_rows,
            renderer=vlm,
            faithful=True,
        )
        for name, trainer in (
            ("grpo_vlm", "GRPOTrainer"),
            ("gspo_vlm", "GRPOTrainer"),
            ("rloo_vlm", "RLOOTrainer"),
        )
    ),
    Example(
        f"{SCRIPTS}/grpo_continuous_batching.py:GRPOTrainer",
        [],
        ["#### 4"],
        {},
        None,
        1.0,
        services=gsm8k_rows,
        faithful=True,
    ),
    Skip(f"{SCRIPTS}/harbor/data_agent.py:GRPOTrainer", "harbor needs Python 3.12 and containers"),
    Skip(
        f"{SCRIPTS}/openreward/seta.py:GRPOTrainer",
        "the OpenReward service serves its environments with a key",
    ),
    Skip(
        openenv("opencode", "AsyncGRPOTrainer"),
        "the OpenCode program in a sandbox; here such a program plays by the proxy",
    ),
]


@contextlib.contextmanager
def _both(first: Any, second: Any) -> Iterator[None]:
    with first, second:
        yield
