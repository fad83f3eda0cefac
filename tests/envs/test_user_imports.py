"""Imports of user code: package roots, files of one name, stand-ins of frameworks."""

import asyncio
import importlib
import importlib.util
import pickle
import subprocess
import sys
import threading

import pytest

from turnwright.config import EnvConfig
from turnwright.envs import resolve_env, user_imports
from turnwright.envs.isolation.process_env import ProcessEnvs
from turnwright.envs.user_code import RemoteException, load_user_module
from turnwright.errors import ConfigError
from turnwright.types import Task

ENV = """
import turnwright as tw
{imports}

class Game(tw.Env):
    tasks = [tw.Task(f"task {{n}}") for n in range(5)]

    def reset(self, task, *, seed=None):
        from {late} import WORD
        return f"{{VALUE}} {{WORD}}"

    def step(self, action):
        return tw.Step(f"ok", 1.0, terminated=True)
"""


def write(root, files):
    for name, text in files.items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text(text)


def opening(spec):
    return spec.factory().reset(spec.tasks("train")[0])


@pytest.fixture
def repository(tmp_path):
    """A source tree as slime's: a folder of packages without `__init__.py`."""
    package = {"__init__.py": "", "base.py": "VALUE = 'base'", "words.py": "WORD = 'late'"}
    write(tmp_path, {f"examples/game/{name}": text for name, text in package.items()})
    write(
        tmp_path,
        {
            "examples/game/deep/__init__.py": "",
            "examples/game/deep/x.py": "from ..base import VALUE as V",
        },
    )
    return tmp_path


@pytest.mark.parametrize(
    ("imports", "late"),
    [
        ("from .base import VALUE", ".words"),
        ("from examples.game.base import VALUE", "examples.game.words"),
        ("import examples.game.base as b; VALUE = b.VALUE", "examples.game.words"),
        ("import examples.game.base; VALUE = examples.game.base.VALUE", ".words"),
        ("from . import base; VALUE = base.VALUE", "words"),
        ("from game.base import VALUE", "game.words"),
        ("from base import VALUE", "words"),
        ("from .deep.x import V as VALUE", ".deep.x"),
        ("import importlib; VALUE = importlib.import_module('.base', __package__).VALUE", ".words"),
    ],
)
def test_a_file_imports_what_its_source_tree_has(
    repository, imports, late, tmp_path_factory, monkeypatch
):
    # Has a folder `examples` too, without `game`.
    elsewhere = tmp_path_factory.mktemp("working-directory")
    (elsewhere / "examples" / "other").mkdir(parents=True)
    monkeypatch.syspath_prepend(elsewhere)
    text = ENV.format(imports=imports, late=late).replace(
        "import WORD", "import V as WORD" if late == ".deep.x" else "import WORD"
    )
    write(repository, {"examples/game/env.py": text})
    before = set(sys.modules)
    spec = resolve_env("examples/game/env.py:Game", base=repository)
    assert opening(spec) == ("base base" if late == ".deep.x" else "base late")
    public = {
        name
        for name in set(sys.modules) - before
        if not name.startswith(("turnwright_package_", "turnwright_user_"))
    }
    assert not public & {"examples", "examples.game", "game", "base", "words"}
    assert str(repository / "examples/game") not in sys.path

    async def isolated():
        server = ProcessEnvs(pickle.loads(pickle.dumps(spec.factory)))
        env = server()
        try:
            return await env.reset(spec.tasks("train")[0])
        finally:
            await env.close()
            await server.close()

    assert asyncio.run(isolated())[0].text == opening(spec)


def test_files_of_one_name_do_not_collide(tmp_path):
    for name in ("a", "b"):
        write(
            tmp_path,
            {f"{name}/env.py": ENV.format(imports="from helper import VALUE", late="helper")},
        )
        write(tmp_path, {f"{name}/helper.py": f"VALUE, WORD = 'of {name}', 'late'"})
    first, second = (resolve_env(f"{name}/env.py:Game", base=tmp_path) for name in ("a", "b"))
    assert (opening(first), opening(second), opening(first)) == (
        "of a late",
        "of b late",
        "of a late",
    )


def test_an_edited_file_is_loaded_again(tmp_path):
    write(tmp_path, {"env.py": "VALUE = 1"})
    first = load_user_module(tmp_path / "env.py", "env.py")
    assert load_user_module(tmp_path / "env.py", "env.py") is first
    write(tmp_path, {"env.py": "VALUE = 22"})
    assert load_user_module(tmp_path / "env.py", "env.py").VALUE == 22


def test_installed_modules_and_the_standard_library_are_themselves(tmp_path):
    write(
        tmp_path,
        {
            "env.py": "import json, numpy, turnwright, os.path\nfrom email import message\n",
            "json.py": "x = 1",
            "numpy.py": "",
        },
    )
    import numpy

    module = load_user_module(tmp_path / "env.py", "env.py")
    assert module.json is sys.modules["json"]
    assert module.numpy is numpy
    assert module.turnwright is sys.modules["turnwright"]


def test_nothing_beyond_the_project_is_found(tmp_path):
    write(
        tmp_path,
        {
            "outside/__init__.py": "",
            "outside/x.py": "",
            "p/pyproject.toml": "",
            "p/deep/env.py": "import outside.x",
        },
    )
    with pytest.raises(
        ConfigError,
        match=r"env.py: line 1: ModuleNotFoundError: No module named 'outside'; install outside",
    ):
        load_user_module(tmp_path / "p/deep/env.py", "env.py")


HOMES = {
    "ours_of_base.py": "from typing import Any\nclass Base:\n    kept = True\nclass Old: ours = "
    "True\ndef help_old(): ...\n",
    "ours_of_gone.py": "from turnwright.envs.user_imports import import_for_user\nBase = "
    "import_for_user('frame_work.base', fromlist=('Base',)).Base\nclass "
    "Gone(Base):\n    pass",
}
TABLE = {
    "frame_work.base": {"ours_of_base": "Base Old help=help_old"},
    "frame_work.gone.base": {"ours_of_gone": "Base Gone"},
    "frame_work.again": {
        "ours_of_base": "Base",
        "frame_work.gone.base": "Old=Base",
        "frame_work.again": "below",
    },
    "frame_work.again.below": {"ours_of_base": "Old"},
}
USER = """
import frame_work.base
import frame_work.gone.base as gone
from frame_work.base import Base
from frame_work import gone as package
assert package.base is gone and gone.Gone.__mro__[1] is Base is frame_work.base.Base
class Mine(Base): pass
def late():
    from frame_work.gone.base import Gone
    import frame_work.gone.base
    return Gone, frame_work.gone.base.Gone
def cannot():
    import frame_work.nothing
"""


@pytest.fixture
def framework(tmp_path, monkeypatch):
    write(tmp_path / "ins", HOMES)
    write(tmp_path, {"user.py": USER})
    monkeypatch.syspath_prepend(tmp_path / "ins")
    stand_ins = importlib.import_module(user_imports.STAND_INS)
    for name, sources in TABLE.items():
        monkeypatch.setitem(stand_ins.MODULES, name, sources)
    before = set(sys.modules)
    yield tmp_path
    for name in set(sys.modules) - before:
        # A process of an environment loads every file that is loaded here.
        del sys.modules[name]


def test_user_code_finds_stand_ins_and_libraries_do_not(framework):
    user = load_user_module(framework / "user.py", "user.py")
    first, second = user.late()
    assert first is second
    assert user.Base.__module__ == "turnwright.envs.stand_ins.frame_work.base"
    assert user_imports.public_name(user.Base.__module__) == "frame_work.base"
    assert pickle.loads(pickle.dumps(user.Base)) is user.Base
    assert user_imports.import_foreign("frame_work.base").Base is user.Base
    assert [one.Base for one in user_imports.loaded_foreign("frame_work.base")] == [user.Base]
    assert importlib.util.find_spec("frame_work") is None
    with pytest.raises(ModuleNotFoundError):
        importlib.import_module("frame_work")
    with pytest.raises(ModuleNotFoundError, match="frame_work"):
        user.cannot()
    found = []
    threads = [threading.Thread(target=lambda: found.append(user.late())) for _ in range(16)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert set(found) == {(first, first)}


def test_a_module_of_a_table_is_one_of_its_own(framework):
    again = importlib.import_module(f"{user_imports.STAND_INS}.frame_work.again")
    # imported, since it has a class of the other.
    base = sys.modules[f"{user_imports.STAND_INS}.frame_work.base"]
    assert base.help.__module__ == base.__name__
    assert base.help.__qualname__ == base.help.__name__ == "help"
    assert pickle.loads(pickle.dumps(base.help)) is base.help
    assert not hasattr(base, "help_old")
    assert base.Any is importlib.import_module("typing").Any, (
        "annotations are evaluated with what the home imports"
    )
    assert (
        base.__package__
        == again.__package__.rpartition(".")[0]
        == sys.modules[base.__package__].__name__
    )
    assert sys.modules[base.__package__].again is again

    assert again.Base is again.Old is base.Base, "objects belong to the first module that has them"
    assert again.__path__ == []
    assert again.below.Old is base.Old
    names = {}
    exec(f"from {again.__name__} import *", names)
    assert {"Base", "Old", "below"} <= set(names)
    with pytest.raises(ImportError, match="cannot import name 'help'"):
        exec(f"from {again.__name__} import help")
    with pytest.raises(ModuleNotFoundError):
        importlib.import_module(f"{base.__name__}.nothing")


def test_the_installed_framework_wins_and_what_it_deleted_is_found(framework, monkeypatch):
    write(
        framework / "site",
        {"frame_work/__init__.py": "", "frame_work/base.py": "class Base:\n    kept = False"},
    )
    monkeypatch.syspath_prepend(framework / "site")
    user = load_user_module(framework / "user.py", "user.py")
    theirs = importlib.import_module("frame_work.base")
    assert user.Base is theirs.Base is user.late()[0].__mro__[1]
    assert not user.Base.kept
    assert user.late()[0] is user.late()[1]
    assert not hasattr(importlib.import_module("frame_work"), "gone")
    assert user_imports.import_foreign("frame_work.base") is theirs
    write(framework, {"old.py": "from frame_work.base import Base, Old\n"})
    assert load_user_module(framework / "old.py", "old.py").Old.ours


def test_modules_with_the_names_of_another_have_the_installed_ones(framework, monkeypatch):
    stand_ins = importlib.import_module(user_imports.STAND_INS)
    monkeypatch.setitem(stand_ins.SAME, "frame_work.old_name", "frame_work.base")
    write(
        framework,
        {"named.py": "from frame_work.old_name import Base\nimport frame_work.old_name as old\n"},
    )
    write(
        framework / "site", {"frame_work/__init__.py": "", "frame_work/base.py": "class Base: pass"}
    )
    monkeypatch.syspath_prepend(framework / "site")
    named = load_user_module(framework / "named.py", "named.py")
    assert named.Base is named.old.Base is importlib.import_module("frame_work.base").Base


def test_a_broken_framework_is_no_missing_one(framework, monkeypatch):
    write(framework / "site", {"frame_work/__init__.py": "import what_it_needs"})
    monkeypatch.syspath_prepend(framework / "site")
    with pytest.raises(
        ConfigError,
        match=r"user.py: line 2: ModuleNotFoundError: No module named 'what_it_needs'; install",
    ):
        load_user_module(framework / "user.py", "user.py")


def test_stand_ins_in_a_process_of_their_own(framework):
    write(
        framework,
        {
            "game.py": f"import sys\nimport turnwright.envs.stand_ins as ins\n"
            f"sys.path.append({str(framework / 'ins')!r})\nins.MODULES.update({TABLE!r})\n"
            + ENV.format(
                imports="from frame_work.base import Base; VALUE = Base.kept",
                late="frame_work.gone.base",
            ).replace("WORD", "Gone")
        },
    )
    spec = resolve_env(EnvConfig(use="game.py:Game"), base=framework)

    async def isolated():
        server = ProcessEnvs(spec.factory)
        env = server()
        try:
            return await env.reset(Task("x"))
        finally:
            await env.close()
            await server.close()

    assert "True" in asyncio.run(isolated())[0].text


def test_private_names_need_nothing_loaded_first():
    code = (
        "import turnwright.envs.stand_ins, sys; assert sys.meta_path[0].__name__ == "
        "'_PrivateFinder'"
    )
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


SCORE = """
class Score:
    def __init__(self):
        self.value = 3
"""


def test_a_process_loads_only_the_files_that_it_needs(tmp_path):
    """Those of its environment, and those of what it is sent."""
    loads = (
        "import pathlib, turnwright as tw; "
        "pathlib.Path(__file__).with_suffix('.loads').open('a').write('x')\n"
    )
    game = ENV.format(imports="from math import pi as VALUE", late="math").replace(
        "import WORD", "import tau as WORD"
    )
    game = game.replace('return f"{VALUE} {WORD}"', "return str(task.info['score'].value)")
    write(
        tmp_path,
        {f"{name}.py": loads + SCORE for name in ("needed", "unused", "changed")}
        | {"env.py": loads + game},
    )
    needed, _, changed = (
        load_user_module(tmp_path / f"{name}.py", "it") for name in ("needed", "unused", "changed")
    )
    spec = resolve_env("env.py:Game", base=tmp_path)
    write(tmp_path, {"changed.py": loads})

    async def isolated():
        server = ProcessEnvs(spec.factory)
        env = server()
        try:
            found = await env.reset(Task("a", info={"score": needed.Score()}))
            with pytest.raises(
                RemoteException,
                match=r"changed\.py has changed since it was loaded; start the run again",
            ):
                await env.reset(Task("b", info={"score": changed.Score()}))
            return found
        finally:
            await env.close()
            await server.close()

    assert asyncio.run(isolated())[0].text == "3"
    counts = {path.stem: path.read_text() for path in tmp_path.glob("*.loads")}
    assert counts == {"needed": "xx", "unused": "x", "changed": "x", "env": "xx"}


@pytest.mark.beside("compat")
def test_modules_with_the_names_of_another_share_its_objects():
    for name, other, shared in [
        ("miles.utils.types", "slime.utils.types", "Sample"),
        ("miles.rollout.rm_hub", "slime.rollout.rm_hub", "async_rm"),
        ("miles.rollout.rm_hub.f1", "slime.rollout.rm_hub.f1", "f1_score"),
        (
            "miles.rollout.inference_rollout.inference_rollout_common",
            "slime.rollout.sglang_rollout",
            "GenerateState",
        ),
        (
            "examples.geo3k_vlm.multi_turn.base_env",
            "examples.geo3k_vlm_multi_turn.base_env",
            "BaseInteractionEnv",
        ),
        ("swift.plugin.orm", "swift.rewards.orm", "ORM"),
    ]:
        one, same = user_imports.import_foreign(name), user_imports.import_foreign(other)
        assert getattr(one, shared) is getattr(same, shared), name
    assert hasattr(user_imports.import_foreign("miles.rollout.base_types"), "GenerateFnInput")
    with pytest.raises(ModuleNotFoundError):
        user_imports.import_foreign("miles.utils.nothing")
