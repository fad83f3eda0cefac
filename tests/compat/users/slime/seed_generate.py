"""Helpers that the printed generate function (seed_generate.txt) calls, which a test
appends to this file."""

import asyncio
from types import SimpleNamespace

from slime.rollout.sglang_rollout import GenerateState
from slime.utils.http_utils import post

state = GenerateState(SimpleNamespace())
url = "http://turnwright.invalid:1/generate"
DUMMY = [{"role": "system", "content": "s"}, {"role": "user", "content": "u"}]


def load_env_module(path):
    import guess_env

    return {"guess_env": guess_env}[path]


def init_from_prompt(sample, state):
    tokens = state.tokenizer(sample.prompt, add_special_tokens=False)["input_ids"]
    return list(tokens), [], []


async def sglang_generate(url, input_ids, sampling_params, image_data):
    payload = {
        "input_ids": input_ids,
        "sampling_params": sampling_params,
        "return_logprob": True,
        "image_data": image_data,
    }
    output = await asyncio.wait_for(post(url, payload), 60)
    rows = output["meta_info"]["output_token_logprobs"]
    finish = output["meta_info"]["finish_reason"]["type"]
    return output["text"], [row[1] for row in rows], [row[0] for row in rows], finish


def append(sample, tokens, logprobs, loss_mask_val):
    sample.tokens = [*sample.tokens, *tokens]
    sample.response_length += len(tokens)
    sample.loss_mask = [*(sample.loss_mask or []), *[loss_mask_val] * len(tokens)]
    sample.rollout_log_probs = [*(sample.rollout_log_probs or []), *logprobs]
    if loss_mask_val:
        sample.response += state.tokenizer.decode(tokens, skip_special_tokens=False)


def encode_observation_delta(user_msg, tokenizer, processor, tools):
    message = {**user_msg, "content": "".join(part["text"] for part in user_msg["content"])}
    dummy = tokenizer.apply_chat_template(
        DUMMY, tools=tools, tokenize=False, add_generation_prompt=False
    )
    full = tokenizer.apply_chat_template(
        [*DUMMY, message], tools=tools, tokenize=False, add_generation_prompt=True
    )
    return tokenizer(full[len(dummy) :], add_special_tokens=False)["input_ids"], [], None, None
