"""What the examples of slime and Miles are played with: services on real sockets, stubs of closed
clients, tokenizers on disk.

`TURNWRIGHT_PLAY_PACKAGES` names a folder of packages that only examples need
(`pip install --target`). An example that needs one is skipped where it is missing.
"""

from __future__ import annotations

import ast
import contextlib
import importlib.util
import json
import os
import sys
import tempfile
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import lru_cache
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from types import ModuleType
from typing import Any

from play_trees import Example, Skip

import turnwright as tw
from turnwright.renderers import CHATML, load_renderer

TESTS = Path(__file__).parents[1] / "tests"
PACKAGES = os.environ.get("TURNWRIGHT_PLAY_PACKAGES", "")


def needs(packages: Mapping[str, str], example: Example) -> Example | Skip:
    """Return an example, or a skip where one of the modules that it imports cannot be imported.

    `packages` has the package of each module.
    """
    missing = [package for module, package in packages.items() if not _importable(module)]
    if not missing:
        return example
    why = (
        f"needs the packages {', '.join(missing)} (set TURNWRIGHT_PLAY_PACKAGES to a folder "
        "that has them)"
    )
    return Skip(example.use, why, example.names)


def _importable(module: str) -> bool:
    with installed():
        try:
            return importlib.util.find_spec(module) is not None
        except (ImportError, ValueError):
            return False


@contextlib.contextmanager
def installed() -> Iterator[None]:
    """Make the packages of examples importable."""
    if PACKAGES and PACKAGES not in sys.path:
        sys.path.append(PACKAGES)
    yield


@contextlib.contextmanager
def all_of(*managers: Callable[[], Any]) -> Iterator[None]:
    """Enter several services."""
    with contextlib.ExitStack() as stack:
        for one in managers:
            stack.enter_context(one())
        yield


@contextlib.contextmanager
def http_service(answer: Callable[[str, Any], Any], port: int = 0) -> Iterator[str]:
    """Answer `POST path` with JSON on a real socket; yields the URL."""

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            body = self.rfile.read(int(self.headers.get("content-length") or 0))
            found = json.dumps(answer(self.path, json.loads(body or b"null"))).encode()
            self.send_response(200)
            self.send_header("content-type", "application/json")
            self.send_header("content-length", str(len(found)))
            self.end_headers()
            self.wfile.write(found)

        def log_message(self, *_: Any) -> None:
            return

    ThreadingHTTPServer.allow_reuse_address = True
    server = ThreadingHTTPServer(("127.0.0.1", port), Handler)
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_port}"
    finally:
        server.shutdown()
        server.server_close()
        thread.join()


@contextlib.contextmanager
def modules(**names: Mapping[str, Any]) -> Iterator[None]:
    """Replace modules that are not installed; `a__b` is `a.b`."""
    made = {}
    for name, values in names.items():
        dotted = name.replace("__", ".")
        parts = dotted.split(".")
        for size in range(1, len(parts) + 1):
            made.setdefault(
                ".".join(parts[:size]), ModuleType(".".join(parts[:size]))
            ).__path__ = []
        vars(made[dotted]).update(values)
    before = {name: sys.modules.get(name) for name in made}
    sys.modules.update(made)
    try:
        yield
    finally:
        for name, module in before.items():
            if module is None:
                sys.modules.pop(name, None)
            else:
                sys.modules[name] = module


@contextlib.contextmanager
def variables(**values: str) -> Iterator[None]:
    """Set environment variables."""
    before = {name: os.environ.get(name) for name in values}
    os.environ.update(values)
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                os.environ.pop(name, None)
            else:
                os.environ[name] = value


@lru_cache
def _folder() -> Path:
    return Path(tempfile.mkdtemp(prefix="play-"))


@lru_cache
def text_renderer() -> Any:
    """Return a renderer of ChatML over a tokenizer of transformers in a directory, which
    `args.hf_checkpoint` names."""
    sys.path.insert(0, str(TESTS))
    from kit.rollouts import bpe
    from transformers import PreTrainedTokenizerFast

    made = PreTrainedTokenizerFast(
        tokenizer_object=bpe(), eos_token="<|im_end|>", pad_token="<|im_end|>"
    )
    made.chat_template = CHATML
    made.save_pretrained(_folder() / "text")
    return load_renderer(_folder() / "text")


@lru_cache
def vision_renderer() -> Any:
    """Return a renderer of a vision-language model of Qwen's kind."""
    sys.path.insert(0, str(TESTS))
    from kit.vision import tiny_vlm_directory

    return load_renderer(tiny_vlm_directory(_folder() / "vlm", weights=False))


def picture() -> str:
    """Return a picture as rows have it: a data URL."""
    import base64
    import io

    from PIL import Image

    buffer = io.BytesIO()
    Image.new("RGB", (84, 56), "green").save(buffer, format="PNG")
    return f"data:image/png;base64,{base64.b64encode(buffer.getvalue()).decode()}"


def text_of(trajectory: tw.Trajectory, turn: int = -1) -> str:
    """Return the ids that the engine received for a turn, and its reply, as text."""
    number = turn % len(trajectory.turns)
    used = trajectory.turns[number]
    sampled = [token for span in used.spans for token in trajectory.spans[span].ids]
    return decode(trajectory.prompt_ids(number) + sampled)


_decoders: list[Callable[..., str]] = []


def decode(ids: Sequence[int]) -> str:
    """Decode ids of the renderer that `with_decoder` was called for last."""
    return _decoders[-1](ids)


def decoding(renderer: Callable[[], Any]) -> Callable[[], Any]:
    """Return a maker of a renderer, whose ids `text_of` then decodes."""

    def make() -> Any:
        made = renderer()
        _decoders.append(made.decode)
        return made

    return make


def trained(trajectory: tw.Trajectory) -> str:
    """Return the trained ids of all rows as text."""
    return "|".join(
        sorted(
            decode([one for one, weight in zip(row.ids, row.weights, strict=True) if weight])
            for row in trajectory.samples()
        )
    )


def found_by_form(tree: Path, folders: Sequence[str]) -> Iterator[str]:
    """Yield `file.py:name` of what is user code of slime or Miles by its form.

    Those are generate functions, rewards, environments, functions and classes for a step, agent
    functions of sessions, filters and tools.
    """
    for folder in folders:
        for path in sorted((tree / folder).rglob("*.py")):
            for node in ast.parse(path.read_text(encoding="utf-8")).body:
                if (name := _entry(node)) is not None:
                    yield f"{path.relative_to(tree)}:{name}"


def _entry(node: ast.stmt) -> str | None:
    if isinstance(node, ast.ClassDef):
        bases = [ast.unparse(base) for base in node.bases]
        return node.name if any(one.endswith(("RolloutFn", "EvalFn")) for one in bases) else None
    if isinstance(node, ast.Assign) and isinstance(node.targets[0], ast.Name):
        # A backend object whose method is the agent function.
        return "run" if node.targets[0].id == "run" else None
    if not isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)) or node.name.startswith("_"):
        return None
    names = [one.arg for one in (*node.args.posonlyargs, *node.args.args)]
    waits = isinstance(node, ast.AsyncFunctionDef)
    kinds = (
        waits and names[:1] == ["args"] and "sampling_params" in names[:3],  # generate
        waits
        and names[:1] == ["args"]
        and names[1:2] in (["sample"], ["samples"])
        and "rew" in node.name + "rm",  # reward
        waits and names == ["input"],  # generate of Miles
        waits
        and names
        == ["base_url", "prompt", "request_kwargs", "metadata"],  # agent function of a session
        names[:1] == ["args"] and names[1:2] == ["rollout_id"] and not waits,  # a step
        names[:2] == ["args", "samples"] and not waits,  # filter
        node.name in ("build_env", "execute_tool"),
        node.name.startswith("reward_f") and waits,
    )
    return node.name if any(kinds) else None


def step(use: str) -> Example:
    """Return a function for a complete step, which our loop replaces: it is refused by name."""
    return Example(use, [{"prompt": "Go."}], ["a"])


def ask_policy(
    base_url: str, messages: Sequence[Mapping[str, Any]], options: Mapping[str, Any]
) -> str:
    """Ask a chat API as an agent server does, and return the content of the reply."""
    import urllib.request

    body = json.dumps({"model": "default", "messages": list(messages), **options}).encode()
    asked = urllib.request.Request(
        f"{base_url}/chat/completions", body, {"Content-Type": "application/json"}
    )
    with urllib.request.urlopen(asked, timeout=60) as answer:
        return str(json.load(answer)["choices"][0]["message"]["content"])
