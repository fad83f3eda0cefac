"""Miles' agent functions: the user's agent asks the model by a chat API, and what it
sampled becomes samples."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from copy import deepcopy
from typing import Any

from turnwright.envs.user_imports import import_foreign
from turnwright.errors import EnvError
from turnwright.types import Trajectory
from turnwright_compat.sampled_rows import EngineCall
from turnwright_compat.slime.engine import EngineServer, current_server
from turnwright_serve.proxy.programs import shared_server
from turnwright_serve.proxy.session import ProxySession, ProxySettings

REQUEST_NAMES = {"max_new_tokens": "max_tokens"}
REQUEST_OPTIONS = ("temperature", "top_p", "top_k", "min_p", "max_new_tokens", "stop")
"""Sampling parameters that a request to a chat API may have."""

END_S = 30.0
"""Seconds that an agent has to end after its episode did."""


async def generate(input: Any) -> Any:
    """Run the agent of `args.custom_agent_function_path`, and return samples of what
    the model replied to it.

    What the agent returns is added to the metadata of each sample, where a reward reads it. A
    sample is one conversation; an agent that rewrites its history, or has several, gives several.
    """
    server = current_server("agentic_tool_call")
    output_class = import_foreign("miles.rollout.base_types").GenerateFnOutput
    function = import_foreign("slime.utils.misc").load_function(
        input.args.custom_agent_function_path
    )
    if function is None:
        raise EnvError(
            "no agent function; give [env.args] args.custom_agent_function_path, or name it in use"
        )

    session = ProxySession(server.model, ProxySettings(untrained=()))
    async with shared_server() as http:
        root = http.open(session)
        try:
            returned = await _call(function, input, root, session)
        finally:
            http.close_session(session)
            await session.end()
    if session.error is not None:
        raise session.error

    samples = _samples(input.sample, server, session)
    for sample in samples:
        vars(sample).update(metadata={**(sample.metadata or {}), **(returned or {})})
    return output_class(samples if len(samples) > 1 else samples[0])


async def _call(
    function: Any, input: Any, root: str, session: ProxySession
) -> Mapping[str, Any] | None:
    """Call the agent; one that is still at work when the episode met a limit is cancelled."""
    sample = input.sample
    request_kwargs: dict[str, Any] = {}
    for name in REQUEST_OPTIONS:
        value = input.sampling_params.get(name)
        if value is not None:
            request_kwargs[REQUEST_NAMES.get(name, name)] = value
    metadata = {
        **(sample.metadata or {}),
        "max_seq_len": input.args.max_seq_len,
        "session_server_id": root.partition("//")[2].partition("/")[0],
    }
    agent = asyncio.ensure_future(
        function(
            base_url=root,
            prompt=sample.prompt,
            request_kwargs=request_kwargs,
            metadata=metadata,
        )
    )
    episode_end = asyncio.ensure_future(session.ended.wait())

    try:
        await asyncio.wait([agent, episode_end], return_when=asyncio.FIRST_COMPLETED)
        if not agent.done():
            # The agent learns the end by the error of its next request, and may still be grading.
            await asyncio.wait([agent], timeout=END_S)
        if session.ended.is_set() and (not agent.done() or agent.exception() is not None):
            return None
        returned = agent.result()
    finally:
        agent.cancel()
        episode_end.cancel()
        await asyncio.gather(agent, episode_end, return_exceptions=True)

    if returned is not None and not isinstance(returned, Mapping):
        raise EnvError(
            f"the agent function returned {type(returned).__name__}; return a dict for the "
            "metadata, or None"
        )
    return returned


def _samples(sample: Any, server: EngineServer, session: ProxySession) -> list[Any]:
    """Return the rows of the conversations as samples, and keep their calls
    for the check of masks."""
    trajectory: Trajectory = server.model.trajectory
    reply_of_message = {
        id(exchange.reply.message): exchange.reply
        for exchange in session.history.exchanges
        if exchange.reply is not None
    }
    for number, turn in enumerate(trajectory.turns):
        reply = reply_of_message.get(id(turn.reply))
        if reply is not None:
            server.calls.append(EngineCall(trajectory.prompt_ids(number), reply))

    statuses = type(sample).Status
    last_calls = server.calls[-1:]
    is_cut = session.limit is not None or any(call.reply.finish == "length" for call in last_calls)
    samples = []
    for row in trajectory.samples():
        start = row.mask.index(True)
        row_sample = deepcopy(sample)
        vars(row_sample).update(
            tokens=list(row.ids),
            response_length=len(row.ids) - start,
            response=server.model.tokenizer.decode(row.ids[start:]),
            loss_mask=[int(weight > 0) for weight in row.weights[start:]],
            rollout_log_probs=[logprob or 0.0 for logprob in row.logprobs[start:]],
            status=statuses.TRUNCATED if is_cut else statuses.COMPLETED,
        )
        samples.append(row_sample)

    if not samples:
        # Nothing was asked, as Miles has it.
        vars(sample).update(status=statuses.ABORTED)
        return [sample]
    return samples
