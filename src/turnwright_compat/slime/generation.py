"""Generate functions of slime and Miles, and the parts that user code makes its own of."""

from __future__ import annotations

import json
import uuid
from collections.abc import Awaitable, Callable, Mapping, Sequence
from copy import deepcopy
from typing import Any

from turnwright.envs.user_imports import import_for_user
from turnwright_compat.slime.engine import GenerateState
from turnwright_compat.slime.interfaces import (
    GenerateFnInput,
    GenerateFnOutput,
    RolloutFnConstructorInput,
    Sample,
)
from turnwright_compat.slime.session import generate as generate_by_agent  # noqa: F401  # of the table
from turnwright_compat.slime.utilities import (
    build_processor_kwargs,
    call_processor,
    encode_image_for_rollout_engine,
    extract_multimodal_train_inputs,
    load_function,
    post,
)


def get_model_url(args: Any, model_name: str, endpoint: str = "/generate") -> str:
    """Return the address of a model: that of `args.sglang_model_routers`, a table of hosts and
    ports, else the policy's."""
    routers = getattr(args, "sglang_model_routers", None) or {}
    host, port = routers.get(model_name, (args.sglang_router_ip, args.sglang_router_port))
    return f"http://{host}:{port}{endpoint}"


async def generate(args: Any, sample: Any, sampling_params: dict[str, Any]) -> Any:
    """Sample one reply to the prompt of a sample, or go on with one that has ids already."""
    state = GenerateState(args)
    images = (sample.multimodal_inputs or {}).get("images")
    if not sample.tokens:
        if images and state.processor is not None:
            options = build_processor_kwargs(sample.multimodal_inputs)
            sample.tokens = list(state.processor(text=sample.prompt, **options)["input_ids"][0])
        else:
            sample.tokens = state.tokenizer(sample.prompt, add_special_tokens=False)["input_ids"]

    max_new_tokens = sampling_params["max_new_tokens"] - sample.response_length
    if max_new_tokens <= 0:
        sample.status = type(sample).Status.TRUNCATED
        return sample

    url = f"http://{args.sglang_router_ip}:{args.sglang_router_port}/generate"
    payload = {
        "input_ids": sample.tokens,
        "sampling_params": {**sampling_params, "max_new_tokens": max_new_tokens},
        "return_logprob": True,
        "image_data": [encode_image_for_rollout_engine(image) for image in images or ()],
    }
    output = await post(url, payload)

    rows = output["meta_info"]["output_token_logprobs"]
    sample.append_response_tokens(
        args,
        tokens=[row[1] for row in rows],
        log_probs=[row[0] for row in rows],
        meta_info=output["meta_info"],
        text=output["text"],
    )
    return sample


def generate_rollout(args: Any, rollout_id: int, data_source: Any, evaluation: bool = False) -> Any:
    """Play a step, as functions for a step call it.

    Raises:
        NotImplementedError: always; our loop plays steps.
    """
    raise NotImplementedError("a step is played by our loop; name the generate function in use")


def read_replies(args: Any, rollout_id: int, data_buffer: Any, evaluation: bool = False) -> Any:
    """Read a step of replies.

    Raises:
        NotImplementedError: always; our loop plays steps.
    """
    raise NotImplementedError(
        "a step is played by our loop; train on given replies with [warmup] dataset"
    )


def generate_rollout_fully_async(
    args: Any, rollout_id: int, data_buffer: Any, evaluation: bool = False
) -> Any:
    """Play a step.

    Raises:
        NotImplementedError: always; our loop plays steps.
    """
    raise NotImplementedError('a step is played by our loop; set [schedule] mode = "async"')


class FullyAsyncRolloutFn:
    """Miles' class for it."""

    def __init__(self, input: RolloutFnConstructorInput) -> None:
        self.input = input


def compute_prompt_ids_from_sample(state: Any, sample: Any, tools: Any = None) -> list[int]:
    """Return the ids of a sample's prompt, which is a text or messages; those of its images set
    `multimodal_train_inputs`."""
    media = sample.multimodal_inputs
    if state.processor and media and any(items is not None for items in media.values()):
        inputs = call_processor(state.processor, sample.prompt, media)
        sample.multimodal_train_inputs = extract_multimodal_train_inputs(inputs)
        return list(inputs["input_ids"][0])

    prompt = sample.prompt
    if not isinstance(prompt, str):
        prompt = state.tokenizer.apply_chat_template(
            prompt, tokenize=False, add_generation_prompt=True, tools=tools
        )
    return list(state.tokenizer.encode(prompt, add_special_tokens=False))


def compute_routing_headers(args: Any, sample: Any) -> dict[str, str] | None:
    """Return no headers: one engine answers."""
    return None


def compute_request_payload(
    args: Any,
    input_ids: Sequence[int],
    sampling_params: Mapping[str, Any],
    multimodal_inputs: Mapping[str, Any] | None = None,
) -> tuple[dict[str, Any] | None, Any]:
    """Return a request; None and the status TRUNCATED where the context has no room for a reply."""
    length = sampling_params.get("max_new_tokens", args.rollout_max_response_len)
    if args.rollout_max_context_len:
        length = min(length, args.rollout_max_context_len - len(input_ids))
    if length <= 0:
        return None, Sample.Status.TRUNCATED

    payload = {
        "input_ids": list(input_ids),
        "sampling_params": {**sampling_params, "max_new_tokens": length},
        "return_logprob": True,
    }
    images = (multimodal_inputs or {}).get("images")
    if images:
        payload["image_data"] = [encode_image_for_rollout_engine(image) for image in images]
    return payload, None


async def update_sample_from_response(
    args: Any,
    sample: Any,
    payload: Mapping[str, Any],
    output: Mapping[str, Any],
    update_loss_mask: bool = False,
) -> None:
    """Append a reply to a sample."""
    rows = output["meta_info"].get("output_token_logprobs") or []
    if not sample.response and not sample.tokens:
        sample.tokens = list(payload["input_ids"])

    had_mask = sample.loss_mask is not None
    sample.append_response_tokens(
        args,
        tokens=[row[1] for row in rows],
        log_probs=[row[0] for row in rows],
        meta_info=output["meta_info"],
        text=output["text"],
    )
    if not update_loss_mask and not had_mask:
        sample.loss_mask = None


def create_tool_call_parser(tool_specs: Sequence[Any], tool_call_parser: str) -> Any:
    """Return SGLang's reader of calls, for tools in OpenAI's format."""
    # SGLang's own, where it is installed.
    protocol = import_for_user("sglang.srt.entrypoints.openai.protocol", fromlist=("Tool",))
    tool_class = protocol.Tool
    parsers = import_for_user(
        "sglang.srt.function_call.function_call_parser", fromlist=("FunctionCallParser",)
    )
    parser_class = parsers.FunctionCallParser

    tools = [
        tool if isinstance(tool, tool_class) else tool_class.model_validate(tool)
        for tool in tool_specs
    ]
    return parser_class(tools=tools, tool_call_parser=tool_call_parser)


async def execute_tool_calls(
    tool_calls: Sequence[Any], execute_one: Callable[[str, dict[str, Any]], Awaitable[str]]
) -> list[dict[str, Any]]:
    """Execute calls in order, and return a message of each result.

    A call is a `ToolCallItem` of SGLang, or one of OpenAI's format, which has an id.
    """
    messages = []
    for call in tool_calls:
        function = getattr(call, "function", None)
        if function is None:
            name, arguments = call.name, call.parameters
            call_id = f"call_{uuid.uuid4().hex[:24]}"
        else:
            name, arguments = function.name, function.arguments
            call_id = call.id

        content = await execute_one(name, json.loads(arguments) if arguments else {})
        if not isinstance(content, str):
            raise TypeError(f"the tool {name} returned {type(content).__name__}; return a text")
        messages.append({"role": "tool", "tool_call_id": call_id, "content": content, "name": name})
    return messages


def update_sample_with_tool_responses(
    sample: Any, tool_messages: Sequence[dict[str, Any]], tokenizer: Any
) -> None:
    """Append the messages of results to a sample, untrained."""
    ids = tokenize_tool_responses(tool_messages, tokenizer)
    sample.append_response_tokens(tokens=ids, trainable=False, text=tokenizer.decode(ids))


def tokenize_tool_responses(tool_messages: Sequence[dict[str, Any]], tokenizer: Any) -> list[int]:
    """Return the ids that the template writes for results, after a made-up call of each, with the
    opening of the next reply."""
    calls = [
        {
            "type": "function",
            "id": message["tool_call_id"],
            "function": {"name": message.get("name", "tool"), "arguments": {}},
        }
        for message in tool_messages
    ]
    before = [
        {"role": "user", "content": "dummy"},
        {"role": "assistant", "content": "", "tool_calls": calls},
    ]

    ids_before = tokenizer.apply_chat_template(before, tokenize=True, add_generation_prompt=False)
    ids = tokenizer.apply_chat_template(
        [*before, *tool_messages], tokenize=True, add_generation_prompt=True
    )
    if ids[: len(ids_before)] != ids_before:
        raise ValueError(
            "the template writes earlier messages differently after a tool's result, so nothing "
            "can be appended"
        )
    return list(ids[len(ids_before) :])


async def generate_single_turn(input: GenerateFnInput) -> GenerateFnOutput:
    """Sample one reply to a prompt, which may be messages."""
    sample = input.sample
    if not isinstance(sample.prompt, str):
        sample.prompt = input.state.tokenizer.apply_chat_template(
            sample.prompt, tokenize=False, add_generation_prompt=True
        )
    return GenerateFnOutput(samples=await generate(input.args, sample, input.sampling_params))


async def generate_multi_turn(input: GenerateFnInput) -> GenerateFnOutput:
    """Sample replies until one calls no tool, is cut, or is the last of `args.generate_max_turns`.

    `args` names the tools: `generate_tool_specs_path`, `generate_execute_tool_function_path`,
    `generate_tool_call_parser`.
    """
    args = input.args
    sample = deepcopy(input.sample)
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
        await update_sample_from_response(
            args, sample, payload=payload, output=output, update_loss_mask=True
        )
        if output["meta_info"]["finish_reason"]["type"] in ("abort", "length"):
            break

        _, calls = parser.parse_non_stream(output["text"])
        if not calls:
            break
        results = await execute_tool_calls(calls, execute)
        update_sample_with_tool_responses(sample, results, tokenizer=input.state.tokenizer)
    return GenerateFnOutput(samples=sample)


class InferenceRolloutFn:
    """Miles' own class for a step.

    Our loop plays the step; a class that derives from it is refused, with what replaces it.
    """

    def __init__(self, input: RolloutFnConstructorInput) -> None:
        self.input = input

    async def __call__(self, input: Any) -> Any:
        """Play a step.

        Raises:
            NotImplementedError: always; our loop plays steps.
        """
        raise NotImplementedError("a step is played by our loop; name the generate function in use")
