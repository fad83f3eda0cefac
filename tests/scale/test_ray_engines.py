"""Servers that a run starts on a real Ray cluster: `make test-ray` installs it."""

from __future__ import annotations

import os
import signal
from collections import Counter
from pathlib import Path

import pytest
from kit.processes import children
from kit.ray_cluster import TOKEN, with_text, write_server
from kit.workers import (
    events,
    final_weights,
    finished,
    kill,
    processes,
    start,
    wait_for,
    write_recipe,
)

pytestmark = pytest.mark.ray
WORDS = ("--model.heads", "1", "--model.kv-heads", "1")
RAY = ("--scale.ray", "local", "--scale.ray-workers", "1", "--scale.ray-cpus", "0.5")
SERVERS = ("--engine.kind", "vllm", "--engine.servers", "2", "--engine.key-env", TOKEN)
ROOM = ("--scale.ray-engine-cpus", "0.5", "--scale.ray-engine-gpus", "0")


@pytest.fixture
def command(tmp_path):
    """Words of a run whose servers are placed, and its variables."""
    recipe, home = write_recipe(tmp_path, pause=0.3), write_server(tmp_path / "home")
    return ("train", recipe, *WORDS, *RAY, *SERVERS, *ROOM, "--engine.install-dir", home)


def pids(text: str) -> list[int]:
    """Processes below this one with a text in their command line or their name."""
    return with_text(text, children())


def test_servers_on_ray_lose_no_call_when_an_actor_and_a_server_are_killed(command, tmp_path):
    alone, run, log = tmp_path / "alone", tmp_path / "run", tmp_path / "log"
    with processes() as started:
        started.append(
            start("train", write_recipe(tmp_path, pause=0.3), *WORDS, "--out", alone, log=log)
        )
        finished(started[0], log)
        started.append(start(*command, "--out", run, log=log, **{TOKEN: "a-key"}))
        wait_for(lambda: len(events(run, "turn")) > 2, 120, log.read_text)
        os.kill(pids("_EngineActor")[0], signal.SIGKILL)
        wait_for(lambda: log.read_text().count("is started again") >= 1, 60, log.read_text)
        before = len(events(run, "turn"))
        wait_for(lambda: len(events(run, "turn")) > before, 60, log.read_text)
        os.kill(pids(str(run / "weights"))[0], signal.SIGKILL)
        wait_for(lambda: log.read_text().count("is started again") >= 2, 60, log.read_text)
        finished(started[1], log)
    wait_for(lambda: not with_text(str(run / "weights")), 30)  # none is left, under whatever parent
    closed = Counter(str(event["k"]) for event in events(run, "closed"))
    assert set(closed) == {str(event["k"]) for event in events(alone, "closed")}
    assert set(closed.values()) == {1}
    assert final_weights(run) == final_weights(alone)


def test_servers_on_ray_end_with_a_killed_run(command, tmp_path):
    run, log = tmp_path / "run", tmp_path / "log"
    with processes() as started:
        started.append(start(*command, "--out", run, log=log, **{TOKEN: "a-key"}))
        wait_for(lambda: events(run, "turn"), 120, log.read_text)
        servers = pids(str(run / "weights"))
        assert servers
        servers += pids("_EngineActor")
        kill(started[0])
        wait_for(lambda: not any(Path(f"/proc/{pid}").exists() for pid in servers), 60)
