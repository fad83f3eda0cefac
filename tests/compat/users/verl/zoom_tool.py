"""Images and videos of a tool, processed by functions that are imported late."""

from uuid import uuid4

from verl.tools.base_tool import BaseTool
from verl.tools.schemas import ToolResponse


class ZoomTool(BaseTool):
    async def create(self, instance_id=None, **kwargs):
        from verl.utils.dataset.vision_utils import process_image, process_video

        frames = [self._picture((n, 0, 0)) for n in range(2)]
        image, video = (
            process_image(self._picture((0, 9, 0))),
            process_video({"video": frames, "fps": 2.0}),
        )
        return instance_id or str(uuid4()), ToolResponse(
            image=[image], video=[video], text="a picture and a video"
        )

    async def execute(self, instance_id, parameters, **kwargs):
        from verl.utils.dataset.vision_utils import process_image

        return (
            ToolResponse(image=[process_image({"image": self._picture((0, 0, 9))})], text="closer"),
            0,
            {},
        )

    def _picture(self, color):
        from PIL import Image

        return Image.new("RGB", (32, 32), color)
