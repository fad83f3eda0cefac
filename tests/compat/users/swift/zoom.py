"""A scheduler that shows a part of the row's image, in a new turn or inside its message's turn."""

from PIL import Image
from swift.rollout.multi_turn import MultiTurnScheduler


class Zoom(MultiTurnScheduler):
    def check_finished(self, infer_request, response_choice, current_turn):
        return "zoom" not in response_choice.message.content

    def step(self, infer_request, response_choice, current_turn):
        first = infer_request.images[0]
        assert isinstance(first, Image.Image), type(first)
        infer_request.images.append(first.crop((0, 0, 32, 32)))
        if "on" in response_choice.message.content:
            infer_request.messages[-1]["content"] += " and"  # goes on in its message
            infer_request.images.pop()
        else:
            infer_request.messages.append({"role": "user", "content": "<image>Here it is."})
        return {
            "infer_request": infer_request,
            "rollout_infos": {"images": list(infer_request.images)},
        }
