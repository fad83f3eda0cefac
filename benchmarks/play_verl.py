"""verl's examples, for `play_trees.py`: tools, agent loops, reward functions, and the code
of its documentation."""

from __future__ import annotations

import ast
import json
import re
import sys
import textwrap
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from play_skyrl import Server, both, needs, pictures, vlm
from play_trees import Example, Skip

import turnwright as tw

FOLDERS = ("examples", "tests", "verl/experimental/agent_loop")
"""Folders of the tree with code that a user writes, or would copy; the loops that rows
name by `agent_name`."""
BASES = (
    "BaseTool",
    "BaseInteraction",
    "AgentLoopBase",
    "RewardManagerBase",
    "AbstractRewardManager",
)
BLOCK = re.compile(r"^\.\. code(?:-block)?:: python\n\s*\n((?:[ \t]+.*\n|\s*\n)+)", re.MULTILINE)
FENCE = re.compile(r"^```python\n(.*?)^```", re.MULTILINE | re.DOTALL)


def candidates(tree: Path) -> list[str]:
    """Return `file:name` of the tools, loops, reward managers and reward functions at the top
    level of files and blocks."""
    found: list[str] = []
    for folder in FOLDERS:
        for path in sorted((tree / folder).rglob("*.py")):
            found += [
                f"{path.relative_to(tree)}:{name}" for name in _names(path.read_text("utf-8"))
            ]
    for path in sorted(
        [
            *(tree / "docs").rglob("*.rst"),
            *(tree / "docs").rglob("*.md"),
            *(tree / "examples").rglob("*.ipynb"),
        ]
    ):
        for block in _blocks(path):
            found += [f"{path.relative_to(tree)}:{name}" for name in _names(block)]
    return [one for one in dict.fromkeys(found) if one.rpartition(":")[2] not in BASES]


def _blocks(path: Path) -> list[str]:
    text = path.read_text("utf-8")
    if path.suffix == ".ipynb":
        cells = [cell for cell in json.loads(text)["cells"] if cell["cell_type"] == "code"]
        return ["".join(cell["source"]) for cell in cells]
    return [
        textwrap.dedent(block)
        for block in (BLOCK if path.suffix == ".rst" else FENCE).findall(text)
    ]


def _names(source: str) -> list[str]:
    try:
        body = ast.parse(source).body
    except SyntaxError:
        return []
    found = []
    for node in body:
        if isinstance(node, ast.ClassDef) and {ast.unparse(base) for base in node.bases} & set(
            BASES
        ):
            found.append(node.name)
        elif isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)):
            names = [one.arg for one in node.args.args]
            tool = any("function_tool" in ast.unparse(one) for one in node.decorator_list)
            if tool or {"solution_str", "ground_truth"} <= set(names):
                found.append(node.name)
    return found


def block(
    page: str, text: str, head: str = "", place: str = ""
) -> Callable[[Path], Mapping[str, str]]:
    """Return a maker of the file that a reader of a page has: its block with a text, below what
    earlier blocks import."""

    def files(tree: Path) -> Mapping[str, str]:
        source = next(one for one in _blocks(tree / page) if text in one)
        return {place: head + source}

    return files


def row(truth: Any, text: str = "Go.", source: str = "test", **columns: Any) -> dict[str, Any]:
    return {
        "prompt": [{"role": "user", "content": text}],
        "data_source": source,
        "reward_model": {"style": "rule", "ground_truth": truth},
        **columns,
    }


def call(name: str, **arguments: Any) -> str:
    return f"<tool_call>\n{json.dumps({'name': name, 'arguments': arguments})}\n</tool_call>"


def answers(reward: float | None, *texts: str) -> Callable[[Sequence[tw.Trajectory]], bool]:
    """Check the reward, and what the tools answered: in full, or up to `...`."""

    def same(text: str, expected: str) -> bool:
        return text.startswith(expected[:-3]) if expected.endswith("...") else text == expected

    def check(found: Sequence[tw.Trajectory]) -> bool:
        for one in found:
            given = [message.text for message in one.messages if message.role == "tool"]
            if reward is not None and (one.reward is None or abs(one.reward - reward) > 1e-9):
                return False
            if len(given) != len(texts) or not all(map(same, given, texts)):
                return False
        return True

    return check


def schemas(*names: str) -> Callable[[Sequence[tw.Trajectory]], bool]:
    """Check that the prompt has the tools that these names are of."""
    decode = tw.byte_renderer().decode
    return lambda found: all(
        f'"name": "{name}"' in decode(one.prompt_ids(0)) for one in found for name in names
    )


def run(code: str) -> dict[str, Any]:
    """Run code as a sandbox, and answer as Sandbox Fusion does."""
    import subprocess

    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=20)
    return {"status": "Success", "run_result": {"stdout": done.stdout, "stderr": done.stderr}}


SANDBOX = Server(lambda request: run(request["code"]))
JUDGE = Server(
    lambda request: {
        "id": "1",
        "object": "chat.completion",
        "created": 0,
        "model": request["model"],
        "choices": [
            {
                "index": 0,
                "finish_reason": "stop",
                "message": {
                    "role": "assistant",
                    "content": "9" if "so 4" in request["messages"][0]["content"] else "1",
                },
            }
        ],
    }
)

AGENT = "tests/experimental/agent_loop/"
REWARD = "tests/experimental/reward_loop/"
NOTEBOOK = "examples/tutorial/agent_loop_get_started/agent_loop_tutorial.ipynb"
LIMITED = f"{REWARD}test_rate_limited_reward_manager_on_cpu.py"
OF_VERL = ("ray", "omegaconf", "hydra", "tensordict")
"""Packages that modules of verl's tests import at their top."""

STUB_TOOLS = """tools:
  - class_name: "tests.tools._stub_search_tools.StubSearchTool"
    config: {retrieval_service_url: http://stub/retrieve, topk: 3, type: native}
    tool_schema:
      type: function
      function:
        name: search
        description: Stub web search.
        parameters:
          type: object
          properties: {query_list: {type: array, description: A list of fully-formed semantic queries.}}
          required: ["query_list"]
  - class_name: "tests.tools._stub_search_tools.StubCrawlTool"
    config: {crawl_service_url: http://stub/crawl, type: native}
    tool_schema:
      type: function
      function:
        name: crawler
        description: Stub crawl.
        parameters:
          type: object
          properties: {url_list: {type: array, description: URLs to crawl.}}
          required: ["url_list"]
"""  # noqa: E501
LOCATION = {"location": "Los Angeles, CA, US"}
WEATHER = '{"temperature": 26.1, "location": "Los Angeles, CA, US", "unit": "celsius"}'


EXAMPLES: list[Example | Skip] = [
    Example(
        "examples/tutorial/agent_loop_get_started/sandbox.py:SandboxTool",
        [row("4")],
        [call("code_interpreter", code="```py\nx = 2 + 2\nx\n```"), "4"],
        args={"sandbox_fusion_url": f"{SANDBOX.url}/run_code"},
        services=SANDBOX,
        check=both(answers(0.0, "4\n"), schemas("code_interpreter")),
    ),
    Example(
        "examples/rewards/custome_reward_fn/aime_reward.py:compute_score",
        [row("12", source="AIME2024")],
        ["so\nAnswer: 12"],
        reward=1.0,
    ),
    Example(
        "mine/weather.py:WeatherTool",
        [row("26.1")],
        [call("get_current_temperature", **LOCATION), "26.1"],
        files=block(NOTEBOOK, "class WeatherTool(BaseTool)", "import json\n", "mine/weather.py"),
        check=both(answers(0.0, WEATHER), schemas("get_current_temperature")),
        names=(f"{NOTEBOOK}:WeatherTool", f"{NOTEBOOK}:SandboxTool"),
    ),
    Example(
        "verl:tools",
        [row("17.3")],
        [
            call("get_weather", city="Tokyo") + "\n" + call("calculator", expression="(3+4)*5"),
            call("fetch_url", url="u") + "\n" + call("calculator", expression="x"),
            "17.3",
        ],
        args={"function_tool_path": f"{AGENT}function_tool_examples.py"},
        check=both(
            answers(
                0.0,
                '{"temperature_c": 17.3, "condition": "drizzle"}',
                "35",
                "<stub body for u>",
                "ERROR: unsupported node: Name(id='x', ctx=Load())",
            ),
            schemas("get_weather", "calculator", "fetch_url"),
        ),
        names=tuple(
            f"{AGENT}function_tool_examples.py:{name}"
            for name in ("get_weather", "calculator", "fetch_url")
        ),
    ),
    Example(
        "verl:tools",
        [row("x")],
        [
            call("search", query_list=["a", "b"]),
            call("crawler", url_list=["u"]),
            call("search"),
            "done",
        ],
        faithful=True,
        args={"tool_config_path": "all_tool_config.yaml"},
        files={"all_tool_config.yaml": STUB_TOOLS},
        check=both(
            answers(0.0, "hits-for:a; hits-for:b", "crawled:u", "hits-for:<empty>"),
            schemas("search", "crawler"),
        ),
        names=(
            "tests/tools/_stub_search_tools.py:StubSearchTool",
            "tests/tools/_stub_search_tools.py:StubCrawlTool",
        ),
    ),
    Example(
        "verl:tools",
        [row("x")],
        [call("get_weather", city="Tokyo"), call("calculator", expression="1+1"), "2"],
        args={"function_tool_path": "path/to/your_tools.py"},
        files=block(
            "docs/sglang_multiturn/multiturn.rst", "def get_weather", place="path/to/your_tools.py"
        ),
        check=answers(0.0, '{"temperature_c": 17.3, "condition": "drizzle"}', "2"),
        names=tuple(
            f"docs/sglang_multiturn/multiturn.rst:{name}" for name in ("get_weather", "calculator")
        ),
    ),
    needs(*OF_VERL)(
        Example(
            f"{AGENT}test_basic_agent_loop.py:WeatherTool",
            [row("26.1")],
            [
                call("get_current_temperature", **LOCATION),
                call("get_current_temperature", place="x"),
                "26.1",
            ],
            check=both(
                answers(
                    0.0,
                    WEATHER,
                    "WeatherTool.get_current_temperature() got an unexpected keyword argument "
                    "'place'",
                ),
                schemas("get_current_temperature"),
            ),
            faithful=True,
        )
    ),
    needs(*OF_VERL)(
        Example(
            f"{AGENT}test_basic_agent_loop.py:WeatherToolWithData",
            [row("25.9")],
            [call("get_temperature_date", **LOCATION, date="2024-10-01", unit="kelvin"), "25.9"],
            check=answers(
                0.0,
                '{"temperature": 25.9, "location": "Los Angeles, CA, US", "date": "2024-10-01", '
                '"unit": "kelvin"}',
            ),
            faithful=True,
        )
    ),
    needs(*OF_VERL)(
        Example(
            f"{AGENT}test_multi_modal.py:ImageGeneratorTool",
            [row("red")],
            [call("generate_image", description="red"), "red"],
            renderer=vlm,
            check=both(answers(0.0, ""), pictures(1)),
        )
    ),
    Example(
        f"{REWARD}reward_fn.py:compute_score_gsm8k",
        [row("4", extra_info={"question": "2 + 2?"})],
        ["so 4"],
        args={"reward_kwargs": {"reward_router_address": JUDGE.url.removeprefix("http://")}},
        services=JUDGE,
        reward=9.0,
    ),
    Example(
        f"{REWARD}reward_fn.py:compute_score_math_verify", [row("4")], [r"so \boxed{4}"], reward=1.0
    ),
    *(
        needs(*OF_VERL)(Example(f"{LIMITED}:{name}", [row("4")], ["4 "], reward=reward))
        for name, reward in (
            ("mock_sync_reward_function", 1.0),
            ("mock_async_reward_function", 1.0),
            ("mock_slow_api_function", 0.5),
            ("mock_dict_result_function", 1.0),
        )
    ),
    Skip(
        f"{LIMITED}:mock_failing_api_function", "it raises always: a double for a test of failures"
    ),
    needs(*OF_VERL)(
        Example(
            "tests/workers/reward_manager/test_dapo_on_cpu.py:_constant_compute_score",
            [row("4")],
            ["4"],
            reward=0.5,
        )
    ),
    Example(
        "my_reward.py:my_reward_fn",
        [row("4")],
        ["a reply of 24 characters"],
        files=block(
            "docs/preparation/reward_function.rst", "def my_reward_fn", place="my_reward.py"
        ),
        reward=0.24,
        names=("docs/preparation/reward_function.rst:my_reward_fn",),
    ),
    needs(*OF_VERL)(
        Example(
            "verl/experimental/agent_loop/single_turn_agent_loop.py:SingleTurnAgentLoop",
            [row("4", text="2 + 2?", source="openai/gsm8k", agent_name="single_turn_agent")],
            ["#### 4"],
            args={"reward": "verl.utils.reward_score:default_compute_score"},
            reward=1.0,
        )
    ),
    needs(*OF_VERL)(
        Example(
            "verl/experimental/agent_loop/tool_agent_loop.py:ToolAgentLoop",
            [row("4", text="2 + 2?", source="openai/gsm8k", agent_name="tool_agent")],
            ["#### 4"],
            args={"reward": "verl.utils.reward_score:default_compute_score"},
            reward=1.0,
        )
    ),
    Skip(
        "docs/advance/reward_loop.rst:UserCostomizedRewardManager",
        "a sketch, whose body is a comment",
        ("docs/extend_guide.rst:MyAgentLoop",),
    ),
    Skip(
        "docs/advance/reward_loop.rst:compute_score_gsm8k",
        "an excerpt of tests/experimental/reward_loop/reward_fn.py",
    ),
]
