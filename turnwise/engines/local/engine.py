"""LocalEngine and the thread that runs its scheduler."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import threading
import warnings
import weakref
from collections.abc import Callable, Iterable
from concurrent.futures import Future
from functools import partial
from math import isfinite
from operator import index
from pathlib import Path
from typing import Any

import torch
from transformers import AutoConfig

from turnwise.engines.base import Generation, Request, StopText
from turnwise.engines.local.batch import ActiveCall, Outcome
from turnwise.engines.local.batch_invariance import calibrate_batch_invariance
from turnwise.engines.local.model import EngineModel
from turnwise.engines.local.sampling import Sampler
from turnwise.engines.local.scheduler import Scheduler
from turnwise.engines.local.vision import ContextMedia, auto_class
from turnwise.engines.local.weights import check_weights, copy_weights
from turnwise.errors import BackendContractError, EngineError, ModelError
from turnwise.types import Sampling, ids_with_media_keys

_log = logging.getLogger(__name__)
Order = Callable[[], Any]


class Worker:
    """Runs a scheduler on a thread of its own, which starts with the first order and sleeps when there is nothing to do."""

    def __init__(self, scheduler: Scheduler) -> None:
        self.scheduler = scheduler
        self._lock = threading.Condition()
        self._orders: list[Order] = []
        self._thread: threading.Thread | None = None
        self._closing = False
        self._failure: BaseException | None = None

    def post(self, orders: list[Order]) -> None:
        """Have these called on the thread before its next step, in order.

        Raises:
            EngineError: when the engine is closed, or has failed.
        """
        with self._lock:
            self._check()
            self._orders += orders
            if self._thread is None:
                self._thread = threading.Thread(target=self._run, name="turnwise-local-engine", daemon=True)
                self._thread.start()
            self._lock.notify()

    def ask(self, order: Order) -> Future[Any]:
        """Have this called on the thread, with its result or exception to wait for; an exception of it is the asker's alone."""
        answer: Future[Any] = Future()

        def run() -> None:
            try:
                result = order()
            except BaseException as error:
                answer.set_exception(error)
            else:
                answer.set_result(result)

        self.post([run])
        return answer

    def check(self) -> None:
        """See that the thread can take orders.

        Raises:
            EngineError: when the engine is closed, or has failed.
        """
        with self._lock:
            self._check()

    def stop(self) -> None:
        """End every call as aborted and the thread with them; further orders are refused."""
        with self._lock:
            self._closing = True
            thread = self._thread
            self._lock.notify()
        if thread is not None and thread is not threading.current_thread():
            thread.join()

    def deliver(self, outcomes: list[Outcome]) -> None:
        """Hand results to the event loops that wait for them, with one wake-up per loop."""
        by_loop: dict[asyncio.AbstractEventLoop, list[Outcome]] = {}
        for outcome in outcomes:
            by_loop.setdefault(outcome[0].future.get_loop(), []).append(outcome)
        for loop, theirs in by_loop.items():
            # A loop that was closed has nobody left who waits.
            if not loop.is_closed():
                try:
                    loop.call_soon_threadsafe(_settle, theirs)
                except RuntimeError:
                    continue

    def _check(self) -> None:
        if self._failure is not None:
            raise EngineError(f"the local engine failed earlier: {self._failure!r}; make a new one") from self._failure
        if self._closing:
            raise EngineError("the local engine is closed; make a new one")

    def _run(self) -> None:
        try:
            while self._turn():
                pass
        except BaseException as error:
            with self._lock:
                self._failure = error
                orders, self._orders = self._orders, []
            for order in orders:  # calls that were just coming in fail with the others
                order()
            self.deliver([(call, _failed(error)) for call in (*self.scheduler.running, *self.scheduler.waiting)])
        else:
            self.deliver(self.scheduler.abort())

    def _turn(self) -> bool:
        """Take orders, then compute a step; False at the end."""
        with self._lock:
            while not self._orders and not self._closing and not self.scheduler.busy:
                self._lock.wait()
            orders, self._orders = self._orders, []
            closing = self._closing
        for order in orders:
            try:
                order()
            except Exception:  # of one call alone, which is over for it
                _log.exception("an order to the local engine failed")
        if closing:
            return False
        self.deliver(self.scheduler.step())
        return True


def _failed(error: BaseException) -> EngineError:
    failure = EngineError(f"the local engine failed in a step: {error!r}")
    failure.__cause__ = error
    return failure


def _settle(outcomes: list[tuple[ActiveCall, Generation | EngineError]]) -> None:
    for call, result in outcomes:
        if call.future.done():  # its caller is gone
            continue
        if isinstance(result, BaseException):
            call.future.set_exception(result)
        else:
            call.future.set_result(result)


COLDEST = 1e-4
"""Least temperature but 0: below, logits divided by it leave the range of float32."""
MOST_SEED = 2**64


def ids_of(request: Request) -> tuple[list[int], str]:
    """The ids of a context as ints, and what is wrong with them."""
    try:
        ids = list(request.ids)
        if set(map(type, ids)) != {int}:
            ids = [index(one) for one in ids if not isinstance(one, bool) or _no_id(one)]
    except (TypeError, OverflowError) as error:
        return [], f"the context holds what is no id: {error}"
    return ids, ""


def fault_of(request: Request, vocabulary: int) -> str:
    """What is wrong with a request beside its context; empty for nothing."""
    if type(request.max_tokens) is not int or request.max_tokens < 1:
        return f"max_tokens is {request.max_tokens!r:.80}; at least 1"
    if not isinstance(request.session, str) or not isinstance(request.group, str):
        return "session and group are texts"
    if type(request.seed) is not int or not -MOST_SEED < request.seed < MOST_SEED:
        return f"the seed is {request.seed!r:.80}; a whole number of at most 64 bits"
    if type(request.routes_from) is not int or request.routes_from < 0:
        return f"routes_from is {request.routes_from!r:.80}; a position"
    if request.stop_text is not None and not isinstance(request.stop_text, StopText):
        return f"stop_text is {request.stop_text!r:.80}; a StopText"
    return _of_sampling(request.sampling) or _of_bans(request.banned_ids, vocabulary)


def _of_sampling(sampling: Sampling) -> str:
    temperature, top_p, top_k = sampling.temperature, sampling.top_p, sampling.top_k
    if not _is_number(temperature) or (temperature != 0 and not COLDEST <= temperature <= 1 / COLDEST):
        return f"the temperature is {temperature!r:.80}; 0, or from {COLDEST:g} to {1 / COLDEST:g}"
    if not _is_number(top_p) or not 0 < top_p <= 1:
        return f"top_p is {top_p!r:.80}; over 0 and at most 1"
    if type(top_k) is not int or not 0 <= top_k < 2**31:
        return f"top_k is {top_k!r:.80}; 0 for all, or how many ids"
    return ""


def _of_bans(banned: Any, vocabulary: int) -> str:
    if not banned:
        return ""
    if not isinstance(banned, frozenset) or any(type(one) is not int for one in banned):
        return "banned_ids is a frozenset of ids"
    low, high = min(banned), max(banned)
    if low < 0 or high >= vocabulary:
        return f"banned_ids: id {low if low < 0 else high} is not in the vocabulary of {vocabulary} ids"
    return "banned_ids: every id of the vocabulary is banned" if len(banned) == vocabulary else ""


def _is_number(value: Any) -> bool:
    return type(value) in (int, float) and isfinite(value)


def _no_id(one: Any) -> bool:
    raise TypeError(f"{one!r}")


MOST_FAILED = 3
"""Steps in a row: one or two are a request's fault, from here on the engine's."""


class LocalEngine:
    """Samples replies from a Hugging Face causal model with continuous batching, in torch, on a CPU or a GPU.

    It holds its own copy of the weights, which change by `update` alone. A reply's ids and logprobs depend, to the last bit,
    on the weights, the context, the sampling settings and the seed: not on other calls, their order, the cache or its size.
    That is verified for the machine at the start (`exact`); it is claimed on CPUs in fp32 only.

    Args:
        model: a module of transformers whose attention goes through its attention interface (Llama, Qwen, Mistral ...), or a
            config, from which one with random weights is made. Never shared: module and config are copied.
        renderer: kept as `engine.renderer` for the rollout; the engine itself knows no text.
        context: most ids of context plus reply; by default the model's own `max_position_embeddings`.
        slots: how many sequences the cache holds at once; by default 256 or what fits into `cache_gib`. Calls beyond
            it wait, and idle sessions lose their place, longest idle first; that costs time and changes nothing else.
        version: policy version of the weights given.
        device, dtype: where and in what to compute; by default as the module is.
        cache_gib: memory for keys and values, in GiB; bounds the default of `slots`.
        sampler: draws the ids; for benchmarks and tests that force them.
        speculate: most ids that are drafted behind each id from what followed the last ones before, and verified in one
            pass; 0 drafts none. It costs rows and saves passes; replies stay as they are without, to the bit where `exact`.

    Raises:
        EngineError: when the model cannot be run here.
    """

    def __init__(
        self,
        model: Any,
        *,
        renderer: Any = None,
        context: int | None = None,
        slots: int | None = None,
        version: int = 0,
        device: Any = None,
        dtype: torch.dtype | None = None,
        cache_gib: float = 4.0,
        sampler: Sampler | None = None,
        speculate: int = 0,
    ) -> None:
        self.renderer = renderer
        config = getattr(model, "config", model).get_text_config()
        self.context = context if context is not None else int(config.max_position_embeddings)
        if self.context < 2 or (slots is not None and slots < 1):
            raise EngineError(f"context is {self.context} and slots {slots}: at least 2 ids and 1 slot are needed")
        if speculate < 0:
            raise EngineError(f"speculate is {speculate}: the most ids to draft at a time, 0 for none")
        self._model = EngineModel(model, self.context, device, dtype)
        try:
            self.exact = calibrate_batch_invariance(self._model)
        except (AttributeError, KeyError, TypeError) as error:
            kind = type(self._model.module).__name__
            raise EngineError(
                f"{kind} does not attend through transformers' attention interface as it would have to: {error!r}; use a server"
            ) from error
        """Whether the start-up test found a row's bits independent of its company; False where it is not claimed."""
        if self._model.on_cpu and not self.exact:
            warnings.warn(
                "local engine: on this machine the last bits of a row depend on the rows beside it, so equal seeds may now and "
                "then give unlike replies (a draw within about 1e-5 of a boundary); try torch.set_num_threads(1) and fp32",
                stacklevel=2,
            )
        self.slots = slots if slots is not None else _fitting(self._model, cache_gib)
        self._scheduler = Scheduler(self._model, sampler or Sampler(), self.slots, speculate)
        self._scheduler.version = version
        self._worker = Worker(self._scheduler)
        self.asleep = False
        """Whether it gave its memory back: it answers nothing before `wake` or `update`."""
        self._fresh: list[ActiveCall] = []
        self._flushing: asyncio.AbstractEventLoop | None = None
        # An engine that nobody closed must not leave its thread, and with it the weights, behind.
        self._finalizer = weakref.finalize(self, self._worker.stop)
        self._finalizer.atexit = False

    @classmethod
    def load(cls, path: str | Path, **options: Any) -> LocalEngine:
        """An engine for a Hugging Face model directory.

        Args:
            path: a directory with config.json and safetensors; nothing is downloaded.
            options: as of the class.

        Raises:
            ModelError: when the directory is not such a model.
            EngineError: when the model cannot be run here.
        """
        try:
            kind = auto_class(AutoConfig.from_pretrained(Path(path), local_files_only=True))
            model = kind.from_pretrained(Path(path), dtype=options.get("dtype") or "auto", local_files_only=True)
        except (OSError, ValueError) as error:
            raise ModelError(f"{path}: not a causal model that transformers can load: {error}") from error
        return cls(model, **options)

    @property
    def fused(self) -> bool:
        """Whether the model runs in the fused forward pass; False where transformers' modules compute."""
        return self._model.fused is not None

    @property
    def vocabulary(self) -> int:
        """How many ids the model knows."""
        return self._model.vocabulary

    @property
    def cache_bytes(self) -> int:
        """Bytes that are set aside for keys, values and routes of all slots."""
        return self._model.cache.nbytes

    @property
    def version(self) -> int:
        """Policy version of the weights."""
        return self._scheduler.version

    @property
    def media_encoded(self) -> int:
        """Images and videos that went through the vision tower so far."""
        seen = self._scheduler.seen
        return 0 if seen is None else seen.encoded

    @property
    def drafted(self) -> int:
        """Ids drafted so far."""
        return self._scheduler.drafted

    @property
    def accepted(self) -> int:
        """How many of the drafted ids were drawn."""
        return self._scheduler.accepted

    def add_pixel_source(self, pixels: Any) -> None:
        """Take pixel values from here too. What was given before stays known while its owner keeps it."""
        seen = self._scheduler.seen
        if pixels is not None and seen is not None:
            seen.add_pixel_source(pixels)

    def set_renderer(self, renderer: Any) -> None:
        """Take the rollout's renderer where none was given."""
        if self.renderer is None:
            self.renderer = renderer

    async def generate(self, request: Request) -> Generation:
        """Sample one reply.

        `max_tokens` is clipped to what the context leaves. Cancelling the call frees its place at the next step.

        Raises:
            BackendContractError: the request cannot be answered as asked (no ids, or some that are not in the vocabulary;
                images where the model sees none, or that do not fit the ids; no room in the context; no tokens wanted; a
                policy newer than the engine's; a temperature, a ban or another setting that cannot be).
            EngineError: the engine failed or is closed.
        """
        prompt = self._checked(request)
        self._worker.check()
        loop = asyncio.get_running_loop()
        limit = min(request.max_tokens, self.context - len(prompt))
        keys, view = self._viewed(request, prompt)
        call = ActiveCall(request, prompt, limit, loop.create_future(), keys, view)
        self._fresh.append(call)
        # Calls of one tick of the loop go over together, so that they are computed together.
        if self._flushing is not loop:
            self._flushing = loop
            loop.call_soon(self._flush)
        try:
            result: Generation = await call.future
        except asyncio.CancelledError:
            if call in self._fresh:
                self._fresh.remove(call)
            else:
                with contextlib.suppress(EngineError):
                    self._worker.post([lambda: self._scheduler.cancel(call)])
            raise
        return result

    def check(self) -> None:
        """See that it can answer.

        Raises:
            EngineError: it is closed, it has failed, or its last steps all failed.
        """
        self._worker.check()
        if self._scheduler.failed_steps >= MOST_FAILED:
            raise EngineError(f"the last {self._scheduler.failed_steps} steps of the local engine failed; see its log")

    def release(self, session: str) -> None:
        """The session is over; its place in the cache may be taken."""
        with contextlib.suppress(EngineError):
            self._worker.post([lambda: self._scheduler.release(session)])

    def abort(self) -> None:
        """End every call in flight; each returns what it has sampled, with finish `abort`."""
        self._flush()
        with contextlib.suppress(EngineError):
            self._worker.post([lambda: self._worker.deliver(self._scheduler.abort())])

    async def update(self, weights: Iterable[tuple[str, Any]], version: int) -> str:
        """Take new weights, by Hugging Face name; calls in flight end as aborted first, and what is cached is forgotten.

        All weights are checked before the first is taken: where this raises, engine, calls and cache are as before. The
        iterable is consumed on the engine's thread.

        Returns:
            `fingerprint` of the weights as they arrived.

        Raises:
            SyncError: when a name or a shape does not fit.
            EngineError: the engine failed or is closed.
        """
        self._flush()
        return await asyncio.wrap_future(self._worker.ask(lambda: self._take(weights, version)))

    async def sleep(self) -> None:
        """Give memory back to whoever shares the device, until `wake` or `update`; calls in flight end as aborted first.

        The cache of keys and values goes, with features of images; weights on a GPU move to the host's memory. What is
        sampled afterwards has the bits that it would have had.

        Raises:
            EngineError: the engine failed or is closed.
        """
        if not self.asleep:
            self.asleep = True  # from here on calls are refused; those before are aborted
            self._flush()
            await asyncio.wrap_future(self._worker.ask(self._sleep))

    async def wake(self) -> None:
        """Be as before `sleep`, with the same weights.

        Raises:
            EngineError: the engine failed or is closed.
        """
        await asyncio.wrap_future(self._worker.ask(self._wake))

    async def close(self) -> None:
        """Stop; calls in flight end as aborted. Closing twice is fine."""
        with contextlib.suppress(EngineError):
            self._flush()
        await asyncio.get_running_loop().run_in_executor(None, self._finalizer)

    def _sleep(self) -> None:
        self._worker.deliver(self._scheduler.abort())
        self._scheduler.offload()

    def _wake(self) -> None:
        if self.asleep:
            self._model.reload()
            self.asleep = False

    def _take(self, weights: Iterable[tuple[str, Any]], version: int) -> str:
        given = check_weights(self._model.module, weights)
        self._wake()
        self._worker.deliver(self._scheduler.abort())
        self._scheduler.clear_cache()
        digest = copy_weights(self._model.module, given)
        self._scheduler.version = version
        return digest

    def _flush(self) -> None:
        self._flushing = None
        calls, self._fresh = self._fresh, []
        if not calls:
            return
        try:
            self._worker.post([partial(self._scheduler.submit, call) for call in calls])
        except EngineError as error:
            for call in calls:
                if not call.future.done():
                    call.future.set_exception(error)

    def _checked(self, request: Request) -> list[int]:
        """The ids of a request that can be answered."""
        ids, wrong_ids = ids_of(request)
        where = f"session {request.session!r:.80}, call {request.call}"
        if self.asleep:
            raise EngineError(f"{where}: the local engine sleeps; wake it, or give it weights, first")
        if wrong_ids or not ids:
            raise BackendContractError(f"{where}: {wrong_ids or 'no ids; a request holds the whole context'}")
        if fault := fault_of(request, self._model.vocabulary):
            raise BackendContractError(f"{where}: {fault}")
        if len(ids) + 1 > self.context:
            raise BackendContractError(f"{where}: {len(ids)} ids leave no room for a reply in a context of {self.context}")
        low, high = min(ids), max(ids)
        if low < 0 or high >= self._model.vocabulary:
            wrong = low if low < 0 else high
            raise BackendContractError(f"{where}: id {wrong} is not in the vocabulary of {self._model.vocabulary} ids")
        if request.min_version > self.version:
            raise BackendContractError(
                f"{where}: asks for policy version {request.min_version}, the engine has {self.version}; update it first"
            )
        return ids

    def _viewed(self, request: Request, ids: list[int]) -> tuple[list[int], ContextMedia | None]:
        """What tells a context apart, and what it shows."""
        where, media = f"session {request.session!r}, call {request.call}", request.media
        seen = self._scheduler.seen
        if seen is None or not (seen.has_pixel_source or media):
            if media:
                raise BackendContractError(f"{where}: {len(media)} images or videos, but {self._model.blind}")
            return ids, None
        if media and media[-1].end > len(ids):
            raise BackendContractError(f"{where}: an image stands at {media[-1].start} to {media[-1].end} of {len(ids)} ids")
        keys = ids_with_media_keys(ids, media) if media else ids
        if not seen.vision.pad_ids.isdisjoint(keys):
            strays = sum(key in seen.vision.pad_ids for key in keys)
            raise BackendContractError(f"{where}: {strays} placeholders of images that belong to none of {len(media)} images")
        return keys, ContextMedia(ids, media, seen.vision) if media else None


def _fitting(model: EngineModel, cache_gib: float) -> int:
    """As many slots of a full context as the memory holds, at most 256."""
    each = model.cache.bytes_per_position * (model.context + 1)
    slots = int(min(256, max(1, cache_gib * 2**30 // each)))
    if slots < 8:
        _log.warning(
            "local engine: %g GiB of cache hold %d sequences of %d positions; set a smaller context, or a larger cache_gib",
            cache_gib,
            slots,
            model.context,
        )
    return slots
