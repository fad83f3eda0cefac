"""A loop with a hidden number: the model guesses, and reads whether the number
is larger or smaller."""

import re
from uuid import uuid4

from verl.experimental.agent_loop.agent_loop import AgentLoopBase, AgentLoopOutput, register
from verl.utils.profiler import simple_timer
from verl.utils.rollout_trace import rollout_trace_op


@register("guess")
class GuessLoop(AgentLoopBase):
    def __init__(self, *args, bonus=0.0, **kwargs):
        super().__init__(*args, **kwargs)
        self.bonus = bonus
        self.response_length = self.rollout_config.response_length
        self.turns = self.rollout_config.multi_turn.max_assistant_turns

    @rollout_trace_op
    async def run(self, sampling_params, priority=0, **kwargs):
        messages = list(kwargs["raw_prompt"])
        secret = int(kwargs["reward_model"]["ground_truth"])
        metrics, mask, logprobs, score = {}, [], [], 0.0
        runtime = await self.ct_build_initial_tokens(messages)
        opening, request_id = len(runtime), uuid4().hex
        for turn in range(self.turns):
            with simple_timer("generate_sequences", metrics):
                output = await self.server_manager.generate(
                    request_id=request_id,
                    prompt_ids=runtime,
                    sampling_params=sampling_params,
                    priority=priority,
                )
            merged, mask, logprobs = await self.ct_merge_assistant_token(
                runtime, output.token_ids, mask, logprobs, assistant_logprobs=output.log_probs
            )
            runtime = merged.token_ids
            text = self.tokenizer.decode(output.token_ids, skip_special_tokens=True)
            found = re.search(r"\d+", text)
            guess = int(found[0]) if found else -1
            if guess == secret:
                score = 1.0 + self.bonus
            if guess == secret or turn + 1 == self.turns or len(mask) >= self.response_length:
                break
            previous = [*messages, {"role": "assistant", "content": text}]
            messages = [
                *previous,
                {"role": "user", "content": "smaller" if guess > secret else "larger"},
            ]
            merged, mask, logprobs = await self.ct_merge_context_msg(
                previous, messages, runtime, mask, logprobs
            )
            runtime = merged.token_ids
        return AgentLoopOutput(
            prompt_ids=runtime[:opening],
            response_ids=runtime[opening:][: self.response_length],
            response_mask=mask[: self.response_length],
            response_logprobs=logprobs[: self.response_length],
            reward_score=score,
            num_turns=2,
            metrics=metrics,
        )
