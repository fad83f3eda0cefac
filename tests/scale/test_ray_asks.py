"""What is asked of Ray, and what its errors do: a cluster of stand-ins, with
Ray's own exceptions."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace

import pytest

from turnwright.config import ScaleConfig
from turnwright.engines.remote.engine_list import EngineList
from turnwright.engines.remote.placed import PlacedServers
from turnwright.errors import EngineError

pytestmark = pytest.mark.ray
OPTIONS = {"max_restarts": -1, "max_task_retries": 0}


class Cluster:
    """Bundles, actors and their options as they are asked for; `faults` are raised by
    calls of a name, in order."""

    def __init__(self, monkeypatch, module):
        from turnwright_cluster import ray_workers

        self.bundles, self.options, self.faults, self.started = [], [], {}, []
        ray = SimpleNamespace(
            remote=lambda cls: SimpleNamespace(options=self._options),
            kill=lambda actor: None,
            shutdown=lambda: None,
            nodes=self._nodes,
            available_resources=dict,
            is_initialized=lambda: True,
        )
        for one in {module, ray_workers}:
            monkeypatch.setattr(one, "ray", ray)
        monkeypatch.setattr(module, "connect", lambda scale: None)
        monkeypatch.setattr(module, "AGAIN_S", 0.01)
        if hasattr(module, "placement_group"):
            monkeypatch.setattr(module, "placement_group", self._group)
            monkeypatch.setattr(module, "remove_placement_group", lambda group: None)
            index = "placement_group_bundle_index"
            monkeypatch.setattr(
                module, "PlacementGroupSchedulingStrategy", lambda group, **given: given[index]
            )

    def _nodes(self):
        self._call("nodes")
        return [{"NodeID": "n1", "Alive": True}]

    def _group(self, bundles, strategy):
        async def ready():
            self._call("ready")

        self.bundles.append((bundles, strategy))
        return SimpleNamespace(ready=ready)

    def _options(self, **options):
        self.options.append(options)
        return SimpleNamespace(remote=self._actor)

    def _call(self, name):
        if self.faults.get(name) and (fault := self.faults[name].pop(0)):
            raise fault

    def _actor(self, *given):
        async def locate():
            self._call("locate")
            return "10.0.0.2", ""

        async def start(directory):
            self.started.append(directory)
            self._call("start")
            return f"http://10.0.0.2:{8000 + len(self.started)}"

        async def ended():
            self._call("ended")
            await asyncio.Event().wait()

        async def run(*given):
            self.started.append(given)
            self._call("run")

        return SimpleNamespace(
            **{one.__name__: SimpleNamespace(remote=one) for one in (locate, start, ended, run)}
        )


@pytest.fixture
def cluster(monkeypatch):
    from turnwright_cluster import ray_engines

    return Cluster(monkeypatch, ray_engines)


def keep(cluster, tmp_path, until, gpus=0.0, count=1):
    """Keep servers running until something holds; return what was noted and the list."""
    from turnwright_cluster.ray_engines import RayEngines

    notes, listed = [], EngineList(tmp_path / "list")

    async def directory(host):
        return tmp_path / host

    async def work():
        engines = RayEngines(
            ScaleConfig(ray="auto", ray_engine_cpus=2.0, ray_engine_gpus=gpus), note=notes.append
        )
        servers = PlacedServers("vllm", count, tmp_path, tmp_path / "logs", 60.0, {})
        try:
            await engines.start(servers, directory, listed)
            async with asyncio.timeout(10):
                while not until(listed.urls()):
                    await asyncio.sleep(0.01)
        finally:
            await engines.close()

    asyncio.run(work())
    return notes


@pytest.mark.parametrize(
    ("gpus", "bundle"), [(0.0, {}), (0.5, {"GPU": 0.5}), (1.0, {"GPU": 1.0}), (4.0, {"GPU": 4.0})]
)
def test_a_bundle_has_the_gpus_of_one_server_and_an_actor_has_all_of_them(
    cluster, tmp_path, gpus, bundle
):
    keep(cluster, tmp_path, lambda urls: len(urls) == 3, gpus, 3)
    assert cluster.bundles == [([{"CPU": 2.0, **bundle}] * 3, "SPREAD")]
    assert cluster.options == [
        {"num_cpus": 2.0, "num_gpus": gpus, "scheduling_strategy": number, **OPTIONS}
        for number in range(3)
    ]
    assert cluster.started == [tmp_path / "10.0.0.2"] * 3


@pytest.mark.parametrize(("call", "starts"), [("locate", 1), ("start", 4), ("ended", 4)])
def test_an_unexpected_error_is_noted_once_and_the_server_is_kept(cluster, tmp_path, call, starts):
    from ray.exceptions import RaySystemError

    # Locating it once more, before the first start, has no fault.
    cluster.faults[call] = [None] * (call == "locate") + [RaySystemError("the store is gone")] * 3
    last = f"http://10.0.0.2:{8000 + starts}"
    notes = keep(cluster, tmp_path, lambda urls: urls == (last,) and not cluster.faults[call])
    again = [note for note in notes if "is started again" in note]
    # Each server that answered has a URL of its own.
    assert len(again) == (3 if call == "ended" else 1)
    assert all(
        "server 0" in note and "RaySystemError" in note and "the store is gone" in note
        for note in again
    )


def test_an_actor_that_died_for_good_is_replaced_and_one_that_is_restarted_is_not(
    cluster, tmp_path
):
    from ray.exceptions import ActorDiedError, ActorUnavailableError

    cluster.faults["ended"] = [ActorUnavailableError("restarting", b"\0" * 16), ActorDiedError()]
    keep(
        cluster,
        tmp_path,
        lambda urls: urls == ("http://10.0.0.2:8003",) and not cluster.faults["ended"],
    )
    assert len(cluster.options) == 2


def test_a_cluster_that_fails_ends_the_run_with_the_reason(cluster, tmp_path):
    from ray.exceptions import RaySystemError

    cluster.faults["ready"] = [RaySystemError("no head")]
    with pytest.raises(EngineError, match="Ray places no servers of 2 CPU"):
        keep(cluster, tmp_path, lambda urls: False)


def test_a_server_that_never_starts_ends_the_run_with_the_reason(cluster, tmp_path):
    cluster.faults["start"] = [OSError("no such device")] * 99
    with pytest.raises(
        EngineError,
        match="none of 1 servers started on the Ray cluster auto: unexpected OSError: no such "
        "device",
    ):
        keep(cluster, tmp_path, lambda urls: False)
    assert len(cluster.started) == 8


def test_unexpected_errors_of_workers_and_nodes_are_noted_once_and_workers_are_kept(monkeypatch):
    from ray.exceptions import RaySystemError

    from turnwright_cluster import ray_workers

    cluster, notes, dead = Cluster(monkeypatch, ray_workers), [], []
    monkeypatch.setattr(ray_workers, "NODES_S", 0.01)
    monkeypatch.setattr(ray_workers, "NodeAffinitySchedulingStrategy", lambda node, soft: node)
    cluster.faults = {
        "run": [RaySystemError("lost")] * 3,
        "nodes": [None, *[RaySystemError("no answer")] * 3],
    }

    async def work():
        workers = ray_workers.RayWorkers(
            ScaleConfig(ray="auto"), on_death=lambda name, why: dead.append(why), note=notes.append
        )
        workers.start("http://run", "token")
        async with asyncio.timeout(10):
            while len(cluster.started) < 4 or cluster.faults["nodes"]:
                await asyncio.sleep(0.01)
        await workers.close()

    asyncio.run(work())
    assert (
        len(
            [
                note
                for note in notes
                if note.startswith("worker ray-n1: unexpected RaySystemError: ") and "lost" in note
            ]
        )
        == 1
    )
    assert len([note for note in notes if "does not list its nodes" in note]) == 1
    assert dead == ["Ray: RaySystemError"] * 3
    assert len(cluster.options) == 4
