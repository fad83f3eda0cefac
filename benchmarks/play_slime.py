"""slime's examples, and how each is played; see `play_trees.py`.

Expected values are of slime's own code for these replies.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from play_slime_kit import (
    decoding,
    found_by_form,
    http_service,
    installed,
    modules,
    needs,
    picture,
    step,
    text_of,
    text_renderer,
    trained,
    variables,
    vision_renderer,
)
from play_trees import Example, Skip

import turnwright as tw

FOLDERS = ("examples", "slime_plugins")


def candidates(tree: Path) -> Iterator[str]:
    """Yield what is user code in the examples and plugins of slime's tree."""
    yield from found_by_form(tree, FOLDERS)


@contextlib.contextmanager
def retrieval() -> Iterator[None]:
    """The retrieval server of search-r1, at the address that its configuration has."""
    documents = {"capital of France": '"France"\nIts capital is Paris.'}

    def answer(path: str, body: Any) -> Any:
        assert (path, body["topk"]) == ("/retrieve", 3)
        return {
            "result": [
                [{"id": "1", "contents": documents.get(query, '"Nothing"\nNo text.')}]
                for query in body["queries"]
            ]
        }

    with http_service(answer, 8000):
        yield


SEARCH = (
    "<think>a</think>\n<search>capital of France</search>",
    "<think>b</think>\n<answer>Paris</answer>",
)
SEARCH_ROW = {
    "prompt": [
        {
            "role": "user",
            "content": "Answer as in <answer> Beijing </answer>. What is the capital of France?",
        }
    ],
    "reward_model": {"ground_truth": {"target": ["Paris"]}, "style": "rule"},
    "data_source": "nq",
}
FOUND = '<information>Doc 1(Title: "France") Its capital is Paris.</information>'


def searched(found: Sequence[tw.Trajectory]) -> bool:
    """The document is in the context of the answer; the replies alone are trained,
    up to their stop texts."""
    (one,) = found
    return FOUND in text_of(one) and trained(one) == "".join(SEARCH)


def search(folder: str, stops: bool = True) -> Example:
    """search-r1; Miles' example sets no stop texts, so its replies are trained
    with their end tokens."""
    whole = "".join(reply + "<|im_end|>" for reply in SEARCH)

    def check(found: Sequence[tw.Trajectory]) -> bool:
        return (
            searched(found) if stops else FOUND in text_of(found[0]) and trained(found[0]) == whole
        )

    return Example(
        f"{folder}/generate_with_search.py:generate",
        [SEARCH_ROW],
        list(SEARCH),
        args={"custom_rm_path": f"{folder}/generate_with_search.py:reward_func"},
        columns={"answer": "reward_model"},
        reward=1.0,
        check=check,
        services=retrieval,
        renderer=decoding(tw.byte_renderer),
        names=(f"{folder}/generate_with_search.py:reward_func",),
    )


CODE = (
    '<tool_call>\n{"name": "code_interpreter", "arguments": {"code": "print(3 * 7)"}}\n</tool_call>'
)


def retooled(found: Sequence[tw.Trajectory]) -> bool:
    """The interpreter ran, its output is in the context, and the tool's schema is in the prompt."""
    (one,) = found
    text = text_of(one)
    return (
        "<interpreter>\nOutput:\n21" in text
        and '"name": "code_interpreter"' in text
        and "21}" in trained(one)
    )


MATH_ROW = {"prompt": [{"role": "user", "content": "What is 3 * 7?"}], "label": "21"}

SOLUTIONS = [
    "<think>a</think>so \\boxed{7}",
    "<think>a</think>so \\boxed{8}",
    *["<think>b</think>so \\boxed{7}"] * 3,
]
REWRITTEN = [
    "<think>c</think>now \\boxed{7}",
    "<think>c</think>now \\boxed{9}",
    *["<think>d</think>now \\boxed{7}"] * 3,
]


def agents(found: Sequence[tw.Trajectory]) -> bool:
    """Eleven samples: 1.2 for right ones since the selected solution is right, 0 for wrong ones."""
    (one,) = found
    rewards = sorted(row.reward for row in one.samples())
    solver, rewriter = text_of(one, 0), text_of(one, 5)
    return (
        [round(reward, 6) for reward in rewards] == [0.0] * 2 + [1.2] * 9
        and "### Problem" in rewriter
        and "so \\boxed{8}" in rewriter
        and "What is" in solver
    )


def multi_agent(folder: str) -> Example:
    """Solvers, rewriters and a selector, whose prompts are made of each other's replies."""
    return Example(
        f"{folder}/rollout_with_multi_agents.py:generate_with_multi_agents",
        [{"prompt": [{"role": "user", "content": "What is 3 + 4?"}], "label": "7"}],
        [*SOLUTIONS, *REWRITTEN, "<think>e</think>Judgment: 1"],
        args={"rm_type": "deepscaler"},
        check=agents,
        renderer=decoding(text_renderer),
        limits={"turns": 20},
    )


TOOL = '<tool_call>{"name": "calc_score", "arguments": {"answer": "ANSWER"}}</tool_call>'
VLM_REPLIES = [TOOL.replace("ANSWER", "8"), TOOL.replace("ANSWER", "7"), "\\boxed{7}"]
VLM_ROW = {"problem": "Which number? <image>", "answer": "7", "images": [picture()]}


def scored(found: Sequence[tw.Trajectory]) -> bool:
    """Three turns: the second reminds of the last chance, the third reads the score 1."""
    (one,) = found
    return (
        len(one.turns) == 3
        and "calc_score result: 0.0" in text_of(one, 1)
        and "calc_score result: 1.0. Parsed answer '7' matches the reference" in text_of(one)
        and "image_pad" in text_of(one, 0)
        and trained(one) == "".join(reply + "<|im_end|>" for reply in VLM_REPLIES)
    )


@contextlib.contextmanager
def pictures_of_messages() -> Iterator[None]:
    """`qwen_vl_utils`, which needs torchvision; what this example's observations have is text."""

    def process_vision_info(messages: Any) -> tuple[Any, Any]:
        assert all(
            isinstance(part, str) or part["type"] == "text"
            for one in messages
            for part in one["content"]
        )
        return None, None

    with modules(qwen_vl_utils={"process_vision_info": process_vision_info}):
        yield


def geo3k(folder: str, config: str, use: str) -> Example:
    """Geometry with a picture and a tool that scores, by the example's own loop or by its
    environment under ours."""
    return Example(
        f"{folder}/{use}",
        [VLM_ROW],
        list(VLM_REPLIES),
        args={"custom_config_path": config, "rm_type": "math"},
        columns={"prompt": "problem"},
        reward=1.0,
        check=scored,
        services=pictures_of_messages,
        renderer=decoding(vision_renderer),
        limits={"turns": 3},
    )


@contextlib.contextmanager
def simulated_user() -> Iterator[None]:
    """tau-bench itself, whose user is a model asked by litellm: it says what it
    wants, and that it is done."""
    from types import SimpleNamespace

    def completion(messages: Any, **_: Any) -> Any:
        said = (
            "Which payment methods do I have? I am yusuf_rossi_9620."
            if len(messages) < 4
            else "###STOP###"
        )
        message = SimpleNamespace(
            content=said, model_dump=lambda: {"role": "assistant", "content": said}
        )
        return SimpleNamespace(
            choices=[SimpleNamespace(message=message)], _hidden_params={"response_cost": 0.0}
        )

    with (
        installed(),
        variables(GEMINI_API_KEY="NONE"),
        modules(litellm={"completion": completion, "provider_list": ["gemini", "auto_router"]}),
    ):
        yield


TAU = [
    '<tool_call>\n{"name": "get_user_details", "arguments": {"user_id": '
    '"yusuf_rossi_9620"}}\n</tool_call>',
    "Credit card.",
]


def called(found: Sequence[tw.Trajectory]) -> bool:
    """The tool's answer is in the context, and the replies are trained."""
    (one,) = found
    return (
        "Yusuf" in text_of(one)
        and len(one.turns) == 2
        and trained(one) == "".join(reply + "<|im_end|>" for reply in TAU)
    )


def tau(folder: str) -> Example | Skip:
    """tau-bench: a tool of the retail world, then an answer to the user, who stops."""
    return needs(
        {"tau_bench": "tau-bench (from its repository)"},
        Example(
            f"{folder}/generate_with_tau.py:generate",
            [{"index": 0}],
            list(TAU),
            args={"args": {"apply_chat_template": False}},
            columns={"prompt": "index"},
            reward=0.0,
            check=called,
            services=simulated_user,
            renderer=decoding(text_renderer),
        ),
    )


PYTHON = (
    '<tool_call>\n{"name": "execute_python_code", "arguments": {"code": "print(3 * '
    '7)"}}\n</tool_call>'
)


def ran(found: Sequence[tw.Trajectory]) -> bool:
    """The code ran in a child process, and its output is in the context of the answer."""
    (one,) = found
    return (
        len(one.turns) == 2
        and "execute_python_code" in text_of(one, 0)
        and "21" in text_of(one).partition(PYTHON)[2][:200]
    )


def strands(folder: str, packages: dict[str, str]) -> Example | Skip:
    """An agent of strands whose model is a client of the router over HTTP."""
    return needs(
        packages,
        Example(
            f"{folder}/generate_with_strands.py:generate",
            [MATH_ROW],
            [PYTHON, "Answer: 21\nDone."],
            args={
                "custom_rm_path": f"{folder}/generate_with_strands.py:reward_func",
                "args": {"apply_chat_template": False},
            },
            reward=1.0,
            check=ran,
            services=installed,
            renderer=decoding(text_renderer),
            names=(f"{folder}/generate_with_strands.py:reward_func",),
        ),
    )


EXAMPLES = [
    search("examples/search-r1"),
    Example(
        "examples/retool/generate_with_retool.py:generate",
        [MATH_ROW],
        [CODE, "Answer: \\boxed{21}"],
        args={
            "custom_rm_path": "examples/retool/generate_with_retool.py:reward_func",
            "reward_key": "score",
        },
        reward=1.0,
        check=retooled,
        renderer=decoding(tw.byte_renderer),
        names=("examples/retool/generate_with_retool.py:reward_func",),
    ),
    multi_agent("examples/multi_agent"),
    # One turn: slime's own Sample refuses what this example appends of an observation,
    # since it comes with logprobs.
    replace(
        geo3k(
            "examples/geo3k_vlm_multi_turn",
            "examples/geo3k_vlm_multi_turn/geo3k_vlm_multi_turn_config.yaml",
            "rollout.py:generate",
        ),
        replies=VLM_REPLIES[-1:],
        check=lambda found: (
            trained(found[0]) == "\\boxed{7}<|im_end|>" and "image_pad" in text_of(found[0], 0)
        ),
    ),
    geo3k(
        "examples/geo3k_vlm_multi_turn",
        "examples/geo3k_vlm_multi_turn/geo3k_vlm_multi_turn_config.yaml",
        "env_geo3k.py:build_env",
    ),
    tau("examples/tau-bench"),
    strands(
        "examples/strands_sglang",
        {"strands": "strands-agents", "strands_sglang": "strands-sglang==0.4.2"},
    ),
    step("slime_plugins/rollout_buffer/rollout_buffer_example.py:generate_rollout"),
    Skip(
        "examples/coding_agent_rl/generate.py:generate",
        "Claude Code or Codex in E2B sandboxes: a closed service, with the image of each task",
    ),
]
