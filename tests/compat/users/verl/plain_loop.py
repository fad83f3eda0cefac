"""A loop of one turn, whose reward is computed by another file."""

from verl.experimental.agent_loop import AgentLoopBase, AgentLoopMetrics, AgentLoopOutput


class PlainLoop(AgentLoopBase):
    async def run(self, sampling_params, **kwargs):
        ids = await self.apply_chat_template(list(kwargs["raw_prompt"]))
        output = await self.server_manager.generate(
            "a", prompt_ids=ids, sampling_params={**sampling_params, "temperature": 0.7}
        )
        return AgentLoopOutput(
            prompt_ids=ids,
            response_ids=output.token_ids,
            response_mask=[1] * len(output.token_ids),
            response_logprobs=output.log_probs,
            num_turns=2,
            metrics=AgentLoopMetrics(),
        )


class TrainsPrompt(AgentLoopBase):
    async def run(self, sampling_params, **kwargs):
        ids = await self.apply_chat_template(list(kwargs["raw_prompt"]))
        output = await self.server_manager.generate(
            "a", prompt_ids=ids, sampling_params=sampling_params
        )
        return AgentLoopOutput(
            prompt_ids=ids[:-1],
            response_ids=[ids[-1], *output.token_ids],
            response_mask=[1] * (1 + len(output.token_ids)),
            reward_score=1.0,
            metrics=AgentLoopMetrics(),
        )


def compute_score(data_source, solution_str, ground_truth, extra_info=None):
    return {"score": float(solution_str.strip() == ground_truth), "length": len(solution_str)}
