"""`turnwright convert`: what trains a critic there does so here, with the settings that mean the
same."""

import tomllib

import pytest

from turnwright.config import load
from turnwright.errors import ConfigError
from turnwright_compat.launch_scripts import convert

VERL = """
MODEL=model
python3 -m verl.trainer.main_ppo algorithm.adv_estimator=gae algorithm.gamma=0.99 algorithm.lam=0.95 \\
  data.train_files=train.jsonl data.train_batch_size=64 data.max_prompt_length=100 data.max_response_length=400 \\
  actor_rollout_ref.model.path=$MODEL actor_rollout_ref.actor.ppo_mini_batch_size=32 \\
  actor_rollout_ref.actor.optim.lr=1e-6 algorithm.use_kl_in_reward=True algorithm.kl_ctrl.kl_coef=0.002 \\
  critic.model.path=$MODEL critic.optim.lr=2e-5 critic.optim.weight_decay=0.01 critic.cliprange_value=0.4 \\
  critic.ppo_epochs=2 critic.ppo_mini_batch_size=16 critic.grad_clip=0.5 critic.optim.lr_warmup_steps_ratio=0.05 \\
  critic.ppo_micro_batch_size_per_gpu=4 critic.model.fsdp_config.param_offload=True critic.strategy=fsdp2 \\
  reward.custom_reward_function.path=score.py trainer.critic_warmup=5 trainer.total_training_steps=50
"""  # noqa: E501

SLIME = """
python3 train.py --hf-checkpoint model --prompt-data train.jsonl --input-key prompt --label-key answer \\
  --rollout-batch-size 32 --n-samples-per-prompt 4 --global-batch-size 64 --num-rollout 50 --rm-type math \\
  --rollout-max-response-len 400 --advantage-estimator ppo --gamma 0.99 --lambd 0.95 --value-clip 0.2 \\
  --critic-lr 1e-5 --critic-load model --num-critic-only-steps 10 --clip-grad 0.5 --normalize-advantages \\
  --kl-coef 0.01 --lr 1e-6 --lr-decay-style constant --critic-num-nodes 1 --critic-num-gpus-per-node 4
"""  # noqa: E501

SKYRL = """
uv run -m skyrl.train.entrypoints.main_base data.train_data=train.jsonl trainer.train_batch_size=64 \\
  trainer.policy_mini_batch_size=32 trainer.critic_mini_batch_size=64 trainer.update_epochs_per_batch=2 \\
  trainer.algorithm.advantage_estimator=gae trainer.algorithm.gamma=0.99 trainer.algorithm.lambd=0.95 \\
  trainer.algorithm.value_clip=0.3 trainer.policy.model.path=model trainer.critic.model.path=model \\
  trainer.critic.optimizer_config.lr=2e-6 trainer.critic.optimizer_config.max_grad_norm=0.5 \\
  trainer.critic.fsdp_config.cpu_offload=true trainer.placement.critic_num_gpus_per_node=4 environment.env_class=gsm8k
"""  # noqa: E501

AGENT = """
python3 -m verl.trainer.main_ppo algorithm.adv_estimator=gigpo algorithm.gamma=0.9 \\
  algorithm.gigpo.step_advantage_w=0.5 algorithm.gigpo.mode=mean_std_norm \\
  data.train_files=train.jsonl data.train_batch_size=16 data.max_prompt_length=2048 \\
  data.max_response_length=512 \\
  actor_rollout_ref.model.path=model actor_rollout_ref.actor.ppo_mini_batch_size=16 \\
  env.env_name=alfworld/AlfredTWEnv env.max_steps=50 env.rollout.n=8
"""


def of(text):
    found = convert(text, name="run.sh")
    return found, tomllib.loads(found.recipe)


def accounts(found):
    return {one.key: one for one in found.accounts}


def loaded(found, folder, environment="REPLACE.py:Env"):
    """Load a recipe as a run does, beside the files that it names; `environment` fills in for one
    that is the user's."""
    (folder / "model").mkdir()
    (folder / "model" / "config.json").write_text("{}")
    (folder / "train.jsonl").write_text('{"prompt": "a", "answer": "b"}\n' * 9)
    (folder / "score.py").write_text("def compute_score(*args, **kwargs):\n    return 0.0\n")
    path = folder / "recipe.toml"
    path.write_text(found.recipe.replace("REPLACE.py:Env", environment))
    return load(path).config.train


# Whole scripts


def test_a_script_of_verl_with_a_critic(tmp_path):
    found, recipe = of(VERL)
    assert recipe["train"]["algorithm"] == "ppo"
    train = loaded(found, tmp_path)
    assert (train.baseline, train.token_discount, train.token_lambda) == ("gae", 0.99, 0.95)
    assert (train.kl, train.kl_in, train.discount) == (0.002, "reward", None)
    # Two epochs of four minibatches; the policy is trained from the fifth step on.
    assert recipe["train"]["critic"] == {
        "lr": 2e-5,
        "max_grad_norm": 0.5,
        "updates": 8,
        "warmup_steps": 4,
    }
    assert train.critic.warmup_steps == 4
    assert [one.key for one in found.accounts if one.kind == "machine"] == [
        "critic.ppo_micro_batch_size_per_gpu",
        "critic.model.fsdp_config.param_offload",
        "critic.strategy",
    ]
    assert [one.key for one in found.dropped()] == [
        "critic.cliprange_value",
        "critic.optim.lr_warmup_steps_ratio",
    ]
    assert found.complete


def test_a_script_of_slime_with_a_critic(tmp_path):
    found, recipe = of(SLIME)
    train = loaded(found, tmp_path)
    assert (train.algorithm, train.token_discount, train.token_lambda) == ("ppo", 0.99, 0.95)
    assert recipe["train"]["critic"] == {
        "lr": 1e-5,
        "max_grad_norm": 0.5,
        "updates": 2,
        "warmup_steps": 10,
    }
    assert (train.critic.updates, train.minibatches) == (2, 2)
    assert [one.key for one in found.dropped()] == ["value-clip"]
    assert found.complete


def test_a_script_of_skyrl_with_a_critic(tmp_path):
    found, recipe = of(SKYRL)
    train = loaded(found, tmp_path)
    assert (train.algorithm, train.token_discount, train.token_lambda) == ("ppo", 0.99, 0.95)
    assert recipe["train"]["critic"] == {"lr": 2e-6, "max_grad_norm": 0.5, "updates": 2}
    # Its default, which is not that of our ppo.
    assert (train.kl_in, train.kl_estimator) == ("loss", "k3")
    assert [one.key for one in found.dropped()] == ["trainer.algorithm.value_clip"]
    assert found.complete


def test_gigpo_of_verl_agent(tmp_path):
    found, recipe = of(AGENT)
    assert recipe["env"][0]["use"] == "REPLACE.py:Env"
    assert [line for line in found.incomplete if "alfworld" in line]
    train = loaded(found, tmp_path, "verl:tools")
    assert (train.algorithm, train.step_weight, train.discount) == ("gigpo", 0.5, 0.9)
    assert train.state == "observation"
    # Limits of a turn are none of an episode.
    assert recipe["limits"] == {"turns": 50, "turn_tokens": 512}
    assert recipe["rollout"] == {"groups": 16, "group_size": 8}
    assert accounts(found)["algorithm.gigpo.mode"].text.startswith("no effect")


def test_gigpo_has_the_discount_of_verl_agent_where_none_is_set():
    _, recipe = of(AGENT.replace("algorithm.gamma=0.9 ", ""))
    assert recipe["train"]["discount"] == 1.0
    found, _ = of(AGENT.replace("mean_std_norm", "mean_norm"))
    assert "algorithm.gigpo.mode" in [one.key for one in found.dropped()]
    found, recipe = of(AGENT.replace("=gigpo", "=grpo").replace("gamma=0.9", "gamma=1.0"))
    assert "step_weight" not in recipe["train"]
    assert accounts(found)["algorithm.gigpo.mode"].text.startswith("no effect")


# Single settings


def test_defaults_of_the_systems_are_written():
    _, recipe = of(
        "python3 -m verl.trainer.main_ppo data.train_files=t.parquet "
        "actor_rollout_ref.model.path=/m"
    )
    assert recipe["train"]["algorithm"] == "ppo"
    assert recipe["train"]["critic"] == {"lr": 1e-5, "updates": 4}
    _, recipe = of(
        "python3 -m skyrl.train.entrypoints.main_base data.train_data=t.parquet "
        "trainer.algorithm.advantage_estimator=gae"
    )
    assert recipe["train"]["critic"] == {"lr": 5e-6, "updates": 4}
    # The critic's rate is the policy's, which is the default here too.
    found, recipe = of(
        "python3 train.py --hf-checkpoint /m --prompt-data t.jsonl --rollout-batch-size 8 "
        "--advantage-estimator ppo"
    )
    assert recipe["train"]["critic"] == {"updates": 1}
    assert [note for note in found.notes if "decays" in note]
    assert [note for note in found.notes if "normalize-advantages" in note]


@pytest.mark.parametrize(
    ("text", "settings"),
    [
        (
            VERL.replace("=gae", "=grpo").replace(
                "algorithm.gamma=0.99", "actor_rollout_ref.rollout.n=4"
            ),
            "algorithm.lam critic.model.path critic.optim.lr critic.cliprange_value "
            "critic.ppo_epochs critic.grad_clip trainer.critic_warmup",
        ),
        (
            SLIME.replace("ppo", "grpo").replace("--gamma 0.99 ", ""),
            "lambd value-clip critic-lr critic-load num-critic-only-steps",
        ),
        (
            SKYRL.replace("=gae", "=rloo").replace("trainer.algorithm.gamma=0.99 ", ""),
            "trainer.algorithm.lambd trainer.algorithm.value_clip trainer.critic_mini_batch_size "
            "trainer.critic.model.path trainer.critic.optimizer_config.lr",
        ),
    ],
    ids=["verl", "slime", "skyrl"],
)
def test_without_a_critic_its_settings_have_no_effect(text, settings, tmp_path):
    found, recipe = of(text)
    assert "critic" not in recipe["train"]
    assert loaded(found, tmp_path).critic.updates == 4
    for key in settings.split():
        assert accounts(found)[key].text == "no effect: the estimator trains no critic"


@pytest.mark.parametrize(
    ("text", "old", "new", "key"),
    [
        (VERL, "critic.model.path=$MODEL", "critic.model.path=other", "critic.model.path"),
        (SLIME, "--critic-load model", "--critic-load other", "critic-load"),
        (
            SKYRL,
            "trainer.critic.model.path=model",
            "trainer.critic.model.path=other",
            "trainer.critic.model.path",
        ),
    ],
    ids=["verl", "slime", "skyrl"],
)
def test_a_critic_begins_as_the_policy(text, old, new, key):
    found, _ = of(text)
    assert accounts(found)[key].text.startswith("no effect at this value: the critic begins")
    found, _ = of(text.replace(old, new))
    assert "other weights are not loaded" in accounts(found)[key].text
    assert key in [one.key for one in found.dropped()]


def test_settings_that_a_critic_shares_with_the_policy():
    found, _ = of(VERL.replace("critic.optim.weight_decay=0.01", "critic.optim.weight_decay=0.1"))
    key = "critic.optim.weight_decay"
    assert accounts(found)[key].text == "the critic has the policy's (train.weight_decay)"
    found, _ = of(VERL)
    assert accounts(found)[key].text.startswith("no effect at this value")


@pytest.mark.parametrize(
    ("text", "filter_words", "key"),
    [
        (VERL, "algorithm.filter_groups.enable=True", "algorithm.filter_groups.enable"),
        (
            SLIME,
            "--dynamic-sampling-filter-path a.check_reward_nonzero_std",
            "dynamic-sampling-filter-path",
        ),
        (
            SKYRL,
            "trainer.algorithm.dynamic_sampling.type=filter",
            "trainer.algorithm.dynamic_sampling.type",
        ),
    ],
    ids=["verl", "slime", "skyrl"],
)
def test_groups_with_equal_rewards_are_not_replaced(text, filter_words, key, tmp_path):
    found, recipe = of(f"{text.rstrip()} {filter_words}")
    assert "refill" not in recipe["train"]
    assert "groups without reward variance" in accounts(found)[key].text
    loaded(found, tmp_path)


@pytest.mark.parametrize(
    ("text", "words"),
    [
        (VERL, "algorithm.norm_adv_by_std_in_grpo=False"),
        (SLIME, "--disable-grpo-std-normalization --disable-rewards-normalization"),
        (SKYRL, "trainer.algorithm.grpo_norm_by_std=false"),
    ],
    ids=["verl", "slime", "skyrl"],
)
def test_the_scale_of_groups_is_none_of_a_critics(text, words):
    found, recipe = of(f"{text.rstrip()} {words}")
    assert "advantage" not in recipe["train"]
    for key in words.replace("--", "").split():
        assert accounts(found)[key.partition("=")[0]].text.startswith("no effect")


def test_a_loss_that_is_an_algorithm_keeps_the_critic(tmp_path):
    found, recipe = of(VERL.rstrip() + " actor_rollout_ref.actor.policy_loss.loss_mode=gspo")
    assert (recipe["train"]["algorithm"], recipe["train"]["advantage"]) == ("gspo", "gae")
    assert loaded(found, tmp_path).critic.lr == 2e-5
    _, recipe = of(SKYRL.rstrip() + " trainer.algorithm.policy_loss_type=cispo")
    assert (recipe["train"]["algorithm"], recipe["train"]["advantage"]) == ("cispo", "gae")


@pytest.mark.parametrize(("steps", "expected"), [("0", None), ("1", None), ("2", 1), ("51", None)])
def test_verls_warm_up_is_the_number_of_a_step(steps, expected):
    found, recipe = of(VERL.replace("critic_warmup=5", f"critic_warmup={steps}"))
    assert recipe["train"]["critic"].get("warmup_steps") == expected
    dropped = "trainer.critic_warmup" in [one.key for one in found.dropped()]
    assert dropped == (steps == "51")


def test_a_part_of_a_configuration_is_of_the_policy():
    found = convert("optim: {lr: 3e-6}\nppo_epochs: 2\n", name="a.yaml", system="verl")
    train = tomllib.loads(found.recipe)["train"]
    assert (train["lr"], train["epochs"]) == (3e-6, 2)


@pytest.mark.parametrize(
    "text",
    [
        "swift rlhf --rlhf_type ppo --model /m --dataset t.jsonl --vf_coef 0.1",
        "from trl import PPOTrainer\n\ntrainer = PPOTrainer(model='m', train_dataset='t.jsonl')\n",
    ],
)
def test_training_by_a_reward_model_is_refused(text):
    name = "run.py" if "import" in text else "run.sh"
    with pytest.raises(ConfigError, match=r"reward model, .*train\.algorithm = \"ppo\""):
        convert(text, name=name)


def test_the_weight_of_a_value_loss_has_no_meaning():
    found = convert("swift rlhf --rlhf_type grpo --model /m --dataset t.jsonl --vf_coef 0.1")
    assert "body of its own" in accounts(found)["vf_coef"].text


COMBINED = {
    "verl": (
        VERL,
        "algorithm.adv_estimator=gae",
        "algorithm.adv_estimator=",
        " algorithm.filter_groups.enable=True algorithm.kl_penalty=low_var_kl"
        " actor_rollout_ref.rollout.n=4 env.rollout.n=4",
        ("grpo", "rloo", "reinforce_plus_plus", "reinforce_plus_plus_baseline", "gigpo", "gae"),
    ),
    "slime": (
        SLIME,
        "--advantage-estimator ppo",
        "--advantage-estimator ",
        " --dynamic-sampling-filter-path a.check_reward_nonzero_std --kl-loss-type k3",
        ("grpo", "gspo", "reinforce_plus_plus", "reinforce_plus_plus_baseline", "ppo"),
    ),
    "skyrl": (
        SKYRL,
        "trainer.algorithm.advantage_estimator=gae",
        "trainer.algorithm.advantage_estimator=",
        " trainer.algorithm.dynamic_sampling.type=filter trainer.algorithm.use_kl_in_reward=true",
        ("grpo", "rloo", "reinforce++", "maxrl", "gae"),
    ),
}


@pytest.mark.parametrize(
    ("name", "estimator"),
    [(name, estimator) for name, case in COMBINED.items() for estimator in case[-1]],
)
def test_whatever_settings_come_together_the_recipe_loads(name, estimator, tmp_path):
    text, old, new, words, _ = COMBINED[name]
    found, recipe = of(text.replace(old, f"{new}{estimator}").rstrip() + words)
    loaded(found, tmp_path)
    # A discount that the recipe cannot have is told.
    gamma = next(one for one in found.accounts if one.key.endswith("gamma"))
    discounts = recipe["train"].keys() & {"discount", "token_discount"}
    assert discounts or gamma in found.dropped()
