"""`turnwright convert`: every setting is accounted for, and what comes out loads."""

import importlib.util
import re
import shlex
import tomllib
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from turnwright.cli.main import main
from turnwright.config import load
from turnwright.config.fields import field_type
from turnwright.config.recipe import ConfigMerge, build
from turnwright.errors import ConfigError
from turnwright_compat.launch_scripts import SYSTEMS, convert

HERE = Path(__file__).parent


def of(text, name="run.sh", **more):
    return convert(text, name=name, **more)


def table(converted):
    return tomllib.loads(converted.recipe)


def kinds(converted):
    return {account.key: account.kind for account in converted.accounts}


@pytest.fixture
def files(tmp_path):
    """Model, data and an environment, as the scripts of this file name them."""
    (tmp_path / "model").mkdir()
    (tmp_path / "model" / "config.json").write_text("{}")
    for name in ("train", "test", "more"):
        (tmp_path / f"{name}.jsonl").write_text(
            '{"prompt": "a", "answer": "b", "gold": "b", "images": []}\n' * 9
        )
    (tmp_path / "search.py").write_text(
        "async def generate(args, sample, sampling_params):\n    return sample\n\n"
        "async def reward(args, sample, **kwargs):\n    return 0.0\n"
    )
    (tmp_path / "my_tool.py").write_text(
        "from verl.tools.base_tool import BaseTool\n\n\nclass Look(BaseTool):\n    pass\n"
    )
    (tmp_path / "tools.yaml").write_text(
        "tools:\n- class_name: my_tool.Look\n  config: {type: native}\n  tool_schema:\n    "
        "type: function\n    function: {name: look, description: Look, parameters: {type: "
        "object, properties: {}, required: []}}\n"
    )
    (tmp_path / "score.py").write_text(
        "def compute_score(data_source, solution_str, ground_truth, extra_info=None):\n    return "
        "0.0\n"
    )
    (tmp_path / "plugin.py").write_text(
        "from swift.rewards import ORM, orms\n\n\nclass Mine(ORM):\n    def __call__(self, "
        "completions, **kwargs):\n        return [0.0 for _ in completions]\n\n\norms['mine'] = "
        "Mine\n"
    )
    (tmp_path / "loop.yaml").write_text("max_turns: 3\nrollout_interaction_env_path: geo\n")
    (tmp_path / "geo.py").write_text("def build_env(sample=None, args=None):\n    return None\n")
    return tmp_path


SLIME = """
MODEL=model
ROLLOUT=(
  --prompt-data train.jsonl --input-key prompt --label-key answer --apply-chat-template
  --multimodal-keys '{"image": "images"}'
  --rollout-batch-size 32 --n-samples-per-prompt 8 --num-rollout 100
  --rollout-max-response-len 4096 --rollout-temperature 0.8 --rollout-top-k -1 --rollout-top-p 0.95
  --rollout-stop "</search>" "</answer>"
  --global-batch-size 128
)
python3 train.py --hf-checkpoint $MODEL "${ROLLOUT[@]}" --use-kl-loss --kl-loss-coef 0.01 --kl-loss-type low_var_kl \\
  --advantage-estimator gspo --eps-clip 0.1 --eps-clip-c 3 --entropy-coef 0.001 --ref-update-interval 5 \\
  --lr 1e-6 --lr-decay-style constant --lr-warmup-iters 4 --adam-beta2 0.98 --use-tis --tis-clip 3 \\
  --dynamic-sampling-filter-path slime.rollout.filter_hub.dynamic_sampling_filters.check_reward_nonzero_std \\
  --custom-generate-function-path search.generate --custom-rm-path search.reward --rollout-function-path mine.rollout \\
  --eval-prompt-data held test.jsonl --eval-interval 10 --n-samples-per-eval-prompt 2 --wandb-key secret123 --use-wandb \\
  --tensor-model-parallel-size 2 --colocate --num-epok 3
"""  # noqa: E501


def test_slime(files):
    found = of(SLIME, folder=files)
    recipe = table(found)
    assert found.system == "slime"
    assert recipe["model"] == {"path": "model"}
    rollout = {
        "groups": 32,
        "group_size": 8,
        "temperature": 0.8,
        "top_k": 0,
        "top_p": 0.95,
        "stop": ["</search>", "</answer>"],
    }
    assert recipe["rollout"] == rollout
    assert recipe["limits"] == {"turn_tokens": 4096, "episode_tokens": 4096}
    train = recipe["train"]
    assert (train["algorithm"], train["minibatches"], train["steps"]) == ("gspo", 2, 100)
    assert (train["kl"], train["kl_in"], train["kl_estimator"], train["reference_every"]) == (
        0.01,
        "loss",
        "k3",
        5,
    )
    # The upper bound is the lower one there.
    assert (train["clip_low"], train["clip_high"], train["clip_cap"]) == (
        0.1,
        0.1,
        3,
    )
    # 4 updates, 2 in a step.
    assert (train["entropy"], train["lr_warmup_steps"], train["betas"]) == (
        0.001,
        2,
        [0.9, 0.98],
    )
    assert (train["correction"], train["correction_high"], train["refill"]) == ("tis", 3, 3)
    assert recipe["env"][0]["use"] == f"{files / 'search.py'}:generate"
    assert recipe["env"][0]["columns"] == {
        "prompt": "prompt",
        "answer": "answer",
        "images": "images",
    }
    assert recipe["env"][0]["eval_tasks"] == "test.jsonl"
    assert kinds(found)["rollout-function-path"] == "none"
    assert kinds(found)["tensor-model-parallel-size"] == "machine"
    assert [(one.key, one.text) for one in found.accounts if one.kind == "unknown"] == [
        ("num-epok", "did you mean 'num-epoch'?")
    ]
    assert "secret123" not in found.recipe


def test_the_environment_of_a_custom_loop_is_played_by_ours(files):
    line = "train.py --hf-checkpoint model --prompt-data train.jsonl --custom-config-path loop.yaml"
    recipe = table(
        of(
            f"{line} --custom-generate-function-path examples.rollout.generate --num-rollout 3",
            folder=files,
        )
    )
    assert recipe["env"][0]["use"] == f"{files / 'geo.py'}:build_env"
    assert recipe["limits"]["turns"] == 3


def test_a_filter_of_the_users_file_stays_one(files):
    line = (
        "train.py --hf-checkpoint model --prompt-data train.jsonl --num-rollout 3 "
        "--dynamic-sampling-filter-path {}"
    )
    found = of(line.format("search.keep"), folder=files)
    assert table(found)["train"]["group_filter"] == f"{files / 'search.py'}:keep"
    assert kinds(found)["dynamic-sampling-filter-path"] == "mapped"
    theirs = of(line.format("slime.rollout.filter_hub.other.keep"), folder=files)
    assert kinds(theirs)["dynamic-sampling-filter-path"] == "none"


def test_columns_of_metadata_and_tools(files):
    line = (
        "train.py --hf-checkpoint model --prompt-data train.jsonl --num-rollout 3 "
        "--metadata-key {} --tool-key {}"
    )
    renamed = of(line.format("meta", "functions"), folder=files)
    assert table(renamed)["env"][0]["columns"] == {"metadata": "meta", "tools": "functions"}
    assert {kinds(renamed)[key] for key in ("metadata-key", "tool-key")} == {"mapped"}
    # Rows may lack a column that has its own name.
    named = of(line.format("metadata", "tools"), folder=files)
    assert "columns" not in table(named)["env"][0]


def test_a_python_launcher_is_read_and_not_run(tmp_path):
    text = f"""
import os
open({str(tmp_path / "ran")!r}, "w")
NAME = "tiny"
GPUS = int(os.environ.get("GPUS", "8"))

def execute():
    ckpt_args = f"--hf-checkpoint /models/{{NAME}} "
    rollout_args = (
        "--rollout-batch-size 4 "
        '--multimodal-keys \\'{{"image": "images"}}\\' '
        f"--rollout-num-gpus {{GPUS}} "
    )
    train_args = f"{{ckpt_args}} {{rollout_args}} "
"""
    found = of(text, "run.py")
    assert [(one.key, one.kind) for one in found.accounts] == [
        *[("hf-checkpoint", "mapped"), ("rollout-batch-size", "mapped")],
        *[("multimodal-keys", "mapped"), ("rollout-num-gpus", "machine")],
    ]
    assert table(found)["model"]["path"] == "/models/tiny"
    assert not (tmp_path / "ran").exists()


SKYRL = """
DATA=.
MULTI="generator.use_conversation_multi_turn=false"
uv run --isolated --extra fsdp -m skyrl.train.entrypoints.main_base \\
  data.train_data="['${DATA}/train.jsonl','${DATA}/more.jsonl']" data.val_data="['${DATA}/test.jsonl']" \\
  trainer.policy.model.path=model trainer.algorithm.advantage_estimator=rloo trainer.algorithm.use_kl_loss=true \\
  trainer.algorithm.kl_loss_coef=0.002 trainer.algorithm.use_entropy_loss=true trainer.algorithm.entropy_loss_coef=0.02 \\
  trainer.algorithm.policy_loss_type=dual_clip trainer.algorithm.clip_ratio_c=4 trainer.train_batch_size=64 \\
  trainer.policy_mini_batch_size=16 trainer.epochs=2 trainer.policy.optimizer_config.num_warmup_steps=3 \\
  generator.apply_overlong_filtering=true generator.sampling_params.min_p=0.05 generator.max_turns=4 $MULTI \\
  generator.sampling_params.repetition_penalty=1.1 generator.sampling_params.stop='["</search>"]' \\
  generator.eval_sampling_params.temperature=0 environment.env_class=search environment.skyrl_gym.search.topk=3 \\
  generator.inference_engine.num_engines=4 +trainer.placement.colocate_all=true generator.max_turn=3
"""  # noqa: E501


def test_skyrl(files):
    found = of(SKYRL)
    recipe = table(found)
    assert found.system == "skyrl"
    train = recipe["train"]
    assert (train["algorithm"], train["kl"], train["entropy"], train["clip_cap"]) == (
        "rloo",
        0.002,
        0.02,
        4,
    )
    assert (train["minibatches"], train["data_epochs"], train["lr_warmup_steps"]) == (4, 2.0, 1)
    assert train["overlong_filter"] is True
    assert recipe["rollout"]["history"] == "inline"
    assert recipe["rollout"]["min_p"] == 0.05
    assert [env["tasks"] for env in recipe["env"]] == ["./train.jsonl", "./more.jsonl"]
    assert len({env["name"] for env in recipe["env"]}) == 2
    assert recipe["env"][0]["use"] == "skyrl:search"
    assert recipe["env"][0]["args"] == {"topk": 3}
    assert "eval" in recipe
    assert recipe["eval"]["greedy"] is True
    penalty = next(one for one in found.accounts if "repetition" in one.key)
    assert (penalty.kind, penalty.text[:12]) == ("none", "no penalties")
    assert kinds(found)["generator.max_turn"] == "unknown"


VERL = """
python3 -m verl.trainer.main_ppo data.train_files=train.jsonl data.val_files=test.jsonl data.max_prompt_length=100 \\
  data.max_response_length=400 data.train_batch_size=64 actor_rollout_ref.model.path=model \\
  actor_rollout_ref.actor.ppo_mini_batch_size=16 actor_rollout_ref.actor.clip_ratio=0.3 \\
  actor_rollout_ref.actor.entropy_coeff=0.01 actor_rollout_ref.actor.use_kl_loss=True \\
  actor_rollout_ref.actor.kl_loss_type=low_var_kl actor_rollout_ref.actor.loss_agg_mode=seq-mean-token-mean \\
  actor_rollout_ref.actor.optim.lr_warmup_steps=5 actor_rollout_ref.rollout.n=4 \\
  actor_rollout_ref.rollout.multi_turn.enable=True actor_rollout_ref.rollout.multi_turn.max_assistant_turns=5 \\
  actor_rollout_ref.rollout.multi_turn.format=hermes actor_rollout_ref.rollout.multi_turn.tool_config_path=tools.yaml \\
  actor_rollout_ref.rollout.multi_turn.tokenization_sanity_check_mode=ignore_strippable \\
  reward.custom_reward_function.path=score.py algorithm.adv_estimator=grpo algorithm.norm_adv_by_std_in_grpo=False \\
  algorithm.filter_groups.enable=True algorithm.filter_groups.max_num_gen_batches=4 trainer.total_training_steps=50 \\
  trainer.n_gpus_per_node=8 actor_rollout_ref.rollout.multi_turn.max_assistant_turn=3
"""  # noqa: E501


def test_a_strict_check_of_verl_is_of_every_episode(files):
    key = "actor_rollout_ref.rollout.multi_turn.tokenization_sanity_check_mode"
    for mode, expected in [
        ("strict", {"sanity": "strict", "sanity_share": 1.0}),
        ("disable", {"sanity": "disable"}),
    ]:
        changed = VERL.replace(f"{key}=ignore_strippable", f"{key}={mode}")
        assert changed != VERL
        rollout = table(of(changed))["rollout"]
        assert {name: rollout[name] for name in rollout if name.startswith("sanity")} == expected


def test_verl(files):
    found = of(VERL)
    recipe = table(found)
    assert found.system == "verl"
    train = recipe["train"]
    assert (train["minibatches"], train["steps"], train["refill"], train["advantage"]) == (
        4,
        50,
        3,
        "mean",
    )
    assert (train["clip_low"], train["clip_high"], train["clip_cap"]) == (0.3, 0.3, 3.0)
    assert (train["kl"], train["kl_estimator"], train["aggregation"]) == (0.001, "k3", "trajectory")
    assert recipe["limits"] == {
        "prompt_tokens": 100,
        "episode_tokens": 400,
        "turns": 5,
        "turn_tokens": 400,
    }
    assert recipe["model"] == {"path": "model", "parser": "hermes"}
    assert recipe["rollout"]["sanity"] == "ignore_strippable"
    assert recipe["env"][0]["use"] == "verl:tools"
    given = {"tool_config_path": "tools.yaml", "reward": "score.py:compute_score"}
    # Its defaults.
    assert recipe["env"][0]["args"] == given | {
        "max_parallel_calls": 1,
        "max_tool_response_length": 256,
    }
    unknown = [(one.key, one.text) for one in found.accounts if one.kind == "unknown"]
    key = "actor_rollout_ref.rollout.multi_turn.max_assistant_turn"
    assert unknown == [(key, f"did you mean '{key}s'?")]


SWIFT = """
CUDA_VISIBLE_DEVICES=0,1 \\
NPROC_PER_NODE=2 \\
swift rlhf --rlhf_type grpo --model model --model_revision v1 --tuner_type full --dataset train.jsonl#100 \\
  --columns '{"gold": "solution"}' --multi_turn_scheduler math_tip_trick --max_turns 3 --reward_funcs accuracy mine \\
  --reward_weights 1 0.5 --external_plugins plugin.py --num_generations 8 --per_device_train_batch_size 4 \\
  --gradient_accumulation_steps 2 --steps_per_generation 8 --max_completion_length 256 --temperature 1.0 --min_p 0.1 \\
  --top_k -1 --beta 0.01 --epsilon 0.2 --delta 2.0 --loss_type dr_grpo --scale_rewards none --overlong_filter true \\
  --dynamic_sample true --max_resample_times 4 --warmup_ratio 0.1 --max_steps 50 --sync_ref_model true \\
  --ref_model_mixup_alpha 1.0 --ref_model_sync_steps 20 --loss_scale last_round --report_to tensorboard swanlab \\
  --repetition_penalty 1.05 --deepspeed zero3 --max_turnz 4
"""  # noqa: E501


def test_swift(files):
    found = of(SWIFT)
    recipe = table(found)
    assert found.system == "swift"
    assert recipe["model"] == {"path": "model", "revision": "v1"}
    assert recipe["rollout"] == {
        "group_size": 8,
        "temperature": 1.0,
        "min_p": 0.1,
        "top_k": 0,
        "groups": 8,
    }
    train = recipe["train"]
    # 50 updates, 4 in a step.
    assert (train["minibatches"], train["steps"], train["lr_warmup_steps"]) == (
        4,
        13,
        1,
    )
    assert (train["kl"], train["clip_low"], train["clip_high"], train["clip_cap"]) == (
        0.01,
        0.2,
        0.2,
        2.0,
    )
    assert (train["aggregation"], train["advantage"], train["refill"]) == ("fixed", "mean", 4)
    assert (train["overlong_filter"], train["reference_every"], train["loss_scale"]) == (
        True,
        5,
        "last_round",
    )
    env = recipe["env"][0]
    assert (env["use"], env["tasks"], env["columns"]) == (
        "swift:math_tip_trick",
        "train.jsonl",
        {"answer": "gold"},
    )
    assert env["args"] == {
        "reward_funcs": ["accuracy", "mine"],
        "reward_weights": [1, 0.5],
        "external_plugins": ["plugin.py"],
    }
    assert recipe["track"]["to"] == ["tensorboard"]
    assert "lora" not in recipe
    assert kinds(found)["repetition_penalty"] == "none"
    assert kinds(found)["max_turnz"] == "unknown"


def test_flags_of_registered_rewards_of_swift_are_arguments_of_the_environment():
    flags = (
        "--repetition_n_grams 4 --cosine_max_len_value_wrong -1.0 --soft_cache_length 50 "
        "--use_gym_env true"
    )
    named = SWIFT.replace(
        "--reward_funcs accuracy mine", f"--reward_funcs repetition soft_overlong {flags}"
    )
    found = of(named)
    args = table(found)["env"][0]["args"]
    assert (args["repetition_n_grams"], args["soft_cache_length"], args["use_gym_env"]) == (
        4,
        50,
        True,
    )
    assert args["soft_max_length"] == 256
    assert "cosine_max_len_value_wrong" not in args  # reward_funcs does not name cosine
    assert kinds(found)["cosine_max_len_value_wrong"] == "none"
    assert "overlong_tokens" not in table(found)["train"]


@pytest.mark.parametrize("scale", ["last_round+mine", "mine"])
def test_a_loss_scale_of_swift_is_an_argument_of_the_scheduler(scale):
    found = of(SWIFT.replace("--loss_scale last_round", f"--loss_scale {scale}"))
    assert table(found)["env"][0]["args"]["loss_scale"] == scale
    assert "loss_scale" not in table(found)["train"]
    assert kinds(found)["loss_scale"] == "mapped"


def test_a_loss_scale_of_swift_that_trains_prompts_has_no_equivalent():
    found = of(SWIFT.replace("--loss_scale last_round", "--loss_scale all"))
    assert "loss_scale" not in table(found)["env"][0]["args"]
    assert kinds(found)["loss_scale"] == "none"


SERVED = (
    "swift rlhf --rlhf_type grpo --model m --dataset d.jsonl --vllm_mode server --max_length 100\n"
)


@pytest.mark.parametrize(
    ("comment", "use"),
    [
        (
            "# swift rollout \\\n#     --model m \\\n#     --multi_turn_scheduler mine \\\n#     "
            "--max_turns 3\n",
            "swift:mine",
        ),
        (
            "# GPUS=0 \\\n# swift rollout \\\n#     --model m\n\n# --multi_turn_scheduler x\n",
            "swift:single_turn",
        ),
        ("# First, start swift rollout.\n", "REPLACE.py:Env"),
        (
            "swift rollout --model m --multi_turn_scheduler mine\n# swift rollout "
            "--multi_turn_scheduler x\n",
            "swift:mine",
        ),
    ],
)
def test_the_server_of_swift_is_often_in_the_comments(comment, use):
    found = of(comment + SERVED)
    assert table(found)["env"][0]["use"] == use
    assert ("limits" in table(found) and table(found)["limits"].get("turns") == 3) == (
        "max_turns" in comment
    )


def test_settings_without_a_loop_of_the_user_have_one_turn():
    assert table(of(SERVED.replace("server", "colocate")))["env"][0]["use"] == "swift:single_turn"
    flags = (
        "train.py --hf-checkpoint m --prompt-data d.jsonl --rollout-batch-size 4 --rm-type "
        "deepscaler"
    )
    env = table(of(flags))["env"][0]
    assert (env["use"], env["args"]) == ("slime:generate", {"rm_type": "deepscaler"})


def test_a_yaml_of_swift_with_groups_of_workers():
    text = (
        "rlhf_type: grpo\nmodel: m\ndataset: d.jsonl\nmax_turns: 4\ntrain:\n  gpus: 8\n  "
        "lora_rank: 4\n  tuner_type: lora\n"
    )
    recipe = table(of(text, "a.yaml"))
    assert (recipe["lora"]["rank"], recipe["limits"]["turns"]) == (4, 4)


@pytest.mark.parametrize("script", [SLIME, SKYRL, VERL, SWIFT])
def test_what_comes_out_passes_the_dry_run(files, script, capsys, monkeypatch):
    monkeypatch.chdir(files)
    text = script.replace("--model_revision v1", "")
    (files / "launch.sh").write_text(text)
    recipe = files / "recipe.toml"
    assert main(["convert", str(files / "launch.sh"), "--out", str(recipe)]) == 0
    assert "unknown setting" in capsys.readouterr().err
    without = script is SKYRL and importlib.util.find_spec("skyrl_gym") is None
    assert main(["train", str(recipe), "--dry-run"]) == (2 if without else 0), (
        capsys.readouterr().err
    )
    assert ("pip install skyrl-gym" in capsys.readouterr().err) == without
    assert main(["convert", str(files / "launch.sh"), "--out", str(recipe)]) == 2
    assert "name a new file" in capsys.readouterr().err


@pytest.mark.parametrize("system", SYSTEMS.values(), ids=SYSTEMS)
def test_a_table_names_existing_recipe_keys(system):
    for key, rule in system.rules.items():
        if isinstance(rule, str):
            assert field_type(rule.replace("env.", "env.0.")) is not None, key
    for key in system.defaults:
        assert field_type(key.replace("env.", "env.0.")) is not None, key
    assert not set(system.rules) & set(system.none)


DESIGN = {
    "verl": (
        "data.train_files data.val_files data.max_prompt_length data.max_response_length "
        "data.train_batch_size data.seed data.filter_overlong_prompts "
        "data.return_multi_modal_inputs data.apply_chat_template_kwargs data.tool_config_path "
        "data.function_tool_path algorithm.adv_estimator algorithm.norm_adv_by_std_in_grpo "
        "algorithm.gamma algorithm.use_kl_in_reward algorithm.kl_penalty "
        "algorithm.kl_ctrl.kl_coef algorithm.filter_groups.enable "
        "algorithm.filter_groups.max_num_gen_batches algorithm.rollout_correction.rollout_is "
        "algorithm.rollout_correction.rollout_is_threshold "
        "algorithm.rollout_correction.rollout_rs "
        "algorithm.rollout_correction.rollout_rs_threshold "
        "algorithm.rollout_correction.bypass_mode actor_rollout_ref.actor.optim.lr "
        "actor_rollout_ref.actor.optim.weight_decay actor_rollout_ref.actor.optim.betas "
        "actor_rollout_ref.actor.optim.clip_grad actor_rollout_ref.actor.optim.lr_scheduler_type "
        "actor_rollout_ref.actor.ppo_mini_batch_size "
        "actor_rollout_ref.actor.ppo_max_token_len_per_gpu actor_rollout_ref.actor.clip_ratio "
        "actor_rollout_ref.actor.clip_ratio_low actor_rollout_ref.actor.clip_ratio_high "
        "actor_rollout_ref.actor.freeze_vision_tower "
        "actor_rollout_ref.actor.policy_loss.loss_mode actor_rollout_ref.actor.loss_agg_mode "
        "actor_rollout_ref.actor.loss_scale_factor actor_rollout_ref.actor.use_kl_loss "
        "actor_rollout_ref.actor.kl_loss_coef actor_rollout_ref.actor.kl_loss_type "
        "actor_rollout_ref.actor.ppo_epochs actor_rollout_ref.actor.router_replay.mode "
        "actor_rollout_ref.rollout.n actor_rollout_ref.rollout.temperature "
        "actor_rollout_ref.rollout.top_p actor_rollout_ref.rollout.top_k "
        "actor_rollout_ref.rollout.max_model_len actor_rollout_ref.rollout.val_kwargs.n "
        "actor_rollout_ref.rollout.val_kwargs.temperature "
        "actor_rollout_ref.rollout.val_kwargs.top_p actor_rollout_ref.rollout.val_kwargs.top_k "
        "actor_rollout_ref.rollout.multi_turn.max_assistant_turns "
        "actor_rollout_ref.rollout.multi_turn.tool_config_path "
        "actor_rollout_ref.rollout.multi_turn.function_tool_path "
        "actor_rollout_ref.rollout.multi_turn.max_tool_response_length "
        "actor_rollout_ref.rollout.multi_turn.tool_response_truncate_side "
        "actor_rollout_ref.rollout.multi_turn.use_inference_chat_template "
        "actor_rollout_ref.rollout.multi_turn.tokenization_sanity_check_mode "
        "actor_rollout_ref.rollout.enable_rollout_routing_replay "
        "actor_rollout_ref.rollout.agent.default_agent_loop actor_rollout_ref.model.path "
        "actor_rollout_ref.model.lora_rank actor_rollout_ref.model.lora_alpha "
        "actor_rollout_ref.model.target_modules "
        "actor_rollout_ref.model.enable_gradient_checkpointing "
        "actor_rollout_ref.model.custom_chat_template reward.custom_reward_function.path "
        "reward.custom_reward_function.name trainer.total_training_steps trainer.test_freq "
        "trainer.save_freq trainer.max_actor_ckpt_to_keep trainer.default_local_dir "
        "trainer.logger trainer.project_name trainer.experiment_name data.prompt_key "
        "data.reward_fn_key data.image_key data.video_key data.audio_key data.shuffle "
        "data.truncation data.train_max_samples data.val_max_samples data.custom_cls.path "
        "data.mm_processor_kwargs algorithm.lam algorithm.filter_groups.metric "
        "algorithm.kl_ctrl.type algorithm.kl_ctrl.horizon algorithm.kl_ctrl.target_kl "
        "algorithm.use_pf_ppo algorithm.rollout_correction.rollout_is_batch_normalize "
        "actor_rollout_ref.actor.clip_ratio_c actor_rollout_ref.actor.entropy_coeff "
        "actor_rollout_ref.actor.tau_pos actor_rollout_ref.actor.tau_neg "
        "actor_rollout_ref.actor.policy_loss.clip_cov_ratio "
        "actor_rollout_ref.actor.policy_loss.kl_cov_ratio "
        "actor_rollout_ref.actor.policy_loss.dro_beta actor_rollout_ref.actor.shuffle "
        "actor_rollout_ref.actor.optim.lr_warmup_steps actor_rollout_ref.rollout.over_sample_rate "
        "actor_rollout_ref.rollout.ignore_eos actor_rollout_ref.rollout.response_length "
        "actor_rollout_ref.rollout.multi_turn.max_user_turns "
        "actor_rollout_ref.rollout.multi_turn.max_parallel_calls "
        "actor_rollout_ref.rollout.multi_turn.format "
        "actor_rollout_ref.rollout.multi_turn.num_repeat_rollouts "
        "actor_rollout_ref.rollout.agent.agent_loop_config_path reward.reward_manager.name "
        "reward.reward_manager.module.path reward.num_workers trainer.total_epochs "
        "trainer.val_before_train trainer.resume_mode trainer.critic_warmup"
    ),
    "slime": (
        "input-key label-key metadata-key tool-key multimodal-keys apply-chat-template "
        "rollout-shuffle num-epoch custom-rm-path rm-type rm-url reward-key eval-reward-key "
        "dynamic-sampling-filter-path buffer-filter-path rollout-sample-filter-path "
        "rollout-all-samples-process-path rollout-sample-hook-path "
        "custom-reward-post-process-path custom-convert-samples-to-train-data-path "
        "custom-advantage-function-path custom-pg-loss-reducer-function-path "
        "custom-loss-function-path custom-tis-function-path custom-config-path "
        "rollout-function-path data-source-path eval-function-path partial-rollout "
        "mask-offpolicy-in-partial-rollout min-batch-collection-ratio rollout-stop-token-ids "
        "rollout-skip-special-tokens entropy-coef eps-clip-c lambd value-clip use-opsm opsm-delta "
        "use-unbiased-kl normalize-advantages loss-mask-type eval-max-response-len "
        "ref-update-interval custom-rollout-log-function-path eval-config use-opd opd-kl-coef "
        "hf-checkpoint prompt-data eval-prompt-data num-rollout rollout-batch-size "
        "n-samples-per-prompt rollout-temperature rollout-top-p rollout-top-k "
        "rollout-max-response-len rollout-max-context-len rollout-max-prompt-len rollout-stop "
        "advantage-estimator eps-clip eps-clip-high use-kl-loss kl-loss-coef kl-loss-type kl-coef "
        "disable-grpo-std-normalization lr weight-decay adam-beta1 adam-beta2 lr-decay-style "
        "clip-grad global-batch-size num-steps-per-rollout seed rollout-seed eval-interval "
        "n-samples-per-eval-prompt eval-temperature eval-top-p eval-top-k save save-interval "
        "use-tis tis-clip tis-clip-low use-rollout-logprobs use-rollout-routing-replay "
        "calculate-per-token-loss over-sampling-batch-size custom-generate-function-path gamma "
        "ref-load max-tokens-per-gpu apply-chat-template-kwargs use-wandb wandb-project group-rm "
        "recompute-granularity skip-eval-before-train"
    ),
    "skyrl": (
        "max_turns n_samples_per_prompt max_input_length max_prompt_length max_generate_length "
        "temperature top_p top_k stop use_conversation_multi_turn eval_n_samples_per_prompt "
        "env_class train_data val_data train_batch_size policy_mini_batch_size "
        "update_epochs_per_batch max_training_steps eval_interval ckpt_interval max_ckpts_to_keep "
        "ckpt_path seed gradient_checkpointing max_tokens_per_microbatch advantage_estimator "
        "use_kl_loss kl_loss_coef kl_estimator_type use_kl_in_reward gamma eps_clip_low "
        "eps_clip_high policy_loss_type loss_reduction grpo_norm_by_std use_tis tis_imp_ratio_cap "
        "tis_ratio_type token_tis_ratio_clip_high sequence_mask_metric geo_mask_high geo_mask_low "
        "enable_return_routed_experts logger project_name run_name max_env_workers lr "
        "weight_decay max_grad_norm rank alpha dropout target_modules batched "
        "append_eos_token_after_stop_str_in_multi_turn zero_reward_on_non_stop "
        "apply_overlong_filtering step_wise_trajectories merge_stepwise_output "
        "vision_language_generator use_cache_salt min_p repetition_penalty additional_kwargs "
        "logprobs use_entropy_loss entropy_loss_coef advantage_batch_normalize clip_ratio_c "
        "value_clip lambd zero_variance_filter zero_variance_filter_tol "
        "outlier_token_is_threshold_low outlier_token_is_threshold_high "
        "token_mask_is_threshold_low token_mask_is_threshold_high product_mask_high "
        "product_mask_low update_ref_every_epoch epochs eval_before_train eval_batch_size "
        "max_seq_len max_staleness_steps num_parallel_generation_workers max_sample_batches "
        "min_replace_ratio resume_mode tags dump_data_batch"
    ),
    "swift": (
        "model dataset val_dataset num_generations generation_batch_size temperature top_p top_k "
        "stop_words max_completion_length max_length vllm_max_model_len max_turns "
        "multi_turn_scheduler gym_env external_plugins reward_funcs reward_weights "
        "advantage_estimator loss_type importance_sampling_level epsilon epsilon_high beta "
        "kl_in_reward scale_rewards num_iterations steps_per_generation dynamic_sample "
        "max_resample_times overlong_filter soft_max_length soft_cache_length "
        "rollout_importance_sampling_mode rollout_importance_sampling_threshold loss_scale "
        "learning_rate weight_decay adam_beta1 adam_beta2 lr_scheduler_type max_grad_norm "
        "max_steps output_dir save_steps save_total_limit eval_steps num_generations_eval seed "
        "report_to lora_rank lora_alpha target_modules lora_dropout freeze_vit "
        "gradient_checkpointing router_replay_mode ref_model system columns template use_gym_env "
        "vllm_server_pass_dataset num_train_epochs per_device_train_batch_size "
        "gradient_accumulation_steps warmup_ratio min_p repetition_penalty "
        "structured_outputs_regex delta tau_pos tau_neg top_entropy_quantile log_entropy "
        "async_generate reward_model reward_model_plugin completion_length_limit_scope "
        "truncation_strategy sync_ref_model ref_model_sync_steps ref_model_mixup_alpha "
        "cosine_max_len repetition_n_grams repetition_max_penalty chord_sft_dataset chord_mu_peak "
        "advantage_reweight off_policy_sequence_mask_delta real_tau fipo_decay_rate "
        "sdar_loss_coef rlsd_lambda teacher_kl_coef log_rollout_offpolicy_metrics "
        "split_dataset_ratio vf_coef"
    ),
}
"""Settings that matter to training, by system: each is in a table."""


@pytest.mark.parametrize("name", DESIGN)
def test_every_setting_that_matters_is_in_a_table(name):
    system = SYSTEMS[name]
    patterns = [re.compile(one.replace(".", r"\.").replace("*", ".*")) for one in system.machine]
    endings = {*system.known(), *(one.rpartition(".")[2] for one in system.known())}
    missing = [
        key
        for key in DESIGN[name].split()
        if key not in endings
        and not any(one.fullmatch(key) or one.fullmatch(f"trainer.{key}") for one in patterns)
    ]
    assert not missing


@pytest.mark.parametrize(
    ("text", "name", "said"),
    [
        ("echo hello", "a.sh", "no settings found"),
        ("run --zzz 1 --yyy 2", "a.sh", "no known setting of slime, skyrl, verl, swift, trl"),
        ("- 1\n- 2", "a.yaml", "holds no table"),
        ("a: [", "a.yaml", "is no YAML file"),
        ("a: &a [1, 2]\nb: *a", "a.yaml", "has aliases"),
        ("def (", "a.py", "is no Python file"),
        ("run '", "a.sh", "a.sh: the script has a ' without its end"),
    ],
)
def test_bad_input_is_one_line(text, name, said, tmp_path, capsys):
    path = tmp_path / name
    path.write_text(text)
    assert main(["convert", str(path)]) == 2
    error = capsys.readouterr().err
    assert said in error
    assert error.count("\n") == 1


def test_a_value_of_another_form_is_named_and_not_fatal():
    found = of(
        "train.py --hf-checkpoint m --num-rollout many --multimodal-keys 3 --rollout-temperature "
        "-1 --lr 1e-6"
    )
    accounts = {one.key: one for one in found.accounts}
    assert accounts["num-rollout"].text.startswith('train.steps = "many" is invalid')
    assert accounts["multimodal-keys"].kind == "none"
    assert accounts["rollout-temperature"].text == "rollout.temperature = -1 must be above 0"
    assert "temperature" not in table(found).get("rollout", {})
    found = of("x -m verl.trainer.main_ppo data.train_files=t data.train_batch_size=null")
    assert "groups" not in table(found)["rollout"]
    accounts = {one.key: one for one in found.accounts}
    assert accounts["data.train_batch_size"].text.endswith("must have a value")


def test_a_setting_cannot_write_lines_into_the_recipe():
    found = of(
        "train.py --hf-checkpoint 'm\n[train]\nsteps = 1' --custom-rm-path 'x\ny' --bad 'a\n[env]'"
    )
    assert table(found)["model"]["path"] == "m\n[train]\nsteps = 1"
    assert not [line for line in found.recipe.splitlines() if line == "[env]"]


def test_an_unknown_system_is_refused():
    with pytest.raises(ConfigError, match="unknown system; did you mean 'slime'"):
        of("run --lr 1", system="slim")


TEXTS = st.one_of(
    st.sampled_from(
        [
            "",
            "-1",
            "0",
            "1",
            "true",
            "None",
            "[1, 'a']",
            '{"a.b": 1}',
            "1e999",
            "nan",
            "'x",
            "a\nb",
            "$HOME/x",
        ]
    ),
    st.text(max_size=12),
    st.floats().map(str),
)


@pytest.mark.parametrize("text", ["''", "a", "nan", "'{\"a\": 1}'", "'[1]'"])
def test_a_teacher_without_a_url_is_left_out_with_the_reason(text):
    found = convert(f"train.py --teacher_model_server {text}", system="swift")
    (account,) = found.accounts
    assert account.kind == "none"
    assert "URL" in account.text or "[[teacher]]" in account.text
    assert "teacher" not in table(found)
    with pytest.raises(ConfigError, match="teacher_model_server: "):
        convert(f"train.py --rlhf_type gkd --teacher_model_server {text}", system="swift")


@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(st.sampled_from(sorted(SYSTEMS)), st.data())
def test_any_value_of_any_setting_gives_a_recipe_of_valid_types(name, data):
    system = SYSTEMS[name]
    keys = data.draw(
        st.lists(st.sampled_from(sorted(system.rules)), min_size=1, max_size=8, unique=True)
    )
    given_settings = [(key, data.draw(TEXTS)) for key in keys]
    quoted = [
        f"{key}={shlex.quote(text)}" if system.hydra else f"--{key} {shlex.quote(text)}"
        for key, text in given_settings
    ]
    found = convert("train.py " + " ".join(quoted), system=name)
    assert [account.key for account in found.accounts] == keys
    merged = ConfigMerge()
    merged.add(table(found), "recipe", where="recipe")
    build(merged.tree, {})


# The commands and configurations of the seed documents, verbatim.

SWIFT_SEED = """swift rollout \\
--model xxx \\
--use_async_engine true \\
--multi_turn_scheduler xxx \\
--max_turns xxx
"""
SWIFT_SEED_FLAGS = """--multi_turn_scheduler xxx
--max_turns xxx
"""
VERL_SEEDS = {
    "basic": (
        'actor_rollout_ref:\n    rollout:\n        multi_turn: True\n        name: "sglang"\n',
        {},
    ),
    "tools": (
        "actor_rollout_ref:\n    rollout:\n        tool_kwargs:\n            tools_config_file: "
        "<path_to_tool_yaml_file>\n",
        {"env.args.tool_config_path": "<path_to_tool_yaml_file>"},
    ),
    "functions": (
        "actor_rollout_ref:\n    rollout:\n        mode: async\n        multi_turn:\n            "
        "enable: True\n            format: hermes  # or any other format your model's chat "
        "template supports\n            function_tool_path: path/to/your_tools.py\n        "
        "agent:\n            default_agent_loop: tool_agent\n",
        {"model.parser": "hermes", "env.args.function_tool_path": "path/to/your_tools.py"},
    ),
    "sanity": (
        "actor_rollout_ref:\n    rollout:\n        multi_turn:\n            "
        "tokenization_sanity_check_mode: "
        '"ignore_strippable"  # Choose from: "disable", "ignore_strippable", "strict"\n',
        {"rollout.sanity": "ignore_strippable"},
    ),
    "media": (
        "data:\n    train_files: a.jsonl\n    return_multi_modal_inputs: False\n",
        {"env.return_multi_modal_inputs": False},
    ),
}
VERL_SEED_LINE = "actor_rollout_ref.rollout.multi_turn.use_inference_chat_template = True\n"
SKYRL_SEED = 'chat_template:\n  source: "name"\n  name_or_path: "qwen3_without_thinking"\n'


def value_at(recipe, key):
    for part in key.split("."):
        recipe = recipe[part][0] if part == "env" else recipe[part]
    return recipe


@pytest.mark.parametrize("name", VERL_SEEDS)
def test_the_configurations_of_verls_document(name):
    text, expected = VERL_SEEDS[name]
    found = of(text, "config.yaml")
    assert found.system == "verl"
    assert not [one for one in found.accounts if one.kind == "unknown"]
    assert {key: value_at(table(found), key) for key in expected} == expected


def test_the_override_of_verls_document_has_spaces():
    found = of(VERL_SEED_LINE)
    assert (found.system, kinds(found)) == ("verl", {VERL_SEED_LINE.split()[0]: "mapped"})
    assert table(found)["rollout"]["history"] == "template"
    assert table(of(f"python -m verl.trainer.main_ppo data.seed=3\n{VERL_SEED_LINE}"))["seed"] == 3


def test_the_configuration_of_skyrls_document():
    found = of(SKYRL_SEED, "config.yaml")
    assert found.system == "skyrl"
    assert table(found)["model"]["template"] == "qwen3_without_thinking"
    assert table(found)["rollout"]["history"] == "template"
    flags = "generator.batched=True generator.use_conversation_multi_turn=False"
    assert table(of(f"x -m skyrl.main {flags}"))["rollout"]["history"] == "inline"


def test_the_command_of_swifts_document():
    found = of(SWIFT_SEED)
    assert found.system == "swift"
    assert table(found)["env"][0]["use"] == "swift:xxx"
    assert {one.kind for one in found.accounts} == {"mapped", "none"}
    assert next(one for one in found.accounts if one.key == "max_turns").text.startswith(
        'limits.turns = "xxx" is invalid'
    )
    flags = of(SWIFT_SEED_FLAGS)
    assert (flags.system, [one.key for one in flags.accounts]) == (
        "swift",
        ["multi_turn_scheduler", "max_turns"],
    )
    assert table(of("swift rlhf --multi_turn_scheduler xxx --max_turns 3"))["limits"]["turns"] == 3


def test_the_flags_of_slimes_document():
    flags = (
        "--rollout-max-response-len 32000 --rollout-function-path my.rollout "
        "--custom-config-path none.yaml"
    )
    found = of(f"python train.py {flags}")
    assert table(found)["limits"]["turn_tokens"] == 32000
    assert kinds(found)["rollout-function-path"] == "none"
    loaded = load(
        None, ["--env.use", "hop", "--limits.turn-tokens", "32000", "--limits.turns", "20"]
    )
    assert loaded.config.limits.turns == 20
