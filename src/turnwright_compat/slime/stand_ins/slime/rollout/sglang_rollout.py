"""State of slime's rollouts, and its own generate function."""

from __future__ import annotations

from typing import Any

from slime.utils.http_utils import post
from slime.utils.processing_utils import build_processor_kwargs, encode_image_for_rollout_engine

from turnwright_compat.slime.engine import GenerateState

__all__ = ["GenerateState", "generate", "generate_rollout", "get_model_url"]


def get_model_url(args: Any, model_name: str, endpoint: str = "/generate") -> str:
    """Return the address of a model: that of `args.sglang_model_routers`, a table of hosts and ports, else the policy's."""
    routers = getattr(args, "sglang_model_routers", None) or {}
    host, port = routers.get(model_name, (args.sglang_router_ip, args.sglang_router_port))
    return f"http://{host}:{port}{endpoint}"


async def generate(args: Any, sample: Any, sampling_params: dict[str, Any]) -> Any:
    """Sample one reply to the prompt of a sample, or go on with one that has ids already."""
    state = GenerateState(args)
    images = (sample.multimodal_inputs or {}).get("images")
    if not sample.tokens and images and state.processor is not None:
        sample.tokens = list(
            state.processor(text=sample.prompt, **build_processor_kwargs(sample.multimodal_inputs))["input_ids"][0]
        )
    elif not sample.tokens:
        sample.tokens = state.tokenizer(sample.prompt, add_special_tokens=False)["input_ids"]
    left = sampling_params["max_new_tokens"] - sample.response_length
    if left <= 0:
        sample.status = type(sample).Status.TRUNCATED
        return sample
    url = f"http://{args.sglang_router_ip}:{args.sglang_router_port}/generate"
    payload = {
        "input_ids": sample.tokens,
        "sampling_params": {**sampling_params, "max_new_tokens": left},
        "return_logprob": True,
        "image_data": [encode_image_for_rollout_engine(one) for one in images or ()],
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
