"""What a file that cannot be loaded says: the module that is missing by its own name, and the
same at a second try."""

import pytest

from turnwright.config.schema import EnvConfig
from turnwright.envs.resolve import resolve_env
from turnwright.errors import ConfigError

TOOL = (
    'def look(x: int) -> str:\n    """Look.\n\n    Args:\n        x: Where.\n    """\n    '
    'return ""\n'
)
FAILS = {
    "a skyrl id": (
        "from skyrl_gym.envs import register\nregister(id='half', entry_point='user:E')\n1/0\n",
        "user.py:E",
        "skyrl:half",
    ),
    "a verl tool": (
        f"from verl.tools.function_tool import function_tool\n@function_tool\n{TOOL}1/0\n",
        "user.py:look",
        None,
    ),
    "a verl loop": (
        "from verl.experimental.agent_loop.agent_loop import AgentLoopBase, "
        "register\n@register('half')\nclass Half(AgentLoopBase):\n    async def run(self, "
        "sampling_params, **kwargs): ...\n1/0\n",
        "user.py:Half",
        None,
    ),
    "a swift scheduler": (
        "from swift.rollout.multi_turn import MultiTurnScheduler, multi_turns\nclass "
        "Half(MultiTurnScheduler):\n    def step(self, infer_request, response_choice, "
        "current_turn): ...\nmulti_turns['half'] = Half\n1/0\n",
        "user.py:Half",
        "swift:half",
    ),
}


def fails(use, base, **args):
    with pytest.raises(ConfigError) as caught:
        resolve_env(EnvConfig(use=use, args=args), base=base)
    return str(caught.value)


@pytest.mark.parametrize("kind", FAILS)
@pytest.mark.beside("compat")
def test_a_load_that_failed_fails_the_second_time_too(kind, tmp_path):
    source, use, registered = FAILS[kind]
    (tmp_path / "user.py").write_text(source)
    first = fails(use, tmp_path)
    assert "division by zero" in first
    assert fails(use, tmp_path) == first
    if registered is not None:
        assert "half" in fails(registered, tmp_path)
    # mended, it registers as if for the first time.
    (tmp_path / "user.py").write_text(source.replace("1/0\n", "x = 1 + 0\n"))
    if kind != "a skyrl id":
        resolve_env(EnvConfig(use=use), base=tmp_path)


MISSING = [
    (
        "from slime.rollout.data_source import X",
        "slime.rollout.data_source",
        "install it from its repository",
    ),
    ("from swift.dataset import register_dataset", "swift.dataset", "pip install ms-swift"),
    (
        "import importlib\nimportlib.import_module('swift.dataset')",
        "swift.dataset",
        "pip install ms-swift",
    ),
    ("import skyrl_gym.nothing", "skyrl_gym.nothing", "pip install skyrl-gym"),
    ("from verl.workers.nothing import X", "verl.workers.nothing", "pip install verl"),
    (
        "import nowhere_at_all",
        "nowhere_at_all",
        "install nowhere_at_all, or place it beside the file",
    ),
    (
        "from .absent import x",
        "game.absent",
        "there is no module game.absent in the files around it",
    ),
    (
        "from game.absent import x",
        "game.absent",
        "there is no module game.absent in the files around it",
    ),
]


@pytest.mark.parametrize(("source", "module", "remedy"), MISSING)
@pytest.mark.beside("compat")
def test_a_missing_module_is_named_as_the_project_that_ships_it(source, module, remedy, tmp_path):
    (tmp_path / "game").mkdir()
    (tmp_path / "game/__init__.py").write_text("")
    (tmp_path / "game/user.py").write_text(source + "\n")
    message = fails("game/user.py:Thing", tmp_path)
    assert f"No module named {module!r}" in message
    assert remedy in message
    assert "turnwright" not in message.replace(str(tmp_path), "")


@pytest.mark.beside("compat")
def test_a_name_that_a_stand_in_lacks_is_said_with_the_frameworks_name(tmp_path):
    (tmp_path / "user.py").write_text("from slime.utils.types import Nothing\n")
    message = fails("user.py:Thing", tmp_path)
    assert (
        "cannot import name 'Nothing' from 'slime.utils.types'; our stand-in lacks it, install "
        "slime" in message
    )
    assert "turnwright" not in message


INSIDE = """
import turnwright as tw

class Outer:
    def method(self): ...

def main():
    class Game(tw.Env):
        def reset(self, task, *, seed=None): ...
        def step(self, action): ...

    async def play(task, model):
        return 1.0

    def nested():
        class Deep: ...
"""


@pytest.mark.parametrize(
    ("name", "function"), [("Game", "main"), ("play", "main"), ("Deep", "main")]
)
def test_what_is_defined_inside_a_function_is_named_as_such(name, function, tmp_path):
    (tmp_path / "user.py").write_text(INSIDE)
    message = fails(f"user.py:{name}", tmp_path)
    assert f"defined inside {function}()" in message
    assert "top level" in message


@pytest.mark.parametrize("name", ["Gane", "method", "Absent"])
def test_other_names_are_not(name, tmp_path):
    (tmp_path / "user.py").write_text(INSIDE)
    assert "defined inside" not in fails(f"user.py:{name}", tmp_path)
