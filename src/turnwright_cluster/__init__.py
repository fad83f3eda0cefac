"""Workers in other processes and on other machines: groups of episodes are placed on them, over HTTP or with Ray."""

from turnwright_cluster.base import GroupSpec, PlayedGroup, RolloutWorker, WorkerLied, WorkerLost

__all__ = ["GroupSpec", "PlayedGroup", "RolloutWorker", "WorkerLied", "WorkerLost"]
