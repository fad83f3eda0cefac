"""Servers that the engine starts itself: programs that speak as vLLM, SGLang and llama.cpp."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import pytest

from kit import remote_engines as kit
from kit.fleets import described, fingerprint
from turnwright.engines.remote import LlamaCppEngine, SglangEngine, VllmEngine
from turnwright.engines.remote.managed import ManagedFleet, ServerProcess
from turnwright.engines.remote.weight_files import ModelDirectories

CLIENTS = {"vllm": VllmEngine, "sglang": SglangEngine, "llamacpp": LlamaCppEngine}
PYTHON = f"""\
#!{sys.executable}
import os, sys
given = dict(zip(sys.argv[1:], sys.argv[2:]))
model = given.get("--model") or given.get("--model-path") or os.path.dirname(given["-m"])
if os.environ.get("KIT_BROKEN"):
    sys.exit("no such kernel")
os.environ["KIT_NAME"] = given.get("--served-model-name") or model
sys.path.insert(0, {str(Path(kit.__file__).parents[1])!r})
from kit import remote_engines
llamacpp = os.path.basename(sys.argv[0]) == "llama-server"
kind = "llamacpp" if llamacpp else "vllm" if "vllm.entrypoints.openai.api_server" in sys.argv else "sglang"
os.execv(sys.executable, [sys.executable, remote_engines.__file__, kind, str(remote_engines.read_weights(model)), given["--port"]])
"""  # noqa: E501


def fleet(home, *kinds, started=None, **options):
    pytest.importorskip("safetensors.torch")
    (home / "source").mkdir(exist_ok=True)
    (home / "source" / "config.json").write_text("{}")
    directories = ModelDirectories(home / "directories", home / "source", fingerprint=fingerprint)
    logs = home / "logs"
    started = started or [
        ServerProcess(kind, home, logs / f"{i}.log", context=256, gpu=False)
        for i, kind in enumerate(kinds)
    ]
    engines = [CLIENTS[server.kind](server.url, context=256) for server in started]
    options = {"start_s": 30.0, "directories": directories, "patience_s": 30.0} | options
    return ManagedFleet(engines, started, **described(**options))


def alive(pid):
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    return True
