# ruff: noqa: E501  # the files of users are texts
"""Miles' agent functions: an agent that asks the model by a chat API, `run(base_url, prompt, request_kwargs, metadata)`."""

import pytest
from kit.rollouts import renderer
from kit.slime import played

import turnwright as tw
from turnwright.config.schema import EnvConfig
from turnwright.envs.resolve import resolve_env

HEAD = """
import asyncio
from functools import partial

from miles.utils.http_utils import post
from miles.utils.types import Sample


async def talk(base_url, prompt, request_kwargs, metadata, turns=2):
    messages = list(prompt) if isinstance(prompt, list) else [{"role": "user", "content": prompt}]
    said = []
    for number in range(turns):
        out = await post(f"{base_url}/v1/chat/completions", {"model": "default", "messages": messages, **request_kwargs})
        said.append(out["choices"][0]["message"]["content"])
        messages += [out["choices"][0]["message"], {"role": "user", "content": f"ran {said[-1]}"}]
    return said


async def judge(args, samples, **options):
    if isinstance(samples, list):
        return [one.metadata.get("reward", 0.0) for one in samples]
    return samples.metadata.get("reward", 0.0)

"""
BODY = "    said = await talk(base_url, prompt, request_kwargs, metadata)\n    assert metadata['n'] == 3 and 'session_server_id' in metadata\n    return {'reward': 0.5 * (said == ['a', 'b']), 'said': said}\n"
SHAPES = {
    "a function": f"async def run(base_url, prompt, request_kwargs=None, metadata=None, **kwargs):\n{BODY}",
    "keywords": f"async def run(*, base_url, prompt, request_kwargs, metadata):\n{BODY}",
    "partial": f"async def many(bonus, base_url, prompt, request_kwargs, metadata):\n{BODY}\nrun = partial(many, 1)",
    "a method": (
        "class Agent:\n    async def play(self, base_url, prompt, request_kwargs=None, metadata=None, **kwargs):\n"
        + "\n".join("    " + line for line in BODY.splitlines())
        + "\nrun = Agent().play"
    ),
    "an object": (
        "class Agent:\n    async def __call__(self, base_url, prompt, request_kwargs=None, metadata=None):\n"
        + "\n".join("    " + line for line in BODY.splitlines())
        + "\nrun = Agent()"
    ),
}
ROW = {"prompt": "Go.", "metadata": {"n": 3}}


def play(folder, text, use="agent.py:run", *, replies=("a", "b"), row=None, args=None, **limits):
    given = {"custom_rm_path": "agent.py:judge", **(args or {})}
    return played(
        folder,
        "pass",
        use,
        replies=replies,
        row=row or ROW,
        args=given,
        files={"agent.py": HEAD + text},
        **limits,
    )


def trained(found):
    rows = []
    for row in found.samples():
        rows.append(
            tw.byte_renderer().decode(
                [one for one, weight in zip(row.ids, row.weights, strict=True) if weight]
            )
        )
    return sorted(rows)


@pytest.mark.parametrize("shape", SHAPES)
def test_an_agent_function_is_known_by_how_it_is_called(shape, tmp_path):
    found = play(tmp_path, SHAPES[shape])
    assert (found.error, found.reward, found.stop) == (None, 0.5, "done")
    assert trained(found) == ["a<|im_end|>b<|im_end|>"]


def test_miles_own_generate_function_takes_its_path(tmp_path):
    """As Miles' flags name it: the generate function in `use`, the agent in `args`."""
    args = {"args": {"custom_agent_function_path": "agent.run", "apply_chat_template": False}}
    use = "miles.rollout.generate_hub.agentic_tool_call:generate"
    found = play(tmp_path, SHAPES["a function"], use, args=args)
    assert (found.error, found.reward) == (None, 0.5)


def test_what_is_asked_has_the_runs_sampling_parameters(tmp_path):
    text = """
async def run(base_url, prompt, request_kwargs, metadata):
    assert request_kwargs == {"temperature": 1.0, "top_p": 1.0, "top_k": -1, "max_tokens": 200}, request_kwargs
    await talk(base_url, prompt, request_kwargs, metadata, 1)
    return {"reward": 1.0}
"""
    found = play(tmp_path, text)
    assert (found.error, found.reward) == (None, 1.0)


def test_messages_stay_messages_without_the_chat_template(tmp_path):
    text = """
async def run(base_url, prompt, request_kwargs, metadata):
    assert prompt == [{"role": "user", "content": "Go."}]
    await talk(base_url, prompt, request_kwargs, metadata, 1)
    return {"reward": 1.0}
"""
    row = {"prompt": [{"role": "user", "content": "Go."}]}
    found = play(tmp_path, text, row=row, args={"args": {"apply_chat_template": False}})
    assert (found.error, found.reward) == (None, 1.0)


def test_an_agent_that_forgets_its_history_gives_several_samples(tmp_path):
    text = """
async def run(base_url, prompt, request_kwargs, metadata):
    await talk(base_url, "One.", request_kwargs, metadata, 1)
    await talk(base_url, "Two.", request_kwargs, metadata, 1)
    return {"reward": 2.0}
"""
    found = play(tmp_path, text)
    assert found.error is None, found.error
    assert trained(found) == ["a<|im_end|>", "b<|im_end|>"]
    assert [row.reward for row in found.samples()] == [2.0, 2.0]


def test_a_reply_that_is_cut_is_rewarded(tmp_path):
    text = """
async def run(base_url, prompt, request_kwargs, metadata):
    out = await post(f"{base_url}/v1/chat/completions", {"model": "m", "messages": [{"role": "user", "content": "Go."}]})
    return {"reward": -1.0 if out["choices"][0]["finish_reason"] == "length" else 1.0}
"""
    found = play(tmp_path, text, replies=["abcdef"], turn_tokens=3)
    assert (found.error, found.reward, found.stop.status) == (None, -1.0, "truncated")
    assert trained(found) == ["abc"]


def test_the_end_of_an_episode_ends_the_agent(tmp_path):
    text = """
async def run(base_url, prompt, request_kwargs, metadata):
    await talk(base_url, prompt, request_kwargs, metadata, 9)
"""
    found = play(tmp_path, text, replies=["a"] * 9, turns=2)
    assert (found.error, found.reward, found.stop.status) == (None, 0.0, "truncated")
    assert len(found.turns) == 2


def test_an_agent_that_asks_nothing_is_aborted_and_one_that_fails_is_an_error(tmp_path):
    quiet = (
        "async def run(base_url, prompt, request_kwargs, metadata):\n    return {'reward': 1.0}\n"
    )
    found = play(tmp_path / "a", quiet)
    assert (found.error, found.reward, str(found.stop)) == (None, None, "aborted")
    wrong = "async def run(base_url, prompt, request_kwargs, metadata):\n    await talk(base_url, prompt, request_kwargs, metadata, 1)\n    raise KeyError('x')\n"
    found = play(tmp_path / "b", wrong)
    assert found.error.type == "KeyError"
    assert found.reward is None
    other = "async def run(base_url, prompt, request_kwargs, metadata):\n    await talk(base_url, prompt, request_kwargs, metadata, 1)\n    return 1.0\n"
    assert "return a dict for the metadata" in play(tmp_path / "c", other).error.message


def test_many_agents_at_once_are_each_their_own(tmp_path):
    path = tmp_path / "agent.py"
    path.write_text(
        HEAD
        + "async def run(base_url, prompt, request_kwargs, metadata):\n    said = await talk(base_url, prompt, request_kwargs, metadata, 1)\n    return {'reward': float(said[0])}\n"
    )
    spec = resolve_env(EnvConfig(use=f"{path}:run", args={"custom_rm_path": f"{path}:judge"}))
    engine = tw.ScriptedEngine(lambda messages, rng: str(rng.randrange(1000)))
    tasks = [tw.Task(f"{number}") for number in range(8)]
    found = tw.rollout(
        spec.agent_function,
        tasks,
        engine,
        renderer=renderer("bpe"),
        limits=tw.Limits(turns=2, turn_tokens=20),
    )
    assert [one.error for one in found] == [None] * 8
    for one in found:
        assert one.messages[-1].text == str(int(one.reward))
