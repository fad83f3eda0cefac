"""SkyRL: two replies at most; a cut reply ends the conversation and is punished."""

from skyrl.train.generators.base import GeneratorInterface

AGAIN = "\n<|im_start|>user\nAgain.<|im_end|>\n<|im_start|>assistant\n"


class Cut(GeneratorInterface):
    def __init__(self, generator_cfg, skyrl_gym_cfg, inference_engine_client, tokenizer):
        self.client, self.tokenizer = inference_engine_client, tokenizer

    async def generate(self, input_batch, disable_tqdm=False):
        (prompt,) = input_batch["prompts"]
        start = self.tokenizer.apply_chat_template(
            prompt, add_generation_prompt=True, tokenize=True, return_dict=False
        )
        ids, mask = list(start), []
        for turn in range(2):
            if turn:
                more = self.tokenizer.encode(AGAIN, add_special_tokens=False)
                ids, mask = [*ids, *more], [*mask, *[0] * len(more)]
            out = await self.client.generate({"prompt_token_ids": [ids], "sampling_params": None})
            (reply,), (reason,), (text,) = (
                out["response_ids"],
                out["stop_reasons"],
                out["responses"],
            )
            ids, mask = [*ids, *reply], [*mask, *[1] * len(reply)]
            if reason == "length":
                break
        return {
            "prompt_token_ids": [start],
            "response_ids": [ids[len(start) :]],
            "rewards": [-1.0 if reason == "length" else float("good" in text)],
            "loss_masks": [mask],
            "stop_reasons": [reason],
            "rollout_metrics": None,
        }
