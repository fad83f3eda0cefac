"""Generate functions of other kinds."""

import asyncio

from slime.rollout.sglang_rollout import GenerateState
from slime.utils.http_utils import post
from slime.utils.types import Sample


async def _ask(args, ids, sampling_params):
    url = f"http://{args.sglang_router_ip}:{args.sglang_router_port}/generate"
    output = await post(
        url, {"input_ids": ids, "sampling_params": sampling_params, "return_logprob": True}
    )
    return output["meta_info"]["output_token_logprobs"], output["meta_info"]["finish_reason"][
        "type"
    ]


def _filled(sample, prompt, rows, reward):
    sample.tokens = [*prompt, *(row[1] for row in rows)]
    sample.response_length = len(rows)
    sample.loss_mask = [1] * len(rows)
    sample.rollout_log_probs = [row[0] for row in rows]
    sample.reward = reward
    sample.status = Sample.Status.COMPLETED
    return sample


async def fan_out(args, sample, sampling_params, evaluation=False):
    """Two samples of one prompt."""
    prompt = GenerateState(args).tokenizer(sample.prompt, add_special_tokens=False)["input_ids"]
    both = await asyncio.gather(*(_ask(args, prompt, sampling_params) for _ in range(2)))
    samples = [Sample(prompt=sample.prompt, label=sample.label, rollout_id=7) for _ in both]
    return [
        _filled(one, prompt, rows, float(at))
        for at, (one, (rows, _)) in enumerate(zip(samples, both, strict=True))
    ]


async def fan_out_unscored(args, sample, sampling_params):
    """The same without rewards, which `batch_length` gives to all of them in one call, as
    slime asks for a list."""
    both = await fan_out(args, sample, sampling_params)
    tokenizer = GenerateState(args).tokenizer
    for one in both:
        one.reward, one.response = None, tokenizer.decode(one.tokens[-one.response_length : -1])
    return both


async def rewarded(args, sample, sampling_params):
    """Sampled by slime's own function, and rewarded twice over."""
    from slime.rollout.rm_hub import batched_async_rm
    from slime.rollout.sglang_rollout import generate

    sample = await generate(args, sample, dict(sampling_params))
    sample.response = sample.response.removesuffix("<|im_end|>")
    sample.reward = sum(await batched_async_rm(args, [sample, sample]))
    return sample


async def batch_length(args, samples):
    return [float(len(one.response)) for one in samples]


async def aborted(args, sample, sampling_params):
    sample.status = Sample.Status.ABORTED
    return sample


async def wrong_mask(args, sample, sampling_params):
    prompt = GenerateState(args).tokenizer(sample.prompt, add_special_tokens=False)["input_ids"]
    rows, _ = await _ask(args, prompt, sampling_params)
    sample = _filled(sample, prompt, rows, 1.0)
    sample.tokens.append(5)
    sample.response_length += 1
    sample.loss_mask.append(1)
    sample.rollout_log_probs.append(0.0)
    return sample


async def pixels(args, sample, sampling_params):
    prompt = GenerateState(args).tokenizer(sample.prompt, add_special_tokens=False)["input_ids"]
    rows, _ = await _ask(args, prompt, sampling_params)
    sample.multimodal_train_inputs = {"pixel_values": 1}
    return _filled(sample, prompt, rows, 1.0)


async def removed(args, sample, sampling_params):
    prompt = GenerateState(args).tokenizer(sample.prompt, add_special_tokens=False)["input_ids"]
    rows, _ = await _ask(args, prompt, sampling_params)
    sample.remove_sample = True
    return _filled(sample, prompt, rows, 1.0)


def generate_rollout(args, rollout_id, data_source, evaluation=False):
    raise NotImplementedError


def check_reward_nonzero_std(args, samples, **kwargs):
    from slime.rollout.filter_hub.base_types import DynamicFilterOutput

    rewards = [sample.get_reward_value(args) for sample in samples]
    return DynamicFilterOutput(keep=len(set(rewards)) > 1, reason="zero_std")
