"""User code inside a tree of its framework: whose modules it imports, and what a
generator's configuration is."""

import textwrap

import pytest
from kit.rollouts import renderer

import turnwright as tw
from turnwright.config.schema import EnvConfig
from turnwright.envs.resolve import load_object, resolve_env
from turnwright.errors import ConfigError

ENV = """
from skyrl_gym.envs.base_text_env import BaseTextEnv, BaseTextEnvStepOutput


class Env(BaseTextEnv):
    def __init__(self, env_config=None, extras={}):
        super().__init__()

    def step(self, action):
        return BaseTextEnvStepOutput(observations=[], reward=REWARD, done=True, metadata={})
"""


def written(folder, files):
    for name, text in files.items():
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(textwrap.dedent(text))
    return folder


def rewarded(folder, use, *replies, args=None, sampling=None):
    spec = resolve_env(EnvConfig(use=use, args=args or {}), base=folder)
    (found,) = tw.rollout(
        spec.agent_function or spec.factory,
        [tw.Task("Go.")],
        tw.ScriptedEngine(list(replies) or ["a"]),
        renderer=renderer("bpe"),
        limits=tw.Limits(turns=4, turn_tokens=64),
        **({} if sampling is None else {"sampling": sampling}),
    )
    assert found.error is None, found.error
    return found.reward


FRAMEWORK = {
    "skyrl_gym/__init__.py": "",
    "skyrl_gym/envs/__init__.py": "",
    "skyrl_gym/envs/base_text_env.py": """
        class BaseTextEnv:
            def __init__(self):
                self.turns = 0

            def init(self, prompt):
                return prompt, {}

            def close(self):
                pass


        BaseTextEnvStepOutput = dict
        """,
    "skyrl_gym/tools/__init__.py": "NEWER = 0.75",
}


@pytest.mark.parametrize("between", ["skyrl_gym/envs/mine", "skyrl_gym/envs/a/b"])
def test_a_file_of_a_framework_has_the_framework_around_it(between, tmp_path):
    source = "from skyrl_gym.tools import NEWER as REWARD\n" + ENV
    written(tmp_path, {**FRAMEWORK, f"{between}/env.py": source})
    spec = load_object(f"{between}/env.py:Env", base=tmp_path)
    assert spec.__mro__[1].__module__.endswith("skyrl_gym.envs.base_text_env")
    assert not spec.__mro__[1].__module__.startswith("turnwright.")


@pytest.mark.parametrize(
    ("marks", "place"),
    [
        (["pyproject.toml"], "src"),
        (["pyproject.toml", "member/pyproject.toml"], "member"),
        (["pyproject.toml", "member/setup.py"], "member"),
        ([".git", "member/pyproject.toml"], "member/src"),
    ],
)
def test_projects_of_a_repository_are_found(marks, place, tmp_path):
    files = {mark: "" for mark in marks} | {
        f"{place}/helpers_of_tree/__init__.py": "",
        f"{place}/helpers_of_tree/a.py": "B = 0.5",
    }
    source = "from helpers_of_tree.a import B as REWARD\n" + ENV
    written(tmp_path, {**files, "examples/deep/env.py": source})
    assert rewarded(tmp_path, "examples/deep/env.py:Env") == 0.5


def test_a_folder_that_is_no_project_is_not_searched(tmp_path):
    files = {"pyproject.toml": "", "member/helpers_elsewhere/__init__.py": ""}
    written(
        tmp_path, {**files, "examples/env.py": "import helpers_elsewhere\nREWARD = 1.0\n" + ENV}
    )
    with pytest.raises(ConfigError, match=r"No module named 'helpers_elsewhere'"):
        rewarded(tmp_path, "examples/env.py:Env")


def test_a_package_whose_init_lacks_a_framework_is_there_for_its_modules(tmp_path):
    files = {
        "pack_one/__init__.py": "FIRST = 1\nfrom . import trainer\nLATER = 2",
        "pack_one/trainer.py": "import a_trainer_that_is_not_installed",
        "pack_one/score.py": "REWARD = 0.25",
        "pack_one/env.py": "from .score import REWARD\nfrom . import FIRST\n" + ENV,
        "pack_one/later.py": "from . import LATER\nREWARD = 1.0\n" + ENV,
    }
    written(tmp_path, files)
    assert rewarded(tmp_path, "pack_one/env.py:Env") == 0.25
    for _ in range(2):
        with pytest.raises(ConfigError, match=r"No module named 'a_trainer_that_is_not_installed'"):
            rewarded(tmp_path, "pack_one/later.py:Env")


def test_a_mistake_of_an_init_is_an_error(tmp_path):
    files = {
        "pack_two/__init__.py": "undefined_name",
        "pack_two/score.py": "REWARD = 0.25",
        "pack_two/env.py": "from .score import REWARD\n" + ENV,
    }
    with pytest.raises(ConfigError, match=r"NameError.*undefined_name"):
        rewarded(written(tmp_path, files), "pack_two/env.py:Env")


def test_a_name_that_a_stand_in_lacks_is_the_trees(tmp_path):
    files = {
        ".git": "",
        "skyrl/__init__.py": "",
        "skyrl/train/__init__.py": "",
        "skyrl/train/generators/__init__.py": "",
        "skyrl/train/generators/base.py": "class GeneratorInterface: ...\n\n\nNEWER = 0.125",
        "examples/env.py": "from skyrl.train.generators.base import GeneratorInterface, NEWER as "
        "REWARD\n" + ENV,
        "examples/gone.py": "from skyrl.train.generators.base import ABSENT\nREWARD = 1.0\n" + ENV,
    }
    written(tmp_path, files)
    assert rewarded(tmp_path, "examples/env.py:Env") == 0.125
    with pytest.raises(ConfigError, match=r"ABSENT"):
        rewarded(tmp_path, "examples/gone.py:Env")


GENERATOR = """
import copy
from dataclasses import asdict, dataclass, field

from skyrl.backends.skyrl_train.inference_servers.engine_utils import get_sampling_params_for_backend
from skyrl.train.config import GeneratorConfig, SkyRLGymConfig
from skyrl.train.generators.base import GeneratorInterface
from skyrl.train.generators.utils import get_response_ids_and_loss_mask_from_messages, get_rollout_metrics


@dataclass
class Own(GeneratorConfig):
    bonus: float = 0.5
    names: list = field(default_factory=lambda: ["a"])


class Base(GeneratorInterface):
    def __init__(self, generator_cfg: Own, skyrl_gym_cfg: SkyRLGymConfig, inference_engine_client, tokenizer, more=None):
        self.cfg, self.client, self.tokenizer, self.more = generator_cfg, inference_engine_client, tokenizer, more

    async def generate(self, input_batch, disable_tqdm=False):
        (prompt,) = input_batch["prompts"]
        ids = self.tokenizer.apply_chat_template(prompt, add_generation_prompt=True, tokenize=True, return_dict=False)
        out = await self.client.generate({"prompt_token_ids": [ids], "sampling_params": self.params(input_batch)})
        return {
            "prompt_token_ids": [ids], "response_ids": out["response_ids"], "rewards": [self.reward(out)],
            "loss_masks": [[1] * len(out["response_ids"][0])], "stop_reasons": out["stop_reasons"],
            "rollout_metrics": get_rollout_metrics(out["response_ids"], [1.0]),
        }

    def params(self, batch):
        return batch["sampling_params"]

    def reward(self, out):
        return 1.0


class Dataclass(Base):
    def params(self, batch):
        found = asdict(copy.deepcopy(self.cfg).sampling_params)
        assert found["max_generate_length"] == 64 and found["logprobs"] == 1, found
        return found

    def reward(self, out):
        return asdict(self.cfg)["sampling_params"]["temperature"]


class Backend(Base):
    def params(self, batch):
        found = get_sampling_params_for_backend(self.cfg.inference_engine.backend, self.cfg.sampling_params)
        assert found == batch["sampling_params"] and found["max_tokens"] == 64, (found, batch)
        return found

    def reward(self, out):
        return self.params({"sampling_params": self.params({"sampling_params": self.params_of()})})["temperature"]

    def params_of(self):
        return get_sampling_params_for_backend("vllm", self.cfg.sampling_params)


class Defaults(Base):
    def reward(self, out):
        cfg = self.cfg
        assert cfg.chat_template.name_or_path is None and cfg.chat_template_kwargs == {} and cfg["max_turns"] == 4
        assert not cfg.inference_engine.enable_return_routed_experts and cfg.max_input_length > 64
        assert cfg.names == ["a"] and cfg.step_wise_trajectories is False
        return cfg.bonus


class Nested(Base):
    def reward(self, out):
        own = copy.deepcopy(self.more)
        own.setdefault("agent", {})["model"] = "m"
        return own.agent.weight


class Renamed(Base):
    def __init__(self, generator_cfg, llm_endpoint_client: "InferenceEngineInterface", tokenizer):
        super().__init__(generator_cfg, None, llm_endpoint_client, tokenizer)

    def reward(self, out):
        return 0.625


class Http(Base):
    def __init__(self, generator_cfg, inference_engine_client, tokenizer):
        self.url = inference_engine_client.get_endpoint_url()


class Masks(Base):
    def reward(self, out):
        ids = out["response_ids"][0]
        messages = [{"role": "user", "content": "Q"}, {"role": "assistant", "content": out["responses"][0]}]
        response, mask, logprobs = get_response_ids_and_loss_mask_from_messages(messages, self.tokenizer, [[-1.0] * len(ids)])
        assert [one for one, trained in zip(response, mask) if trained] == ids, (response, mask, ids)
        assert [one for one in logprobs if one] == [-1.0] * len(ids) and len(logprobs) == len(mask) == len(response)
        return 0.25
"""  # noqa: E501


@pytest.mark.parametrize(
    ("use", "args", "reward"),
    [
        ("Dataclass", {}, 0.5),
        ("Backend", {}, 0.5),
        ("Base", {}, 1.0),
        ("Defaults", {}, 0.5),
        ("Defaults", {"generator_cfg": {"bonus": 0.75}}, 0.75),
        ("Dataclass", {"generator_cfg": {"sampling_params": {"temperature": 0.25}}}, 0.25),
        ("Nested", {"more": {"agent": {"weight": 0.125}}}, 0.125),
        ("Masks", {}, 0.25),
        ("Renamed", {}, 0.625),
    ],
)
def test_a_generator_has_skyrls_configuration(use, args, reward, tmp_path):
    written(tmp_path, {"user.py": GENERATOR})
    assert (
        rewarded(tmp_path, f"user.py:{use}", args=args, sampling=tw.Sampling(temperature=0.5))
        == reward
    )


def test_an_agent_that_wants_the_engine_over_http_is_pointed_to_programs(tmp_path):
    written(tmp_path, {"user.py": GENERATOR})
    spec = resolve_env(EnvConfig(use="user.py:Http"), base=tmp_path)
    (found,) = tw.rollout(
        spec.agent_function, [tw.Task("Go.")], tw.ScriptedEngine(["a"]), renderer=renderer("bpe")
    )
    assert found.error.type == "EnvError"
    assert "get_endpoint_url" in found.error.message
    assert 'use = "program"' in found.error.message


def test_a_generator_makes_environments_of_the_users_files(tmp_path):
    source = """
    import skyrl_gym
    from skyrl_gym.envs import register
    from skyrl_gym.metrics import aggregate_for_environment

    register(id="of_a_file", entry_point="worlds.one:Env")
    """
    use = """


    class Makes(Base):
        def reward(self, out):
            env = skyrl_gym.make("of_a_file", env_config=None, extras={})
            prompt, _ = env.init([{"role": "user", "content": "Q"}])
            assert aggregate_for_environment("of_a_file", [{"a": 1}, {"a": 2}]) == {"a": 1.5}
            return env.step("x")["reward"]
    """
    files = {
        "worlds/one.py": "REWARD = 0.375\n" + ENV,
        "user.py": textwrap.dedent(source) + GENERATOR + textwrap.dedent(use),
    }
    assert rewarded(written(tmp_path, files), "user.py:Makes") == 0.375


@pytest.mark.parametrize(
    ("line", "name", "project"),
    [
        (
            "from skyrl_gym.tools import SQLCodeExecutorToolGroup",
            "SQLCodeExecutorToolGroup",
            "SkyRL-Gym",
        ),
        ("from skyrl.train.config import make_config", "make_config", "SkyRL"),
        ("from verl.tools.schemas import ABSENT", "ABSENT", "verl"),
    ],
)
def test_a_name_that_no_stand_in_has_is_named_with_the_remedy(line, name, project, tmp_path):
    written(tmp_path, {"user.py": f"{line}\nREWARD = 1.0\n{ENV}"})
    message = rf"line 1: ImportError: cannot import name '{name}' from '[\w.]+'; our stand-in lacks it, install {project} \("  # noqa: E501
    with pytest.raises(ConfigError, match=message):
        rewarded(tmp_path, "user.py:Env")
