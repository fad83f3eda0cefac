"""Loss scales: the answer counts twice, thoughts half."""

import re

from swift.loss_scale import LossScale, loss_scale_map


class Answers(LossScale):
    is_binary = False

    def get_loss_scale(self, context, *, query=None, **kwargs):
        parts = [part for part in re.split(r"(Answer: \d)", context) if part]
        weight = 3.0 if query and "hard" in query else 2.0
        return parts, [weight if part.startswith("Answer") else 1.0 for part in parts]


class Thoughts(LossScale):
    is_binary = False

    def get_loss_scale(self, context, **kwargs):
        head, mark, rest = context.partition("</think>")
        return ([head + mark, rest], [0.5, 1.0]) if mark else ([context], [1.0])


loss_scale_map["answers"] = Answers
loss_scale_map["thoughts"] = Thoughts
