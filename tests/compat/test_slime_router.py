# ruff: noqa: E501  # the files of users are texts
"""User code of slime and Miles that brings its own HTTP client: the rollout servers have a real address."""

import pytest
from kit.slime import played

import turnwright as tw
from turnwright.config.schema import EnvConfig
from turnwright.envs.resolve import resolve_env

CLIENTS = {
    "aiohttp": """
        async with aiohttp.ClientSession(base_url=url) as session:
            async with session.post("/generate", json=body) as answer:
                return answer.status, await answer.json()
    """,
    "urllib in a thread": """
        def send():
            data = json.dumps(body).encode()
            asked = urllib.request.Request(url + "/generate", data, {"Content-Type": "application/json"})
            with urllib.request.urlopen(asked) as answer:
                return answer.status, json.load(answer)
        return await asyncio.to_thread(send)
    """,
}


def source(client, rest):
    return f"""
import asyncio
import json
import urllib.request

import aiohttp
from slime.rollout.sglang_rollout import GenerateState


async def ask(url, body):
{client}


async def generate(args, sample, sampling_params):
    url = f"http://{{args.sglang_router_ip}}:{{args.sglang_router_port}}"
    sample.tokens = GenerateState(args).tokenizer(sample.prompt, add_special_tokens=False)["input_ids"]
    body = {{"input_ids": sample.tokens, "sampling_params": sampling_params, "return_logprob": True}}
{rest}
    return sample
"""


ONE_REPLY = """
    status, out = await ask(url, body)
    rows = out["meta_info"]["output_token_logprobs"]
    sample.append_response_tokens(
        args, tokens=[row[1] for row in rows], log_probs=[row[0] for row in rows], meta_info=out["meta_info"], text=out["text"]
    )
    assert out["meta_info"]["e2e_latency"] >= 0 and out["meta_info"]["completion_tokens"] == len(rows)
    sample.reward = float(out["text"].removesuffix("<|im_end|>"))
"""


def written(folder, text):
    (folder / "own").mkdir()
    path = folder / "own/mine.py"
    path.write_text(text)
    return f"{path}:generate"


@pytest.mark.parametrize("client", CLIENTS)
def test_a_client_of_the_users_gets_the_replies_of_its_episode(client, tmp_path):
    """Many episodes at once: none reads the reply of another, and what is trained is what was sampled."""
    use = written(tmp_path, source(CLIENTS[client], ONE_REPLY))
    tasks = [tw.Task(f"{number}", id=str(number)) for number in range(12)]
    found = tw.rollout(
        resolve_env(EnvConfig(use=use)).agent_function,
        tasks,
        tw.ScriptedEngine(lambda messages, rng: str(rng.randrange(1000))),
        renderer=tw.byte_renderer(),
        limits=tw.Limits(turns=2, turn_tokens=20),
    )
    assert [one.error for one in found] == [None] * 12
    said = []
    for one in found:
        (row,) = one.samples()
        trained = [token for token, mask in zip(row.ids, row.mask, strict=True) if mask]
        said.append(tw.byte_renderer().decode(trained).removesuffix("<|im_end|>"))
    assert [float(text) for text in said] == [one.reward for one in found]
    assert len(set(said)) > 6


def test_a_reply_that_is_cut_comes_with_its_finish(tmp_path):
    rest = ONE_REPLY.replace('float(out["text"].removesuffix("<|im_end|>"))', "0.25")
    rest += '    assert out["meta_info"]["finish_reason"]["type"] == "length"\n'
    use = written(tmp_path, source(CLIENTS["aiohttp"], rest))
    (found,) = tw.rollout(
        resolve_env(EnvConfig(use=use)).agent_function,
        [tw.Task("Go.")],
        tw.ScriptedEngine(["abcdef"]),
        renderer=tw.byte_renderer(),
        limits=tw.Limits(turns=2, turn_tokens=3),
    )
    assert (found.error, found.reward, found.stop.status) == (None, 0.25, "truncated")


def test_what_the_servers_cannot_do_is_the_error_of_a_request(tmp_path):
    rest = (
        """
    for wrong, why in (({**body, "stream": True}, "stream"), ({"sampling_params": {}}, "input_ids or text"), ([1], "no object")):
        status, answer = await ask(url, wrong)
        assert status == 400 and why in answer["error"], answer
    async with aiohttp.ClientSession() as session:
        async with session.get(url + "/health") as answer:
            assert answer.status == 200
        async with session.get(url + "/model_info") as answer:
            assert (await answer.json())["is_generation"]
"""
        + ONE_REPLY
    )
    found = played(
        tmp_path,
        "pass",
        "mine.py:generate",
        replies=["1"],
        files={"mine.py": source(CLIENTS["aiohttp"], rest)},
    )
    assert (found.error, found.reward) == (None, 1.0)


def test_post_reaches_the_engine_at_the_same_address(tmp_path):
    rest = """
    from slime.utils.http_utils import post

    out = await post(url + "/generate", body)
    assert args.sglang_router_ip == "127.0.0.1" and args.sglang_router_port > 1
    rows = out["meta_info"]["output_token_logprobs"]
    sample.append_response_tokens(args, tokens=[row[1] for row in rows], log_probs=[row[0] for row in rows])
    sample.reward = 1.0
"""
    found = played(
        tmp_path,
        "pass",
        "mine.py:generate",
        replies=["1"],
        files={"mine.py": source(CLIENTS["aiohttp"], rest)},
    )
    assert (found.error, found.reward) == (None, 1.0)


def none_left(*_, **__):
    raise OSError(24, "Too many open files")


@pytest.mark.parametrize("full", ["create_server", "limit"])
def test_without_a_socket_post_still_works(full, tmp_path, monkeypatch):
    """Without one at all, or with half of the process's files in use."""
    from turnwright_compat.slime import router as slime_router

    if full == "create_server":
        monkeypatch.setattr(slime_router.socket, "create_server", none_left)
    else:
        monkeypatch.setattr(slime_router, "_most_files", lambda: 2)
    text = """
    async def generate(args, sample, sampling_params):
        assert args.sglang_router_ip == "turnwright.invalid"
        sample = await one_reply(args, sample, sampling_params)
        sample.reward = 1.0
        return sample
    """
    found = played(tmp_path, text)
    assert (found.error, found.reward) == (None, 1.0)


def test_sampling_parameters_are_the_runs(tmp_path):
    """A function that picks its own from `sampling_params` or from `args` samples as the run says."""
    text = """
    async def generate(args, sample, sampling_params):
        picked = {key: sampling_params[key] for key in ("max_new_tokens", "temperature", "top_p", "top_k")}
        assert picked == {"max_new_tokens": 200, "temperature": 0.5, "top_p": 0.75, "top_k": -1}, picked
        assert (args.rollout_temperature, args.rollout_top_p, args.rollout_top_k) == (0.5, 0.75, -1)
        sample = await one_reply(args, sample, picked)
        sample.reward = 1.0
        return sample
    """
    path = tmp_path / "mine.py"
    path.write_text(
        "from slime.rollout.sglang_rollout import generate as one_reply\n"
        + "\n".join(line[4:] for line in text.splitlines())
    )
    (found,) = tw.rollout(
        resolve_env(EnvConfig(use=f"{path}:generate")).agent_function,
        [tw.Task("Go.")],
        tw.ScriptedEngine(["a"]),
        renderer=tw.byte_renderer(),
        limits=tw.Limits(turns=2, turn_tokens=200),
        sampling=tw.Sampling(temperature=0.5, top_p=0.75),
    )
    assert (found.error, found.reward) == (None, 1.0)
    (row,) = found.samples()
    assert (row.sampling.temperature, row.sampling.top_p) == (0.5, 0.75)
