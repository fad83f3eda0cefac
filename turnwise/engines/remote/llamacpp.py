"""llama.cpp's server: `/completion` with ids."""

from __future__ import annotations

from collections.abc import Sequence
from math import log
from typing import Any

from turnwise.engines.base import Request
from turnwise.engines.remote.base import (
    CONTROL_S,
    ExpectedWeights,
    RemoteEngine,
    ResponseErrors,
    ServerResponse,
    align_logprobs,
    field_of,
    number_at,
)
from turnwise.errors import EngineError

FINISH = {"eos": "stop", "word": "stop", "limit": "length"}


class LlamaCppEngine(RemoteEngine):
    """A llama.cpp server.

    Three things differ from the others. It gives no logprob for an id that ends inside a character, so `missing_logprobs`
    has to be set to train with it. It takes no stop ids: ids behind one are left out, and counted as `ids_left_out`. It takes
    no new weights: what it samples is of the file that it was started with.

    Its plain logprobs are those of the model before any sampler, so they are asked for where the distribution is the model's
    own (temperature 1, nothing banned) or greedy; otherwise those behind the samplers are. Keys and values are kept in half
    precision unless it is started with `-ctk f32 -ctv f32 -fa off`: 2e-3 to 4e-3 off, instead of 2e-6.
    """

    kind = "llama.cpp"

    async def _look(self) -> None:
        props = await self.http.page("/props", CONTROL_S)
        self.server_version = str(props.get("build_info") or "")
        self.model = self.model or props.get("model_alias") or props.get("model_path")
        context = number_at(props, "default_generation_settings.n_ctx")
        if self.context is None and context:
            self.context = context

    async def _sample(self, request: Request, asked: int, name: str, seconds: float) -> Any:
        if request.media:
            raise EngineError(f"{self.display_name}: images are sent to vLLM and SGLang, not to llama.cpp")
        sampling = request.sampling
        samplers = ["top_k"] if sampling.top_k else []
        samplers += ["temperature"] if sampling.temperature else []
        samplers += ["top_p"] if sampling.top_p < 1.0 else []
        body: dict[str, Any] = {
            "prompt": list(request.ids),
            "n_predict": asked,
            "temperature": sampling.temperature,
            "samplers": samplers,
            "top_k": sampling.top_k,
            "top_p": sampling.top_p,
            "min_p": 0.0,
            "typical_p": 1.0,
            "top_n_sigma": -1.0,
            "xtc_probability": 0.0,
            "dry_multiplier": 0.0,
            "dynatemp_range": 0.0,
            "mirostat": 0,
            "repeat_penalty": 1.0,
            "presence_penalty": 0.0,
            "frequency_penalty": 0.0,
            "ignore_eos": False,
            "n_probs": 1,
            "min_keep": 0,
            "post_sampling_probs": _behind_samplers(request),
            "return_tokens": True,
            "cache_prompt": True,
            "seed": request.seed & 0xFFFFFFFE,  # all bits set asks for one of its own
            "stop": [],
            "stream": False,
        }
        if request.banned_ids:
            body["logit_bias"] = [[token, False] for token in sorted(request.banned_ids)]
        return await self.http.post("/completion", body, seconds)

    def _read(self, raw: Any, request: Request, held: ExpectedWeights) -> ServerResponse:
        breach = ResponseErrors(self.display_name)
        ids, said = field_of(raw, "tokens", breach), field_of(raw, "stop_type", breach)
        if raw.get("truncated"):
            raise breach("truncated", "is true: the context was cut, so what was sampled follows something else")
        entries = []
        for row in raw.get("completion_probabilities") or ():
            token = field_of(row, "id", breach)
            entries.append((token, _logprob(row, breach)))
        logprobs = align_logprobs(ids, entries)
        if logprobs is None:
            raise breach(
                "completion_probabilities", f"are of ids that are not among the {len(ids)} sampled ones, in their order"
            )
        prompt, cached = raw.get("tokens_evaluated"), number_at(raw, "timings.cache_n")
        return ServerResponse(ids, logprobs, FINISH.get(said, str(said)), prompt, held.version, cached, cut=True)

    async def score(self, ids: Sequence[int]) -> list[float]:
        """The likeliest ids behind these and their logprobs: it scores no ids of ours."""
        body = {
            "prompt": list(ids),
            "n_predict": 1,
            "temperature": 0.0,
            "n_probs": 8,
            "return_tokens": True,
            "cache_prompt": False,
        }
        raw = await self.http.post("/completion", body | {"post_sampling_probs": False, "samplers": []}, self.request_s)
        breach = ResponseErrors(self.display_name)
        rows = field_of(raw, "completion_probabilities", breach)
        top = field_of(rows, "0.top_logprobs", breach) if rows else ()
        return [value for row in top for value in (float(row["id"]), float(row["logprob"]))]


def _behind_samplers(request: Request) -> bool:
    sampling = request.sampling
    if not sampling.temperature:
        return False
    return sampling.temperature != 1.0 or not sampling.is_unmodified or bool(request.banned_ids)


def _logprob(row: Any, breach: ResponseErrors) -> float:
    if "logprob" in row:
        return row["logprob"]  # type: ignore[no-any-return]
    prob = field_of(row, "prob", breach)
    if type(prob) not in (float, int) or not 0.0 < prob <= 1.0 + 1e-6:
        raise breach("completion_probabilities", f"hold the probability {prob!r} of an id that was sampled")
    return log(prob)
