"""Servers on nodes that do not see the run's directory, and nodes that die: raylets in mount
namespaces of their own."""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path

import pytest
from kit.ray_cluster import TOKEN, VARIABLES, ray_nodes, write_server
from kit.workers import events, final_weights, finished, processes, start, wait_for, write_recipe

pytestmark = pytest.mark.ray
WORDS = ("--model.heads", "1", "--model.kv-heads", "1")
ROOM = (
    "--scale.ray-workers",
    "1",
    "--scale.ray-cpus",
    "0.5",
    "--scale.ray-engine-cpus",
    "2",
    "--scale.ray-engine-gpus",
    "0",
)
SERVERS = (
    "--engine.kind",
    "vllm",
    "--engine.key-env",
    TOKEN,
    "--engine.tree",
    "true",
    "--engine.servers",
)


@pytest.fixture
def folders(tmp_path):
    """Directory of the run, which only the first node sees, and the words of a run
    that is played there."""
    run, home = tmp_path / "run", write_server(tmp_path / "home")
    run.mkdir()
    return run, (*WORDS, *ROOM, "--engine.install-dir", home, "--out", run)


def alone(folder: Path, *words: str) -> Path:
    """Play the recipe in one process; return the run."""
    run, log = folder / "alone", folder / "alone.log"
    with processes() as started:
        started.append(start("train", write_recipe(folder), *WORDS, *words, "--out", run, log=log))
        finished(started[0], log)
    return run


def test_nodes_that_do_not_see_the_run_get_its_weights_once_over_the_network(folders, tmp_path):
    run, words = folders
    log = tmp_path / "log"
    with ray_nodes(tmp_path) as nodes, processes() as started:
        nodes.add(1)  # room for the worker alone
        other = nodes.add(5, hidden=run)
        recipe = write_recipe(tmp_path, pause=0.3)
        words = (recipe, *words, *SERVERS, "2", "--scale.ray", nodes.address)
        started.append(start("train", *words, log=log, **VARIABLES))
        wait_for(
            lambda: [e for e in events(run, "turn") if e["k"][:2] == ["train", 1]],
            120,
            log.read_text,
        )
        servers = other.pids("turnwright.cli.main")
        models = {
            Path(f"/proc/{pid}/cmdline").read_bytes().split(b"\0")[4].decode() for pid in servers
        }
        seen = [list(Path(f"/proc/{pid}/root{run}").iterdir()) for pid in servers]
        stored = sorted(path for model in models for path in Path(model).parent.iterdir())
        finished(started[0], log)
    assert len(servers) == 2
    assert seen == [[], []], "the servers see the run's directory: nothing is proven"
    assert len({Path(model).parent for model in models}) == 1  # one reader for both
    assert {path.name for path in stored} <= {f"policy-{version}" for version in range(3)}
    assert not any(path.exists() for path in stored)
    assert final_weights(run) == final_weights(alone(tmp_path))


def test_an_evaluation_has_its_servers_placed_and_plays_as_one_process_does(folders, tmp_path):
    _, words = folders
    words, log, alone_log = words[: words.index("--out")], tmp_path / "log", tmp_path / "alone.json"
    recipe, trained = write_recipe(tmp_path), alone(tmp_path)
    model = max((trained / "checkpoints").glob("step-*"))
    command = (
        "eval",
        recipe,
        *WORDS,
        "--checkpoint",
        model,
        "--samples",
        "8",
        "--json",
        "--display",
        "plain",
    )
    with ray_nodes(tmp_path) as nodes, processes() as started:
        started.append(start(*command, log=alone_log))
        finished(started[0], alone_log)
        nodes.add(1)
        nodes.add(2)
        started.append(
            start(
                *command, *words, *SERVERS, "1", "--scale.ray", nodes.address, log=log, **VARIABLES
            )
        )
        finished(started[1], log)
    assert "workers ([scale]) play those of turnwright train" in log.read_text()
    found, wanted = (
        json.loads(one.read_text()[one.read_text().index("{") :]) for one in (log, alone_log)
    )
    assert found == wanted


def test_a_server_of_a_node_that_dies_is_replaced_on_another_and_nothing_is_lost(folders, tmp_path):
    run, words = folders
    log, listed, hold = tmp_path / "log", run / "engines" / "ray.txt", tmp_path / "hold"
    held = ("--env.args.hold", hold, "--limits.env-s", "600", "--limits.wall-clock-s", "600")
    with ray_nodes(tmp_path) as nodes, processes() as started:
        nodes.add(1)
        first, second = nodes.add(3, hidden=run), nodes.add(3, hidden=run)  # each with room for one
        recipe = write_recipe(tmp_path, pause=0.3)
        words = (recipe, *words, *SERVERS, "2", "--scale.ray", nodes.address, *held)
        started.append(start("train", *words, log=log, **VARIABLES))
        wait_for(
            lambda: events(run, "turn") and listed.read_text().count("http") == 2,
            120,
            log.read_text,
        )
        second.kill()
        hold.touch()  # however long Ray takes to notice
        wait_for(lambda: second.host not in listed.read_text(), 120, log.read_text)
        before = len(events(run, "turn"))
        hold.unlink()
        # By the other one alone.
        wait_for(lambda: len(events(run, "turn")) > before + 2, 60, log.read_text)
        assert first.host in listed.read_text()
        hold.touch()
        third = nodes.add(3, hidden=run)
        wait_for(lambda: third.host in listed.read_text(), 180, log.read_text)
        hold.unlink()
        finished(started[0], log)
    undisturbed = alone(tmp_path)
    closed = Counter(str(event["k"]) for event in events(run, "closed"))
    assert set(closed) == {str(event["k"]) for event in events(undisturbed, "closed")}
    assert set(closed.values()) == {1}
    assert final_weights(run) == final_weights(undisturbed)
