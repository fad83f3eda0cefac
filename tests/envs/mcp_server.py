"""A server of the official package, started by tests: over stdio, or over HTTP with a
port as its argument."""

import base64
import os
import signal
import sys
import time
from io import BytesIO

import pydantic

# A model is built when it is first used; the packages' hundreds took 0.4 s of CPU in each
# of the tests' servers.
pydantic.BaseModel.model_config = pydantic.ConfigDict(defer_build=True)

from mcp.server.mcpserver import MCPServer  # noqa: E402
from mcp_types import AudioContent, ImageContent, TextContent  # noqa: E402
from PIL import Image  # noqa: E402

server = MCPServer("toys")
NOTES: list[str] = []


@server.tool()
def note(text: str, times: int = 1) -> str:
    """Write a note."""
    NOTES.extend([text] * times)
    return " ".join(NOTES)


@server.tool()
def pid() -> int:
    """The process that answers."""
    return os.getpid()


@server.tool()
def fail() -> str:
    """Fail."""
    raise ValueError("the drawer is stuck")


@server.tool()
def picture() -> list[ImageContent]:
    """Draw."""
    return [ImageContent(data="AAAA", mime_type="image/png")]


@server.tool()
def square(side: int) -> list[TextContent | ImageContent | AudioContent]:
    """Draw a red square, and hum."""
    out = BytesIO()
    Image.new("RGB", (side, side), "red").save(out, "PNG")
    drawn = ImageContent(data=base64.b64encode(out.getvalue()).decode(), mime_type="image/png")
    return [
        TextContent(text="Here:"),
        drawn,
        TextContent(text="Well?"),
        AudioContent(data="AAAA", mime_type="audio/wav"),
    ]


@server.tool()
def hang(seconds: float = 3600.0) -> str:
    """Hang."""
    time.sleep(seconds)
    return "back"


@server.tool()
def die_once(path: str) -> str:
    """Die where the file is not there yet."""
    if not os.path.exists(path):
        open(path, "w").close()
        os.kill(os.getpid(), signal.SIGKILL)
    return "alive"


@server.tool()
def die() -> str:
    """Die."""
    print("out of memory", file=sys.stderr, flush=True)
    os.kill(os.getpid(), signal.SIGKILL)
    return ""


if __name__ == "__main__":
    if "STUBBORN" in os.environ:
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
    if len(sys.argv) > 1:
        server.run("streamable-http", host="127.0.0.1", port=int(sys.argv[1]))
    else:
        server.run()
