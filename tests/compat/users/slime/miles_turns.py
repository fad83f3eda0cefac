"""A generate function of Miles' older kind, over several turns."""

from miles.rollout.sglang_rollout import GenerateState
from miles.utils.http_utils import post
from miles.utils.types import Sample


async def generate(args, sample: Sample, sampling_params) -> Sample:
    tokenizer = GenerateState(args).tokenizer
    url = f"http://{args.sglang_router_ip}:{args.sglang_router_port}/generate"
    sample.tokens = tokenizer.encode(sample.prompt, add_special_tokens=False)
    sample.loss_mask, sample.rollout_log_probs = [], []
    for turn in range(args.max_turns):
        output = await post(
            url,
            {
                "input_ids": sample.tokens,
                "sampling_params": sampling_params,
                "return_logprob": True,
            },
        )
        rows = output["meta_info"]["output_token_logprobs"]
        more = tokenizer.encode(
            f"\n<|im_start|>user\nturn {turn}<|im_end|>\n<|im_start|>assistant\n",
            add_special_tokens=False,
        )
        more = more if turn + 1 < args.max_turns else []
        sample.tokens = sample.tokens + [row[1] for row in rows] + more
        sample.loss_mask += [1] * len(rows) + [0] * len(more)
        sample.rollout_log_probs += [row[0] for row in rows] + [0.0] * len(more)
        sample.response += output["text"]
    sample.response_length, sample.status, sample.reward = (
        len(sample.loss_mask),
        Sample.Status.COMPLETED,
        1.0,
    )
    return sample
