"""A judge behind an OpenAI-style chat endpoint: cached, within a budget and a rate, tried again, and never waited for long."""

from __future__ import annotations

import asyncio
import json
import os
import random
import time
from collections import Counter
from collections.abc import AsyncGenerator, Mapping, Sequence
from dataclasses import dataclass
from hashlib import blake2b
from pathlib import Path
from typing import Any
from uuid import uuid4
from weakref import WeakKeyDictionary

from turnwise.env.reward.judge import chat_messages
from turnwise.env.reward.rewards import count_metric
from turnwise.errors import ConfigError, JudgeError
from turnwise.types import Message
from turnwise.types.retry import retry_after

MOST_BYTES = 8_000_000
"""Of one answer; a longer one is given up."""
MOST_REMEMBERED = 65_536
"""Answers in memory; the oldest go first."""
PASSING = frozenset((408, 409, 425, 429, *range(500, 600)))
"""HTTP statuses that may be better next time."""


class _Passing(JudgeError):
    """A failure that may be better next time, after so many seconds at least."""

    def __init__(self, cause: str, message: str, after: float = 0.0) -> None:
        super().__init__(cause, message)
        self.after = after


@dataclass(slots=True)
class _Lane:
    """What belongs to one event loop."""

    places: asyncio.Semaphore
    running: dict[str, asyncio.Future[str]]
    holder: AsyncGenerator[Any, None] | None = None
    client: Any = None


class ChatJudge:
    """Asks a model at `URL/chat/completions`. One object serves all episodes; it keeps no connection beyond an event loop.

    `counts` has what happened since it was made: `calls`, `tokens`, `cached`, `retries`, and `failed/CAUSE`; the metrics of
    an episode have what its own rewards asked for, as `judge_calls` and so on.
    """

    def __init__(
        self,
        url: str,
        model: str,
        *,
        key_env: str | None = None,
        options: Mapping[str, Any] | None = None,
        cache: bool | str | Path = True,
        most_calls: int | None = None,
        most_tokens: int | None = None,
        per_minute: float | None = None,
        at_once: int = 16,
        retries: int = 3,
        backoff_s: float = 0.5,
        attempt_s: float = 20.0,
        deadline_s: float = 50.0,
    ) -> None:
        """
        Args:
            url: of the API, up to and including its version: `https://host/v1`.
            model: the name that the endpoint knows.
            key_env: the environment variable that holds the API key; it is read at each call and written down nowhere.
            options: further fields of a request, over `temperature = 0` and `max_tokens = 1024`.
            cache: remember answers by the content of the question; a directory keeps them for later runs.
            most_calls: most requests sent, retries included.
            most_tokens: most tokens, as the endpoint counts them; requests in flight may go over it.
            per_minute: most requests begun in a minute, evenly spaced.
            at_once: most requests at a time.
            retries: of one question, after what may pass (connection, deadline, 408, 409, 425, 429, 5xx, another form).
            backoff_s: before the first retry; twice as long before each next one, give or take a half; `Retry-After` if longer.
            attempt_s: deadline of one request.
            deadline_s: of one question: all requests, waits and the rate limit.

        Raises:
            ConfigError: for a setting that cannot be, or without `httpx2`.
        """
        _check(
            url, key_env, dict(calls=most_calls, tokens=most_tokens, rate=per_minute, at_once=at_once), attempt_s, deadline_s
        )
        if retries < 0 or backoff_s < 0:
            raise ConfigError("ChatJudge: retries and backoff_s are at least 0")
        self.url = url.rstrip("/") + "/chat/completions"
        self.model = model
        self.counts: Counter[str] = Counter()
        self._key_env = key_env
        self._options = {"temperature": 0, "max_tokens": 1024} | dict(options or {})
        self._cache = bool(cache)
        self._folder = Path(cache) if isinstance(cache, (str, Path)) else None
        self._known: dict[str, str] = {}
        self._most_calls, self._most_tokens, self._per_minute = most_calls, most_tokens, per_minute
        self._at_once, self._retries, self._backoff_s = at_once, retries, backoff_s
        self._attempt_s, self._deadline_s = attempt_s, deadline_s
        self._next = 0.0
        self._lanes: WeakKeyDictionary[asyncio.AbstractEventLoop, _Lane] = WeakKeyDictionary()

    def __getstate__(self) -> dict[str, Any]:
        """For another process, which has event loops of its own."""
        return {name: value for name, value in vars(self).items() if name != "_lanes"}

    def __setstate__(self, state: dict[str, Any]) -> None:
        vars(self).update(state, _lanes=WeakKeyDictionary())

    def __repr__(self) -> str:
        return f"ChatJudge({self.url!r}, {self.model!r})"

    async def ask(self, messages: Sequence[Message]) -> str:
        """The answer of the model, or of the cache; equal questions that are asked at once are one request.

        Raises:
            JudgeError: when there is none by the deadline, with its `cause`.
        """
        body = {"model": self.model, "messages": chat_messages(messages)} | self._options
        try:
            async with asyncio.timeout(self._deadline_s):
                return await (self._remembered(body) if self._cache else self._tried(body))
        except TimeoutError:
            error = JudgeError("deadline", f"{self!r} gave no answer in {self._deadline_s:g} s")
        except JudgeError as failed:
            error = failed
        self.counts[f"failed/{error.cause}"] += 1
        raise error

    async def _remembered(self, body: dict[str, Any]) -> str:
        lane, key = self._lane(), blake2b(json.dumps([self.url, body], sort_keys=True).encode(), digest_size=20).hexdigest()
        while key in lane.running:  # another episode asks the same: wait for its answer, not with its deadline
            await asyncio.wait([lane.running[key]])
        found = self._known.get(key)
        if found is not None:
            self._count("cached")
            return found
        running = lane.running[key] = asyncio.get_running_loop().create_future()
        try:
            found = await asyncio.to_thread(self._read, key) if self._folder is not None else None
            if found is not None:
                self._count("cached")
            else:
                found = await self._tried(body)
                await self._keep(key, found)
            self._known[key] = found
            while len(self._known) > MOST_REMEMBERED:
                del self._known[next(iter(self._known))]
        finally:
            del lane.running[key]
            running.cancel()
        return found

    async def _keep(self, key: str, answer: str) -> None:
        if self._folder is not None:
            try:
                await asyncio.to_thread(self._write, key, answer)
            except OSError:  # the answer is there all the same
                self.counts["cache_unwritten"] += 1

    async def _tried(self, body: dict[str, Any]) -> str:
        lane = self._lane()
        end = time.monotonic() + self._deadline_s
        for attempt in range(self._retries + 1):
            try:
                await self._turn(end)
                async with lane.places:
                    self._spend()
                    if lane.client is None:
                        lane.holder = _clients(self._at_once, self.url.startswith("https:"))
                        lane.client = await anext(lane.holder)
                    async with asyncio.timeout(self._attempt_s):
                        return await self._post(lane, body)
            except TimeoutError:
                failed = _Passing("deadline", f"{self!r} did not answer a request in {self._attempt_s:g} s")
            except _Passing as passing:
                failed = passing
            wait = max(self._backoff_s * 2**attempt * random.uniform(0.5, 1.5), failed.after)
            if attempt == self._retries or time.monotonic() + wait >= end:
                break
            self._count("retries")
            await asyncio.sleep(wait)
        raise JudgeError(failed.cause, f"{failed} (after {attempt + 1} requests)")

    async def _turn(self, end: float) -> None:
        """Wait until the rate allows a request."""
        if self._per_minute is None:
            return
        now = time.monotonic()
        at = max(now, self._next)
        if at >= end:
            raise JudgeError(
                "deadline", f"{self!r}: the rate of {self._per_minute:g} a minute has no place before the deadline"
            )
        self._next = at + 60.0 / self._per_minute
        await asyncio.sleep(at - now)

    def _spend(self) -> None:
        if self._most_calls is not None and self.counts["calls"] >= self._most_calls:
            raise JudgeError("budget", f"{self!r}: its budget of {self._most_calls} calls is used up")
        if self._most_tokens is not None and self.counts["tokens"] >= self._most_tokens:
            raise JudgeError("budget", f"{self!r}: its budget of {self._most_tokens} tokens is used up")
        self._count("calls")

    async def _post(self, lane: _Lane, body: dict[str, Any]) -> str:
        import httpx2

        key = os.environ.get(self._key_env, "") if self._key_env is not None else ""
        headers = {"authorization": f"Bearer {key}"} if key else {}
        try:
            async with lane.client.stream("POST", self.url, json=body, headers=headers) as response:
                raw = bytearray()
                async for piece in response.aiter_bytes():
                    raw += piece
                    if len(raw) > MOST_BYTES:
                        raise JudgeError("schema", f"{self!r} answered with more than {MOST_BYTES} bytes")
        except (httpx2.HTTPError, httpx2.StreamError, OSError) as error:
            raise _Passing("connection", f"{self!r}: {type(error).__name__}: {error}") from error
        if response.status_code != 200:
            said = bytes(raw[:200]).decode("utf-8", "replace")
            told = f"{self!r} answered with the HTTP status {response.status_code}: {said.replace(key, '***') if key else said}"
            if response.status_code in PASSING:
                raise _Passing("status", told, retry_after(response.headers.get("retry-after")))
            raise JudgeError("status", told)
        return self._read_answer(bytes(raw))

    def _read_answer(self, raw: bytes) -> str:
        try:
            answer = json.loads(raw)
            text = answer["choices"][0]["message"]["content"]
            usage = answer.get("usage") or {}
            tokens = usage.get("total_tokens")
        except (ValueError, LookupError, TypeError, AttributeError, RecursionError) as error:
            raise _Passing("schema", f"{self!r} answered what is no chat completion ({error}): {raw[:200]!r}") from error
        if isinstance(tokens, int) and not isinstance(tokens, bool) and tokens >= 0:
            self._count("tokens", tokens)
        elif self._most_tokens is not None:
            raise JudgeError("schema", f"{self!r} does not say how many tokens it used (usage.total_tokens): give most_calls")
        if not isinstance(text, str):
            raise _Passing("schema", f"{self!r} answered with a content that is no text: {raw[:200]!r}")
        return text

    def _lane(self) -> _Lane:
        loop = asyncio.get_running_loop()
        lane = self._lanes.get(loop)
        if lane is None:
            lane = self._lanes[loop] = _Lane(asyncio.Semaphore(self._at_once), {})
        return lane

    def _count(self, name: str, amount: int = 1) -> None:
        self.counts[name] += amount
        count_metric(f"judge_{name}", amount)

    def _file(self, key: str) -> Path:
        assert self._folder is not None
        return self._folder / key[:2] / f"{key}.json"

    def _read(self, key: str) -> str | None:
        try:
            text = json.loads(self._file(key).read_text(encoding="utf-8"))["answer"]
        except FileNotFoundError:
            return None
        except (OSError, ValueError, LookupError, TypeError):
            self.counts["cache_broken"] += 1  # asked again, and written anew
            return None
        return text if isinstance(text, str) else None

    def _write(self, key: str, answer: str) -> None:
        file = self._file(key)
        file.parent.mkdir(parents=True, exist_ok=True)
        draft = file.with_name(f"{file.name}.{uuid4().hex}")
        try:
            draft.write_text(json.dumps({"model": self.model, "answer": answer}), encoding="utf-8")
            os.replace(draft, file)
        finally:
            draft.unlink(missing_ok=True)


async def _clients(most: int, verify: bool) -> AsyncGenerator[Any, None]:
    """One client, closed when the event loop ends: loops close the generators that are left (`shutdown_asyncgens`)."""
    import httpx2

    limits = httpx2.Limits(max_connections=most, max_keepalive_connections=most)
    async with httpx2.AsyncClient(timeout=None, limits=limits, verify=verify) as client:  # the deadlines are ours
        yield client


def _check(url: str, key_env: str | None, most: Mapping[str, float | None], *seconds: float) -> None:
    if not url.startswith(("http://", "https://")):
        raise ConfigError(f"ChatJudge: the URL is {url!r}; it begins with http:// or https:// and ends with the API's version")
    for name, value in most.items():
        if value is not None and not value > 0:
            raise ConfigError(f"ChatJudge: {name} is {value!r}; it is over 0")
    if not all(second > 0 for second in seconds):
        raise ConfigError("ChatJudge: attempt_s and deadline_s are over 0")
    if key_env is not None and key_env not in os.environ:
        raise ConfigError(f"ChatJudge: the environment variable {key_env} is not set; it holds the API key")
    try:
        import httpx2  # noqa: F401
    except ImportError:
        raise ConfigError("ChatJudge needs httpx2: pip install 'turnwise[judge]'") from None
