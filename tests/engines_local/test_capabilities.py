"""Optional capabilities are found where rollouts look for them."""

from __future__ import annotations

import pytest

from turnwright.engines import AcceptsPixelSource, NeedsRenderer
from turnwright.engines.local import LocalEngine
from turnwright.engines.remote import Fleet, RemoteEngine
from turnwright.envs.env import IsolatedReward
from turnwright.envs.isolation.process_env import ProcessEnv
from turnwright.envs.tool_env import ToolEnv


@pytest.mark.parametrize("engine", [LocalEngine, RemoteEngine, Fleet])
def test_engines_have_the_capabilities_that_rollouts_look_for(engine):
    assert issubclass(engine, NeedsRenderer)
    assert issubclass(engine, AcceptsPixelSource)


def test_environments_compute_isolated_rewards_where_rollouts_look_for_it():
    assert issubclass(ToolEnv, IsolatedReward)
    assert issubclass(ProcessEnv, IsolatedReward)
