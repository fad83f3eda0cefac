"""LocalEngine: samples from a Hugging Face model in this process.

`LocalEngine.generate` checks a request, hands it to its `Worker` and waits for the reply. The
worker repeats `Scheduler.step`, which computes one step of all calls together; read on there. The
engine also passes on what changes between steps: new weights, sleep, the end of calls.
`AdapterEngine` is one of several policies that share the model.

How a batch is computed is not here (`EngineModel.forward`), nor how an id is drawn (`Sampler`) or
which context finds which cached keys (`SlotTable.place`).
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import warnings
import weakref
from collections.abc import Iterable, Sequence
from functools import lru_cache, partial
from operator import index
from pathlib import Path
from typing import Any

import torch

from turnwright.engines.local.adapters import AdapterShape, copy_adapter
from turnwright.engines.local.batch_invariance import calibrate_batch_invariance
from turnwright.engines.local.model import EngineModel
from turnwright.engines.local.quantization import from_directory
from turnwright.engines.local.sampler import Sampler
from turnwright.engines.local.scheduler import Scheduler
from turnwright.engines.local.step_rows import ActiveCall
from turnwright.engines.local.vision import ContextMedia
from turnwright.engines.local.weights import check_weights
from turnwright.engines.local.worker import SHORT_STEP_S, Worker
from turnwright.engines.protocols import Generation, Request, StopText
from turnwright.errors import BackendContractError, EngineError, ModelError
from turnwright.types import ids_with_media_keys, is_finite_number

_log = logging.getLogger(__name__)
MIN_TEMPERATURE = 1e-4
"""Minimum nonzero temperature: below it, scaled logits leave the range of float32."""
SEED_LIMIT = 2**64


def ids_of(request: Request) -> tuple[list[int], str]:
    """Return the context ids as ints, and what is wrong with them."""
    try:
        ids = list(request.ids)
        # Nearly always ints already, which this tells without a Python call for each id.
        if set(map(type, ids)) != {int}:
            ids = [_id_of(value) for value in ids]
    except (TypeError, OverflowError) as error:
        return [], f"the context contains a value that is not an id: {error}"
    return ids, ""


def _id_of(value: Any) -> int:
    """Return an integer of any library as an int; a bool is none."""
    if isinstance(value, bool):
        raise TypeError(f"{value!r}")
    return index(value)


def fault_of(request: Request, vocabulary: int) -> str:
    """Return what is wrong with a request apart from its context, or an empty string."""
    if type(request.max_tokens) is not int or request.max_tokens < 1:
        return f"max_tokens must be an integer of at least 1, not {request.max_tokens!r:.80}"
    if not isinstance(request.session, str) or not isinstance(request.group, str):
        return "session and group must be strings"
    if type(request.seed) is not int or not -SEED_LIMIT < request.seed < SEED_LIMIT:
        return f"the seed must be an integer of at most 64 bits, not {request.seed!r:.80}"
    if type(request.routes_from) is not int or request.routes_from < 0:
        return f"routes_from must be a position, not {request.routes_from!r:.80}"
    if type(request.alternatives) is not int or request.alternatives < 0:
        return f"alternatives must be a number of ids, not {request.alternatives!r:.80}"
    if request.stop_text is not None and not isinstance(request.stop_text, StopText):
        return f"stop_text must be a StopText, not {request.stop_text!r:.80}"

    temperature = request.sampling.temperature
    if not is_finite_number(temperature) or (
        temperature != 0 and not MIN_TEMPERATURE <= temperature <= 1 / MIN_TEMPERATURE
    ):
        return (
            f"the temperature must be 0 or from {MIN_TEMPERATURE:g} to {1 / MIN_TEMPERATURE:g}, "
            f"not {temperature!r:.80}"
        )
    fault = request.sampling.fault()
    if fault:
        return fault

    if not request.banned_ids:
        return ""
    if not isinstance(request.banned_ids, frozenset):
        return "banned_ids must be a frozenset of ids"
    return _banned_fault(request.banned_ids, vocabulary)


# All requests of a rollout share one set, of 100,000 ids where a tokenizer uses few of a
# model's rows.
@lru_cache(maxsize=64)
def _banned_fault(banned: frozenset[int], vocabulary: int) -> str:
    if any(type(id_) is not int for id_ in banned):
        return "banned_ids must be a frozenset of ids"
    low = min(banned)
    high = max(banned)
    if low < 0 or high >= vocabulary:
        unknown = low if low < 0 else high
        return f"banned_ids: id {unknown} is not in the vocabulary of {vocabulary} ids"
    if len(banned) == vocabulary:
        return "banned_ids: every id of the vocabulary is banned"
    return ""


MAX_SLOTS = 1024
"""Default of cached sequences, where memory allows."""
MAX_FAILED_STEPS = 3
"""Consecutive failed steps after which the engine counts as failed; one or two may
be a request's fault."""


class LocalEngine:
    """Samples replies from a Hugging Face causal model with continuous batching, in
    torch, on a CPU or a GPU.

    It holds its own copy of the weights, which change only by `update`. A reply's ids and logprobs
    depend, to the last bit, on the weights, the context, the sampling settings and the seed. They
    do not depend on other calls, their order or the cache, nor on interruptions: a reply that
    another call continues (`Request.reply_position`) is the one without an interruption. This is
    verified at the start (`exact`) and claimed only on CPUs in float32.

    Example::

        engine = LocalEngine.load("path/to/model", context=4096)
        trajectories = tw.rollout(env, tasks, engine=engine)

    Args:
        model: transformers module that uses the attention interface (Llama, Qwen, Mistral ...), or
            a config for random weights. Module and config are copied, never shared.
        renderer: kept as `engine.renderer` for the rollout; the engine itself does not use text.
        context: maximum number of ids of context plus reply; by default the model's
            `max_position_embeddings`.
        slots: number of cached sequences; by default 1024 or as many as fit into
            `cache_gib`. Further calls wait, and idle sessions are evicted, longest idle
            first; results do not change.
        version: policy version of the given weights.
        device, dtype: device and type of the computation; by default the module's.
        cache_gib: memory for keys and values in GiB; bounds the default of `slots`.
        sampler: draws the ids; benchmarks and tests may force them.
        speculate: maximum number of ids drafted after each id by lookup in the context, verified in
            one pass; 0 drafts none. It computes more rows in fewer passes. Replies do not change,
            to the bit where `exact`.
        adapters: LoRA adapters of policies that share the model, each without effect until its
            first update; `adapter` returns the engine of one.

    Raises:
        EngineError: when the model is not supported, or an adapter's layers are not
            linear layers of its decoder.
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
        adapters: Sequence[AdapterShape] = (),
    ) -> None:
        self.renderer = renderer
        # A module has its configuration; a configuration comes in place of a module.
        config = getattr(model, "config", model).get_text_config()
        self.context = context if context is not None else int(config.max_position_embeddings)
        if self.context < 2 or (slots is not None and slots < 1):
            raise EngineError(
                f"context {self.context} and slots {slots}: at least 2 ids and 1 slot are required"
            )
        if speculate < 0:
            raise EngineError(
                f"speculate must be a number of ids to draft, 0 for none; not {speculate}"
            )

        self._model = EngineModel(model, self.context, device, dtype, adapters)
        self.exact = self._is_batch_invariant()
        """Whether the start-up check found results independent of batching; False where this is
        not claimed."""
        if self._model.adapters is not None:
            self._model.adapters.reset()  # they were random for the check
        if self._model.on_cpu and not self.exact:
            warnings.warn(
                "local engine: on this machine the last bits of a row depend on other rows of its "
                "batch, so equal seeds may rarely give different replies (draws within about 1e-5 "
                "of a boundary); try torch.set_num_threads(1), float32",
                stacklevel=2,
            )

        self.slots = slots if slots is not None else _default_slots(self._model, cache_gib)
        self._scheduler = Scheduler(
            self._model, sampler or Sampler(), self.slots, speculate, version
        )
        self._worker = Worker(self._scheduler, SHORT_STEP_S if self._model.on_cpu else 0.0)
        self.asleep = False
        """Whether its memory is released; calls are refused until `wake` or `update`."""

        # An engine that is garbage-collected without `close` must not leave its
        # thread and weights alive.
        self._finalizer = weakref.finalize(self, self._worker.stop)
        self._finalizer.atexit = False

    @classmethod
    def load(cls, path: str | Path, **options: Any) -> LocalEngine:
        """Load an engine from a Hugging Face model directory.

        Args:
            path: directory with config.json and safetensors; nothing is downloaded.
            options: as of the class.

        Raises:
            ModelError: when the directory is not such a model.
            EngineError: when the model is not supported.
        """
        try:
            model = from_directory(Path(path), options.get("dtype") or "auto")
        except (OSError, ValueError) as error:
            raise ModelError(
                f"{path}: not a causal model that transformers can load: {error}"
            ) from error
        return cls(model, **options)

    def _is_batch_invariant(self) -> bool:
        """Return whether results are independent of batching, by a check of this model here."""
        try:
            invariant: bool = calibrate_batch_invariance(self._model)
        except (AttributeError, KeyError, TypeError) as error:
            kind = type(self._model.module).__name__
            raise EngineError(
                f"{kind} does not use transformers' attention interface as required: {error!r}; "
                "use a server"
            ) from error
        return invariant

    @property
    def fused(self) -> bool:
        """Whether the fused forward pass is used instead of transformers' modules."""
        return self._model.fused is not None

    @property
    def vocabulary(self) -> int:
        """Number of ids of the model."""
        return self._model.vocabulary

    @property
    def cache_bytes(self) -> int:
        """Bytes allocated for keys, values and routes of all slots."""
        return self._model.cache.nbytes

    @property
    def weight_bytes(self) -> int:
        """Bytes of the weights, packed ones included."""
        return self._model.weight_bytes

    def cache_bytes_of(self, sequences: int | None, length: int) -> int:
        """Return the bytes that the cache grows to with this many sequences of `length` ids.

        `sequences` None counts all slots.
        """
        slots = self.slots if sequences is None else min(sequences, self.slots)
        return self._model.cache_bytes_of(slots, min(length, self.context))

    @property
    def gives_alternatives(self) -> bool:
        """Whether it returns the most likely ids with each sampled one: always."""
        return True

    @property
    def queue_lengths(self) -> tuple[int, int]:
        """Number of replies that are computed, and of calls that wait for a slot."""
        return len(self._scheduler.running), len(self._scheduler.waiting)

    @property
    def version(self) -> int:
        """Policy version of the weights."""
        return self._scheduler.versions[0]

    def adapter(self, number: int) -> AdapterEngine:
        """Return the engine of a policy that shares this model.

        Adapters are numbered from 1; number 0 is the model without one.
        """
        return AdapterEngine(self, number)

    @property
    def media_encoded(self) -> int:
        """Number of images and videos encoded by the vision tower."""
        return 0 if self._scheduler.seen is None else self._scheduler.seen.encoded

    @property
    def drafted(self) -> int:
        """Number of drafted ids."""
        return self._scheduler.drafted

    @property
    def accepted(self) -> int:
        """Number of drafted ids that were sampled."""
        return self._scheduler.accepted

    @property
    def records_experts(self) -> bool:
        """Whether replies can hold the experts of each id.

        They can for a mixture of experts whose layers have one number of them.
        """
        return bool(self._model.recording)

    def add_pixel_source(self, pixels: Any) -> None:
        """Add a source of pixel values; earlier sources remain while their owners keep them."""
        seen = self._scheduler.seen
        if pixels is not None and seen is not None:
            seen.add_pixel_source(pixels)

    def set_renderer(self, renderer: Any) -> None:
        """Use the rollout's renderer if none was given."""
        if self.renderer is None:
            self.renderer = renderer

    async def generate(self, request: Request) -> Generation:
        """Sample one reply.

        `max_tokens` is clipped to the rest of the context. Cancelling the call frees its slot at
        the next step.

        Raises:
            BackendContractError: for an invalid request: missing or unknown ids, images that the
                model or the ids do not support, a full context, max_tokens below 1, a policy newer
                than the engine's, or an invalid setting.
            EngineError: the engine failed or is closed.
        """
        return await self._generate(request, 0)

    async def _generate(self, request: Request, adapter: int) -> Generation:
        prompt = self._check_request(request, self._scheduler.versions[adapter])
        limit = min(request.max_tokens, self.context - len(prompt))
        keys, view = self._context_media(request, prompt)
        future = asyncio.get_running_loop().create_future()
        call = ActiveCall(request, prompt, limit, future, keys, view, adapter)

        self._worker.post(partial(self._scheduler.submit, call))
        try:
            generation: Generation = await future
        except asyncio.CancelledError:
            # An engine that has stopped has no call left to cancel.
            with contextlib.suppress(EngineError):
                self._worker.post(partial(self._scheduler.cancel, call))
            raise
        return generation

    def check(self) -> None:
        """Check that the engine works.

        Raises:
            EngineError: when it is closed or failed, or its last steps all failed.
        """
        self._worker.check()
        if self._scheduler.failed_steps >= MAX_FAILED_STEPS:
            raise EngineError(
                f"the last {self._scheduler.failed_steps} steps of the local engine failed; see "
                "its log"
            )

    def release(self, session: str) -> None:
        """End a session; its cache slots may be reused."""
        self._release(session, 0)

    def _release(self, session: str, adapter: int) -> None:
        with contextlib.suppress(EngineError):
            self._worker.post(partial(self._scheduler.release, session, adapter))

    def abort(self) -> None:
        """End every call in flight; each returns what it has sampled, with finish `abort`."""
        self._abort(None)

    def _abort(self, adapter: int | None) -> None:
        with contextlib.suppress(EngineError):
            self._worker.post(lambda: self._worker.deliver(self._scheduler.abort(adapter)))

    async def update(self, weights: Iterable[tuple[str, Any]], version: int) -> str:
        """Replace the weights, which come by Hugging Face name.

        Calls in flight first end as aborted, and the cache is cleared. All weights are checked
        before the first is copied: on an error, engine, calls and cache are unchanged. The weights
        are iterated over where the engine computes, twice unless they are an iterator.

        Returns:
            `fingerprint` of the weights as received.

        Raises:
            SyncError: when a name or a shape does not match.
            EngineError: the engine failed or is closed.
        """
        return await asyncio.wrap_future(
            self._worker.ask(lambda: self._update_weights(weights, version))
        )

    async def sleep(self) -> None:
        """Release memory for other users of the device, until `wake` or `update`.

        Calls in flight first end as aborted. The key-value cache and image features are dropped;
        weights on a GPU move to host memory. Later samples have the same bits as without sleep.

        Raises:
            EngineError: the engine failed or is closed.
        """
        if not self.asleep:
            self.asleep = True  # later calls are refused, earlier ones aborted
            await asyncio.wrap_future(self._worker.ask(self._sleep))

    async def wake(self) -> None:
        """Undo `sleep`, with the same weights; raises as `sleep`."""
        await asyncio.wrap_future(self._worker.ask(self._wake))

    async def drop_cache(self) -> None:
        """Release the memory of keys, values and image features unless calls are in flight.

        The next call computes them anew, and later samples have the same bits. Raises
        `EngineError` when the engine failed or is closed.
        """
        await asyncio.wrap_future(self._worker.ask(self._drop_cache))

    async def close(self) -> None:
        """Stop; calls in flight end as aborted. May be called twice."""
        self._worker.stop()
        await asyncio.to_thread(self._worker.join)

    def _drop_cache(self) -> None:
        if not self._scheduler.running and not self._scheduler.waiting:
            self._scheduler.clear_cache()
            self._model.release_cache()

    def _sleep(self) -> None:
        self._worker.deliver(self._scheduler.abort())
        self._scheduler.clear_cache()
        self._model.offload()

    def _wake(self) -> None:
        if self.asleep:
            self._model.reload()
            self.asleep = False

    def _update_weights(self, weights: Iterable[tuple[str, Any]], version: int) -> str:
        checked = check_weights(self._model.module, weights)
        self._wake()
        self._worker.deliver(self._scheduler.abort())
        self._scheduler.clear_cache()
        digest = self._model.copy_weights(checked)
        self._scheduler.versions[0] = version
        return digest

    async def _update_adapter(
        self, number: int, weights: Iterable[tuple[str, Any]], version: int
    ) -> str:
        adapters = self._model.adapters
        assert adapters is not None

        def work() -> str:
            checked = adapters.check(number, weights)
            self._wake()
            self._worker.deliver(self._scheduler.abort(number))
            self._scheduler.clear_cache(number)
            digest = copy_adapter(checked)
            self._scheduler.versions[number] = version
            return digest

        return await asyncio.wrap_future(self._worker.ask(work))

    def _check_request(self, request: Request, version: int) -> list[int]:
        """Return the ids of the context; raise unless the request can be computed."""
        ids, ids_fault = ids_of(request)
        where = f"session {request.session!r:.80}, call {request.call}"
        if self.asleep:
            raise EngineError(f"{where}: the local engine is asleep; call wake or update first")
        if ids_fault:
            raise BackendContractError(f"{where}: {ids_fault}")
        if not ids:
            raise BackendContractError(f"{where}: no ids; a request needs the complete context")
        fault = fault_of(request, self._model.vocabulary)
        if fault:
            raise BackendContractError(f"{where}: {fault}")

        position = request.reply_position
        if type(position) is not int or not 0 <= position < len(ids):
            raise BackendContractError(
                f"{where}: reply_position must be below the {len(ids)} ids of the context, not "
                f"{position!r:.80}"
            )
        if len(ids) + 1 > self.context:
            raise BackendContractError(
                f"{where}: {len(ids)} ids fill the context of {self.context}"
            )

        low = min(ids)
        high = max(ids)
        if low < 0 or high >= self._model.vocabulary:
            unknown = low if low < 0 else high
            raise BackendContractError(
                f"{where}: id {unknown} is not in the vocabulary of {self._model.vocabulary} ids"
            )
        if request.min_version > version:
            raise BackendContractError(
                f"{where}: requests policy version {request.min_version}, the engine has "
                f"{version}; update it first"
            )
        return ids

    def _context_media(
        self, request: Request, ids: list[int]
    ) -> tuple[list[int], ContextMedia | None]:
        """Return the cache keys of a context, and its media."""
        where = f"session {request.session!r}, call {request.call}"
        media = request.media
        seen = self._scheduler.seen
        if seen is None or not (seen.has_pixel_source or media):
            if media:
                raise BackendContractError(
                    f"{where}: {len(media)} images or videos, but {self._model.blind}"
                )
            return ids, None

        if media and media[-1].end > len(ids):
            raise BackendContractError(
                f"{where}: an image is at {media[-1].start} to {media[-1].end} of {len(ids)} ids"
            )
        keys = ids_with_media_keys(ids, media) if media else ids
        # A media key replaces each placeholder of an image, so those that are left have none.
        if not seen.vision.pad_ids.isdisjoint(keys):
            strays = sum(key in seen.vision.pad_ids for key in keys)
            raise BackendContractError(
                f"{where}: {strays} image placeholders belong to none of {len(media)} images"
            )
        return keys, ContextMedia(ids, media, seen.vision) if media else None


class AdapterEngine:
    """Policy that shares the model of a local engine with others, and has its own LoRA adapter.

    Its calls are computed in the passes of the others. They have caches and a version of their
    own, so that an update touches only this policy. Sleeping, waking and closing concern the
    shared engine.
    """

    def __init__(self, shared: LocalEngine, number: int) -> None:
        if not 0 <= number < len(shared._scheduler.versions):
            raise EngineError(
                f"adapter {number}: the engine has {len(shared._scheduler.versions) - 1}, from 1"
            )
        self.shared = shared
        self.number = number

    @property
    def context(self) -> int:
        """Maximum number of ids of context plus reply."""
        return self.shared.context

    @property
    def gives_alternatives(self) -> bool:
        """Whether it returns the most likely ids with each sampled one: always."""
        return True

    @property
    def renderer(self) -> Any:
        """Renderer of the model, or None."""
        return self.shared.renderer

    @property
    def version(self) -> int:
        """Policy version of the adapter."""
        return self.shared._scheduler.versions[self.number]

    def set_renderer(self, renderer: Any) -> None:
        """Use the rollout's renderer if none was given."""
        self.shared.set_renderer(renderer)

    def add_pixel_source(self, pixels: Any) -> None:
        """Add a source of pixel values."""
        self.shared.add_pixel_source(pixels)

    async def generate(self, request: Request) -> Generation:
        """Sample one reply; raises as `LocalEngine.generate`."""
        return await self.shared._generate(request, self.number)

    def check(self) -> None:
        """Check that the shared engine works; raises as `LocalEngine.check`."""
        self.shared.check()

    def release(self, session: str) -> None:
        """End a session of this policy."""
        self.shared._release(session, self.number)

    def abort(self) -> None:
        """End this policy's calls in flight."""
        self.shared._abort(self.number)

    async def update(self, weights: Iterable[tuple[str, Any]], version: int) -> str:
        """Replace the adapter's matrices, which come by peft's names.

        This policy's calls in flight first end as aborted, and its cache is cleared. All matrices
        are checked before the first is copied. Wakes the shared engine.

        Returns:
            `fingerprint` of the matrices as received.

        Raises:
            SyncError: when a name or a shape does not match, or a value is not finite.
            EngineError: the engine failed or is closed, or this policy has no adapter.
        """
        if not self.number:
            raise EngineError(
                "a policy without an adapter shares its weights with others; update the shared "
                "engine"
            )
        return await self.shared._update_adapter(self.number, weights, version)

    async def sleep(self) -> None:
        """Release the shared engine's memory; see `LocalEngine.sleep`."""
        await self.shared.sleep()

    async def wake(self) -> None:
        """Undo `sleep`."""
        await self.shared.wake()

    async def close(self) -> None:
        """Stop the shared engine; may be called more than once."""
        await self.shared.close()


def _default_slots(model: EngineModel, cache_gib: float) -> int:
    """Return how many slots of a full context fit into the memory, at most 1024."""
    each = model.cache.bytes_per_position * (model.context + 1)
    slots = int(min(MAX_SLOTS, max(1, cache_gib * 2**30 // each)))
    if slots < 8:
        _log.warning(
            "local engine: %g GiB of cache hold %d sequences of %d positions; reduce context "
            "or increase cache_gib",
            cache_gib,
            slots,
            model.context,
        )
    return slots
