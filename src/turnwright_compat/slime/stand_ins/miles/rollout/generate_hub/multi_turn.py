"""Replies and the results of the tools that they call."""

from __future__ import annotations

from copy import deepcopy

from miles.rollout.base_types import GenerateFnInput, GenerateFnOutput
from miles.rollout.generate_utils.generate_endpoint_utils import (
    compute_prompt_ids_from_sample,
    compute_request_payload,
    update_sample_from_response,
)
from miles.rollout.generate_utils.tool_call_utils import (
    create_tool_call_parser,
    execute_tool_calls,
    update_sample_with_tool_responses,
)
from miles.utils.http_utils import post
from miles.utils.misc import load_function


async def generate(input: GenerateFnInput) -> GenerateFnOutput:
    """Sample replies until one calls no tool, is cut, or is the last of `args.generate_max_turns`.

    `args` names the tools: `generate_tool_specs_path`, `generate_execute_tool_function_path`, `generate_tool_call_parser`.
    """
    args, sample = input.args, deepcopy(input.sample)
    url = f"http://{args.sglang_router_ip}:{args.sglang_router_port}/generate"
    execute = load_function(args.generate_execute_tool_function_path)
    tools = load_function(args.generate_tool_specs_path)
    parser = create_tool_call_parser(tools, args.generate_tool_call_parser)

    sample.tokens = compute_prompt_ids_from_sample(input.state, sample, tools=tools)
    for _ in range(args.generate_max_turns):
        payload, status = compute_request_payload(args, sample.tokens, input.sampling_params)
        if payload is None:
            sample.status = status
            break
        output = await post(url, payload)
        await update_sample_from_response(args, sample, payload=payload, output=output, update_loss_mask=True)
        if output["meta_info"]["finish_reason"]["type"] in ("abort", "length"):
            break

        calls = parser.parse_non_stream(output["text"])[1]
        if not calls:
            break
        results = await execute_tool_calls(calls, execute)
        update_sample_with_tool_responses(sample, results, tokenizer=input.state.tokenizer)
    return GenerateFnOutput(samples=sample)
