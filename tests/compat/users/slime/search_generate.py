"""A custom generate function that sends texts, as slime's search example has it."""

from slime.rollout.sglang_rollout import GenerateState
from slime.utils.http_utils import post
from slime.utils.types import Sample


async def generate(args, sample: Sample, sampling_params) -> Sample:
    assert not args.partial_rollout
    state = GenerateState(args)
    url = f"http://{args.sglang_router_ip}:{args.sglang_router_port}/generate"
    prompt_ids = state.tokenizer(sample.prompt, add_special_tokens=False)["input_ids"]
    sample.tokens, response = list(prompt_ids), ""
    params = {**sampling_params, "stop": ["</search>", "</answer>"]}
    for _ in range(args.max_turns):
        output = await post(
            url,
            {"text": sample.prompt + response, "sampling_params": params, "return_logprob": True},
        )
        rows = output["meta_info"]["output_token_logprobs"]
        sample.append_response_tokens(
            args,
            tokens=[row[1] for row in rows],
            log_probs=[row[0] for row in rows],
            meta_info=output["meta_info"],
        )
        response += output["text"]
        if output["meta_info"]["finish_reason"]["type"] == "length" or "<answer>" in output["text"]:
            break
        found = f"\n\n<information>{args.index[output['text'].split('<search>')[1].split('</search>')[0]]}</information>\n\n"  # noqa: E501
        ids = state.tokenizer(found, add_special_tokens=False)["input_ids"]
        sample.append_response_tokens(args, tokens=ids, trainable=False)
        response += found
    sample.response = response
    return sample


async def reward_func(args, sample, **kwargs):
    if not isinstance(sample, Sample):
        raise TypeError("Sample must be an instance of Sample class.")
    given = sample.response.split("<answer>")[-1].split("</answer>")[0]
    return {"score": float(given == sample.label), "format": 1.0}
