"""Helpers that user code of slime and Miles imports: requests, paths,
processors, coroutines, spans."""

from __future__ import annotations

import asyncio
import base64
import contextvars
import io
import json
import sys
import threading
import urllib.request
from collections.abc import Callable, Coroutine, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from turnwright.envs.foreign import import_object
from turnwright_compat.slime.engine import EPISODE, current_server, server_of
from turnwright_compat.slime.processor import open_picture


async def post(url: str, payload: Any, max_retries: int = 60, headers: Any = None, **_: Any) -> Any:
    """Send JSON and return the JSON of the answer; the address of the servers is the
    engine of this episode."""
    server = server_of(url)
    if server is not None:
        return await server.answer(url, payload)
    return await asyncio.to_thread(_send, url, payload, headers)


async def get(url: str, **_: Any) -> Any:
    """Return the JSON at an address."""
    return await asyncio.to_thread(_send, url, None, None)


def _send(url: str, payload: Any, headers: Any) -> Any:
    body = None if payload is None else json.dumps(payload).encode()
    request = urllib.request.Request(
        url, body, {"Content-Type": "application/json", **(headers or {})}
    )
    if request.type not in ("http", "https"):
        raise ValueError(f"{url}: neither http nor https")
    with urllib.request.urlopen(request, timeout=600) as answer:
        return json.load(answer)


LOOPS = ("turnwright_compat.slime.generation", "turnwright_compat.slime.reward_rules")
"""Modules with loops and rewards of slime's and Miles' own."""


class SingletonMeta(type):
    """Metaclass of classes with one object."""

    _only: Any

    def __call__(cls, *args: Any, **options: Any) -> Any:
        """Return the one object, made by the first call."""
        if "_only" not in vars(cls):
            cls._only = super().__call__(*args, **options)
        return cls._only


def load_function(path: Any) -> Any:
    """Return what `module.name` names, of the caller's own tree too; a function as it is,
    and None for no path."""
    if callable(path) or not path:
        return path or None
    caller = sys._getframe(1).f_globals
    near = Path(caller["__file__"]) if "__file__" in caller else None
    server = EPISODE.get()
    if server is not None and server.base is not None and caller.get("__name__") in LOOPS:
        # For a loop of slime's or Miles' own, the recipe names the function.
        near = server.base / "_"
    return import_object(str(path), "load_function", near=near)


def load_tokenizer(name_or_path: str, **_: Any) -> Any:
    """Return the tokenizer of the episode that runs, whatever the path."""
    return current_server("load_tokenizer").model.tokenizer


def load_processor(name_or_path: str, **_: Any) -> Any:
    """Return the processor of the episode that runs, whatever the path; None
    for a text-only model."""
    return current_server("load_processor").processor


def build_processor_kwargs(multimodal_inputs: dict[str, Any] | None = None) -> dict[str, Any]:
    """Return arguments of the processor: ids as lists, everything else as tensors."""
    arguments = dict(multimodal_inputs or {})
    arguments["text_kwargs"] = {
        **arguments.get("text_kwargs", {}),
        "return_tensors": None,
        "return_mm_token_type_ids": False,
    }
    for key in ("audio_kwargs", "images_kwargs", "videos_kwargs"):
        arguments[key] = {**arguments.get(key, {}), "return_tensors": "pt"}
    return arguments


def process_vision_info(prompt: Sequence[dict[str, Any]], processor: Any) -> dict[str, Any]:
    """Return the images of messages as Pillow images; None where there are none."""
    images: list[Any] = []
    for message in prompt:
        if not isinstance(message.get("content"), list):
            continue
        for part in message["content"]:
            if isinstance(part, dict) and part.get("image") is not None:
                images.append(part["image"])
    return {"images": [open_picture(image) for image in images] or None, "videos": None}


def encode_image_for_rollout_engine(image: Any) -> str:
    """Return a Pillow image as a data URL of a PNG file."""
    buffer = io.BytesIO()
    image.convert("RGB").save(buffer, format="PNG")
    return f"data:image/png;base64,{base64.b64encode(buffer.getvalue()).decode()}"


def call_processor(
    processor: Any, text: Any, multimodal_inputs: dict[str, Any] | None = None
) -> Any:
    """Call a processor with the arguments that Miles gives it."""
    return processor(text=text, **build_processor_kwargs(multimodal_inputs))


def extract_multimodal_train_inputs(processor_output: Mapping[str, Any]) -> dict[str, Any] | None:
    """Return what a processor made besides ids and masks; None if that is nothing."""
    inputs = {
        key: value
        for key, value in processor_output.items()
        if key not in ("input_ids", "attention_mask")
    }
    return inputs or None


def run(coro: Coroutine[Any, Any, Any]) -> Any:
    """Run a coroutine to its end on an event loop of its own, and return its result.

    It runs in a thread, since the caller's may have a loop that runs already.
    """
    results: list[Any] = []
    errors: list[BaseException] = []
    context = contextvars.copy_context()

    def work() -> None:
        try:
            results.append(context.run(asyncio.run, coro))
        except BaseException as error:
            errors.append(error)

    thread = threading.Thread(target=work)
    thread.start()
    thread.join()
    if errors:
        raise errors[0]
    return results[0]


class TraceSpanContext:
    """What a span gives to its block."""

    def set(self, key: str, value: Any) -> TraceSpanContext:
        """Do nothing."""
        return self

    def update(self, attrs: Mapping[str, Any] | None) -> TraceSpanContext:
        """Do nothing."""
        return self

    set_attr = set
    update_attrs = update


@contextmanager
def trace_span(
    target: Any = None, name: str = "", *, attrs: Any = None, **_: Any
) -> Iterator[TraceSpanContext]:
    """Yield a span."""
    yield TraceSpanContext()


def trace_function(name: str = "", **_: Any) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Return a decorator that changes nothing."""
    return lambda function: function


def trace_event(target: Any = None, name: str = "", *, attrs: Any = None, **_: Any) -> None:
    """Do nothing."""


def bind_trace(sample: Any) -> None:
    """Do nothing."""


def build_sglang_meta_trace_attrs(meta: Mapping[str, Any]) -> dict[str, Any]:
    """Return the counts of a reply's `meta_info`."""
    names = ("prompt_tokens", "completion_tokens", "cached_tokens", "e2e_latency")
    return {name: meta[name] for name in names if meta.get(name) is not None}
