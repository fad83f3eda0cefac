# ruff: noqa: E501  # the files of users are texts
"""slime or Miles is importable: user code plays as without it, although the originals need Ray and the trainer's servers."""

import importlib
import sys
import textwrap

import pytest
from kit.slime import HEAD, played

import turnwright as tw
from turnwright.config.schema import EnvConfig
from turnwright.envs.resolve import resolve_env

ORIGINAL = {
    "__init__.py": "",
    "utils/__init__.py": "",
    "utils/misc.py": "import ray_that_is_missing\n",
    "utils/http_utils.py": "async def post(url, payload, max_retries=60, headers=None):\n    raise RuntimeError('no client')\n\ndef only_there():\n    return 'only there'\n",
    "utils/types.py": "import ray_that_is_missing\n",
    "utils/own_module.py": "VALUE = 'installed'\n",
    "rollout/__init__.py": "",
    "rollout/sglang_rollout.py": "import ray_that_is_missing\n",
}


@pytest.fixture(params=["slime", "miles"])
def original(request, tmp_path, monkeypatch):
    """A package of that name on `sys.path`, as an installed one."""
    home = tmp_path / "site" / request.param
    for name, text in ORIGINAL.items():
        path = home / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    monkeypatch.syspath_prepend(str(home.parent))
    importlib.invalidate_caches()
    yield request.param
    for name in [
        one for one in sys.modules if f"{one}.".startswith((f"{request.param}.", "users_own."))
    ]:
        del sys.modules[name]


SOURCE = """
    from slime.utils.http_utils import only_there, post
    from slime.utils.own_module import VALUE
    import slime.utils.http_utils
    import slime.utils.own_module as own

    async def generate(args, sample, sampling_params):
        assert (only_there(), VALUE, own.VALUE) == ("only there", "installed", "installed")
        assert slime.utils.http_utils.post is post
        sample = await one_reply(args, sample, sampling_params)
        assert isinstance(sample, Sample)
        sample.reward = 1.0
        return sample
"""


def test_modules_that_need_servers_are_ours_and_others_the_installed_ones(original, tmp_path):
    files = {"user.py": (HEAD + textwrap.dedent(SOURCE)).replace("slime", original)}
    found = played(tmp_path, "", files=files)
    assert (found.error, found.reward) == (None, 1.0)


def test_rewards_by_name_and_environments_are_ours(original, tmp_path):
    found = played(
        tmp_path / "a", "pass", "slime:generate", replies=["\\boxed{7}"], args={"rm_type": "math"}
    )
    assert (found.error, found.reward) == (None, 1.0)
    source = f"""
    from {original}.rollout.rm_hub import grade_answer_verl

    class Asks:
        def __init__(self, label):
            self.label = label

        def step(self, text):
            return {{}}, True, {{"reward": float(grade_answer_verl(text, self.label))}}

    def build_env(sample, args):
        return Asks(sample.label)
    """
    found = played(tmp_path / "b", source, "user.py:build_env", replies=["\\boxed{7}"])
    assert (found.error, found.reward) == (None, 1.0)


PACKAGE = {
    "users_own/__init__.py": "",
    "users_own/game/__init__.py": "",
    "users_own/game/rollout.py": """
        from slime.utils.misc import load_function
        from .rules import bonus

        async def generate(args, sample, sampling_params):
            return await load_function("users_own.game.table.play")(args, sample, sampling_params, bonus())
    """,
    "users_own/game/rules.py": "from slime.rollout.sglang_rollout import GenerateState\n\ndef bonus():\n    return 0.5\n",
    "users_own/game/table.py": """
        from slime.rollout.sglang_rollout import generate as one_reply

        async def play(args, sample, params, bonus):
            sample = await one_reply(args, sample, params)
            sample.reward = bonus
            return sample
    """,
    "users_own/rewards.py": "from slime.utils.types import Sample\n\nasync def judge(args, sample, **options):\n    return 0.25\n",
}


@pytest.mark.parametrize("on_path", [False, True])
def test_a_users_package_plays_alike_on_the_path_or_not(original, on_path, tmp_path, monkeypatch):
    """As with `pip install -e`, or PYTHONPATH: its modules are found by Python itself."""
    home = tmp_path / "project"
    for name, text in PACKAGE.items():
        path = home / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(textwrap.dedent(text).replace("slime", original))
    if on_path:
        monkeypatch.syspath_prepend(str(home))
        importlib.invalidate_caches()
    rewards = []
    for args in ({}, {"custom_rm_path": "users_own.rewards:judge"}):
        use = "users_own/game/rollout.py:generate" if not args else "slime:generate"
        spec = resolve_env(EnvConfig(use=use, args=args), base=home)
        (found,) = tw.rollout(
            spec.agent_function,
            [tw.Task("Go.")],
            tw.ScriptedEngine(["a"]),
            renderer=tw.byte_renderer(),
            limits=tw.Limits(turns=2, turn_tokens=9),
        )
        assert found.error is None, found.error
        rewards.append(found.reward)
    assert rewards == [0.5, 0.25]


def test_other_code_keeps_the_installed_package(original, tmp_path):
    played(
        tmp_path,
        "async def generate(args, sample, params):\n    return await one_reply(args, sample, params)",
    )
    module = importlib.import_module(f"{original}.utils.http_utils")
    assert "site" in module.__file__
    with pytest.raises(ModuleNotFoundError, match="ray_that_is_missing"):
        importlib.import_module(f"{original}.rollout.sglang_rollout")
