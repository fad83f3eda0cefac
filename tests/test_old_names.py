"""Old names and module paths of release 0.1 work for one more release, and warn."""

from __future__ import annotations

import subprocess
import sys
from importlib import import_module
from types import SimpleNamespace

import pytest

import turnwise as tw
from turnwise import _old_names
from turnwise.engines import AcceptsPixelSource, NeedsRenderer, Request
from turnwise.engines.local import LocalEngine
from turnwise.engines.remote import Fleet, RemoteEngine
from turnwise.envs import Action, EnvSpec
from turnwise.envs.base import IsolatedReward
from turnwise.envs.isolation.process_env import ProcessEnv
from turnwise.envs.tool_env import ToolEnv
from turnwise.renderers.base import vision_of
from turnwise.types import Sample, Trajectory

MEMBERS = [
    (Trajectory, "received", "prompt_ids"),
    (Trajectory, "begins", "reply_start"),
    (Trajectory, "lineage", "turn_chain"),
    (Trajectory, "placed", "media_placements"),
    (Sample, "routed", "routes_mask"),
    (EnvSpec, "both", "train_and_eval_tasks"),
    (Action, "whole", "raw_source"),
    (Request, "want", "extras"),
]


@pytest.mark.parametrize(("old", "new"), _old_names.PUBLIC.items())
def test_public_names(old, new):
    with pytest.warns(DeprecationWarning, match=f"turnwise.{old} is now turnwise.{new}"):
        assert getattr(tw, old) is getattr(tw, new)


@pytest.mark.parametrize(("old", "new"), _old_names._PATHS.items())
def test_module_paths_forward_to_the_new_modules(old, new):
    target = import_module(new)
    name = next((name for name in vars(target) if not name.startswith("_")), None)
    if name is None:  # a package that exports nothing
        assert not import_module(old).__path__
        return
    with pytest.warns(DeprecationWarning, match=f"{old} is now {new}"):
        assert getattr(import_module(old), name) is getattr(target, name)


@pytest.mark.parametrize(("old", "new"), _old_names._NAMES.items())
def test_names_of_documented_modules(old, new):
    module, _, name = old.rpartition(".")
    with pytest.warns(DeprecationWarning, match="the next release removes the old name"):
        assert getattr(import_module(module), name) is getattr(import_module(_old_names._PATHS[module]), new)


@pytest.mark.parametrize(("owner", "old", "new"), MEMBERS)
def test_members(owner, old, new):
    holder = SimpleNamespace(**{new: object()})
    with pytest.warns(DeprecationWarning, match=f"{owner.__name__}.{old} is now {new}"):
        assert vars(owner)[old].__get__(holder, owner) is getattr(holder, new)
    assert hasattr(owner, new) or new in owner.__dataclass_fields__


class OldEngine(tw.ScriptedEngine):
    """Implements the members of release 0.1."""

    set_renderer = None
    bound = None

    def bind(self, renderer):
        OldEngine.bound = renderer
        tw.ScriptedEngine.set_renderer(self, renderer)


class OldRenderer:
    """Declares no `vision`; everything else is the built-in renderer's."""

    eyes = "processor"

    def __init__(self):
        self.inner = tw.byte_renderer()

    def __getattr__(self, name):
        if name == "vision":
            raise AttributeError(name)
        return getattr(self.inner, name)


def test_members_that_users_implement_work_under_their_old_names():
    renderer = tw.byte_renderer()
    with pytest.warns(DeprecationWarning, match="OldEngine.bind is now set_renderer"):
        tw.Rollout(OldEngine(["x"]), renderer)
    assert OldEngine.bound is renderer
    with pytest.warns(DeprecationWarning, match="OldRenderer.eyes is now vision"):
        assert vision_of(OldRenderer()) == "processor"


@pytest.mark.parametrize("engine", [LocalEngine, RemoteEngine, Fleet])
def test_engines_have_the_capabilities_that_rollouts_look_for(engine):
    assert issubclass(engine, NeedsRenderer)
    assert issubclass(engine, AcceptsPixelSource)


def test_environments_compute_isolated_rewards_where_rollouts_look_for_it():
    assert issubclass(ToolEnv, IsolatedReward)
    assert issubclass(ProcessEnv, IsolatedReward)


def test_importing_an_old_package_leaves_the_functions_callable():
    code = (
        "import turnwise, turnwise.rollout, turnwise.train, turnwise.rollout.sanity\n"
        "from turnwise.rollout import Rollout\n"
        "assert callable(turnwise.rollout) and callable(turnwise.train)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
