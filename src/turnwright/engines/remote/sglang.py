"""SGLang client.

What a server of SGLang is asked and what it answers: `SglangEngine._sample` makes the request of a
reply, `_read` reads the response, `scores` asks for logprobs of given ids, and the methods under
"Weights" name, replace and release the server's weights. Everything that is not SGLang's own is in
`RemoteEngine`, LoRA adapters in `LoraServerEngine`.
"""

from __future__ import annotations

import asyncio
import math
from base64 import b64encode
from collections.abc import Sequence
from contextlib import closing
from pathlib import Path
from typing import Any, Literal

from turnwright.engines.protocols import Request
from turnwright.engines.remote.experts import sglang_experts
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
    parsing,
    version_runs,
)
from turnwright.engines.remote.server_adapters import LoraApi, LoraServerEngine
from turnwright.engines.remote.weight_sync import (
    SPARE_S,
    UNFINISHED,
    GroupTransfer,
    RequestTransfer,
    WeightGroup,
    rendezvous,
    run_together,
    suppress_errors,
)
from turnwright.engines.scoring import IdScores, ScoreRequest
from turnwright.errors import EngineError, SyncError
from turnwright.types import ROUTES, Alternatives, VideoRef

VERSION = "meta_info.weight_version"
ASLEEP = "asleep"
"""Name that SGLang is given for its weights while it sleeps: it reports sleep in no other way. A
restarted server reports another name."""
IDLE_S = 30.0
"""Seconds for a paused server to become idle."""
UNCOMPLETED = {"flush_cache": False}
"""Fields of a request after which others of the same update follow."""
ROUTING_KEY = "x-smg-routing-key"
"""Header by which SGLang's router keeps a session on one worker; a single server ignores it."""


class SglangEngine(LoraServerEngine):
    """Client of an SGLang server.

    Its logprobs include the temperature, and its responses name their weights.
    """

    kind = "SGLang"
    gives_alternatives = True
    lora_api = LoraApi(
        "/load_lora_adapter",
        "/unload_lora_adapter",
        needs="--enable-lora, a --max-lora-rank and --lora-target-modules (turnwright engines "
        "start sglang --lora)",
        status=400,
        words="LoRA adapter",
        counts_calls=True,
    )

    _takes_extra_key = False
    """Whether the server separates cached prefixes by a key; set by `open` where it matters."""
    _reports_load = True
    """False once the server had neither route of its load."""

    async def _identify(self) -> None:
        info = await self._info("server")
        self.server_version = str(info.get("version") or "")
        model = await self._info("model")
        self.model = self.model or model.get("served_model_name") or model.get("model_path")
        context = info.get("context_length") or info.get("max_req_input_len")
        if self.context is None and type(context) is int:
            self.context = context
        if self.label is None:
            self.label = _name(model)
        self.asleep = _name(model) == ASLEEP
        if self.in_flight != "recompute" and not self.seeded:
            api = await self.http.page("/openapi.json", CONTROL_S)
            schemas = field_of(api, "components.schemas", self.breach)
            fields = field_of(schemas, "GenerateReqInput.properties", self.breach)
            self._takes_extra_key = "extra_key" in fields

    async def _info(self, what: Literal["model", "server"]) -> dict[str, Any]:
        try:
            return await self.http.page(f"/{what}_info", CONTROL_S)
        except EngineError:
            return await self.http.page(f"/get_{what}_info", CONTROL_S)  # before 0.5.6

    async def load(self) -> EngineLoad | None:
        if not self._reports_load:
            return None
        try:
            try:
                page = await self.http.get("/v1/loads", CONTROL_S)
            except EngineError:
                page = await self.http.get("/get_load", CONTROL_S)  # before 2026
        except EngineError as error:
            if not error.status:
                raise
            self._reports_load = False
            return None

        with parsing("the load", self.display_name):
            rows = page["loads"] if isinstance(page, dict) else page
            waiting = [row["num_waiting_reqs"] for row in rows]
            # The older field counts waiting requests too.
            running = [
                row.get("num_running_reqs", row.get("num_reqs", 0) - row["num_waiting_reqs"])
                for row in rows
            ]
            caches = [float(row["token_usage"]) for row in rows if "token_usage" in row]
            return EngineLoad(int(sum(running)), int(sum(waiting)), max(caches, default=None))

    async def _sample(self, request: Request, max_tokens: int, name: str, seconds: float) -> Any:
        # The distribution and the end of the reply.
        sampling = self._neutral_sampling(request)
        sampling |= {"max_new_tokens": max_tokens, "min_new_tokens": 0, "no_stop_trim": True}
        # ignore_eos would disable our stop ids too; the server's own end ids are recognized in
        # the response.
        sampling["ignore_eos"] = False
        if request.banned_ids:
            sampling["logit_bias"] = {str(id_): -1e9 for id_ in sorted(request.banned_ids)}
        if self.seeded:
            sampling |= {"sampling_seed": request.seed, "reply_position": request.reply_position}
        if request.stop_text is not None:
            sampling["stop"] = list(request.stop_text.texts)

        ids, echo = encode_ids(request)
        body: dict[str, Any] = {
            "rid": name,
            "input_ids": ids,
            "sampling_params": sampling,
            "return_logprob": True,
            "logprob_start_len": -1,
            "stream": False,
        }
        if request.alternatives:
            body["top_logprobs_num"] = request.alternatives
        if request.media:
            body["image_data"] = self._images(request)
        if ROUTES in request.extras:
            body |= {"return_routed_experts": True, "routed_experts_start_len": request.routes_from}
        headers = {ROUTING_KEY: request.session} if request.session else None

        adapter = self.adapter  # another may replace it while the call is under way
        with self._check_adapter_loaded():
            body |= self._adapter_name() | self._extra_key()
            raw = await self.http.post("/generate", body, seconds, headers, echo)
        if adapter is not None and _aborted_unseen(raw):
            self._miscounted.add(adapter[0])
        return raw

    def _adapter_name(self) -> dict[str, str]:
        """Return the adapter field of requests, if any; cached prefixes are separated by it."""
        return {"lora_path": self.adapter[0]} if self.adapter else {}

    def _extra_key(self) -> dict[str, str]:
        """Return the field that separates cached prefixes by weights, where updates leave the
        cache."""
        return {} if self.in_flight == "recompute" else {"extra_key": f"turnwright-{self.version}"}

    def _images(self, request: Request) -> list[str]:
        """Return the images as URLs of their data.

        Their ids are already expanded, and servers with #26555 keep them so.
        """
        if self.pixels is None:
            raise EngineError(
                f"{self.display_name}: the request has images, but no pixel source; call "
                "add_pixel_source"
            )
        if any(isinstance(block.media, VideoRef) for block in request.media):
            raise EngineError(f"{self.display_name}: sending videos to servers is not supported")
        urls: list[str] = []
        for block in request.media:
            encoded = b64encode(self.pixels.store.png_bytes(block.media))
            urls.append(f"data:image/png;base64,{encoded.decode()}")
        return urls

    def _read(self, raw: Any, request: Request, expected: ExpectedWeights) -> ServerResponse:
        ids = field_of(raw, "output_ids", self.breach)
        meta = field_of(raw, "meta_info", self.breach)
        finish = field_of(meta, "finish_reason", self.breach)
        reason = finish.get("type") if isinstance(finish, dict) else finish

        rows = meta.get("output_token_logprobs")
        logprobs: Sequence[Any] = [None] * len(ids)
        if rows is not None:
            if len(rows) != len(ids):
                raise self.breach(
                    "meta_info.output_token_logprobs", f"are {len(rows)} for {len(ids)} ids"
                )
            logprobs = logprobs_of(rows, ids, (1, 0), _logprob_of, self.breach)
        alternatives: Sequence[Alternatives] = ()
        if request.alternatives:
            top_rows = meta.get("output_top_logprobs")
            if top_rows is None and not ids:
                top_rows = []
            alternatives = alternatives_of(top_rows, ids, request, _top_logprobs, self.breach)

        echo = raw.get("prompt_token_ids") or meta.get("prompt_token_ids")
        self._check_name("meta_info.id", meta.get("id"), expected.request)
        prompt = echo or meta.get("prompt_tokens")
        cached = number_at(meta, "cached_tokens")
        if prompt is None and reason == "abort" and not ids:
            # Aborted in the queue: nothing was sampled, and no length is reported.
            prompt = len(request.ids)

        # One field names the weights of the last id, the other those of each run of ids.
        name = meta.get("weight_version")
        spans = meta.get("weight_versions")
        runs: list[tuple[int, str]] = []
        if self._check_present(VERSION, name is not None):
            runs = [(0, str(name))]
        if self._check_present(f"{VERSION}s", bool(spans)):
            runs = version_runs(spans, self.breach)
        elif self.in_flight == "keep":
            raise self.breach(
                f"{VERSION}s",
                "is missing: engine.in_flight = keep needs the weights of each id; update the "
                "server",
            )
        versions = expected.versions(runs, cached, self.display_name)

        extras = sglang_experts(meta.get("routed_experts"), request, len(ids), self.breach)
        # Each pass counts as many proposed ids as it may draft, even when it found fewer.
        drafts = (
            number_at(meta, "spec_num_proposed_drafts"),
            number_at(meta, "spec_num_correct_drafts"),
        )
        return ServerResponse(
            ids,
            logprobs,
            str(reason),
            prompt,
            versions,
            cached,
            extras,
            drafts=drafts,
            alternatives=alternatives,
        )

    async def abort(self, *names: str) -> None:
        await asyncio.gather(
            *(self.http.post("/abort_request", {"rid": name}, CONTROL_S) for name in names)
        )

    # Weights

    async def weights_name(self) -> str | None:
        return _name(await self._info("model"))

    def scoring_fault(self, request: ScoreRequest) -> str:
        if request.temperature == 1.0 or self.seeded:
            return ""
        return (
            "it reports probabilities of a prompt at temperature 1, and the policy samples at "
            f"temperature {request.temperature:g}: serve the teacher by `turnwright serve`"
        )

    async def scores(self, request: ScoreRequest) -> IdScores:
        self._check_scoring(request)
        ids = list(request.ids)
        sampling = {"max_new_tokens": 0 if self.seeded else 1, "temperature": 1.0}
        body: dict[str, Any] = {"input_ids": ids, "return_logprob": True, "logprob_start_len": 0}

        # A server that does not leave out banned ids is asked for theirs, which are subtracted.
        subtracted = [] if self.seeded else sorted(request.banned_ids)
        if self.seeded:
            sampling |= self._scoring_fields(request)
        elif subtracted:
            body["token_ids_logprob"] = subtracted
        if request.top:
            body["top_logprobs_num"] = request.top + min(len(subtracted), request.top)
        if request.media:
            image_request = Request(ids, 1, frozenset(), 0, "score", media=request.media)
            body["image_data"] = self._images(image_request)

        with self._check_adapter_loaded():
            body |= {"sampling_params": sampling} | self._adapter_name() | self._extra_key()
            raw = await self.http.post("/generate", body, self.request_s)
        return self._read_scores(raw, request, subtracts=bool(subtracted))

    def _read_scores(self, raw: Any, request: ScoreRequest, *, subtracts: bool) -> IdScores:
        """Read the scores of a prompt; `subtracts` tells whether the probability of the banned ids
        is there to be subtracted."""
        # One row for each id of the prompt; the first has no logprob.
        ids = list(request.ids)
        meta = field_of(raw, "meta_info", self.breach)
        rows = _rows(meta, "input_token_logprobs", ids, self.breach)
        top_rows = _rows(meta, "input_top_logprobs", ids, self.breach) if request.top else []
        banned_rows: Sequence[Any] = [None] * len(ids)
        if subtracts:
            banned_rows = _rows(meta, "input_token_ids_logprobs", ids, self.breach)
        in_media: set[int] = set()
        for block in request.media:
            in_media.update(range(block.start, block.end))

        logprobs: list[float] = []
        top: list[dict[int, float]] = []
        for position in range(1, len(ids)):
            row = rows[position]
            # SGLang 0.5.19 reports id 0 for the last id of the vocabulary here; rows are in the
            # order of the ids anyway.
            if row[1:2] == [0] or position in in_media:
                row = [row[0], ids[position]]
            logprob = _logprob_of(row, ids[position], self.breach)
            if type(logprob) is not float:
                raise self.breach(
                    "meta_info.input_token_logprobs", "contain a value that is not a number"
                )
            log_rest = _log_rest(banned_rows[position], self.breach)
            logprobs.append(logprob - log_rest)
            if request.top:
                likeliest: list[tuple[int, float]] = []
                for entry in top_rows[position]:
                    if entry[1] not in request.banned_ids:
                        likeliest.append((int(entry[1]), float(entry[0]) - log_rest))
                top.append(dict(likeliest[: request.top]))
        return IdScores(logprobs, top)

    @property
    def names_weights(self) -> bool:
        return self.label is not None and (self.seeded or VERSION in self._optional_fields)

    def _in_flight_fault(self) -> str:
        if self.seeded:
            return INTERRUPTS if self.in_flight == "keep" else ""
        if self._takes_extra_key:
            return ""
        return "needs the field extra_key of /generate; update the server"

    async def pause(self, mode: Literal["abort", "retract", "in_place"] = "abort") -> None:
        """Pause sampling: `abort` ends calls in flight, `retract` requeues them, `in_place` freezes
        them."""
        await self.http.post("/pause_generation", {"mode": mode}, UPDATE_S)

    async def _pause_for_update(self) -> None:
        if self.in_flight == "keep":
            await self.pause("in_place")
        elif self.seeded:
            # `turnwright serve` computes the cache of a retracted reply again, to the bits of an
            # interrupted one.
            await self.pause("retract")
        else:
            await self.pause("abort")

    async def resume(self) -> None:
        """Resume sampling."""
        await self.http.post("/continue_generation", {}, CONTROL_S)

    async def _load_from_disk(self, directory: Path, version: int) -> None:
        async with self._paused():
            body = {"model_path": str(directory)} | self._completion(version)
            body["abort_all_requests"] = self.in_flight != "keep"
            answer = await self.http.post("/update_weights_from_disk", body, UPDATE_S)
            self._check_success(answer)

    async def _load_from_group(self, transfer: GroupTransfer) -> None:
        ranks = await self._ranks()
        async with self._paused():
            with closing(transfer.group(self.url, ranks)) as group:
                await self._send_through(group, transfer)

    async def _send_through(self, group: WeightGroup, transfer: GroupTransfer) -> None:
        """Send the buckets of an update through a process group with the paused server."""
        http = self.http
        seconds = transfer.seconds + SPARE_S
        await self._name_unfinished(transfer.version)
        joining = http.post("/init_weights_update_group", rendezvous(group), seconds)
        self._check_success(await run_together(joining, group.connect(), group))

        last = len(transfer.buckets) - 1
        try:
            for index, bucket in enumerate(transfer.buckets):
                body: dict[str, Any] = {
                    "names": bucket.names,
                    "dtypes": bucket.dtypes,
                    "shapes": bucket.shapes,
                    "group_name": group.name,
                }
                body |= self._completion(transfer.version) if index == last else UNCOMPLETED
                receiving = http.post("/update_weights_from_distributed", body, seconds)
                self._check_success(await run_together(receiving, group.send(index), group))
        finally:
            leave_body = {"group_name": group.name}
            leaving = http.post("/destroy_weights_update_group", leave_body, CONTROL_S)
            await suppress_errors(leaving)

    async def _load_from_requests(self, transfer: RequestTransfer) -> None:
        ranks = await self._ranks()
        async with self._paused():
            await self._name_unfinished(transfer.version)

            last = transfer.request_count - 1
            for index in range(transfer.request_count):
                # Each rank reads its own copy and keeps its part of the tensors.
                text = await asyncio.to_thread(transfer.encode_body, index)
                body: dict[str, Any] = {"serialized_named_tensors": [text] * ranks}
                body |= self._completion(transfer.version) if index == last else UNCOMPLETED
                path = "/update_weights_from_tensor"
                self._check_success(await self.http.post(path, body, transfer.seconds))

    async def _ranks(self) -> int:
        """Return the number of ranks of the server."""
        info = await self._info("server")
        return int(info.get("tp_size") or 1)

    async def _name_unfinished(self, version: int) -> None:
        """Name the weights as those of an update that has begun."""
        body = {"new_version": UNFINISHED.format(version)}
        self._check_success(await self.http.post("/update_weight_version", body, CONTROL_S))

    def _completion(self, version: int) -> dict[str, Any]:
        """Return the fields of a request that completes an update: the weights' name, and whether
        the cache of those before is dropped."""
        return {"flush_cache": self.in_flight == "recompute", "weight_version": str(version)}

    def _check_success(self, response: Any) -> None:
        if not (isinstance(response, dict) and response.get("success")):
            raise SyncError(f"{self.display_name} reports failure: {response}")

    async def _sleep(self) -> None:
        await self.pause("abort")

        # Releasing memory before the server is idle ends it; the cache is dropped only when it is.
        fault: EngineError | None = None
        for _ in range(int(IDLE_S / 0.1)):
            try:
                # Refused while requests run.
                await self.http.post_status("/flush_cache", {}, IDLE_S)
                break
            except EngineError as error:
                fault = error
            await asyncio.sleep(0.1)
        else:
            raise EngineError(f"the paused server still has requests after {IDLE_S:g} s: {fault}")

        await self.http.post("/update_weight_version", {"new_version": ASLEEP}, CONTROL_S)
        await self.http.post(
            "/release_memory_occupation", {"tags": ["kv_cache", "weights"]}, UPDATE_S
        )

    async def _sleeps(self) -> bool:
        name = await self.weights_name() or ""
        return name == ASLEEP or name.endswith(UNFINISHED.format(""))

    async def _wake(self, part: Part) -> None:
        await self.http.post("/resume_memory_occupation", {"tags": [part]}, UPDATE_S)
        if part == "kv_cache":
            await self.resume()


def _aborted_unseen(raw: Any) -> bool:
    """Return whether a call was aborted elsewhere than in a running batch.

    Only an abort there is counted as its end by SGLang 0.5.19.
    """
    try:
        finish = raw["meta_info"]["finish_reason"]
        return bool(finish["type"] == "abort" and finish.get("message") != "Aborted")
    except (LookupError, TypeError, AttributeError):
        return False


def _name(info: dict[str, Any]) -> str | None:
    name = info.get("weight_version")
    return None if name is None else str(name)


def _rows(meta: Any, name: str, ids: Sequence[int], breach: Breach) -> Any:
    """Return a field with one row per id of a prompt."""
    rows = meta.get(name)
    if not isinstance(rows, list) or len(rows) != len(ids):
        count = len(rows) if isinstance(rows, list) else "none"
        raise breach(f"meta_info.{name}", f"are {count} for {len(ids)} ids")
    return rows


def _log_rest(banned: Any, breach: Breach) -> float:
    """Return the log of the probability that is left by banned ids, from rows [logprob, id, text]
    of them."""
    if banned is None:
        return 0.0
    try:
        banned_probability = math.fsum(math.exp(row[0]) for row in banned)
        return math.log1p(-min(banned_probability, 1.0))
    except (TypeError, ValueError, IndexError):
        raise breach(
            "meta_info.input_token_ids_logprobs", "do not hold one number below 0 per banned id"
        ) from None


def _top_logprobs(rows: Any) -> list[tuple[Any, Any]]:
    """Return the ids and logprobs of rows [logprob, id, text]."""
    return [(row[1], row[0]) for row in rows]


def _logprob_of(row: Any, id_: Any, breach: Breach) -> Any:
    """Return the logprob of a row [logprob, id, text] after checking its id."""
    if not isinstance(row, list) or len(row) < 2 or row[1] != id_:
        raise breach("token logprobs", f"contain {row!r} for the id {id_}")
    return row[0]
