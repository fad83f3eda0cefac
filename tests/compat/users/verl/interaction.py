"""A simulated user that hints until the answer is right."""

from verl.interactions.base import BaseInteraction


class HintInteraction(BaseInteraction):
    def __init__(self, config):
        super().__init__(config)
        self.states = {}

    async def start_interaction(self, instance_id=None, ground_truth=None, **kwargs):
        self.states[instance_id] = {"truth": ground_truth, "seen": 0}
        return instance_id

    async def generate_response(self, instance_id, messages, **kwargs):
        state = self.states[instance_id]
        state["seen"] += 1
        last = next(one["content"] for one in reversed(messages) if one["role"] == "assistant")
        if state["truth"] in last:
            return True, "Right.", 1.0, {"tries": state["seen"]}
        return False, f"{self.config['hint']} ({len(messages)} messages)", 0.0, {}

    async def calculate_score(self, instance_id, **kwargs):
        return 0.0

    async def finalize_interaction(self, instance_id, **kwargs):
        del self.states[instance_id]
