"""The routes by which a server gives its memory back while a trainer has the device, as SGLang and vLLM have them."""

from __future__ import annotations

from typing import Any, Protocol

from turnwise.engine.serve.bodies import Tags
from turnwise.engine.serve.http import Call, Endpoint, HttpError, Table

PARTS = ("weights", "kv_cache")


class SleepControl(Protocol):
    """Gives memory back and takes it again."""

    released: set[str]
    """Whose memory was given back: `weights`, `kv_cache`."""

    async def sleep(self) -> None:
        """End what runs, and give back all."""

    async def wake(self, part: str) -> None:
        """Take the memory of a part back."""

    def resume(self) -> None:
        """Sample again."""

    @property
    def paused(self) -> bool:
        """Whether nothing is sampled."""


def vllm_sleep(served: SleepControl) -> Table:
    """vLLM's: it samples again as soon as all memory is back."""

    async def sleep(call: Call) -> Any:
        level = call.query.get("level") or "1"
        if level not in ("1", "2"):
            raise HttpError(400, f"level is {level!r:.80}: 1 or 2")
        if not served.released:
            await served.sleep()
        return {"status": "sleeping", "level": int(level)}

    async def wake(call: Call) -> Any:
        tag = call.query.get("tags")
        if tag and tag not in PARTS:
            raise HttpError(400, f"tags is {tag!r:.80}: {' or '.join(PARTS)}")
        for part in [tag] if tag else sorted(served.released):
            if part in served.released:
                await served.wake(part)
        if not served.released:
            served.resume()
        return {"status": "sleeping" if served.released else "awake", "tags": tag}

    async def sleeps(call: Call) -> Any:
        return {"is_sleeping": bool(served.released) or served.paused}

    return {
        ("POST", "/sleep"): Endpoint(sleep, changes=True),
        ("POST", "/wake_up"): Endpoint(wake, changes=True),
        ("GET", "/is_sleeping"): Endpoint(sleeps),
    }


def sglang_sleep(served: SleepControl) -> Table:
    """SGLang's. It ends itself where it is told to release while it works, or to resume what it has: that is refused here."""

    async def release(call: Call) -> Any:
        if served.released or not served.paused:
            raise HttpError(400, "released already" if served.released else "pause first")
        await served.sleep()
        return {}

    async def resume(call: Call) -> Any:
        for part in call.body.tags or sorted(served.released):
            if part not in served.released:
                raise HttpError(400, f"{part} was not released")
            await served.wake(part)
        return {}

    return {
        ("POST", "/release_memory_occupation"): Endpoint(release, Tags, changes=True),
        ("POST", "/resume_memory_occupation"): Endpoint(resume, Tags, changes=True),
    }
