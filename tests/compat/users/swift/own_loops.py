"""Schedulers with a loop, hooks or a state of their own."""

from swift.infer_engine import RequestConfig
from swift.infer_engine.protocol import ChatCompletionResponse, RolloutInferRequest, RolloutOutput
from swift.rollout.multi_turn import MultiTurnScheduler, multi_turns


class TwoDrafts(MultiTurnScheduler):
    def __init__(self, infer_engine=None, max_turns=None, *, best=1, **kwargs):
        super().__init__(infer_engine, max_turns, **kwargs)
        self.best = best

    async def run(
        self, infer_request: RolloutInferRequest, request_config: RequestConfig, **kwargs
    ):
        messages, rows = infer_request.messages, []
        for question in ("Which is better?", None):
            response: ChatCompletionResponse = await self.infer_engine.infer_async(
                infer_request, request_config, **kwargs
            )
            choice = response.choices[0]
            messages.append({"role": "assistant", "content": choice.message.content})
            rows.append(list(choice.token_ids))
            if question:
                messages.append({"role": "user", "content": question})
        return RolloutOutput(
            response=response,
            messages=messages,
            response_token_ids=rows,
            response_loss_mask=[[0] * len(rows[0]), [1] * len(rows[1])],
            rollout_infos={"best": self.best},
        )


class Memory(MultiTurnScheduler):
    """Keeps what each trajectory said in one object, by its id."""

    def __init__(self, *args, **kwargs):
        super().__init__(*args, **kwargs)
        self.said = {}

    async def on_trajectory_start(self, requests):
        for request in requests:
            assert request.uuid not in self.said
            self.said[request.uuid] = []

    def on_turn_end(self, infer_request, response_choice, current_turn):
        said = self.said[infer_request.uuid]
        said.append(response_choice.message.content)
        assert (
            [one["role"] for one in infer_request.messages].count("assistant")
            == len(said)
            == current_turn
        )
        return {"done": current_turn == 3, "rollout_infos": {"words": sum(map(len, said))}}

    def step(self, infer_request, response_choice, current_turn):
        longest = max(self.said[infer_request.uuid], key=len)
        infer_request.messages.append({"role": "user", "content": f"Say more than: {longest}"})
        return {"infer_request": infer_request}


class Half(MultiTurnScheduler):
    """Appends to its message, by ids, whatever they are."""

    def step(self, infer_request, response_choice, current_turn):
        ids = list(response_choice.token_ids)
        tip = self.tokenizer.encode(" and", add_special_tokens=False)
        infer_request.messages[-1]["content"] += " and"
        mask = [1] * len(ids) + [0] * len(tip)
        return {
            "infer_request": infer_request,
            "response_token_ids": ids + tip,
            "response_loss_mask": mask,
        }


multi_turns["memory"] = Memory
