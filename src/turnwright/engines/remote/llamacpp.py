"""llama.cpp's server: `/completion` with ids.

`LlamaCppEngine` says in what it differs from the clients of vLLM and SGLang; what they have in
common is in `RemoteEngine`.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence
from math import log
from pathlib import Path
from typing import Any

from turnwright.engines.protocols import Request
from turnwright.engines.remote.http import CONTROL_S, encode_ids
from turnwright.engines.remote.remote_engine import RemoteEngine
from turnwright.engines.remote.response import (
    Breach,
    ExpectedWeights,
    SampledVersions,
    ServerResponse,
    align_logprobs,
    field_of,
    number_at,
)
from turnwright.errors import EngineError

LIKELIEST = 8
"""Next ids that tell which weights a server has."""
FINISH = {"eos": "stop", "word": "stop", "limit": "length"}


class LlamaCppEngine(RemoteEngine):
    """Client of a llama.cpp server.

    It differs from the others in three ways. Ids that end inside a character have no logprob, so
    training needs `missing_logprobs`. It takes no stop ids: ids after one are dropped and counted
    as `ids_left_out`. It takes no new weights: a run that started it starts it again with them
    (`set_restart`).

    Its plain logprobs are the model's, before any sampler. They are requested when the sampling
    distribution is the model's own (temperature 1, nothing banned) or greedy; otherwise those after
    the samplers are. Keys and values are half precision unless the server runs with
    `-ctk f32 -ctv f32 -fa off`: errors of 2e-3 to 4e-3 instead of 2e-6.
    """

    kind = "llama.cpp"
    _restart: Callable[[Path], Awaitable[None]] | None = None

    def set_restart(self, restart: Callable[[Path], Awaitable[None]]) -> None:
        """Take new weights by a function that starts the server again with those of a directory."""
        self._restart = restart

    async def _load_from_disk(self, directory: Path, version: int) -> None:
        if self._restart is None:
            await super()._load_from_disk(directory, version)
        else:
            await self._restart(directory)

    async def _identify(self) -> None:
        props = await self.http.page("/props", CONTROL_S)
        self.server_version = str(props.get("build_info") or "")
        self.model = self.model or props.get("model_alias") or props.get("model_path")
        context = number_at(props, "default_generation_settings.n_ctx")
        if self.context is None and context:
            self.context = context

    async def _sample(self, request: Request, max_tokens: int, name: str, seconds: float) -> Any:
        if request.media:
            raise EngineError(
                f"{self.display_name}: images work with vLLM and SGLang, not with llama.cpp"
            )

        sampling = request.sampling
        is_model_distribution = (
            sampling.temperature == 1.0 and sampling.is_unmodified and not request.banned_ids
        )
        is_greedy = not sampling.temperature
        samplers: list[str] = []
        if sampling.top_k:
            samplers.append("top_k")
        # Without it llama.cpp draws at temperature 1 whatever the temperature is.
        samplers.append("temperature")
        if sampling.min_p:
            samplers.append("min_p")
        if sampling.top_p < 1.0:
            samplers.append("top_p")

        ids, _ = encode_ids(request)
        body: dict[str, Any] = {
            "prompt": ids,
            "n_predict": max_tokens,
            "temperature": sampling.temperature,
            "samplers": samplers,
            "top_k": sampling.top_k,
            "top_p": sampling.top_p,
            "min_p": sampling.min_p,
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
            "post_sampling_probs": not is_model_distribution and not is_greedy,
            "return_tokens": True,
            "cache_prompt": True,
            "seed": request.seed & 0xFFFFFFFE,  # all bits set requests a random seed
            "stop": [],
            "stream": False,
        }
        if request.banned_ids:
            body["logit_bias"] = [[id_, False] for id_ in sorted(request.banned_ids)]
        return await self.http.post("/completion", body, seconds)

    def _read(self, raw: Any, request: Request, expected: ExpectedWeights) -> ServerResponse:
        ids = field_of(raw, "tokens", self.breach)
        stop_type = field_of(raw, "stop_type", self.breach)
        if raw.get("truncated"):
            raise self.breach("truncated", "is true: the ids were sampled from a truncated context")

        rows = raw.get("completion_probabilities") or ()
        entries = [(field_of(row, "id", self.breach), _logprob(row, self.breach)) for row in rows]
        logprobs = align_logprobs(ids, entries)
        if logprobs is None:
            raise self.breach(
                "completion_probabilities", f"are not a subsequence of the {len(ids)} sampled ids"
            )

        prompt = raw.get("tokens_evaluated")
        cached = number_at(raw, "timings.cache_n")
        finish = FINISH.get(stop_type, str(stop_type))
        versions = SampledVersions(expected.version)
        return ServerResponse(ids, logprobs, finish, prompt, versions, cached, trim=True)

    async def score(self, ids: Sequence[int]) -> list[float]:
        """Return the `LIKELIEST` next ids and their logprobs, by id: llama.cpp does not score given
        ids."""
        body = {
            "prompt": list(ids),
            "n_predict": 1,
            "temperature": 0.0,
            "n_probs": LIKELIEST,
            "return_tokens": True,
            "cache_prompt": False,
            "post_sampling_probs": False,
            "samplers": [],
        }
        raw = await self.http.post("/completion", body, self.request_s)
        rows = field_of(raw, "completion_probabilities", self.breach)
        likeliest = field_of(rows, "0.top_logprobs", self.breach) if rows else ()

        values: list[float] = []
        for row in sorted(likeliest, key=lambda row: int(row["id"])):
            values += [float(row["id"]), float(row["logprob"])]
        return values


def _logprob(row: Any, breach: Breach) -> float:
    if "logprob" in row:
        return row["logprob"]  # type: ignore[no-any-return]
    probability = field_of(row, "prob", breach)
    if type(probability) not in (float, int) or not 0.0 < probability <= 1.0 + 1e-6:
        raise breach(
            "completion_probabilities", f"contain the probability {probability!r} of a sampled id"
        )
    return log(probability)
