"""Requests to `/generate`, and samples from their answers."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from miles.utils.processing_utils import call_processor, encode_image_for_rollout_engine, extract_multimodal_train_inputs


def compute_prompt_ids_from_sample(state: Any, sample: Any, tools: Any = None) -> list[int]:
    """Return the ids of a sample's prompt, which is a text or messages; those of its images set `multimodal_train_inputs`."""
    media = sample.multimodal_inputs
    if state.processor and media and any(one is not None for one in media.values()):
        made = call_processor(state.processor, sample.prompt, media)
        sample.multimodal_train_inputs = extract_multimodal_train_inputs(made)
        return list(made["input_ids"][0])
    prompt = sample.prompt
    if not isinstance(prompt, str):
        prompt = state.tokenizer.apply_chat_template(prompt, tokenize=False, add_generation_prompt=True, tools=tools)
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
    from miles.utils.types import Sample

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
    if images := (multimodal_inputs or {}).get("images"):
        payload["image_data"] = [encode_image_for_rollout_engine(one) for one in images]
    return payload, None


async def update_sample_from_response(
    args: Any, sample: Any, payload: Mapping[str, Any], output: Mapping[str, Any], update_loss_mask: bool = False
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
