"""slime: two replies at most; a cut reply ends the conversation and is punished."""

from slime.rollout.sglang_rollout import GenerateState
from slime.utils.http_utils import post
from slime.utils.types import Sample

AGAIN = "\n<|im_start|>user\nAgain.<|im_end|>\n<|im_start|>assistant\n"


async def generate(args, sample, sampling_params):
    state = GenerateState(args)
    url = f"http://{args.sglang_router_ip}:{args.sglang_router_port}/generate"
    start = state.tokenizer(sample.prompt, add_special_tokens=False)["input_ids"]
    ids, mask, text = list(start), [], ""
    for turn in range(2):
        if turn:
            more = state.tokenizer(AGAIN, add_special_tokens=False)["input_ids"]
            ids, mask = [*ids, *more], [*mask, *[0] * len(more)]
        payload = {"input_ids": ids, "sampling_params": sampling_params, "return_logprob": True}
        output = await post(url, payload)
        reply = [row[1] for row in output["meta_info"]["output_token_logprobs"]]
        ids, mask, text = [*ids, *reply], [*mask, *[1] * len(reply)], output["text"]
        if output["meta_info"]["finish_reason"]["type"] == "length":
            sample.status = Sample.Status.TRUNCATED
            break
    else:
        sample.status = Sample.Status.COMPLETED
    sample.tokens, sample.loss_mask, sample.response = ids, mask, text
    sample.response_length = len(ids) - len(start)
    return sample


async def reward(args, sample, **kwargs):
    return -1.0 if sample.status == Sample.Status.TRUNCATED else float("good" in sample.response)
