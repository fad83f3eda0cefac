"""One reply."""

from __future__ import annotations

from miles.rollout.base_types import GenerateFnInput, GenerateFnOutput
from slime.rollout.sglang_rollout import generate as one_reply


async def generate(input: GenerateFnInput) -> GenerateFnOutput:
    """Sample one reply to a prompt, which may be messages."""
    sample = input.sample
    if not isinstance(sample.prompt, str):
        sample.prompt = input.state.tokenizer.apply_chat_template(sample.prompt, tokenize=False, add_generation_prompt=True)
    return GenerateFnOutput(samples=await one_reply(input.args, sample, input.sampling_params))
