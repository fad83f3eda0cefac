"""RemoteEngine: one server, one verified request."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Awaitable, Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from math import isfinite
from pathlib import Path
from typing import Any, Literal, NamedTuple
from uuid import uuid4

from turnwise.engines.base import Finish, Generation, MissingLogprobs, Request
from turnwise.engines.remote.http import HttpClient
from turnwise.engines.remote.weight_sync import GroupTransfer, RequestTransfer
from turnwise.errors import (
    BackendContractError,
    ConfigError,
    EngineError,
    EngineUnavailable,
    NotTrainable,
    StaleWeights,
    SyncError,
    TurnwiseError,
)
from turnwise.renderers.base import HasCodec
from turnwise.renderers.tokenizer import ByteTokenizer
from turnwise.types import ROUTES


def align_logprobs(ids: Sequence[int], entries: Sequence[tuple[int, float]]) -> list[float | None] | None:
    """Assign logprob entries to ids where the match is unambiguous.

    Servers may omit ids; llama.cpp omits those that end inside a character. An entry that fits several ids is assigned to none:
    a misplaced logprob is worse than a missing one.

    Args:
        ids: sampled ids.
        entries: (id, logprob) pairs, a subsequence of the ids in order.

    Returns:
        One logprob per id, None where missing or ambiguous; None overall when the entries are not a subsequence of the ids.
    """
    first: list[int] = []
    place = 0
    for token, _ in entries:
        while place < len(ids) and ids[place] != token:
            place += 1
        if place == len(ids):
            return None
        first.append(place)
        place += 1
    last = [0] * len(entries)
    place = len(ids) - 1
    for number in range(len(entries) - 1, -1, -1):
        while ids[place] != entries[number][0]:
            place -= 1
        last[number] = place
        place -= 1
    found: list[float | None] = [None] * len(ids)
    for number, (early, late) in enumerate(zip(first, last, strict=True)):
        if early == late:
            found[early] = entries[number][1]
    return found


MIN_LOGPROB = -9000.0
"""vLLM and others report -9999 for a missing logprob."""
MAX_VOCABULARY = 2**31
"""Larger than any vocabulary."""
MAX_LOGPROB = 1e-3
"""Tolerance for rounding; a logprob is at most 0."""


class ExpectedWeights(NamedTuple):
    """Weights that a request expects, and the request's name."""

    version: int
    name: str | None
    """The server's name for the weights; None when it has none."""
    request: str = ""
    """Request id sent to the server."""

    def check(self, names: Sequence[str], who: str) -> None:
        """Check that these weights sampled a response.

        Raises:
            StaleWeights: when others did.
        """
        if self.name is not None and any(name != self.name for name in names):
            raise StaleWeights(
                f"{who} sampled with weights it calls {', '.join(map(repr, names))}, but policy {self.version} is "
                f"{self.name!r} (the server restarted, or another client updated it)"
            )


class ResponseFields:
    """Optional response fields of one server; a field seen once must be in every later response.

    Whether a server sends them depends on its kind and version.
    """

    def __init__(self) -> None:
        self._fields: set[str] = set()

    def check_present(self, field_name: str, found: bool, breach: ResponseErrors) -> bool:
        """Return whether a response has a field.

        Raises:
            BackendContractError: when it is missing and an earlier response had it.
        """
        if found:
            self._fields.add(field_name)
        elif field_name in self._fields:
            raise breach(field_name, "is missing from the response, and earlier responses of the server had it")
        return found

    def check_name(self, field_name: str, value: Any, request: str, breach: ResponseErrors) -> None:
        """Check that a response belongs to a request; servers may add a prefix or suffix to the request id.

        Raises:
            BackendContractError: when it belongs to another request.
        """
        if self.check_present(field_name, value is not None, breach) and (not isinstance(value, str) or request not in value):
            raise breach(field_name, f"is {value!r:.80} for the request {request!r}: the response is another request's")


@dataclass(slots=True)
class ServerResponse:
    """One response in a server-independent form."""

    ids: Sequence[Any]
    logprobs: Sequence[Any]
    """One per id; None where the server may and did omit it."""
    finish: str
    """`stop`, `length` or `abort`, as the server reported it."""
    prompt: Sequence[int] | int | None
    """Context ids as echoed by the server, or their count."""
    version: int
    cached: int = 0
    extras: Mapping[str, tuple[int, Any]] = field(default_factory=dict)
    trim: bool = False
    """Whether to drop ids after a stop id: the server was not sent the stop ids."""
    drafts: tuple[int, int] = (0, 0)
    """Ids drafted by speculative decoding and how many were sampled, where reported."""


class ResponseErrors:
    """Builds errors that name the server, its version and the field."""

    def __init__(self, server: str) -> None:
        self.server = server

    def __call__(self, field_name: str, problem: str) -> BackendContractError:
        return BackendContractError(f"{self.server}: {field_name} {problem}")


def verify_response(
    response: ServerResponse,
    request: Request,
    max_tokens: int,
    missing: MissingLogprobs,
    breach: ResponseErrors,
    vocabulary: int = MAX_VOCABULARY,
) -> tuple[Generation, int]:
    """Check a response and convert it to a generation.

    Ids after the first stop id or stop text are dropped. After a stop id this is allowed only with `response.trim`; servers
    match stop texts by their own decoding. A response that ends without a stop id, a stop text or its token limit is an
    aborted one, and another call continues the reply.

    Args:
        max_tokens: the token limit sent, at most `request.max_tokens`.
        missing: handling of ids without a logprob.
        vocabulary: exclusive upper bound of valid ids.

    Returns:
        The generation and the number of dropped ids.

    Raises:
        BackendContractError: naming server, version and field.
    """
    _check_prompt(response.prompt, request.ids, breach)
    ids = response.ids
    if not isinstance(ids, list):
        raise breach("output ids", f"are {ids!r:.80}, not a list")
    for position, token in enumerate(ids):
        if type(token) is not int or not 0 <= token < vocabulary:
            known = f"; the vocabulary has {vocabulary} ids" if type(token) is int else ""
            raise breach("output ids", f"contain {token!r:.80} at position {position}{known}")
    if not isinstance(response.logprobs, list):
        raise breach("logprobs", f"are {response.logprobs!r:.80}, not a list")
    if response.cached < 0 or (response.cached > len(request.ids) and not request.media):  # the server counts ids per image
        raise breach("cached tokens", f"are {response.cached} of a prompt of {len(request.ids)} ids")
    if len(ids) > max_tokens:
        raise breach("output ids", f"are {len(ids)}; at most {max_tokens} were requested")
    if len(response.logprobs) != len(ids):
        raise breach("logprobs", f"are {len(response.logprobs)} for {len(ids)} ids")
    end, finish = _find_end(response, request, max_tokens, breach)
    logprobs = [_check_logprob(value, position, missing, breach) for position, value in enumerate(response.logprobs[:end])]
    if not end and finish != "abort":
        raise breach("output ids", f"are empty with the finish reason {finish!r}")
    lost: MissingLogprobs = missing if None in logprobs else "error"
    if end < len(ids) and ROUTES in response.extras:  # dropped ids were not fed
        start, routes = response.extras[ROUTES]
        response.extras = {**response.extras, ROUTES: (start, routes.slice(0, len(request.ids) + end - 1 - start))}
    generation = Generation(
        list(ids[:end]), logprobs, finish, response.version, response.cached, response.extras, lost, *response.drafts
    )
    return generation, len(ids) - end


def _check_prompt(echo: Sequence[int] | int | None, sent: Sequence[int], breach: ResponseErrors) -> None:
    if echo is None:
        raise breach("the prompt", "is echoed neither as ids nor as a count, so it cannot be compared with the prompt sent")
    if type(echo) is int:
        if echo != len(sent):
            raise breach("the prompt", f"has {echo} ids on the server; {len(sent)} were sent")
        return
    if not isinstance(echo, list) or not set(map(type, echo)) <= {int}:
        raise breach("the prompt", f"is echoed as {echo!r:.80}, not as a list of ids")
    if echo != list(sent):
        position = next((i for i, (a, b) in enumerate(zip(echo, sent, strict=False)) if a != b), min(len(echo), len(sent)))
        raise breach("the prompt", f"is echoed with {len(echo)} ids; {len(sent)} were sent; first difference at {position}")


def _find_end(response: ServerResponse, request: Request, max_tokens: int, breach: ResponseErrors) -> tuple[int, Finish]:
    """Return how many ids of a response count, and its finish reason."""
    ids = response.ids
    if response.finish not in ("stop", "length", "abort"):
        raise breach("the finish reason", f"is {response.finish!r}; expected stop, length or abort")
    stop = next((position + 1 for position, token in enumerate(ids) if token in request.stop_ids), 0)
    if stop and stop < len(ids) and not response.trim:
        raise breach("output ids", f"continue after the stop id {ids[stop - 1]} at position {stop - 1}")
    text_end = request.stop_text.first_completion(ids[:stop] if stop else ids) if request.stop_text is not None else 0
    stop = min(filter(None, (stop, text_end)), default=0)
    if stop:
        return stop, "stop"
    if response.finish == "length":
        if len(ids) < max_tokens:
            raise breach(
                "the finish reason",
                f"is 'length' after {len(ids)} of {max_tokens} ids: the server's context is shorter than expected",
            )
        return len(ids), "length"
    # The server stopped for a reason of its own (an end token that is no stop id here, an interruption): the reply continues.
    return len(ids), "abort"


def _check_logprob(value: Any, position: int, missing: MissingLogprobs, breach: ResponseErrors) -> float | None:
    if value is None:
        if missing == "error":
            raise breach(
                "logprobs",
                f"have none for the id at position {position}; engine.missing_logprobs = 'mask' leaves such ids untrained, "
                "'recompute' uses the trainer's own",
            )
        return None
    if type(value) not in (float, int) or not isfinite(value) or not MIN_LOGPROB < value <= MAX_LOGPROB:
        raise breach("logprobs", f"contain {value!r} at position {position}, which is not a log-probability")
    return float(value)


MAX_RETRY_AFTER = 8
"""Times that one call waits for a server's `Retry-After`."""
CONTROL_S = 10.0
"""Deadline for requests without computation: health, versions, aborts."""
Part = Literal["weights", "kv_cache"]
"""Parts of a server's memory, as vLLM and SGLang name them."""
UPDATE_S = 600.0
"""Deadline for reading new weights from a disk."""
CANARY = (3, 1, 4, 1, 5, 9, 2, 6, 5, 3, 5, 8, 9, 7, 9, 3, 2, 3, 8, 4, 6, 2, 6, 4, 3, 3, 8, 3, 2, 7, 9, 5)
"""Ids of every vocabulary; their logprobs tell one set of weights from another."""


class WeightsLabel(NamedTuple):
    """Identity of a server's weights."""

    name: str | None
    """The server's name for its weights; None when it has none."""
    scores: tuple[float, ...]
    """The server's logprobs of `CANARY`."""


class RemoteEngine:
    """One server as an engine; use a subclass: `VllmEngine`, `SglangEngine`, `LlamaCppEngine`, `ChatEngine`.

    Every call is one request, and a failed request is an error (`Fleet` retries it). The exception is a server that answers
    with `Retry-After`: the call waits for it, within the deadline.
    """

    kind = ""
    health = "/health"

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
    ) -> None:
        """
        Args:
            url: base URL of the server.
            model: name under which the server serves the model; by default `open` asks the server.
            context: maximum number of ids of context plus reply; by default `open` asks the server.
            renderer: renderer of the model.
            key_env: environment variable that holds an API key.
            version: policy version of the server's current weights.
            missing_logprobs: handling of ids without a logprob: `error`, `mask` (untrained, counted) or `recompute` (the
                trainer's own forward pass, counted).
            request_s: deadline of one request in seconds, unless the request's own is earlier.
            most: maximum number of concurrent connections.

        Raises:
            ConfigError: for an invalid setting.
        """
        if missing_logprobs not in ("error", "mask", "recompute"):
            raise ConfigError(f"missing_logprobs must be error, mask or recompute, not {missing_logprobs!r}")
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
        self.server_version = ""
        """Version reported by the server; empty before `open`."""
        self.label: str | None = None
        """The server's name for the weights of `version`."""
        self.counts: Counter[str] = Counter()
        """`requests`, `tokens`, `cached_tokens`, `prompt_tokens`, `aborted`, `ids_left_out`, `logprobs_missing`,
        `draft_ids`, `draft_ids_accepted`, `images_as_pictures`, `images_sent`, `images_named`, `images_missed`."""
        self.asleep = False
        """Whether the server released its memory: weights and cache are gone until new weights arrive."""
        self.pixels: Any = None
        self._weights_awake = False
        """Whether a sleeping server already has its memory for weights again."""
        self.patient = True
        """Whether a call waits out a server's `Retry-After`; a fleet asks other servers meanwhile."""
        self.response_fields = ResponseFields()
        """Optional fields of the server's responses."""
        self._vocabulary_size: tuple[Any, int] | None = None
        self._opened = False
        self._aborts: set[asyncio.Task[None]] = set()

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self.url!r})"

    @property
    def display_name(self) -> str:
        """Name in errors: kind, version and URL."""
        return f"{self.kind}{' ' + self.server_version if self.server_version else ''} at {self.url}"

    @property
    def seeded(self) -> bool:
        """Whether requests carry seeds: `turnwise serve` draws from them exactly as the local engine does."""
        return self.server_version.startswith("turnwise-")

    def set_renderer(self, renderer: Any) -> None:
        """Use the rollout's renderer if none was given."""
        if self.renderer is None:
            self.renderer = renderer

    def add_pixel_source(self, pixels: Any) -> None:
        """Set the source of the images of `Request.media`."""
        self.pixels = pixels

    async def open(self) -> None:
        """Query versions, model and context once; called automatically before the first request.

        Raises:
            EngineError: when the server does not report them.
        """
        if not self._opened:
            with parsing("the server's description", ResponseErrors(self.display_name)):
                await self._identify()
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
        if self.version < request.min_version:
            raise StaleWeights(
                f"{self.display_name} has policy {self.version}; the request needs {request.min_version} or later"
            )
        max_tokens = request.max_tokens
        if self.context is not None:
            max_tokens = min(max_tokens, self.context - len(request.ids))
            if max_tokens < 1:
                raise EngineError(f"{self.display_name}: {len(request.ids)} ids fill the context of {self.context}")
        waited = 0
        while True:
            try:
                return await self._generate(request, max_tokens)
            except EngineUnavailable as error:
                waited += 1
                if not self.patient or not error.retry_after or waited > MAX_RETRY_AFTER:
                    raise
                if error.retry_after > self._seconds(request):
                    raise
                self.counts["waited_as_told"] += 1
                await asyncio.sleep(error.retry_after)

    async def _generate(self, request: Request, max_tokens: int) -> Generation:
        name = uuid4().hex
        expected, seconds, breach = (
            ExpectedWeights(self.version, self.label, name),
            self._seconds(request),
            ResponseErrors(self.display_name),
        )
        self.counts["requests"] += 1
        done = False
        try:
            raw = await self._sample(request, max_tokens, name, seconds)
            done = True
        finally:
            if not done:
                self._abort_later(name)
        with parsing("the response", breach):
            response = self._read(raw, request, expected)
            generation, left_out = verify_response(
                response, request, max_tokens, self.missing_logprobs, breach, self._vocabulary()
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

    async def check_health(self, seconds: float) -> None:
        """Check that the server responds.

        Raises:
            EngineError: when it does not.
        """
        await self.http.alive(self.health, seconds)

    # Weights

    async def weights_label(self) -> WeightsLabel:
        """Return the server's name for its weights and its scores of `CANARY`.

        Raises:
            EngineError: when the server does not report them.
        """
        with parsing("the server's description of its weights", ResponseErrors(self.display_name)):
            return WeightsLabel(await self.weights_name(), tuple(await self.score(CANARY)))

    async def load_from_disk(self, directory: str | Path, version: int) -> None:
        """Make the server load weights from a directory it can access, named `version`; calls in flight end first.

        Success is unproven until `weights_label` confirms it.

        Raises:
            SyncError: when the server refuses or fails.
        """
        await self.open()
        await self._update_weights(lambda: self._load_from_disk(Path(directory), version), version)

    async def load_from_group(self, transfer: GroupTransfer) -> None:
        """Make the server take weights from a process group, named by their version; calls in flight end first.

        Success is unproven until `weights_label` confirms it. After a failure the server may have some of the weights; it then
        reports a name that is no policy's, so its responses are rejected until a complete update.

        Raises:
            SyncError: when the server refuses, fails, or ends before it has all weights.
        """
        await self.open()
        await self._update_weights(lambda: self._load_from_group(transfer), transfer.version)

    async def load_from_requests(self, transfer: RequestTransfer) -> None:
        """Make the server take weights from request bodies; otherwise as `load_from_group`.

        Raises:
            SyncError: as `load_from_group`.
        """
        await self.open()
        await self._update_weights(lambda: self._load_from_requests(transfer), transfer.version)

    async def use_adapter(self, directory: Path, version: int) -> None:
        """Make the server use a LoRA adapter from a directory it can access, named `version`.

        Raises:
            SyncError: when the server refuses or fails.
        """
        raise SyncError(f"{self.display_name}: this kind of server does not take LoRA adapters (engine.update)")

    async def sleep(self) -> None:
        """Make the server release the memory of weights and cache; calls in flight end first. New weights wake it.

        Raises:
            EngineError: when it does not.
        """
        await self.open()
        if not self.asleep:
            await self._sleep()
            self.asleep = True

    async def _update_weights(self, work: Callable[[], Awaitable[None]], version: int) -> None:
        """Apply new weights; a sleeping server gets its memory for weights before, and for the cache after."""
        try:
            if self.asleep and not await self._sleeps():
                self.asleep = False  # restarted meanwhile, with all its memory
            if self.asleep and not self._weights_awake:
                await self._wake("weights")
            self._weights_awake = self.asleep
            await work()
            if self.asleep:
                await self._wake("kv_cache")
            self.asleep = self._weights_awake = False
        except NotTrainable:
            raise
        except TurnwiseError as error:
            raise SyncError(f"{self.display_name} did not take the weights of policy {version}: {error}") from error
        self.version, self.label = version, await self.weights_name()
        if self.label is not None and self.label != str(version):
            raise SyncError(f"{self.display_name} reports the weights {self.label!r} after loading policy {version}")

    # Overridden by each kind of server

    async def weights_name(self) -> str | None:
        """Return the server's name for its weights; None when it has none."""
        return None

    async def draft_totals(self) -> tuple[int, int] | None:
        """Return total drafted and accepted ids since the server started; None when it drafts none or reports no totals.

        Raises:
            EngineError: when the server does not respond.
        """
        return None

    async def score(self, ids: Sequence[int]) -> list[float]:
        """Return numbers that identify the weights by their output for these ids.

        Where the server allows it: log p(ids[i] | ids[:i]) for i >= 1 at temperature 1.
        """
        raise SyncError(f"{self.display_name}: this kind of server does not score ids")

    async def abort(self, name: str) -> None:
        """End one request on the server, by name."""

    async def _identify(self) -> None:
        raise NotImplementedError

    async def _sample(self, request: Request, max_tokens: int, name: str, seconds: float) -> Any:
        raise NotImplementedError

    def _read(self, raw: Any, request: Request, expected: ExpectedWeights) -> ServerResponse:
        raise NotImplementedError

    async def _load_from_disk(self, directory: Path, version: int) -> None:
        raise SyncError(f"{self.display_name}: this kind of server takes no new weights; restart it with them")

    async def _sleep(self) -> None:
        raise EngineError(f"{self.display_name}: this kind of server cannot release its memory (engine.colocate)")

    async def _sleeps(self) -> bool:
        """Ask a server that was put to sleep whether it still is."""
        return False

    async def _wake(self, part: Part) -> None:
        """Restore memory: for weights, with undefined content; or for the cache, after which the server samples again."""
        raise EngineError(f"{self.display_name}: this kind of server does not sleep")

    async def _load_from_group(self, transfer: GroupTransfer) -> None:
        raise SyncError(f"{self.display_name}: this kind of server takes no weights by process group (engine.update)")

    async def _load_from_requests(self, transfer: RequestTransfer) -> None:
        raise SyncError(f"{self.display_name}: this kind of server takes no weights in requests (engine.update)")

    # Helpers

    def _vocabulary(self) -> int:
        """Return an upper bound of valid ids, by the renderer; models have slightly more ids than their tokenizers."""
        if self._vocabulary_size is None or self._vocabulary_size[0] is not self.renderer:
            bound = MAX_VOCABULARY
            if isinstance(self.renderer, HasCodec):
                codec = self.renderer.codec
                bound = max(codec.vocab_size, *(one + 1 for one in codec.control.values()), 1)
                bound += 0 if isinstance(codec, ByteTokenizer) else 1024 + bound // 64
            self._vocabulary_size = self.renderer, bound
        return self._vocabulary_size[1]

    def _seconds(self, request: Request) -> float:
        if request.deadline is None:
            return self.request_s
        left = request.deadline - asyncio.get_running_loop().time()
        return max(0.001, min(self.request_s, left))

    def _abort_later(self, name: str) -> None:
        """Abort a request in the background, for servers that do not end it when its connection closes."""
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
            self.counts["draft_ids"] += generation.drafted
            self.counts["draft_ids_accepted"] += generation.accepted
        if generation.finish == "abort":
            self.counts["aborted"] += 1
        if left_out:
            self.counts["ids_left_out"] += left_out
        if generation.missing_logprobs != "error":
            self.counts["logprobs_missing"] += sum(p is None for p in generation.logprobs)


@contextmanager
def parsing(what: str, breach: ResponseErrors) -> Iterator[None]:
    """Parse a response.

    Raises:
        BackendContractError: in place of a Python error caused by an unexpected form.
    """
    try:
        yield
    except TurnwiseError:
        raise
    except (LookupError, TypeError, ValueError, AttributeError, OverflowError) as error:
        raise breach(what, f"has an unexpected form: {type(error).__name__}: {error!s:.200}") from error


def only_choice(raw: Any, breach: ResponseErrors) -> Any:
    """Return the only choice of a response.

    Raises:
        BackendContractError: when there is not exactly one, or it is not an object.
    """
    choices = field_of(raw, "choices", breach)
    if not isinstance(choices, list) or len(choices) != 1:
        count = f"{len(choices)}" if isinstance(choices, list) else f"{choices!r:.80}"
        raise breach("choices", f"are {count}; exactly one was requested")
    if not isinstance(choices[0], dict):
        raise breach("choices.0", f"is {choices[0]!r:.80}, not an object")
    return choices[0]


def field_of(raw: Any, path: str, breach: ResponseErrors) -> Any:
    """Return a value of a response, by a path such as `choices.0.token_ids`.

    Raises:
        BackendContractError: when it is missing; null counts as present.
    """
    value = raw
    for part in path.split("."):
        try:
            value = value[int(part)] if part.isdigit() else value[part]
        except (LookupError, TypeError):
            error: BackendContractError = breach(path, "is missing from the response")
            raise error from None
    return value


def number_at(raw: Any, path: str) -> int:
    """Return an integer of a response by its path, 0 when missing."""
    value = raw
    for part in path.split("."):
        value = value.get(part) if isinstance(value, Mapping) else None
    return value if type(value) is int else 0
