"""verl: two replies at most; a cut reply, which has no end token, ends the
conversation and is punished."""

from verl.experimental.agent_loop.agent_loop import AgentLoopBase, AgentLoopMetrics, AgentLoopOutput

AGAIN = "\n<|im_start|>user\nAgain.<|im_end|>\n<|im_start|>assistant\n"


class Cut(AgentLoopBase):
    async def run(self, sampling_params, **kwargs):
        start = await self.apply_chat_template(list(kwargs["raw_prompt"]))
        ids, mask = list(start), []
        for turn in range(2):
            if turn:
                more = self.tokenizer.encode(AGAIN, add_special_tokens=False)
                ids, mask = [*ids, *more], [*mask, *[0] * len(more)]
            output = await self.server_manager.generate(
                "a", prompt_ids=ids, sampling_params=sampling_params
            )
            ids, mask = [*ids, *output.token_ids], [*mask, *[1] * len(output.token_ids)]
            # verl's stop reason is "completed" for both.
            cut = output.token_ids[-1] != self.tokenizer.eos_token_id
            if cut:
                break
        text = self.tokenizer.decode(output.token_ids, skip_special_tokens=True)
        score = -1.0 if cut else float("good" in text)
        return AgentLoopOutput(
            prompt_ids=start,
            response_ids=ids[len(start) :],
            response_mask=mask,
            reward_score=score,
            num_turns=2,
            metrics=AgentLoopMetrics(),
        )
