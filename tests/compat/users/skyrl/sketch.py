"""An observation with an image, in OpenAI's parts."""

import base64
import struct
import zlib
from typing import Any

from skyrl_gym.envs.base_text_env import BaseTextEnv, BaseTextEnvStepOutput


def png(color: tuple[int, int, int], size: int = 8) -> bytes:
    def chunk(kind: bytes, data: bytes) -> bytes:
        return (
            struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))
        )

    rows = b"".join(b"\0" + bytes(color) * size for _ in range(size))
    header = struct.pack(">IIBBBBB", size, size, 8, 2, 0, 0, 0)
    return (
        b"\x89PNG\r\n\x1a\n"
        + chunk(b"IHDR", header)
        + chunk(b"IDAT", zlib.compress(rows))
        + chunk(b"IEND", b"")
    )


class SketchEnv(BaseTextEnv):
    def __init__(self, env_config: Any = None, extras: dict[str, Any] = {}):  # noqa: B006
        super().__init__()

    def step(self, action: str) -> BaseTextEnvStepOutput:
        self.turns += 1
        if self.turns == 2:
            return BaseTextEnvStepOutput(
                observations=[], reward=float("red" in action), done=True, metadata={}
            )
        url = "data:image/png;base64," + base64.b64encode(png((255, 0, 0))).decode()
        parts: Any = [
            {"type": "image_url", "image_url": {"url": url}},
            {"type": "text", "text": "Which color?"},
        ]
        message = {"role": "user", "content": parts}
        return BaseTextEnvStepOutput(observations=[message], reward=0.0, done=False, metadata={})
