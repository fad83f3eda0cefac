"""A generate function of Miles' newer kind."""

from miles.rollout.base_types import GenerateFnInput, GenerateFnOutput
from miles.utils.http_utils import post
from miles.utils.types import Sample


async def generate(input: GenerateFnInput) -> GenerateFnOutput:
    args, sample = input.args, input.sample
    url = f"http://{args.sglang_router_ip}:{args.sglang_router_port}/generate"
    prompt = input.state.tokenizer(sample.prompt, add_special_tokens=False)["input_ids"]
    output = await post(
        url, {"input_ids": prompt, "sampling_params": input.sampling_params, "return_logprob": True}
    )
    rows = output["meta_info"]["output_token_logprobs"]
    sample.tokens, sample.response_length = [*prompt, *(row[1] for row in rows)], len(rows)
    sample.response, sample.status = output["text"], Sample.Status.COMPLETED
    return GenerateFnOutput(samples=sample)
