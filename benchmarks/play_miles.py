"""Miles' examples, and how each is played; see `play_trees.py`.

Expected values are of Miles' own code for these replies.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from play_slime import MATH_ROW, geo3k, multi_agent, search, tau
from play_slime_kit import (
    all_of,
    ask_policy,
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

FOLDERS = ("examples", "miles_plugins", "tests/manual")
EXPERIMENTAL = "examples/experimental"


def candidates(tree: Path) -> Iterator[str]:
    """Yield what is user code in the examples and plugins of Miles' tree."""
    yield from found_by_form(tree, FOLDERS)


CALL = (
    '<tool_call>\n{"name": "code_interpreter", "arguments": {"code": "print(3 * 7)"}}\n</tool_call>'
)


def retooled(found: Sequence[tw.Trajectory]) -> bool:
    """The tool's schema is in the prompt, its output in the context of the answer, and
    the replies are trained."""
    (one,) = found
    text = text_of(one)
    return (
        '"name": "code_interpreter"' in text
        and "Output:\n21" in text
        and "\\boxed{21}" in trained(one)
    )


@contextlib.contextmanager
def agent_server(variable: str, reward: float) -> Iterator[None]:
    """An agent server: two turns with the policy at the address that it gets, then the
    reward of its harness."""

    def answer(path: str, body: Any) -> Any:
        assert path == "/run", path
        url = body.get("base_url") or body["policy_base_url"]
        messages = [{"role": "user", "content": f"Fix {body['instance_id']}."}]
        said = ask_policy(url, messages, {"max_tokens": 100})
        messages += [
            {"role": "assistant", "content": said},
            {"role": "user", "content": f"ran: {said}"},
        ]
        last = ask_policy(url, messages, {"max_tokens": 100})
        done = reward if last == "done" else 0.0
        return {
            "reward": done,
            "exit_status": "Submitted",
            "agent_metrics": {"turns": 2},
            "metadata": {"resolved": True},
        }

    with http_service(answer) as url, variables(**{variable: url}):
        yield


def agentic(found: Sequence[tw.Trajectory]) -> bool:
    """Both replies are trained, in one conversation."""
    (one,) = found
    return (
        "ran: ls" in text_of(one)
        and trained(one) == "ls<|im_end|>done<|im_end|>"
        and len(one.turns) == 2
    )


AGENT_ROW = {
    "prompt": [{"role": "user", "content": "Fix it."}],
    "metadata": {"instance_id": "a-1", "agent_name": "mini"},
}


def agent(
    use: str, reward: str, services: Any, row: Any = None, package: str = "httpx"
) -> Example | Skip:
    """An agent function, whose reward reads what it returned."""
    example = Example(
        use,
        [row or AGENT_ROW],
        ["ls", "done"],
        args={"custom_rm_path": reward},
        reward=0.75,
        check=agentic,
        services=services,
        renderer=decoding(text_renderer),
        names=(reward,),
    )
    return needs({package: package}, example)


TERMINAL_ROW = {
    "prompt": [{"role": "user", "content": "One command a turn."}],
    "metadata": {"task_id": "hello"},
}


@contextlib.contextmanager
def terminal() -> Iterator[None]:
    """The client of OpenEnv's terminal world, whose server runs in the image of a task."""

    class Action:
        def __init__(self, action_type: str, command: str = "") -> None:
            self.action_type, self.command = action_type, command

    class World:
        def __init__(self, **_: Any) -> None:
            self.ran: list[str] = []

        async def __aenter__(self) -> World:
            return self

        async def __aexit__(self, *_: object) -> None:
            return

        async def reset(self, task_id: str) -> Any:
            return SimpleNamespace(
                observation=SimpleNamespace(instruction=f"List the files of {task_id}.")
            )

        async def step(self, action: Action) -> Any:
            if action.action_type == "evaluate":
                info = {"harness": "tests/test.sh"}
                return SimpleNamespace(
                    reward=0.75 if self.ran[:1] == ["ls"] else 0.0,
                    observation=SimpleNamespace(info=info),
                )
            self.ran.append(action.command)
            return SimpleNamespace(observation=SimpleNamespace(output=f"ran: {action.command}"))

    with (
        modules(tbench2_env={"Tbench2Action": Action, "Tbench2Env": World}),
        variables(OPENENV_MAX_TURNS="2"),
    ):
        yield


def split(found: Sequence[tw.Trajectory]) -> bool:
    """Two samples of one reply, whose reward each has: its first half, and the rest."""
    (one,) = found
    return (
        len(one.turns) == 1 and one.reward == 1.0 and trained(one) == "It is \\boxed{21}<|im_end|>"
    )


def distilled(name: str, reward: float) -> Example:
    """Rewards of self-distillation: answers in a box or after `Answer:`; none in
    training without a task."""
    use = f"examples/on_policy_distillation/qwen3_5_35b_selfdistill/rm.py:{name}"
    return Example(
        "slime:generate",
        [MATH_ROW],
        ["so\nAnswer: 21"],
        args={"custom_rm_path": use, "args": PLAIN},
        reward=reward,
        names=(use,),
    )


PLAIN = {"rollout_skip_special_tokens": True}
SANDBOXES = [
    Skip(
        f"{EXPERIMENTAL}/openenv/openenv_{one}_agent_function.py:run",
        f"{one}'s sandboxes: a closed service, with images",
    )
    for one in ("daytona", "modal", "e2b")
]


EXAMPLES = [
    search(f"{EXPERIMENTAL}/search-r1", stops=False),
    multi_agent(f"{EXPERIMENTAL}/multi_agent"),
    tau(f"{EXPERIMENTAL}/tau-bench"),
    Skip(
        f"{EXPERIMENTAL}/strands_sglang/generate_with_strands.py:generate",
        "no version of strands-sglang on the package index has SGLangClient.from_miles_args",
        (f"{EXPERIMENTAL}/strands_sglang/generate_with_strands.py:reward_func",),
    ),
    geo3k(
        "examples/geo3k_vlm/multi_turn",
        "examples/geo3k_vlm/multi_turn/geo3k_vlm_multi_turn_config.yaml",
        "rollout.py:generate",
    ),
    geo3k(
        "examples/geo3k_vlm/multi_turn",
        "examples/geo3k_vlm/multi_turn/geo3k_vlm_multi_turn_config.yaml",
        "env_geo3k.py:build_env",
    ),
    Example(
        "examples/geo3k_vlm/rollout.py:generate",
        [{"problem": "Which number? <image>", "answer": "7", "images": [picture()]}],
        ["It is \\boxed{7}"],
        args={"rm_type": "math"},
        columns={"prompt": "problem"},
        reward=1.0,
        check=lambda found: (
            "image_pad" in text_of(found[0], 0)
            and trained(found[0]) == "It is \\boxed{7}<|im_end|>"
        ),
        renderer=decoding(vision_renderer),
    ),
    Example(
        "miles.rollout.generate_hub.multi_turn:generate",
        [MATH_ROW],
        [CALL, "Answer: \\boxed{21}"],
        args={
            "custom_rm_path": "examples/retool_v2/tool_sandbox.py:reward_func",
            "reward_key": "score",
            "args": {
                "apply_chat_template": False,
                "generate_tool_specs_path": "examples.retool_v2.tool_sandbox.tool_specs",
                "generate_execute_tool_function_path": "examples.retool_v2.tool_sandbox.execute_tool",  # noqa: E501
                "generate_tool_call_parser": "qwen25",
            },
        },
        reward=1.0,
        check=retooled,
        renderer=decoding(text_renderer),
        names=(
            "examples/retool_v2/tool_sandbox.py:reward_func",
            "examples/retool_v2/tool_sandbox.py:execute_tool",
        ),
    ),
    agent(
        "examples/swe-agent-harbor-docker/swe_agent_function.py:run",
        "examples/swe-agent-harbor-docker/generate.py:reward_func",
        lambda: all_of(installed, lambda: agent_server("AGENT_SERVER_URL", 0.75)),
    ),
    agent(
        f"{EXPERIMENTAL}/nemo-gym/nemogym_agent_function.py:run",
        f"{EXPERIMENTAL}/nemo-gym/nemogym_generate.py:reward_func",
        lambda: all_of(installed, lambda: agent_server("NEMO_GYM_URL", 0.75)),
    ),
    agent(
        f"{EXPERIMENTAL}/openenv/openenv_agent_function.py:run",
        f"{EXPERIMENTAL}/openenv/openenv_generate.py:reward_func",
        lambda: all_of(installed, terminal),
        TERMINAL_ROW,
        "openai",
    ),
    Example(
        "tests/manual/compact_split_generate.py:generate",
        [MATH_ROW],
        ["It is \\boxed{21}"],
        args={"rm_type": "math"},
        check=split,
        renderer=decoding(tw.byte_renderer),
    ),
    distilled("reward_func", 1.0),
    distilled("reward_func_pure_opd", 0.0),
    *SANDBOXES,
    step(f"{EXPERIMENTAL}/eval/eval_delegate_rollout.py:generate_rollout"),
    step(f"{EXPERIMENTAL}/verifiers/verifiers_rollout.py:generate_rollout"),
    step("examples/swe-agent-harbor-docker/generate.py:RolloutFn"),
    Skip(
        f"{EXPERIMENTAL}/hud/rollout.py:generate",
        "environments of HUD in Daytona's sandboxes: a closed service, with the image of each task",
        (f"{EXPERIMENTAL}/hud/rollout.py:reward_func",),
    ),
    Skip(
        f"{EXPERIMENTAL}/formal_math/single_round/reward_fn.py:reward_fn",
        "a Lean server in a container on every node of a Ray cluster",
    ),
    Skip(
        "examples/infra_features/fully_async/external_eval_fn.py:ExternalSglangEvalFn",
        "starts an SGLang server of its own on a GPU, for evaluation",
    ),
    Skip(
        "examples/infra_features/random_async/random_async_rollout.py:generate_rollout_random_async",
        "measures SGLang servers on GPUs with random ids, and their metrics; no agent",
    ),
]
