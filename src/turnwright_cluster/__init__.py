"""Workers in other processes and on other machines: groups of episodes are placed on them,
over HTTP or with Ray."""

from typing import TYPE_CHECKING

from turnwright._lazy import lazy_names

if TYPE_CHECKING:
    from turnwright_cluster.base import GroupSpec as GroupSpec
    from turnwright_cluster.base import PlayedGroup as PlayedGroup
    from turnwright_cluster.base import RolloutWorker as RolloutWorker
    from turnwright_cluster.base import WorkerLost as WorkerLost

if not TYPE_CHECKING:
    __all__, __getattr__ = lazy_names(__name__, __file__)
