"""vLLM client.

What a server of vLLM is asked and what it answers: `VllmEngine._sample` makes the request of a
reply, `_read` reads the response, `scores` asks for logprobs of given ids, and the methods under
"Weights" name, replace and release the server's weights. Everything that is not vLLM's own is in
`RemoteEngine`; LoRA adapters are in `LoraServerEngine`, images in `VllmImages`, and the plugin by
which a server takes weights from a process group in `vllm_plugin.py`.
"""

from __future__ import annotations

import asyncio
import re
from collections.abc import Sequence
from contextlib import closing
from pathlib import Path
from typing import Any, Literal
from uuid import uuid4

from turnwright.engines.protocols import MAX_ALTERNATIVES, Request
from turnwright.engines.remote.experts import vllm_experts
from turnwright.engines.remote.http import CONTROL_S, encode_ids
from turnwright.engines.remote.remote_engine import UPDATE_S, EngineLoad, Part
from turnwright.engines.remote.response import (
    INTERRUPTS,
    Breach,
    ExpectedWeights,
    ServerResponse,
    alternatives_of,
    field_of,
    logprobs_of,
    number_at,
    only_choice,
    parsing,
    version_runs,
)
from turnwright.engines.remote.server_adapters import LoraApi, LoraServerEngine
from turnwright.engines.remote.vllm_images import VllmImages
from turnwright.engines.remote.weight_sync import (
    SPARE_S,
    UNFINISHED,
    GroupTransfer,
    WeightGroup,
    rendezvous,
    run_together,
    suppress_errors,
)
from turnwright.engines.scoring import IdScores, ScoreRequest
from turnwright.errors import ConfigError, EngineError, EngineUnavailable, SyncError
from turnwright.renderers.renderer import HasCodec
from turnwright.types import Alternatives

GENERATE = "/inference/v1/generate"
COMPLETIONS = "/v1/completions"
VERSIONS = "choices.0.weight_versions"
SPEC = ("draft", "accepted")
"""Names in vLLM's counters of speculative decoding."""
BETWEEN_STEPS_S = 120.0
"""Deadline for requests answered between engine steps; the first steps may compile kernels."""
Route = Literal["auto", "generate", "completions"]


class VllmEngine(LoraServerEngine):
    """Client of a vLLM server.

    It uses the tokens-only route where available (`--enable-scale-out` or `--tokens-only`): only
    that route reports which weights sampled each id, and only it takes images. No seed is sent,
    because on CPUs a seeded request can end the server, and a server's random stream is its own
    anyway.

    Start the server with `--logprobs-mode processed_logprobs`, for logprobs of the sampling
    distribution. Weight updates need `VLLM_SERVER_DEV_MODE=1`, on a private network.
    """

    kind = "vLLM"
    gives_alternatives = True
    lora_api = LoraApi(
        "/v1/load_lora_adapter",
        "/v1/unload_lora_adapter",
        needs="--enable-lora and VLLM_ALLOW_RUNTIME_LORA_UPDATING=1 (turnwright engines start "
        "vllm --lora)",
        status=404,
        words="",
        counts_calls=False,
    )

    def __init__(self, url: str, *, route: Route = "auto", **options: Any) -> None:
        """
        Args:
            route: `generate`, `completions`, or `auto` to ask the server.
            options: as of `RemoteEngine`.
        """
        super().__init__(url, **options)
        if route not in ("auto", "generate", "completions"):
            raise ConfigError(f"route must be auto, generate or completions, not {route!r}")
        self.route: Route = route
        self.routes: frozenset[str] = frozenset()
        self.drafts = False
        """Whether the server decodes speculatively; set by `open`."""
        self.takes_pictures = False
        """Whether the server reports that it takes images, as `turnwright serve` does; set by
        `open`."""
        self._allowed_last: tuple[frozenset[int], list[int]] | None = None
        self.images = VllmImages(self)

    async def _identify(self) -> None:
        version = await self.http.page("/version", CONTROL_S)
        self.server_version = str(version.get("version", ""))

        # The base model; adapters are listed beside it.
        listed = field_of(await self.http.get("/v1/models", CONTROL_S), "data", self.breach)
        for model in listed:
            if model.get("parent") is None and self.model in (None, model["id"]):
                break
        else:
            raise EngineError(
                f"{self.display_name} serves {[row.get('id') for row in listed]}, not "
                f"{self.model!r}"
            )
        self.model = model["id"]
        self.takes_pictures = "image" in (model.get("modalities") or ())
        if self.context is None and type(model.get("max_model_len")) is int:
            self.context = model["max_model_len"]

        api = await self.http.page("/openapi.json", CONTROL_S)
        self.routes = frozenset(api.get("paths", ()))
        if self.route == "auto":
            self.route = "generate" if GENERATE in self.routes else "completions"
        if self.label is None:
            self.label = await self.weights_name()
        self.drafts = await self.draft_totals() is not None
        self.asleep = await self._sleeps()

    async def _metrics(self, *names: str) -> list[list[float]]:
        """Return the values of each metric, one per engine of the server.

        There are none where it has no such metric or page.
        """
        try:
            page = await self.http.text("/metrics", CONTROL_S)
        except EngineUnavailable as error:
            if "HTTP status" not in str(error):
                raise
            return [[] for _ in names]  # no such page
        except EngineError:
            return [[] for _ in names]

        metrics: list[list[float]] = []
        with parsing("/metrics", self.display_name):
            for name in names:
                values = re.findall(rf"^vllm:{name}(?:{{.*}})? (\S+)$", page, re.MULTILINE)
                metrics.append([float(value) for value in values])
        return metrics

    async def draft_totals(self) -> tuple[int, int] | None:
        names = [f"spec_decode_num_{name}_tokens_total" for name in SPEC]
        drafted, accepted = await self._metrics(*names)
        return (int(sum(drafted)), int(sum(accepted))) if drafted else None

    async def load(self) -> EngineLoad | None:
        # The third had its second name before 0.10.
        running, waiting, cache = await self._metrics(
            "num_requests_running", "num_requests_waiting", "(?:kv|gpu)_cache_usage_perc"
        )
        if not running or not waiting:
            return None
        return EngineLoad(int(sum(running)), int(sum(waiting)), max(cache, default=None))

    async def _sample(self, request: Request, max_tokens: int, name: str, seconds: float) -> Any:
        # The distribution and the end of the reply.
        sampling = self._neutral_sampling(request)
        sampling |= {"max_tokens": max_tokens, "logprobs": 0, "ignore_eos": True}
        if request.alternatives:
            # The tokens-only route counts the sampled id among so many ids.
            spare = 1 if self.route == "generate" else 0
            sampling["logprobs"] = min(request.alternatives + spare, MAX_ALTERNATIVES)
        if request.banned_ids and self.drafts:
            sampling["allowed_token_ids"] = self._allowed(request.banned_ids)
        elif request.banned_ids:
            sampling["logit_bias"] = {str(id_): -100.0 for id_ in sorted(request.banned_ids)}
        if self.seeded:
            sampling |= {"seed": request.seed, "reply_position": request.reply_position}
        if request.stop_text is not None:
            sampling |= {"stop": list(request.stop_text.texts), "include_stop_str_in_output": True}

        # The tokens-only route.
        if self.route == "generate":
            sampling["detokenize"] = "stop" in sampling
            ids, echo = encode_ids(request)
            body = {
                "request_id": name,
                "model": self._model_name,
                "token_ids": ids,
                "sampling_params": sampling,
                "return_token_ids": True,
                "cache_salt": self._cache_salt,
            }
            with self._check_adapter_loaded():
                if request.media:
                    return await self.images.ask(GENERATE, body, request, seconds)
                return await self.http.post(GENERATE, body, seconds, echo=echo)

        # The route of the OpenAI API.
        if request.media:
            raise EngineError(
                f"{self.display_name}: images need {GENERATE}, which this server lacks; start it "
                "with --enable-scale-out"
            )
        ids, echo = encode_ids(request)
        body = {
            "model": self._model_name,
            "prompt": ids,
            "return_token_ids": True,
            "return_tokens_as_token_ids": True,
            "add_special_tokens": False,
            **sampling,
            "cache_salt": self._cache_salt,
        }
        with self._check_adapter_loaded():
            return await self.http.post(COMPLETIONS, body, seconds, {"x-request-id": name}, echo)

    def _allowed(self, banned: frozenset[int]) -> list[int]:
        """Return all ids except the banned ones.

        A drafting vLLM refuses biases (0.32.0) but takes this list.
        """
        if self._allowed_last is None or self._allowed_last[0] != banned:
            if not isinstance(self.renderer, HasCodec):
                raise EngineError(
                    f"{self.display_name} decodes speculatively and takes banned ids only as a "
                    "list of all others, which needs the model's renderer: pass renderer=, or "
                    "start the server without --speculative-config"
                )
            codec = self.renderer.codec
            vocabulary = max(codec.vocab_size, *(id_ + 1 for id_ in codec.control.values()), 1)
            allowed = [id_ for id_ in range(vocabulary) if id_ not in banned]
            self._allowed_last = (banned, allowed)
        return self._allowed_last[1]

    @property
    def _model_name(self) -> str | None:
        """Model name of requests: the adapter, or else the model itself."""
        return self.adapter[0] if self.adapter else self.model

    @property
    def _cache_salt(self) -> str:
        """Text that separates cached prefixes by weights: an in-place load does not clear the
        cache."""
        weights = self.adapter[0] if self.adapter else "base"
        return f"turnwright-{weights}-{self.version}"

    def _read(self, raw: Any, request: Request, expected: ExpectedWeights) -> ServerResponse:
        choice = only_choice(raw, self.breach)
        name_field = "request_id" if self.route == "generate" else "id"
        self._check_name(name_field, raw.get(name_field), expected.request)
        ids = field_of(choice, "token_ids", self.breach)
        if ids is None:
            problem = (
                "is null: the server is older than 0.10.2, or a proxy dropped return_token_ids"
            )
            raise self.breach("choices.0.token_ids", problem)

        # Prompt, one logprob for each id, the most likely ids, and the weights that sampled them.
        reported = choice.get("logprobs") or {}
        rows: Any
        if self.route == "generate":
            prompt = field_of(raw, "prompt_token_ids", self.breach)
            rows = reported.get("content")
            logprobs = None
            if rows is not None:
                logprobs = logprobs_of(rows, ids, ("token_id", "logprob"), _logprob_of, self.breach)
            spans = choice.get("weight_versions")
        else:
            prompt = field_of(choice, "prompt_token_ids", self.breach)
            logprobs = rows = reported.get("token_logprobs")
            spans = None
        if logprobs is None:
            logprobs = [None] * len(ids)
        elif len(rows) != len(ids):
            raise self.breach("logprobs", f"are {len(rows)} for {len(ids)} ids")
        if prompt is None:
            prompt = raw.get("usage", {}).get("prompt_tokens")
        alternatives: Sequence[Alternatives] = ()
        if request.alternatives:
            alternatives = self._alternatives(reported, ids, request)

        finish = str(choice.get("finish_reason"))
        cached = number_at(raw, "usage.prompt_tokens_details.cached_tokens")
        runs: list[tuple[int, str]] = []
        if ids and self._check_present(VERSIONS, bool(spans)):
            runs = version_runs(spans, self.breach)
        versions = expected.versions(runs, cached, self.display_name)
        extras = vllm_experts(choice.get("routed_experts"), request, len(ids), self.breach)
        drafts = (
            number_at(raw, "metrics.speculative_decoding.num_draft_tokens"),
            number_at(raw, "metrics.speculative_decoding.num_accepted_draft_tokens"),
        )
        return ServerResponse(
            ids,
            logprobs,
            finish,
            prompt,
            versions,
            cached,
            extras,
            drafts=drafts,
            alternatives=alternatives,
        )

    def _alternatives(
        self, reported: Any, ids: Sequence[int], request: Request
    ) -> Sequence[Alternatives]:
        """Return the most likely ids of each position, from the logprobs of either route."""
        if self.route == "completions":
            # Tables with ids as `token_id:7`, the sampled one beyond those asked for.
            rows = reported.get("top_logprobs")
            return alternatives_of(rows, ids, request, _named_logprobs, self.breach)

        def ranked(row: Any) -> list[tuple[Any, Any]]:
            # The sampled id may be none of the most likely ones.
            entries = field_of(row, "top_logprobs", self.breach)
            return [
                (entry["token_id"], entry["logprob"])
                for entry in entries
                if (entry.get("rank") or 0) <= request.alternatives
            ]

        return alternatives_of(reported.get("content"), ids, request, ranked, self.breach)

    async def abort(self, *names: str) -> None:
        # The server adds to the names of requests, by the route.
        if self.route == "generate":
            path = "/inference/v1/abort_requests"
            request_ids: list[str] = []
            for name in names:
                request_ids += [f"generate-tokens-{name}", name]
        elif "/abort_requests" in self.routes:
            path = "/abort_requests"
            request_ids = [f"cmpl-{name}-0" for name in names]
        else:
            return
        await self.http.post(path, {"request_ids": request_ids}, CONTROL_S)

    # Weights

    async def weights_name(self) -> str | None:
        if "/weight_info" not in self.routes:
            return None
        info = await self.http.page("/weight_info", CONTROL_S)
        name = info.get("weight_version")
        return None if name is None else str(name)

    async def score(self, ids: Sequence[int]) -> list[float]:
        if self.adapter is None:
            return await super().score(ids)
        # Beside other calls, prompt_logprobs of an adapter end vLLM 0.32.0 on a CPU.
        prefixes = [ids[:end] for end in range(2, len(ids) + 1)]
        return list(await asyncio.gather(*map(self._score_last, prefixes)))

    def scoring_fault(self, request: ScoreRequest) -> str:
        if request.is_plain or self.seeded:
            return ""
        banned = f", and {len(request.banned_ids)} ids are banned" if request.banned_ids else ""
        return (
            "it reports probabilities of a prompt at temperature 1 with nothing banned, and the "
            f"policy samples at temperature {request.temperature:g}{banned}: serve the teacher by "
            "SGLang or `turnwright serve`"
        )

    async def scores(self, request: ScoreRequest) -> IdScores:
        self._check_scoring(request)
        ids = list(request.ids)
        settings = {
            "max_tokens": 0 if self.seeded else 1,
            "temperature": 1.0,
            "prompt_logprobs": request.top,
            **self._scoring_fields(request),
        }
        body: dict[str, Any]
        with self._check_adapter_loaded():
            if request.media:
                body = {
                    "request_id": uuid4().hex,
                    "model": self._model_name,
                    "token_ids": ids,
                    "sampling_params": settings,
                    "cache_salt": self._cache_salt,
                }
                image_request = Request(ids, 1, frozenset(), 0, "score", media=request.media)
                raw = await self.images.ask(GENERATE, body, image_request, self.request_s)
                rows = field_of(raw, "prompt_logprobs", self.breach)
            else:
                body = {
                    "model": self._model_name,
                    "prompt": ids,
                    "add_special_tokens": False,
                    **settings,
                    "cache_salt": self._cache_salt,
                }
                raw = await self.http.post(COMPLETIONS, body, self.request_s)
                rows = field_of(raw, "choices.0.prompt_logprobs", self.breach)

        # A row has the logprobs of some ids by their text: the likeliest, and that of the prompt.
        logprobs: list[float] = []
        top: list[dict[int, float]] = []
        try:
            for row, id_ in zip(rows[1:], ids[1:], strict=True):
                logprobs.append(float(row[str(id_)]["logprob"]))
                of_row = {int(other): float(entry["logprob"]) for other, entry in row.items()}
                if request.top:
                    by_logprob = sorted(of_row.items(), key=lambda pair: -pair[1])
                    top.append(dict(by_logprob[: request.top]))
        except (LookupError, TypeError, ValueError, AttributeError):
            raise self.breach("prompt_logprobs", "does not hold one logprob per id") from None
        return IdScores(logprobs, top)

    async def _score_last(self, ids: Sequence[int]) -> float:
        """Return the logprob of the last id after the others."""
        body = {
            "model": self._model_name,
            "prompt": list(ids[:-1]),
            "max_tokens": 1,
            "temperature": 1.0,
            "logprobs": 1,
            "logprob_token_ids": [ids[-1]],
            "return_tokens_as_token_ids": True,
            "add_special_tokens": False,
            "cache_salt": self._cache_salt,
        }
        with self._check_adapter_loaded():
            raw = await self.http.post(COMPLETIONS, body, self.request_s)
        field_name = f"choices.0.logprobs.top_logprobs.0.token_id:{ids[-1]}"
        value = field_of(raw, field_name, self.breach)
        if type(value) is not float:
            raise self.breach(field_name, f"is {value!r:.80}, not a logprob")
        return value

    @property
    def names_weights(self) -> bool:
        if self.label is None or self.route != "generate":
            return False
        return self.seeded or VERSIONS in self._optional_fields

    def _in_flight_fault(self) -> str:
        if self.in_flight != "keep":
            return ""
        if self.seeded:
            return INTERRUPTS
        if self.route != "generate" or "/weight_info" not in self.routes:
            return (
                f"needs {GENERATE} and /weight_info; start the server with --enable-scale-out "
                "and VLLM_SERVER_DEV_MODE=1"
            )
        return ""

    async def pause(self, mode: Literal["abort", "wait", "keep"] = "abort") -> None:
        """Pause sampling: `abort` ends calls in flight with what they have, `wait` finishes
        them, `keep` freezes them."""
        query: dict[str, str] = {"mode": mode}
        # By default vLLM drops its caches here, for `keep` too.
        if self.in_flight != "recompute":
            query["clear_cache"] = "false"
        await self._control("/pause", query)

    async def _pause_for_update(self) -> None:
        if self.asleep:  # a sleeping server is paused already
            return
        # `turnwright serve` keeps replies and computes their cache again, to the bits of an
        # interrupted one.
        keeps = self.in_flight == "keep" or (self.seeded and self.names_weights)
        await self.pause("keep" if keeps else "abort")

    async def _drop_cache(self) -> None:
        if self.in_flight == "recompute":
            await self._control("/reset_prefix_cache", {})

    async def resume(self) -> None:
        """Resume sampling."""
        await self._control("/resume", {})

    async def _load_from_disk(self, directory: Path, version: int) -> None:
        async with self._paused():
            body = {
                "method": "reload_weights",
                "kwargs": {"weights_path": str(directory)},
                "timeout": UPDATE_S,
            }
            await self.http.post("/collective_rpc", body, UPDATE_S)
            await self._drop_cache()
            if "/update_weight_version" in self.routes:
                await self._name_weights(str(version))

    async def _load_from_group(self, transfer: GroupTransfer) -> None:
        if "/init_weight_transfer_engine" not in self.routes:
            raise SyncError(
                f"{self.display_name} lacks the route /init_weight_transfer_engine: start it with "
                "`turnwright engines start vllm --group`, which enables weights by process group"
            )
        world = number_at(await self.http.get("/get_world_size", CONTROL_S), "world_size")
        async with self._paused():
            with closing(transfer.group(self.url, world or 1)) as group:
                await self._send_through(group, transfer)
            await self._drop_cache()

    async def _send_through(self, group: WeightGroup, transfer: GroupTransfer) -> None:
        """Send the buckets of an update through a process group with the paused server."""
        http = self.http
        seconds = transfer.seconds + SPARE_S
        await self._name_weights(UNFINISHED.format(transfer.version))
        join_body = {"init_info": rendezvous(group)}
        joining = http.post("/init_weight_transfer_engine", join_body, seconds)
        await run_together(joining, group.connect(), group)

        try:
            await self._begin_update(seconds)
            for index, bucket in enumerate(transfer.buckets):
                info = {
                    "names": bucket.names,
                    "dtype_names": bucket.dtypes,
                    "shapes": bucket.shapes,
                }
                receiving = http.post("/update_weights", {"update_info": info}, seconds)
                await run_together(receiving, group.send(index), group)
            finish_body = {"weight_version": str(transfer.version)}
            await http.post("/finish_weight_update", finish_body, seconds)
        finally:
            await suppress_errors(http.post("/shutdown_weight_transfer_engine", {}, CONTROL_S))

    async def _begin_update(self, seconds: float) -> None:
        """Begin an update; one that was interrupted is ended first."""
        try:
            await self.http.post("/start_weight_update", {}, seconds)
        except EngineError:
            await suppress_errors(self.http.post("/finish_weight_update", {}, seconds))
            await self.http.post("/start_weight_update", {}, seconds)

    async def _name_weights(self, name: str) -> None:
        await self.http.post("/update_weight_version", {"new_version": name}, CONTROL_S)

    async def _sleeps(self) -> bool:
        if "/is_sleeping" not in self.routes:
            return False
        page = await self.http.page("/is_sleeping", BETWEEN_STEPS_S)
        return page.get("is_sleeping") is True

    async def _sleep(self) -> None:
        # Level 2 drops the weights; level 1 would keep a copy in host memory that is never used.
        await self._control("/sleep", {"level": "2", "mode": "abort"})
        if not await self._sleeps():
            raise EngineError(f"{self.display_name} accepted /sleep, but /is_sleeping is false")

    async def _wake(self, part: Part) -> None:
        await self._control("/wake_up", {"tags": part})
        if part == "kv_cache" and await self._sleeps():
            raise EngineError(
                f"{self.display_name} accepted /wake_up, but /is_sleeping is still true"
            )

    async def _control(self, path: str, query: dict[str, str]) -> None:
        if path not in self.routes:
            raise SyncError(
                f"{self.display_name} lacks {path}: start it with VLLM_SERVER_DEV_MODE=1, "
                "reachable by the trainer only"
            )
        arguments = "&".join(f"{key}={value}" for key, value in query.items())
        await self.http.post_status(f"{path}?{arguments}" if arguments else path, {}, UPDATE_S)


def _named_logprobs(row: Any) -> list[tuple[int, Any]]:
    """Return the ids and logprobs of a table of `/v1/completions`."""
    return [(int(name.removeprefix("token_id:")), logprob) for name, logprob in row.items()]


def _logprob_of(row: Any, id_: Any, breach: Breach) -> Any:
    """Return the logprob of an entry after checking its id."""
    row_id = field_of(row, "token_id", breach)
    if row_id != id_:
        raise breach("choices.0.logprobs", f"are of the id {row_id}; the sampled id is {id_}")
    return field_of(row, "logprob", breach)
