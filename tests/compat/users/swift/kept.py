"""A reward that keeps what it was called with."""

from swift.rewards import ORM, orms

COLUMNS = (
    "messages",
    "response_token_ids",
    "rollout_infos",
    "is_truncated",
    "finish_reason",
    "multi_turn_infos",
)


class Kept(ORM):
    def __init__(self, args=None, **kwargs):
        super().__init__(args)
        self.seen = []

    def __call__(self, completions, **kwargs):
        self.seen.append({"completions": completions, **{key: kwargs[key] for key in COLUMNS}})
        return [0.0] * len(completions)


orms["kept"] = Kept
