"""Generate functions and rewards as they are written in many ways: names of their own, lists in
place, statuses as texts."""

from copy import deepcopy

from slime.rollout.sglang_rollout import GenerateState
from slime.utils.http_utils import post
from slime.utils.types import Sample


async def _reply(configuration, ids, params):
    url = f"http://{configuration.sglang_router_ip}:{configuration.sglang_router_port}/generate"
    return await post(
        url, {"input_ids": list(ids), "sampling_params": params, "return_logprob": True}
    )


def _rows(out):
    return [row[1] for row in out["meta_info"]["output_token_logprobs"]], [
        row[0] for row in out["meta_info"]["output_token_logprobs"]
    ]


async def in_place(configuration, item, params):
    """Called by position; the lists of the sample are kept in variables, and grow."""
    tokenizer = GenerateState(configuration).tokenizer
    item.tokens, item.loss_mask, item.rollout_log_probs = (
        list(tokenizer.encode(item.prompt)),
        [],
        [],
    )
    ids, mask, logprobs = item.tokens, item.loss_mask, item.rollout_log_probs
    for number in range(2):
        out = await _reply(configuration, ids, params)
        new, found = _rows(out)
        ids += new
        mask += [1] * len(new)
        logprobs += found
        if number == 0:
            more = tokenizer.encode("\n<|im_start|>user\nmore<|im_end|>\n<|im_start|>assistant\n")
            ids.extend(more)
            mask.extend([0] * len(more))
            logprobs.extend([0.0] * len(more))
        item.response += out["text"]
    item.response_length, item.status = len(mask), Sample.Status.COMPLETED
    return item


async def appended(args, sample, sampling_params, evaluation=False):
    """By the sample's own method, which sets the status of a cut reply."""
    tokenizer = GenerateState(args).tokenizer
    sample.tokens = list(tokenizer.encode(sample.prompt))
    out = await _reply(args, sample.tokens, sampling_params)
    ids, logprobs = _rows(out)
    sample.append_response_tokens(
        args, tokens=ids, log_probs=logprobs, meta_info=out["meta_info"], text=out["text"]
    )
    return sample


async def worded(*given):
    """A sample of its own, whose status is a text."""
    args, sample, params = given
    ids = list(GenerateState(args).tokenizer.encode(sample.prompt))
    out = await _reply(args, ids, params)
    new, logprobs = _rows(out)
    cut = out["meta_info"]["finish_reason"]["type"] == "length"
    return Sample(
        prompt=sample.prompt,
        label=sample.label,
        tokens=[*ids, *new],
        response=out["text"],
        response_length=len(new),
        loss_mask=[1] * len(new),
        rollout_log_probs=logprobs,
        status="truncated" if cut else "completed",
    )


async def several(args, sample, sampling_params):
    """Three samples of one prompt, rewarded together."""
    return [await appended(args, deepcopy(sample), dict(sampling_params)) for _ in range(3)]


async def length(configuration, item, **_):
    """A reward called by position, of one sample or of a list."""
    if isinstance(item, list):
        return [float(one.response_length) for one in item]
    return item.response_length + (item.label == "7") / 2
