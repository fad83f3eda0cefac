"""The routes by which a server gives its memory back while a trainer has the device, as SGLang and vLLM have them."""

from __future__ import annotations

from typing import Any, Protocol

from turnwise.engine.serve.bodies import Tags
from turnwise.engine.serve.http import Call, Endpoint, Refused, Table

PARTS = ("weights", "kv_cache")


class Sleeper(Protocol):
    """Gives memory back and takes it again."""

    gone: set[str]
    """Whose memory was given back: `weights`, `kv_cache`."""

    async def sleep(self) -> None:
        """End what runs, and give back all."""

    async def wake(self, part: str) -> None:
        """Take the memory of a part back."""

    def go_on(self) -> None:
        """Sample again."""

    @property
    def still(self) -> bool:
        """Whether nothing is sampled."""


def vllm_sleep(served: Sleeper) -> Table:
    """vLLM's: it samples again as soon as all memory is back."""

    async def sleep(call: Call) -> Any:
        level = call.query.get("level") or "1"
        if level not in ("1", "2"):
            raise Refused(400, f"level is {level!r:.80}: 1 or 2")
        if not served.gone:
            await served.sleep()
        return {"status": "sleeping", "level": int(level)}

    async def wake(call: Call) -> Any:
        tag = call.query.get("tags")
        if tag and tag not in PARTS:
            raise Refused(400, f"tags is {tag!r:.80}: {' or '.join(PARTS)}")
        for part in [tag] if tag else sorted(served.gone):
            if part in served.gone:
                await served.wake(part)
        if not served.gone:
            served.go_on()
        return {"status": "sleeping" if served.gone else "awake", "tags": tag}

    async def sleeps(call: Call) -> Any:
        return {"is_sleeping": bool(served.gone) or served.still}

    return {
        ("POST", "/sleep"): Endpoint(sleep, changes=True),
        ("POST", "/wake_up"): Endpoint(wake, changes=True),
        ("GET", "/is_sleeping"): Endpoint(sleeps),
    }


def sglang_sleep(served: Sleeper) -> Table:
    """SGLang's. It ends itself where it is told to release while it works, or to resume what it has: that is refused here."""

    async def release(call: Call) -> Any:
        if served.gone or not served.still:
            raise Refused(400, "released already" if served.gone else "pause first")
        await served.sleep()
        return {}

    async def resume(call: Call) -> Any:
        for part in call.body.tags or sorted(served.gone):
            if part not in served.gone:
                raise Refused(400, f"{part} was not released")
            await served.wake(part)
        return {}

    return {
        ("POST", "/release_memory_occupation"): Endpoint(release, Tags, changes=True),
        ("POST", "/resume_memory_occupation"): Endpoint(resume, Tags, changes=True),
    }
