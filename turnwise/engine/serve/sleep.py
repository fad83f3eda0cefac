"""The routes by which a server gives its memory back while a trainer has the device, as SGLang and vLLM have them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Protocol

from turnwise.engine.serve.http import Handler, Refused

Table = dict[tuple[str, str], Handler]


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

    async def sleep(path: str, body: Any, more: Mapping[str, str]) -> Any:
        if not served.gone:
            await served.sleep()
        return {"status": "sleeping", "level": int(more.get("?level") or 1)}

    async def wake(path: str, body: Any, more: Mapping[str, str]) -> Any:
        tag = more.get("?tags")
        for part in [tag] if tag else sorted(served.gone):
            if part in served.gone:
                await served.wake(part)
        if not served.gone:
            served.go_on()
        return {"status": "sleeping" if served.gone else "awake", "tags": tag}

    async def sleeps(path: str, body: Any, more: Mapping[str, str]) -> Any:
        return {"is_sleeping": bool(served.gone) or served.still}

    return {("POST", "/sleep"): sleep, ("POST", "/wake_up"): wake, ("GET", "/is_sleeping"): sleeps}


def sglang_sleep(served: Sleeper) -> Table:
    """SGLang's. It ends itself where it is told to release while it works, or to resume what it has: that is refused here."""

    async def release(path: str, body: Any, more: Mapping[str, str]) -> Any:
        if served.gone or not served.still:
            raise Refused(400, "released already" if served.gone else "pause first")
        await served.sleep()
        return {}

    async def resume(path: str, body: Any, more: Mapping[str, str]) -> Any:
        for part in (body or {}).get("tags") or sorted(served.gone):
            if part not in served.gone:
                raise Refused(400, f"{part} was not released")
            await served.wake(part)
        return {}

    return {("POST", "/release_memory_occupation"): release, ("POST", "/resume_memory_occupation"): resume}
