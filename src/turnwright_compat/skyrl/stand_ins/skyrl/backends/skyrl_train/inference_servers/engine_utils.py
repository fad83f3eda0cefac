"""Sampling parameters in the engine's words."""

from __future__ import annotations

from typing import Any


def get_sampling_params_for_backend(backend: str, sampling_params: Any) -> dict[str, Any]:
    """Return the parameters as vLLM names them."""
    if backend != "vllm":
        raise ValueError(f"the backend is vllm, not {backend!r}")
    stop = sampling_params.stop
    found = {
        "min_tokens": 1,
        "skip_special_tokens": True,
        "include_stop_str_in_output": True,
        "max_tokens": sampling_params.max_generate_length,
        "logprobs": sampling_params.logprobs,
        "stop": None if stop is None else list(stop),
    }
    for key in ("temperature", "top_p", "top_k", "min_p"):
        if (value := getattr(sampling_params, key, None)) is not None:
            found[key] = value
    for key, value in (getattr(sampling_params, "additional_kwargs", None) or {}).items():
        found.setdefault(key, value)
    return found
