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
    """Give each id its logprob, where it is certain which entry is its own.

    The entries are those of some of the ids, in order (llama.cpp leaves out ids that end inside a character). Where an entry
    could belong to several ids, none of them gets it: a logprob in the wrong place is worse than none.

    Args:
        ids: what was sampled.
        entries: (id, logprob), a subsequence of the ids.

    Returns:
        One per id, None where it is missing or uncertain; None in all for entries that are no subsequence of the ids.
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


LOWEST = -9000.0
"""vLLM and others write -9999 where there is no logprob to tell."""
MOST_IDS = 2**31
"""No vocabulary has so many."""
HIGHEST = 1e-3
"""A logprob is at most 0; so much over it is rounding."""


class ExpectedWeights(NamedTuple):
    """What a request was: the weights that it was meant for, and its own name."""

    version: int
    name: str | None
    """The server's own word for them, None where it has none."""
    request: str = ""
    """What the request was called."""

    def check(self, names: Sequence[str], who: str) -> None:
        """See that an answer was sampled by them.

        Raises:
            StaleWeights: when it was not.
        """
        if self.name is not None and any(name != self.name for name in names):
            raise StaleWeights(
                f"{who} sampled with weights that it calls {', '.join(map(repr, names))}; policy {self.version} is "
                f"{self.name!r} (restarted, or updated by somebody else)"
            )


class Carried:
    """What a server's answers tell of themselves: once it stood in one, it stands in each.

    Whether a server tells it depends on its kind and version. One whose answers had it, and then one has not, mixes things up.
    """

    def __init__(self) -> None:
        self._fields: set[str] = set()

    def see(self, field_name: str, found: bool, breach: ResponseErrors) -> bool:
        """Whether an answer has a field.

        Raises:
            BackendContractError: when it has not, and an earlier one had.
        """
        if found:
            self._fields.add(field_name)
        elif field_name in self._fields:
            raise breach(field_name, "is missing from the answer, and earlier answers of the server had it")
        return found

    def check_name(self, field_name: str, said: Any, request: str, breach: ResponseErrors) -> None:
        """See that an answer is that of a request; servers put words of their own around its name.

        Raises:
            BackendContractError: when it is another's.
        """
        if self.see(field_name, said is not None, breach) and (not isinstance(said, str) or request not in said):
            raise breach(field_name, f"is {said!r:.80}, and the request was {request!r}: the answer is another's")


@dataclass(slots=True)
class ServerResponse:
    """One answer, taken out of a server's own form."""

    ids: Sequence[Any]
    logprobs: Sequence[Any]
    """One per id; None where the server gave none for an id and may."""
    finish: str
    """`stop`, `length` or `abort`: what the server says, in one word for all kinds of server."""
    prompt: Sequence[int] | int | None
    """The ids of the context as the server echoes them, or their number."""
    version: int
    cached: int = 0
    extras: Mapping[str, tuple[int, Any]] = field(default_factory=dict)
    cut: bool = False
    """Whether the server may go on behind a stop id (it was not told of them): what is behind it is then left out."""
    drafts: tuple[int, int] = (0, 0)
    """Ids that speculative decoding drafted for it, and how many of them were sampled, where the server tells."""


class ResponseErrors:
    """Makes errors that name the server, its version and the field."""

    def __init__(self, server: str) -> None:
        self.server = server

    def __call__(self, field_name: str, told: str) -> BackendContractError:
        return BackendContractError(f"{self.server}: {field_name} {told}")


def verify_response(
    answer: ServerResponse,
    request: Request,
    asked: int,
    missing: MissingLogprobs,
    breach: ResponseErrors,
    vocabulary: int = MOST_IDS,
) -> tuple[Generation, int]:
    """The answer as a generation.

    Ids behind the first stop id or stop text were not asked for and are left out (only where `answer.cut`, or a stop text,
    which servers know by their own decoding). An answer that ends otherwise than by a stop id, a stop text or its limit is
    an aborted one: the same reply goes on with another call.

    Args:
        asked: the token limit that was sent, at most `request.max_tokens`.
        missing: what becomes of ids without a logprob.
        vocabulary: ids from here on are none of the model's.

    Returns:
        The generation, and how many ids were left out.

    Raises:
        BackendContractError: naming server, version and field.
    """
    _check_prompt(answer.prompt, request.ids, breach)
    ids = answer.ids
    if not isinstance(ids, list):
        raise breach("output ids", f"are {ids!r:.80}, no list")
    for place, token in enumerate(ids):
        if type(token) is not int or not 0 <= token < vocabulary:
            known = f", and the vocabulary has {vocabulary} ids" if type(token) is int else ""
            raise breach("output ids", f"hold {token!r:.80} at position {place}{known}")
    if not isinstance(answer.logprobs, list):
        raise breach("logprobs", f"are {answer.logprobs!r:.80}, no list")
    if answer.cached < 0 or (answer.cached > len(request.ids) and not request.media):  # images are several ids to the server
        raise breach("cached tokens", f"are {answer.cached} of a prompt of {len(request.ids)} ids")
    if len(ids) > asked:
        raise breach("output ids", f"are {len(ids)} where {asked} were asked for")
    if len(answer.logprobs) != len(ids):
        raise breach("logprobs", f"are {len(answer.logprobs)} for {len(ids)} ids")
    end, finish = _end(answer, request, asked, breach)
    kept = [_number(value, place, missing, breach) for place, value in enumerate(answer.logprobs[:end])]
    if not end and finish != "abort":
        raise breach("output ids", f"are none, and the server says {finish!r}")
    lost: MissingLogprobs = missing if None in kept else "error"
    if end < len(ids) and ROUTES in answer.extras:  # what was left out was fed to nothing that counts
        start, routes = answer.extras[ROUTES]
        answer.extras = {**answer.extras, ROUTES: (start, routes.slice(0, len(request.ids) + end - 1 - start))}
    made = Generation(list(ids[:end]), kept, finish, answer.version, answer.cached, answer.extras, lost, *answer.drafts)
    return made, len(ids) - end


def _check_prompt(echo: Sequence[int] | int | None, sent: Sequence[int], breach: ResponseErrors) -> None:
    if echo is None:
        raise breach("the prompt", "is echoed neither as ids nor as their number, so nothing shows that it is what was sent")
    if type(echo) is int:
        if echo != len(sent):
            raise breach("the prompt", f"has {echo} ids in the server and {len(sent)} were sent")
        return
    if not isinstance(echo, list) or not set(map(type, echo)) <= {int}:
        raise breach("the prompt", f"is echoed as {echo!r:.80}, no list of ids")
    if echo != list(sent):
        place = next((i for i, (a, b) in enumerate(zip(echo, sent, strict=False)) if a != b), min(len(echo), len(sent)))
        raise breach(
            "the prompt", f"is echoed with {len(echo)} ids, {len(sent)} were sent, and they differ from position {place} on"
        )


def _end(answer: ServerResponse, request: Request, asked: int, breach: ResponseErrors) -> tuple[int, Finish]:
    """How many ids of the answer count, and how it ended."""
    ids = answer.ids
    if answer.finish not in ("stop", "length", "abort"):
        raise breach("the finish reason", f"is {answer.finish!r}, which is not known")
    stop = next((place + 1 for place, token in enumerate(ids) if token in request.stop_ids), 0)
    if stop and stop < len(ids) and not answer.cut:
        raise breach("output ids", f"go on behind the stop id {ids[stop - 1]} at position {stop - 1}")
    said = request.stop_text.first_completion(ids[:stop] if stop else ids) if request.stop_text is not None else 0
    stop = min(filter(None, (stop, said)), default=0)
    if stop:
        return stop, "stop"
    if answer.finish == "length":
        if len(ids) < asked:
            raise breach(
                "the finish reason",
                f"is 'length' behind {len(ids)} of {asked} ids: its context is shorter than was taken for granted",
            )
        return len(ids), "length"
    # The server stopped at what is no end here (an end token of its own, an interruption): the reply goes on.
    return len(ids), "abort"


def _number(value: Any, place: int, missing: MissingLogprobs, breach: ResponseErrors) -> float | None:
    if value is None:
        if missing == "error":
            raise breach(
                "logprobs",
                f"lack the one of the id at position {place}; engine.missing_logprobs = 'mask' leaves such ids untrained, "
                "'recompute' takes the trainer's own",
            )
        return None
    if type(value) not in (float, int) or not isfinite(value) or not LOWEST < value <= HIGHEST:
        raise breach("logprobs", f"hold {value!r} at position {place}, which is no log-probability")
    return float(value)


MOST_WAITS = 8
"""Times that one call waits as a server's `Retry-After` says."""
CONTROL_S = 10.0
"""For questions that need no computing: health, versions, aborts."""
Part = Literal["weights", "kv_cache"]
"""What a server's memory is for, as vLLM and SGLang call it."""
UPDATE_S = 600.0
"""For new weights to be read from a disk."""
CANARY = (3, 1, 4, 1, 5, 9, 2, 6, 5, 3, 5, 8, 9, 7, 9, 3, 2, 3, 8, 4, 6, 2, 6, 4, 3, 3, 8, 3, 2, 7, 9, 5)
"""Ids that every vocabulary has; what a server says of them tells one set of weights from another."""


class WeightsLabel(NamedTuple):
    """What tells a server's weights from others."""

    name: str | None
    """The server's own word for its weights, None where it has none."""
    scores: tuple[float, ...]
    """Its logprobs of `CANARY`."""


class RemoteEngine:
    """One server as an engine. Every call is one request; a fault is an error and is asked again by nobody (see `Fleet`), but
    for a server that says when it may be asked again: that is waited for, within the deadline.

    Use one of its kinds: `VllmEngine`, `SglangEngine`, `LlamaCppEngine`, `ChatEngine`.
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
            url: of the server.
            model: the name that it serves the model under; it is asked for by default.
            context: most ids of context plus reply; the server is asked by default, when `open` is called.
            renderer: of its model.
            key_env: the environment variable that holds an API key.
            version: policy version of the weights that the server has now.
            missing_logprobs: what becomes of ids for which the server gives no logprob: `error`, `mask` (untrained, counted)
                or `recompute` (the trainer's own forward, counted).
            request_s: deadline of one request, unless the request's own is earlier.
            most: most connections at once.

        Raises:
            ConfigError: for a setting that cannot be.
        """
        if missing_logprobs not in ("error", "mask", "recompute"):
            raise ConfigError(f"missing_logprobs is error, mask or recompute, not {missing_logprobs!r}")
        if not request_s > 0 or most < 1:
            raise ConfigError("an engine's request_s is over 0, and most is at least 1")
        self.http = HttpClient(url, key_env=key_env, most=most)
        self.url = self.http.url
        self.model = model
        self.context = context
        self.renderer = renderer
        self.version = version
        self.missing_logprobs: MissingLogprobs = missing_logprobs
        self.request_s = request_s
        self.server_version = ""
        """As the server says; empty before `open`."""
        self.label: str | None = None
        """The server's own word for the weights of `version`."""
        self.counts: Counter[str] = Counter()
        """`requests`, `tokens`, `cached_tokens`, `prompt_tokens`, `aborted`, `ids_left_out`, `logprobs_missing`,
        `draft_ids`, `draft_ids_accepted`, `images_as_pictures`, `images_sent`, `images_named`, `images_missed`."""
        self.asleep = False
        """Whether it gave its memory back: weights and the cache are gone until new ones come."""
        self.pixels: Any = None
        self._half = False
        """Whether one that sleeps has its memory for weights already."""
        self.patient = True
        """Whether a call waits for as long as the server says (`Retry-After`); a fleet asks others meanwhile."""
        self.carried = Carried()
        """What the server's answers tell of themselves."""
        self._known: tuple[Any, int] | None = None
        self._opened = False
        self._aborts: set[asyncio.Task[None]] = set()

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self.url!r})"

    @property
    def display_name(self) -> str:
        """What errors call it."""
        return f"{self.kind}{' ' + self.server_version if self.server_version else ''} at {self.url}"

    @property
    def seeded(self) -> bool:
        """Whether it is sent seeds: `turnwise serve` draws from them as the engine in this process does."""
        return self.server_version.startswith("turnwise-")

    def set_renderer(self, renderer: Any) -> None:
        """Take the rollout's renderer where none was given."""
        if self.renderer is None:
            self.renderer = renderer

    def add_pixel_source(self, pixels: Any) -> None:
        """Where the images behind `Request.media` are."""
        self.pixels = pixels

    async def open(self) -> None:
        """Ask the server once what it is: versions, model, context. Called by itself before the first request.

        Raises:
            EngineError: when it cannot say.
        """
        if not self._opened:
            with formed("what the server says of itself", ResponseErrors(self.display_name)):
                await self._look()
            self._opened = True

    async def generate(self, request: Request) -> Generation:
        """Sample one reply; cancelling the call ends it in the server.

        Raises:
            EngineUnavailable: no answer came; it may be asked again.
            StaleWeights: the server has other weights than it should.
            BackendContractError: the answer breaks the contract.
            EngineError: the server refuses the request.
        """
        if not self._opened:
            await self.open()
        if self.version < request.min_version:
            raise StaleWeights(
                f"{self.display_name} has policy {self.version}, and {request.min_version} is the oldest that may answer"
            )
        asked = request.max_tokens
        if self.context is not None:
            asked = min(asked, self.context - len(request.ids))
            if asked < 1:
                raise EngineError(f"{self.display_name}: {len(request.ids)} ids leave no room in a context of {self.context}")
        waited = 0
        while True:
            try:
                return await self._generate(request, asked)
            except EngineUnavailable as error:
                waited += 1
                if not self.patient or not error.retry_after or waited > MOST_WAITS:
                    raise
                if error.retry_after > self._seconds(request):
                    raise
                self.counts["waited_as_told"] += 1
                await asyncio.sleep(error.retry_after)

    async def _generate(self, request: Request, asked: int) -> Generation:
        name = uuid4().hex
        held, seconds, breach = (
            ExpectedWeights(self.version, self.label, name),
            self._seconds(request),
            ResponseErrors(self.display_name),
        )
        self.counts["requests"] += 1
        done = False
        try:
            raw = await self._sample(request, asked, name, seconds)
            done = True
        finally:
            if not done:
                self._abort_later(name)
        with formed("the answer", breach):
            answer = self._read(raw, request, held)
            generation, left_out = verify_response(answer, request, asked, self.missing_logprobs, breach, self._vocabulary())
        self._count(generation, left_out, len(request.ids))
        return generation

    def release(self, session: str) -> None:
        """A server forgets by itself."""

    async def close(self) -> None:
        """Close the connections; calls in flight end with an error."""
        for task in list(self._aborts):
            task.cancel()
        await asyncio.gather(*self._aborts, return_exceptions=True)
        await self.http.close()

    async def check_health(self, seconds: float) -> None:
        """See that the server answers.

        Raises:
            EngineError: when it does not.
        """
        await self.http.alive(self.health, seconds)

    # Weights

    async def weights_label(self) -> WeightsLabel:
        """What the server's weights are called, and what they say of `CANARY`.

        Raises:
            EngineError: when it does not say.
        """
        with formed("what the server says of its weights", ResponseErrors(self.display_name)):
            return WeightsLabel(await self.weights_name(), tuple(await self.score(CANARY)))

    async def load_from_disk(self, directory: str | Path, version: int) -> None:
        """Have the server read weights from a directory that it can see, and call them `version`; calls in flight end first.

        It is not proven to have worked before `weights_label` says so.

        Raises:
            SyncError: when the server refuses, or cannot.
        """
        await self.open()
        await self._take(lambda: self._load(Path(directory), version), version)

    async def load_from_group(self, shipment: GroupTransfer) -> None:
        """Have the server take weights that a process group brings, and call them by their version; calls in flight end first.

        It is not proven to have worked before `weights_label` says so. Where it does not work, the server may have some of
        them; it then calls what it has by no policy's number, so none of its answers is taken before it has been given all.

        Raises:
            SyncError: when the server refuses, or cannot, or is gone before it has them.
        """
        await self.open()
        await self._take(lambda: self._receive(shipment), shipment.version)

    async def load_from_requests(self, mail: RequestTransfer) -> None:
        """As `load_from_group`, with weights that stand in requests.

        Raises:
            SyncError: as `load_from_group`.
        """
        await self.open()
        await self._take(lambda: self._accept(mail), mail.version)

    async def use_adapter(self, directory: Path, version: int) -> None:
        """Have the server answer by a LoRA adapter, in a directory that it can see, and call it `version`.

        Raises:
            SyncError: when the server refuses, or cannot.
        """
        raise SyncError(f"{self.display_name}: this kind of server is given no adapters here (engine.update)")

    async def sleep(self) -> None:
        """Have the server give back the memory of weights and cache; calls in flight end first. New weights wake it.

        Raises:
            EngineError: when it does not.
        """
        await self.open()
        if not self.asleep:
            await self._sleep()
            self.asleep = True

    async def _take(self, work: Callable[[], Awaitable[None]], version: int) -> None:
        """Take new weights; one that sleeps gets its memory for weights before, and for the cache after."""
        try:
            if self.asleep and not await self._sleeps():
                self.asleep = False  # it was started again meanwhile, and has all its memory
            if self.asleep and not self._half:
                await self._wake("weights")
            self._half = self.asleep
            await work()
            if self.asleep:
                await self._wake("kv_cache")
            self.asleep = self._half = False
        except NotTrainable:
            raise
        except TurnwiseError as error:
            raise SyncError(f"{self.display_name} did not take the weights of policy {version}: {error}") from error
        self.version, self.label = version, await self.weights_name()
        if self.label is not None and self.label != str(version):
            raise SyncError(f"{self.display_name} calls its weights {self.label!r} after policy {version} was loaded")

    # What each kind of server has its own way for

    async def weights_name(self) -> str | None:
        """The server's own word for its weights; None where it has none."""
        return None

    async def draft_totals(self) -> tuple[int, int] | None:
        """Ids that the server drafted since it began, and how many of them it sampled; None where it drafts none, or no totals
        are told.

        Raises:
            EngineError: when it does not answer.
        """
        return None

    async def score(self, ids: Sequence[int]) -> list[float]:
        """What the server's weights say of ids: numbers that are others with other weights.

        Where the kind allows it, these are log p(ids[i] | ids[:i]) for i from 1 on at temperature 1.
        """
        raise SyncError(f"{self.display_name}: this kind of server scores no ids")

    async def abort(self, name: str) -> None:
        """End one request in the server, by its name."""

    async def _look(self) -> None:
        raise NotImplementedError

    async def _sample(self, request: Request, asked: int, name: str, seconds: float) -> Any:
        raise NotImplementedError

    def _read(self, raw: Any, request: Request, held: ExpectedWeights) -> ServerResponse:
        raise NotImplementedError

    async def _load(self, directory: Path, version: int) -> None:
        raise SyncError(f"{self.display_name}: this kind of server takes no new weights; start it again with them")

    async def _sleep(self) -> None:
        raise EngineError(f"{self.display_name}: this kind of server does not give its memory back (engine.colocate)")

    async def _sleeps(self) -> bool:
        """Whether it still does, asked where it was put to sleep."""
        return False

    async def _wake(self, part: Part) -> None:
        """Get memory back: for weights, whatever stands in it then, or for the cache, after which it samples again."""
        raise EngineError(f"{self.display_name}: this kind of server does not sleep")

    async def _receive(self, shipment: GroupTransfer) -> None:
        raise SyncError(f"{self.display_name}: this kind of server takes no weights by process group")

    async def _accept(self, mail: RequestTransfer) -> None:
        raise SyncError(f"{self.display_name}: this kind of server takes no weights in requests (engine.update)")

    # Helpers

    def _vocabulary(self) -> int:
        """Ids from here on are none of the model's, as far as its renderer tells: models have somewhat more than tokenizers."""
        if self._known is None or self._known[0] is not self.renderer:
            most = MOST_IDS
            if isinstance(self.renderer, HasCodec):
                codec = self.renderer.codec
                most = max(codec.vocab_size, *(one + 1 for one in codec.control.values()), 1)
                most += 0 if isinstance(codec, ByteTokenizer) else 1024 + most // 64
            self._known = self.renderer, most
        return self._known[1]

    def _seconds(self, request: Request) -> float:
        if request.deadline is None:
            return self.request_s
        left = request.deadline - asyncio.get_running_loop().time()
        return max(0.001, min(self.request_s, left))

    def _abort_later(self, name: str) -> None:
        """Closing the connection ends a request; where it does not, this does. Nobody waits for it."""
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
def formed(what: str, breach: ResponseErrors) -> Iterator[None]:
    """Read what a server answered.

    Raises:
        BackendContractError: where it has another form, which the reading of it came upon as an error of Python's.
    """
    try:
        yield
    except TurnwiseError:
        raise
    except (LookupError, TypeError, ValueError, AttributeError, OverflowError) as error:
        raise breach(what, f"has another form than it should: {type(error).__name__}: {error!s:.200}") from error


def only_choice(raw: Any, breach: ResponseErrors) -> Any:
    """The one choice of an answer.

    Raises:
        BackendContractError: where there are others, or none, or it is no object.
    """
    choices = field_of(raw, "choices", breach)
    if not isinstance(choices, list) or len(choices) != 1:
        told = f"{len(choices)}" if isinstance(choices, list) else f"{choices!r:.80}"
        raise breach("choices", f"are {told}, and one was asked for")
    if not isinstance(choices[0], dict):
        raise breach("choices.0", f"is {choices[0]!r:.80}, no object")
    return choices[0]


def field_of(raw: Any, path: str, breach: ResponseErrors) -> Any:
    """A value inside an answer, by a path such as `choices.0.token_ids`.

    Raises:
        BackendContractError: when it is not there; null counts as there.
    """
    value = raw
    for part in path.split("."):
        try:
            value = value[int(part)] if part.isdigit() else value[part]
        except (LookupError, TypeError):
            error: BackendContractError = breach(path, "is missing from the answer")
            raise error from None
    return value


def number_at(raw: Any, path: str) -> int:
    """A whole number inside an answer, 0 where there is none."""
    value = raw
    for part in path.split("."):
        value = value.get(part) if isinstance(value, Mapping) else None
    return value if type(value) is int else 0
