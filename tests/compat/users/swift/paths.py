"""Schedulers whose loop is their own: hooks of other arguments, and rows that share replies."""

import asyncio
import copy

from swift.infer_engine.protocol import RolloutInferRequest, RolloutOutput
from swift.rewards import ORM, MultiTurnScheduler, multi_turns, orms


class Paths(MultiTurnScheduler):
    """Plays a tree of replies, all of a depth at once; each path to a leaf is a row."""

    def __init__(self, infer_engine=None, max_turns=None, *args, **kwargs):
        super().__init__(infer_engine, max_turns, *args, **kwargs)

    async def run(self, infer_request, request_config, **kwargs):
        branches = list(infer_request.data_dict["branches"])
        paths = [(infer_request.messages, [])]
        while True:
            calls = []
            for number, (messages, _) in enumerate(paths):
                request = RolloutInferRequest(messages=copy.deepcopy(messages), uuid=str(number))
                calls.append(self.infer_engine.infer_async(request, request_config, **kwargs))
            answers = await asyncio.gather(*calls)
            paths = [self.step(path, answer) for path, answer in zip(paths, answers, strict=True)]
            if not branches:
                break
            many = branches.pop(0)
            paths = [self.asked(path, n) for path in paths for n in range(many)]
        rows = []
        for answer, (messages, ids) in zip(answers, paths, strict=True):
            mask = [[1] * len(one) for one in ids]
            rows.append(
                RolloutOutput(
                    response=answer,
                    messages=messages,
                    response_token_ids=ids,
                    response_loss_mask=mask,
                )
            )
        return rows

    def step(self, path, answer):
        messages, ids = path
        choice = answer.choices[0]
        return [*messages, {"role": "assistant", "content": choice.message.content}], [
            *ids,
            list(choice.token_ids),
        ]

    def check_finished(self, path):
        raise AssertionError("the loop has no use for it")

    def asked(self, path, number):
        messages, ids = path
        return [*messages, {"role": "user", "content": f"Way {number}?"}], ids


class Length(ORM):
    def __call__(self, completions, **kwargs):
        return [float(len(text)) for text in completions]


multi_turns["paths"], orms["length"] = Paths, Length
