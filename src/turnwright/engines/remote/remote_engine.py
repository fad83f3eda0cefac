"""RemoteEngine: one server as an engine.

`RemoteEngine.generate` sends one request and verifies the response; `load_from_disk` and its
siblings bring new weights to the server; `weights_label` and `scores` tell which weights it has.
What a kind of server is asked, and how its answers are read, is in the subclasses (`VllmEngine`,
`SglangEngine`, `LlamaCppEngine`, `ChatEngine`), which override the methods under "Overridden by
each kind of server".

A failed request is an error here: retries, many servers and their health are `Fleet`'s. The checks
of a response are in `verify_response`, the bytes on the wire in `HttpClient`.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any, Literal, NamedTuple
from uuid import uuid4

from turnwright.engines.protocols import Generation, InFlight, MissingLogprobs, Request
from turnwright.engines.remote.http import HttpClient
from turnwright.engines.remote.response import (
    ExpectedWeights,
    ServerResponse,
    WeightsLabel,
    fault_of,
    parsing,
    verify_response,
)
from turnwright.engines.remote.weight_sync import GroupTransfer, RequestTransfer, suppress_errors
from turnwright.engines.scoring import IdScores, ScoreRequest
from turnwright.errors import (
    BackendContractError,
    ConfigError,
    EngineError,
    EngineUnavailable,
    NotTrainable,
    StaleWeights,
    SyncError,
    TurnwrightError,
)
from turnwright.renderers.renderer import HasCodec
from turnwright.renderers.tokenizer import ByteTokenizer

MAX_VOCABULARY = 2**31
"""Larger than any vocabulary."""
MAX_RETRY_AFTER = 8
"""Times that one call waits for a server's `Retry-After`."""
Part = Literal["weights", "kv_cache"]
"""Parts of a server's memory, as vLLM and SGLang name them."""
UPDATE_S = 600.0
"""Deadline for reading new weights from a disk."""
DRAIN_S = 5.0
"""Seconds for calls in flight to end before a weight update, where responses do not name their
weights."""
ABORT_AGAIN_S = 0.05
"""Seconds until a call that was to end is aborted again; the first time it may not have arrived
yet."""
CANARY = tuple(int(digit) for digit in "31415926535897932384626433832795")
"""Ids of every vocabulary; their logprobs tell one set of weights from another."""
KNOWN_TEXT = (
    "The weights of this model are those of the last step: one, two, three, and what "
    "follows is checked."
)
"""Text for the same where the tokenizer is known. Ids without sense are no measure for a language
model: in float32 their logprobs were off by 5e-3 and 2e-2 nats in two libraries, those of this text
by 1e-5 (SmolLM2-135M)."""


class EngineLoad(NamedTuple):
    """What a server reports of its queue and its cache."""

    running: int
    """Requests that it computes."""
    waiting: int
    """Requests in its queue."""
    cache: float | None = None
    """Fraction of its cache that running requests use; None where not reported."""


class RemoteEngine:
    """One server as an engine; use a subclass: `VllmEngine`, `SglangEngine`, `LlamaCppEngine`,
    `ChatEngine`.

    Every call is one request, and a failed request is an error (`Fleet` retries it). The exception
    is a server that answers with `Retry-After`: the call waits for it, within the deadline.
    """

    kind = ""
    health = "/health"
    gives_alternatives = False
    """Whether this kind of server returns the most likely ids with each sampled one."""

    def __init__(
        self,
        url: str,
        *,
        model: str | None = None,
        context: int | None = None,
        renderer: Any = None,
        key_env: str | None = None,
        version: int = 0,
        missing_logprobs: MissingLogprobs = "error",
        request_s: float = 600.0,
        most: int = 256,
        in_flight: InFlight = "recompute",
    ) -> None:
        """
        Args:
            url: base URL of the server.
            model: name under which the server serves the model; by default `open` asks the server.
            context: maximum number of ids of context plus reply; by default `open` asks the server.
            renderer: renderer of the model.
            key_env: environment variable that holds an API key.
            version: policy version of the server's current weights.
            missing_logprobs: handling of ids without a logprob: `error`, `mask` (untrained,
                counted) or `recompute` (the trainer's own forward pass, counted).
            request_s: deadline of one request in seconds, unless the request's own is earlier.
            most: maximum number of concurrent connections.
            in_flight: replies in flight during a weight update: `recompute` interrupts them and
                drops the prefix cache, `salt` interrupts them and separates the cache by policy
                version, `keep` continues them on the cache they have.

        Raises:
            ConfigError: for an invalid setting.
        """
        if missing_logprobs not in ("error", "mask", "recompute"):
            raise ConfigError(
                f"missing_logprobs must be error, mask or recompute, not {missing_logprobs!r}"
            )
        if not request_s > 0 or most < 1:
            raise ConfigError("request_s must be over 0, and most at least 1")

        self.http = HttpClient(url, key_env=key_env, most=most)
        self.url = self.http.url
        self.model = model
        self.context = context
        self.renderer = renderer
        self.version = version
        self.missing_logprobs: MissingLogprobs = missing_logprobs
        self.request_s = request_s
        self.in_flight: InFlight = in_flight

        self.server_version = ""
        """Version reported by the server; empty before `open`."""
        self.label: str | None = None
        """The server's name for the weights of `version`."""
        self.counts: Counter[str] = Counter()
        """`requests`, `tokens`, `cached_tokens`, `prompt_tokens`, `aborted`, `ids_left_out`,
        `logprobs_missing`, `draft_ids`, `draft_ids_accepted`, `images_as_pictures`, `images_sent`,
        `images_named`, `images_missed`."""
        self.asleep = False
        """Whether the server released its memory: weights and cache are gone until new weights
        arrive."""
        self.pixels: Any = None

        self._weights_awake = False
        """Whether a sleeping server already has its memory for weights again."""
        self.patient = True
        """Whether a call waits out a server's `Retry-After`; a fleet asks other servers
        meanwhile."""
        self._updates: dict[str, int] = {}
        """Policy versions of the updates begun, by their names on the server; responses to earlier
        requests may name them."""
        self._optional_fields: set[str] = set()
        """Optional fields that a response had; whether the server sends them depends on its kind
        and version."""
        self._known_ids: tuple[int, ...] | None = None
        self._vocabulary_size: tuple[Any, int] | None = None
        self._neutral: tuple[Any, dict[str, Any]] | None = None
        """The settings that all requests of a phase share."""

        self._opened = False
        self._calls: set[str] = set()
        """Names of the calls in flight."""
        self._aborts: set[asyncio.Task[None]] = set()

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self.url!r})"

    @property
    def display_name(self) -> str:
        """Name in errors: kind, version and URL."""
        if self.server_version:
            return f"{self.kind} {self.server_version} at {self.url}"
        return f"{self.kind} at {self.url}"

    @property
    def seeded(self) -> bool:
        """Whether requests carry seed and reply position.

        `turnwright serve` draws by them exactly as the local engine does.
        """
        return self.server_version.startswith("turnwright-")

    def breach(self, field_name: str, problem: str) -> BackendContractError:
        """Return the error for a response that violates the contract."""
        return fault_of(self.display_name, field_name, problem)

    def set_renderer(self, renderer: Any) -> None:
        """Use the rollout's renderer if none was given."""
        if self.renderer is None:
            self.renderer = renderer

    def add_pixel_source(self, pixels: Any) -> None:
        """Set the source of the images of `Request.media`."""
        self.pixels = pixels

    async def open(self) -> None:
        """Query versions, model and context once, before the first request.

        Raises `EngineError` when they are not reported.
        """
        if self._opened:
            return
        with parsing("the server's description", self.display_name):
            await self._identify()
        if self.in_flight != "recompute":
            fault = self._in_flight_fault()
            if fault:
                raise ConfigError(
                    f"{self.display_name}: engine.in_flight = {self.in_flight}: {fault}"
                )
        self._opened = True

    async def generate(self, request: Request) -> Generation:
        """Sample one reply; cancelling the call ends it on the server.

        Raises:
            EngineUnavailable: no response arrived; the request may be retried.
            StaleWeights: the server has other weights than expected.
            BackendContractError: the response violates the contract.
            EngineError: the server rejects the request.
        """
        if not self._opened:
            await self.open()
        max_tokens = request.max_tokens
        if self.context is not None:
            max_tokens = min(max_tokens, self.context - len(request.ids))
            if max_tokens < 1:
                raise EngineError(
                    f"{self.display_name}: {len(request.ids)} ids fill the context of "
                    f"{self.context}"
                )

        waits = 0
        while True:
            version = self.version
            if version < request.min_version:
                needed = request.min_version
                raise StaleWeights(
                    f"{self.display_name} has policy {version}; the request needs {needed} or later"
                )
            try:
                return await self._generate(request, max_tokens)
            except StaleWeights:
                if self.version == version:
                    raise
                # The weights changed on its way, and its adapter is gone.
                self.counts["sent_again"] += 1
            except EngineUnavailable as error:
                waits += 1
                may_wait = self.patient and waits <= MAX_RETRY_AFTER
                if not may_wait or not 0 < error.retry_after <= self._seconds(request):
                    raise
                self.counts["waited_as_told"] += 1
                await asyncio.sleep(error.retry_after)

    async def _generate(self, request: Request, max_tokens: int) -> Generation:
        """Send one request and verify its response."""
        name = uuid4().hex
        expected = ExpectedWeights(self.version, self.label, name, self._updates, self.in_flight)
        self.counts["requests"] += 1
        self._calls.add(name)
        try:
            raw = await self._sample(request, max_tokens, name, self._seconds(request))
        except BaseException:
            self._abort_later(name)
            raise
        finally:
            self._calls.discard(name)

        with parsing("the response", self.display_name):
            response = self._read(raw, request, expected)
            generation, left_out = verify_response(
                response,
                request,
                max_tokens,
                self.missing_logprobs,
                self._vocabulary(),
                self.breach,
            )
        self._count(generation, left_out, len(request.ids))
        return generation

    def release(self, session: str) -> None:
        """Do nothing; servers evict their own caches."""

    async def close(self) -> None:
        """Close the connections; calls in flight end with an error."""
        for task in list(self._aborts):
            task.cancel()
        await asyncio.gather(*self._aborts, return_exceptions=True)
        await self.http.close()

    async def end_calls(self, seconds: float) -> None:
        """End the calls in flight as aborted, with the ids they have, and those of no other client.

        Waits at most some seconds for their responses.
        """
        calls = set(self._calls)
        loop = asyncio.get_running_loop()
        end = loop.time() + seconds
        while loop.time() < end:
            left = calls & self._calls
            if not left:
                return
            await suppress_errors(self.abort(*left))
            await asyncio.sleep(ABORT_AGAIN_S)

    async def check_health(self, seconds: float) -> None:
        """Raise `EngineError` unless the server responds."""
        await self.http.text(self.health, seconds)

    # Weights

    @property
    def known_ids(self) -> tuple[int, ...]:
        """Ids whose scores tell one set of weights from another, the same for the life of this
        client."""
        if self._known_ids is None:
            codec = self.renderer.codec if isinstance(self.renderer, HasCodec) else None
            ids: tuple[int, ...] = ()
            if codec is not None:
                ids = tuple(codec.encode_plain(KNOWN_TEXT))[: len(CANARY)]
            self._known_ids = ids if len(ids) > 1 else CANARY
        return self._known_ids

    async def weights_label(self) -> WeightsLabel:
        """Return the server's name for its weights and its scores of `known_ids`."""
        with parsing("the server's description of its weights", self.display_name):
            name, scores = await asyncio.gather(self.weights_name(), self.score(self.known_ids))
            return WeightsLabel(name, tuple(scores))

    async def load_from_disk(self, directory: str | Path, version: int) -> None:
        """Make the server load weights from a directory it can access, named `version`.

        Calls in flight are interrupted. Success is unproven until `weights_label` confirms it.
        Raises `SyncError` when the server refuses or fails.
        """
        await self._update_weights(lambda: self._load_from_disk(Path(directory), version), version)

    async def load_from_group(self, transfer: GroupTransfer) -> None:
        """Make the server take weights from a process group, named by their version.

        Calls in flight are interrupted. Success is unproven until `weights_label` confirms it.
        After a failure the server may have some of the weights; it then reports a name that is no
        policy's, so its responses are rejected until a complete update. Raises `SyncError` when the
        server refuses, fails, or ends before it has all weights.
        """
        await self._update_weights(lambda: self._load_from_group(transfer), transfer.version)

    async def load_from_requests(self, transfer: RequestTransfer) -> None:
        """Make the server take weights from request bodies; otherwise as `load_from_group`."""
        await self._update_weights(lambda: self._load_from_requests(transfer), transfer.version)

    async def use_adapter(self, directory: Path, version: int) -> None:
        """Make the server use a LoRA adapter from a directory it can access, named `version`.

        Raises as `load_from_disk`.
        """
        raise SyncError(
            f"{self.display_name}: this kind of server does not take LoRA adapters (engine.update)"
        )

    async def sleep(self) -> None:
        """Make the server release the memory of weights and cache.

        Calls in flight end first. New weights wake it. Raises `EngineError` when it does not.
        """
        await self.open()
        if not self.asleep:
            await self._sleep()
            self.asleep = True

    async def _update_weights(self, work: Callable[[], Awaitable[None]], version: int) -> None:
        """Apply new weights.

        A sleeping server gets its memory for weights before, and for the cache after.
        """
        await self.open()
        self._updates[str(version)] = version
        try:
            if self.asleep and not await self._sleeps():
                self.asleep = False  # restarted meanwhile, with all its memory
            if self.asleep and not self._weights_awake:
                await self._wake("weights")
            self._weights_awake = self.asleep

            await work()

            if self.asleep:
                await self._wake("kv_cache")
            self.asleep = False
            self._weights_awake = False
        except NotTrainable:
            raise
        except TurnwrightError as error:
            raise SyncError(
                f"{self.display_name} did not take the weights of policy {version}: {error}"
            ) from error

        label = await self.weights_name()
        self.version = version
        self.label = label
        if self.label is not None and self.label != str(version):
            raise SyncError(
                f"{self.display_name} reports the weights {self.label!r} after loading policy "
                f"{version}"
            )

    @asynccontextmanager
    async def _paused(self) -> AsyncIterator[None]:
        """Pause sampling while the server takes weights, and resume it.

        Waking resumes a server that sleeps. Where the server does not take the weights, that is the
        error, whether or not it resumes. Where it took them and does not resume, that is an error
        too: a paused server answers no call.
        """
        await self._pause_for_update()
        try:
            yield
        except BaseException:
            if not self.asleep:
                await suppress_errors(self.resume())
            raise
        if not self.asleep:
            await self.resume()

    # Overridden by each kind of server

    @property
    def names_weights(self) -> bool:
        """Whether responses name the weights that sampled them, so that calls may be in flight
        during an update."""
        return False

    def _in_flight_fault(self) -> str:
        """Return why the server does not support `in_flight`, or an empty string."""
        return "this kind of server takes no new weights"

    async def weights_name(self) -> str | None:
        """Return the server's name for its weights; None when it has none."""
        return None

    async def load(self) -> EngineLoad | None:
        """Return the server's load; None where it reports none."""
        return None

    async def draft_totals(self) -> tuple[int, int] | None:
        """Return total drafted and accepted ids since the server started.

        None when it drafts none or reports no totals.
        """
        return None

    async def score(self, ids: Sequence[int]) -> list[float]:
        """Return log p(ids[i] | ids[:i]) for i >= 1 at temperature 1, which identify the
        weights."""
        scores = await self.scores(ScoreRequest(ids))
        return scores.logprobs

    async def scores(self, request: ScoreRequest) -> IdScores:
        """Score given ids; raise `EngineError` for a distribution that the server does not
        compute."""
        raise SyncError(f"{self.display_name}: this kind of server does not score ids")

    def scoring_fault(self, request: ScoreRequest) -> str:
        """Return why the server cannot score under the distribution of a request, or an empty
        string.

        The client must be open.
        """
        return "this kind of server does not score ids"

    async def abort(self, *names: str) -> None:
        """End requests on the server, by name."""

    async def _identify(self) -> None:
        raise NotImplementedError

    async def _sample(self, request: Request, max_tokens: int, name: str, seconds: float) -> Any:
        raise NotImplementedError

    def _read(self, raw: Any, request: Request, expected: ExpectedWeights) -> ServerResponse:
        raise NotImplementedError

    async def _pause_for_update(self) -> None:
        """Pause sampling for new weights, as `in_flight` says."""
        raise NotImplementedError

    async def resume(self) -> None:
        """Resume sampling."""
        raise NotImplementedError

    async def _load_from_disk(self, directory: Path, version: int) -> None:
        raise SyncError(
            f"{self.display_name}: this kind of server takes no new weights; restart it with them"
        )

    async def _sleep(self) -> None:
        raise EngineError(
            f"{self.display_name}: this kind of server cannot release its memory (engine.colocate)"
        )

    async def _sleeps(self) -> bool:
        """Ask a server that was put to sleep whether it still is."""
        return False

    async def _wake(self, part: Part) -> None:
        """Restore memory of a sleeping server.

        That for weights has undefined content; after that for the cache the server samples again.
        """
        raise EngineError(f"{self.display_name}: this kind of server does not sleep")

    async def _load_from_group(self, transfer: GroupTransfer) -> None:
        raise SyncError(
            f"{self.display_name}: this kind of server takes no weights by process group "
            "(engine.update)"
        )

    async def _load_from_requests(self, transfer: RequestTransfer) -> None:
        raise SyncError(
            f"{self.display_name}: this kind of server takes no weights in requests (engine.update)"
        )

    # Helpers

    def _check_scoring(self, request: ScoreRequest) -> None:
        fault = self.scoring_fault(request)
        if fault:
            raise EngineError(f"{self.display_name}: {fault}")

    def _scoring_fields(self, request: ScoreRequest) -> dict[str, Any]:
        """Return the fields by which `turnwright serve` takes another distribution than the
        model's."""
        fields: dict[str, Any] = {}
        if request.temperature != 1.0:
            fields["score_temperature"] = request.temperature
        if request.banned_ids:
            fields["score_banned_ids"] = sorted(request.banned_ids)
        return fields

    def _neutral_sampling(self, request: Request) -> dict[str, Any]:
        """Return the sampling settings that vLLM and SGLang share.

        They override the server's defaults and set exactly our stop ids.
        """
        sampling = request.sampling
        key = (sampling, request.stop_ids)
        if self._neutral is None or self._neutral[0] != key:
            fields = {
                "n": 1,
                "temperature": sampling.temperature,
                "top_p": sampling.top_p,
                "top_k": sampling.top_k or -1,
                "min_p": sampling.min_p,
                "stop_token_ids": sorted(request.stop_ids),
                "presence_penalty": 0.0,
                "frequency_penalty": 0.0,
                "repetition_penalty": 1.0,
                "skip_special_tokens": False,
                "spaces_between_special_tokens": False,
            }
            self._neutral = (key, fields)
        return dict(self._neutral[1])

    def _vocabulary(self) -> int:
        """Return an upper bound of valid ids, by the renderer."""
        if self._vocabulary_size is None or self._vocabulary_size[0] is not self.renderer:
            bound = MAX_VOCABULARY
            if isinstance(self.renderer, HasCodec):
                codec = self.renderer.codec
                bound = max(codec.vocab_size, *(id_ + 1 for id_ in codec.control.values()), 1)
                # Models have slightly more ids than their tokenizers.
                if not isinstance(codec, ByteTokenizer):
                    bound += 1024 + bound // 64
            self._vocabulary_size = (self.renderer, bound)
        return self._vocabulary_size[1]

    def _check_present(self, field_name: str, is_present: bool) -> bool:
        """Return whether a response has an optional field.

        Raises when it is missing and an earlier response had it.
        """
        if is_present:
            self._optional_fields.add(field_name)
        elif field_name in self._optional_fields:
            raise self.breach(
                field_name,
                "is missing from the response, and earlier responses of the server had it",
            )
        return is_present

    def _check_name(self, field_name: str, value: Any, request: str) -> None:
        """Check that a response belongs to a request; servers may add a prefix or suffix to the
        request id."""
        if self._check_present(field_name, value is not None) and (
            not isinstance(value, str) or request not in value
        ):
            raise self.breach(
                field_name,
                f"is {value!r:.80} for the request {request!r}: the response is another request's",
            )

    def _seconds(self, request: Request) -> float:
        """Return the seconds that a request may take from now on."""
        if request.deadline is None:
            return self.request_s
        left = request.deadline - asyncio.get_running_loop().time()
        return max(0.001, min(self.request_s, left))

    def _abort_later(self, name: str) -> None:
        """Abort a request in the background, for servers that do not end it when its connection
        closes."""
        if type(self).abort is RemoteEngine.abort:
            return

        async def end() -> None:
            try:
                await self.abort(name)
            except EngineError:
                self.counts["aborts_failed"] += 1

        task = asyncio.get_running_loop().create_task(end())
        self._aborts.add(task)
        task.add_done_callback(self._aborts.discard)

    def _count(self, generation: Generation, left_out: int, prompt: int) -> None:
        self.counts["tokens"] += len(generation.ids)
        self.counts["prompt_tokens"] += prompt
        self.counts["cached_tokens"] += generation.cached_tokens
        if generation.drafted:
            self.counts.update(draft_ids=generation.drafted, draft_ids_accepted=generation.accepted)
        if generation.finish == "abort":
            self.counts["aborted"] += 1
        if left_out:
            self.counts["ids_left_out"] += left_out
        if generation.missing_logprobs != "error":
            self.counts["logprobs_missing"] += sum(p is None for p in generation.logprobs)
