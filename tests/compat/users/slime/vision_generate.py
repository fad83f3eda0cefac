"""A generate function in the form of slime's example with images: ids of the processor, and
inputs of the trainer."""

import torch
from examples.geo3k_vlm_multi_turn.base_env import BaseInteractionEnv
from PIL import Image
from slime.rollout.sglang_rollout import GenerateState
from slime.utils.http_utils import post
from slime.utils.processing_utils import (
    build_processor_kwargs,
    encode_image_for_rollout_engine,
    process_vision_info,
)
from slime.utils.types import Sample

DUMMY = [{"role": "system", "content": "s"}, {"role": "user", "content": "u"}]


class Colours(BaseInteractionEnv):
    def __init__(self, colours):
        self.colours = list(colours)

    def reset(self):
        return {}, {}

    def step(self, response_text):
        if not self.colours:
            return {}, True, {}
        picture = Image.new("RGB", (56, 28), self.colours.pop(0))
        return {"obs_str": "and this?", "multi_modal_data": {"image": [picture]}}, False, {}


def _processed(processor, text, images):
    made = processor(text=text, **build_processor_kwargs(images))
    return list(made["input_ids"][0]), {
        key: value for key, value in made.items() if key not in ("input_ids", "attention_mask")
    }


async def generate(args, sample: Sample, sampling_params) -> Sample:
    state = GenerateState(args)
    tokenizer, processor = state.tokenizer, state.processor
    url = f"http://{args.sglang_router_ip}:{args.sglang_router_port}/generate"
    env = Colours(sample.metadata["colours"])
    prompt, inputs = _processed(processor, sample.prompt, sample.multimodal_inputs)
    sample.tokens, chunks = prompt, [inputs]
    images = [
        encode_image_for_rollout_engine(one)
        for one in (sample.multimodal_inputs or {}).get("images") or ()
    ]
    for _ in range(args.max_turns):
        payload = {
            "input_ids": sample.tokens,
            "sampling_params": sampling_params,
            "return_logprob": True,
        }
        output = await post(url, payload | ({"image_data": images} if images else {}))
        rows = output["meta_info"]["output_token_logprobs"]
        sample.append_response_tokens(
            args,
            tokens=[row[1] for row in rows],
            log_probs=[row[0] for row in rows],
            meta_info=output["meta_info"],
        )
        observation, done, _ = env.step(output["text"])
        if done:
            break
        message = env.format_observation(observation)
        dummy = tokenizer.apply_chat_template(DUMMY, tokenize=False, add_generation_prompt=False)
        text = tokenizer.apply_chat_template(
            [*DUMMY, message], tokenize=False, add_generation_prompt=True
        )
        shown = process_vision_info([message], processor)
        ids, inputs = _processed(processor, text, shown)
        sample.append_response_tokens(
            args, tokens=ids[len(tokenizer.encode(dummy)) :], trainable=False
        )
        chunks.append(inputs)
        images += [encode_image_for_rollout_engine(one) for one in shown["images"]]
    keys = {key for chunk in chunks for key in chunk}
    sample.multimodal_train_inputs = {
        key: torch.cat([chunk[key] for chunk in chunks if key in chunk]) for key in keys
    }
    if args.shift:
        sample.multimodal_train_inputs["pixel_values"] = (
            sample.multimodal_train_inputs["pixel_values"] + args.shift
        )
    sample.reward = 1.0
    return sample
