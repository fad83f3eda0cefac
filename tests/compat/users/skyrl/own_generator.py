"""A generator of its own: two drafts, the first one not trained, a reward for a token."""

from skyrl.backends.skyrl_train.inference_servers.base import InferenceEngineInput
from skyrl.train.generators.base import GeneratorInput, GeneratorInterface, GeneratorOutput


class DraftGenerator(GeneratorInterface):
    def __init__(
        self,
        generator_cfg,
        skyrl_gym_cfg,
        inference_engine_client,
        tokenizer,
        model_name,
        *,
        bonus=1.0,
    ):
        self.config, self.client, self.tokenizer, self.bonus = (
            generator_cfg,
            inference_engine_client,
            tokenizer,
            bonus,
        )

    async def generate(self, input_batch: GeneratorInput) -> GeneratorOutput:
        out = {
            key: []
            for key in (
                "prompt_token_ids",
                "response_ids",
                "loss_masks",
                "rewards",
                "stop_reasons",
                "rollout_logprobs",
            )
        }
        for prompt, extras in zip(input_batch["prompts"], input_batch["env_extras"], strict=True):
            start = self.tokenizer.apply_chat_template(
                prompt, add_generation_prompt=True, tokenize=True
            )
            ids, mask, logprobs, rewards, reason = list(start), [], [], [], "stop"
            for turn in range(2):
                sampling = {"max_generate_length": self.config.sampling_params.max_generate_length}
                batch = InferenceEngineInput(prompt_token_ids=[ids], sampling_params=sampling)
                answer = await self.client.generate(batch)
                reply, reason = answer["response_ids"][0], answer["stop_reasons"][0]
                ids, mask = [*ids, *reply], [*mask, *[turn] * len(reply)]
                logprobs += answer["response_logprobs"][0]
                right = extras["reward_spec"]["ground_truth"] in answer["responses"][0]
                rewards += [*[0.0] * (len(reply) - 1), self.bonus * right]
                if turn == 0:
                    text = "\n<|im_start|>user\nAgain.<|im_end|>\n<|im_start|>assistant\n"
                    more = self.tokenizer.encode(text)
                    ids, mask = [*ids, *more], [*mask, *[0] * len(more)]
                    logprobs, rewards = (
                        [*logprobs, *[0.0] * len(more)],
                        [*rewards, *[0.0] * len(more)],
                    )
            out["prompt_token_ids"].append(start)
            out["response_ids"].append(ids[len(start) :])
            out["loss_masks"].append(mask)
            out["rewards"].append(rewards)
            out["stop_reasons"].append(reason)
            out["rollout_logprobs"].append(logprobs)
        return GeneratorOutput(**out, rollout_metrics={"generate/drafts": 2})
