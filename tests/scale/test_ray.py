"""Workers on a real Ray cluster: `make test-ray` installs it."""

from __future__ import annotations

import os
import signal
from pathlib import Path

import pytest
from kit.processes import children
from kit.workers import events, final_weights, finished, processes, start, wait_for, write_recipe

pytestmark = pytest.mark.ray
WORDS = ("--scale.ray", "local", "--scale.ray-workers", "2", "--scale.ray-cpus", "0.5")


def test_workers_on_ray_give_the_weights_of_one_process(alone, tmp_path):
    recipe, log = write_recipe(tmp_path), tmp_path / "log"
    with processes() as started:
        started.append(start("train", recipe, "--out", tmp_path / "run", *WORDS, log=log))
        finished(started[0], log)
    assert final_weights(tmp_path / "run") == final_weights(alone)


def test_a_node_that_joins_gets_a_worker_and_one_that_leaves_is_no_error(alone, tmp_path):
    from ray.cluster_utils import Cluster

    recipe, log = write_recipe(tmp_path, pause=0.5), tmp_path / "log"
    run = tmp_path / "run"
    cluster = Cluster(initialize_head=True, head_node_args={"num_cpus": 2})
    try:
        with processes() as started:
            started.append(
                start("train", recipe, "--out", run, "--scale.ray", cluster.address, log=log)
            )
            wait_for(
                lambda: [e for e in events(run, "turn") if e["k"][0] == "train"], why=log.read_text
            )
            assert log.read_text().count("joined: up to") == 1
            node = cluster.add_node(num_cpus=2)
            wait_for(lambda: log.read_text().count("joined: up to") == 2, why=log.read_text)
            cluster.remove_node(node, allow_graceful=False)
            finished(started[0], log)
    finally:
        cluster.shutdown()
    assert final_weights(run) == final_weights(alone)


def actors() -> list[int]:
    """Processes of actors below this one."""
    names = {pid: Path(f"/proc/{pid}/comm") for pid in children()}
    return [pid for pid, name in names.items() if name.exists() and "_Actor" in name.read_text()]


def test_a_killed_actor_is_restarted_and_its_groups_are_asked_for_again(alone, tmp_path):
    recipe, log = write_recipe(tmp_path, pause=0.3), tmp_path / "log"
    run = tmp_path / "run"
    with processes() as started:
        started.append(start("train", recipe, "--out", run, *WORDS, log=log))
        wait_for(
            lambda: [e for e in events(run, "turn") if e["k"][0] == "train"], why=log.read_text
        )
        victim = actors()[0]
        os.kill(victim, signal.SIGKILL)
        finished(started[0], log)
    assert final_weights(run) == final_weights(alone)
    assert log.read_text().count("joined: up to") >= 3  # Ray restarted it
