"""Programs over the official SDKs, openai-agents, pydantic-ai, smolagents and
mini-swe-agent: `make test-agents`."""

from __future__ import annotations

import ast
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
from kit.programs import END, MINI, MINI_ENV, STEPS, Outcome, counts, run_program
from kit.proxy import called

import turnwright as tw
from tests.agents.real_programs import installed
from turnwright_serve.proxy import anthropic, chat, responses
from turnwright_serve.proxy.wire import IGNORED, REFUSED

pytestmark = [pytest.mark.agents, pytest.mark.timeout(300)]
PROGRAMS = Path(__file__).parent / "programs"
SUBMIT = "Done.\n" + called("bash", command="echo COMPLETE_TASK_AND_SUBMIT_FINAL_OUTPUT")

APPENDING = [
    ("sdk_chat", (), {}),
    ("sdk_chat", ("stream",), {}),
    ("sdk_responses", (), {}),
    ("sdk_responses", ("stream",), {}),
    ("sdk_messages", (), {}),
    ("sdk_messages", ("stream",), {}),
    ("openai_agents", (), {}),
    ("openai_agents", ("chat",), {}),
    ("pydantic_ai_agent", ("chat",), {"arguments_form": len(STEPS)}),
    ("pydantic_ai_agent", ("responses",), {"arguments_form": len(STEPS)}),
    ("pydantic_ai_agent", ("anthropic",), {}),
]


def script(
    shell: Callable[[str], str], end: str, steps: Sequence[str] = STEPS
) -> Callable[..., str]:
    """Return a script that runs a step in each reply, then ends."""

    def reply(messages: Sequence[tw.Message], rng: Any) -> str:
        done = sum(message.role == "assistant" for message in messages)
        return shell(steps[done]) if done < len(steps) else end

    return reply


def library(name: str, arguments: Sequence[str], reply: Any, **given: Any) -> Outcome:
    """Play one of the programs beside this file."""
    return run_program(
        ("python", str(PROGRAMS / f"{name}.py"), "{task}", *arguments), reply, **given
    )


@pytest.mark.parametrize(("name", "arguments", "expected"), APPENDING, ids=lambda value: str(value))
def test_a_program_that_only_appends_is_one_row(
    name: str, arguments: tuple[str, ...], expected: dict[str, int]
) -> None:
    outcome = library(
        name, arguments, script(lambda step: "I will look.\n" + called("shell", command=step), END)
    )
    trajectory = outcome.trajectory
    assert (trajectory.reward, trajectory.branches, len(trajectory.turns)) == (
        1.0,
        {},
        len(STEPS) + 1,
    )
    assert len(list(trajectory.samples())) == 1
    assert counts(trajectory) == expected
    assert END in outcome.results[0].output


def test_smolagents_writes_every_reply_anew() -> None:
    """Its tool agent sends calls back as text; its code agent adds text after the sampled
    ids, which stay one row."""
    tools = library(
        "smolagents_agent",
        ("tools",),
        script(lambda step: called("shell", command=step), called("final_answer", answer=END)),
    )
    code = library(
        "smolagents_agent",
        ("code",),
        script(
            lambda step: f"I look.\n<code>\nprint(shell({step!r}))\n</code>",
            f"<code>\nfinal_answer({END!r})\n</code>",
        ),
    )
    for outcome, rows in ((tools, 5), (code, 1)):
        trajectory = outcome.trajectory
        assert trajectory.reward == 1.0
        assert trajectory.branches == {"rewritten_reply": len(STEPS)}
        assert len(list(trajectory.samples())) == rows
        assert END in outcome.results[0].output


def test_mini_swe_agent_appends() -> None:
    outcome = run_program(
        MINI, script(lambda step: "I look.\n" + called("bash", command=step), SUBMIT), env=MINI_ENV
    )
    trajectory = outcome.trajectory
    assert (trajectory.reward, trajectory.branches, len(trajectory.turns)) == (
        1.0,
        {},
        len(STEPS) + 1,
    )
    assert len(list(trajectory.samples())) == 1
    assert counts(trajectory) == {}


def test_mini_swe_agent_drops_a_reply_without_a_call() -> None:
    steps = [STEPS[0], "", *STEPS[1:]]
    said = iter(steps)

    def reply(messages: Sequence[tw.Message], rng: Any) -> str:
        step = next(said, None)
        return (
            SUBMIT
            if step is None
            else called("bash", command=step)
            if step
            else "I have no call to make."
        )

    trajectory = run_program(MINI, reply, env=MINI_ENV).trajectory
    assert (trajectory.reward, trajectory.branches) == (1.0, {"dropped_reply": 1})
    assert len(list(trajectory.samples())) == 2


@pytest.mark.parametrize(
    "name", ["sdk_chat", "sdk_responses", "sdk_messages", "openai_agents", "pydantic_ai_agent"]
)
def test_a_limit_ends_a_program(name: str) -> None:
    """Nothing asks again: the status and its header are taken as they are meant."""
    arguments = ("chat",) if name == "pydantic_ai_agent" else ()
    reply = script(lambda step: called("shell", command=step), END)
    outcome = library(name, arguments, reply, limits=tw.Limits(turns=3, turn_tokens=4000))
    assert (outcome.trajectory.stop, len(outcome.trajectory.turns)) == ("max_turns", 3)
    assert outcome.results[0].exit_code == 1


@pytest.mark.parametrize(
    ("file", "base", "known"),
    [
        (
            "openai/types/chat/completion_create_params.py",
            "CompletionCreateParamsBase",
            chat.FIELDS,
        ),
        (
            "openai/types/responses/response_create_params.py",
            "ResponseCreateParamsBase",
            responses.FIELDS,
        ),
        ("anthropic/types/message_create_params.py", "MessageCreateParamsBase", anthropic.FIELDS),
        (
            "anthropic/types/beta/message_create_params.py",
            "MessageCreateParamsBase",
            anthropic.FIELDS,
        ),
    ],
)
def test_every_field_of_the_official_clients_is_read_ignored_or_refused(
    file: str, base: str, known: frozenset[str]
) -> None:
    (packages,) = (Path(installed("python")).parents[1] / "lib").glob("python3*/site-packages")
    classes = [
        node
        for node in ast.parse((packages / file).read_text()).body
        if isinstance(node, ast.ClassDef)
    ]
    (params,) = (node for node in classes if node.name == base)
    fields = {
        row.target.id
        for row in params.body
        if isinstance(row, ast.AnnAssign) and isinstance(row.target, ast.Name)
    }
    assert len(fields) > 15
    assert fields <= known | IGNORED | REFUSED | {"n"}
