"""`turnwright convert` never invents: what it cannot read is named, what would be
another training is refused."""

import itertools
import tomllib

import pytest

from turnwright.cli.main import main
from turnwright.errors import ConfigError
from turnwright_compat.convert import launcher
from turnwright_compat.launch_scripts import convert, convert_file


def converted(tmp_path, files, name="run.sh"):
    for path, text in files.items():
        target = tmp_path / path
        target.parent.mkdir(parents=True, exist_ok=True)
        target.write_text(text)
    found = convert_file(tmp_path / name)
    return found, tomllib.loads(found.recipe)


def of(text, name="run.sh"):
    found = convert(text, name=name)
    return found, tomllib.loads(found.recipe)


def says(found, *parts):
    """Return whether one line of what is missing has all parts, and the
    recipe has it as a comment."""
    lines = [one for one in found.incomplete if all(part in one for part in parts)]
    return bool(lines) and all(f"# Incomplete: {one}." in found.recipe for one in lines)


# verl: agent loops and turns

VERL = (
    "python3 -m verl.trainer.main_ppo data.train_files=t.parquet data.train_batch_size=8 "
    "data.max_response_length=1024 actor_rollout_ref.model.path=/m actor_rollout_ref.rollout.n=4 "
    "actor_rollout_ref.actor.ppo_mini_batch_size=8 algorithm.adv_estimator=grpo "
)
ROLLOUT = "actor_rollout_ref.rollout"


@pytest.mark.parametrize(
    ("words", "turns"),
    [
        ("", 1),
        ("{0}.multi_turn.max_assistant_turns=8", 8),
        ("{0}.multi_turn.max_user_turns=8", 9),  # a last reply follows the last result
        ("{0}.multi_turn.max_user_turns=8 {0}.multi_turn.max_assistant_turns=8", 8),
        ("{0}.multi_turn.max_user_turns=2 {0}.multi_turn.max_assistant_turns=8", 3),
        (
            "{0}.multi_turn.enable=True",
            1024,
        ),  # unlimited there: no episode has more replies than tokens
        ("{0}.agent.default_agent_loop=tool_agent", 1024),
        ("{0}.agent.default_agent_loop=mine", 1024),
        ("{0}.agent.agent_loop_config_path=loops.yaml {0}.multi_turn.max_assistant_turns=5", 5),
        ("{0}.multi_turn.max_assistant_turns=null", 1),
    ],
)
def test_an_agent_loop_has_the_turns_that_its_settings_name(words, turns):
    _, recipe = of(VERL + words.format(ROLLOUT))
    assert recipe["limits"]["turns"] == turns


LOOPS = "- name: web\n  _target_: loops.WebLoop\n- name: sql\n  _target_: my_pkg.sql.SqlLoop\n"


@pytest.mark.parametrize(
    ("loops", "words", "use"),
    [
        (LOOPS, "{0}.agent.default_agent_loop=web", "loops.py:WebLoop"),
        (LOOPS, "{0}.agent.default_agent_loop=sql", "my_pkg.sql:SqlLoop"),
        (LOOPS, "", "REPLACE.py:Loop"),
        (LOOPS, "{0}.agent.default_agent_loop=tool_agent", "verl:tools"),
        ("- name: web\n  _target_: loops.WebLoop\n", "", "loops.py:WebLoop"),
        (None, "{0}.agent.default_agent_loop=web", "REPLACE.py:Loop"),
        ("no: [list", "", "REPLACE.py:Loop"),
    ],
)
def test_the_loop_of_a_configuration_is_named(tmp_path, loops, words, use):
    script = (
        VERL + f"{ROLLOUT}.agent.agent_loop_config_path=conf/loops.yaml {words.format(ROLLOUT)}"
    )
    files = {"run.sh": script, "loops.py": ""} | (
        {} if loops is None else {"conf/loops.yaml": loops}
    )
    found, recipe = converted(tmp_path, files)
    assert recipe["env"][0]["use"].removeprefix(f"{tmp_path}/") == use
    assert bool(found.incomplete) == use.startswith("REPLACE")


def test_without_an_estimator_verls_default_is_written():
    found, recipe = of(VERL.replace("algorithm.adv_estimator=grpo", ""))
    assert recipe["train"]["algorithm"] == "ppo"
    assert recipe["train"]["critic"] == {"lr": 1e-5, "updates": 1}
    assert 'algorithm = "ppo"  # verl\'s default\n' in found.recipe
    assert found.complete


def test_an_estimator_that_is_not_here_is_not_another_one():
    found, recipe = of(VERL.replace("=grpo", "=remax"))
    assert "algorithm" not in recipe["train"]
    assert "critic" not in recipe["train"]
    assert any("adv_estimator = remax" in line for line in found.lines())


def test_verls_asynchronous_trainers_have_their_schedules():
    words = (
        " async_training.require_batches=2 rollout.total_rollout_steps=1600 data.train_batch_size=0"
    )
    text = VERL.replace(
        "verl.trainer.main_ppo", "verl.experimental.fully_async_policy.fully_async_main"
    )
    _, recipe = of(text + words)
    assert recipe["schedule"]["mode"] == "async"
    assert (recipe["rollout"]["groups"], recipe["train"]["steps"]) == (16, 100)
    _, recipe = of(
        VERL.replace("verl.trainer.main_ppo", "verl.experimental.one_step_off_policy.main_ppo")
    )
    assert recipe["schedule"]["mode"] == "one_step_off"


DISTILLS = (
    " distillation.enabled=True distillation.teacher_models.teacher_model.model_path=/t "
    "distillation.distillation_loss.loss_mode={} "
    "distillation.distillation_loss.use_policy_gradient={} "
    "distillation.distillation_loss.use_task_rewards=False"
)


def test_verls_distillation_is_a_teacher_or_refused():
    _, recipe = of(VERL + DISTILLS.format("k1", "True"))
    assert recipe["teacher"] == [{"path": "/t", "signal": "advantage", "weight": 1.0}]
    assert recipe["train"]["reward_weight"] == 0.0
    for mode, gradient in (("k3", "True"), ("k1", "False"), ("forward_kl_topk", "False")):
        with pytest.raises(ConfigError, match="a loss that is not here"):
            of(VERL + DISTILLS.format(mode, gradient))


# Hydra

MY = """defaults:
  - ppo_trainer
  - tools@actor_rollout_ref.rollout: fast
  - _self_
actor_rollout_ref:
  rollout:
    n: 16
    multi_turn: {enable: true, max_assistant_turns: 5}
data:
  max_prompt_length: 100
  max_response_length: ${data.max_prompt_length}
custom_reward_function: {path: score.py, name: compute_score}
"""
FAST = "temperature: 0.7\ntop_p: 0.9\nn: 2\n"
HYDRA = (
    "python3 -m verl.trainer.main_ppo {} actor_rollout_ref.model.path=/m "
    "algorithm.adv_estimator=grpo {}"
)


@pytest.mark.parametrize("entry", ['{"": fast}', '{" ": fast}', '{"": [fast, slow]}'])
def test_an_entry_of_defaults_without_a_group_is_named_and_not_read(tmp_path, entry):
    files = {
        "run.sh": HYDRA.format("-cp conf -cn my", "data.train_files=t.parquet"),
        "conf/my.yaml": f"defaults:\n  - {entry}\n" + MY.partition("_self_\n")[2],
        "conf/fast.yaml": FAST,
    }
    found, recipe = converted(tmp_path, files)
    assert not found.complete
    assert any("names no group" in line for line in found.incomplete), found.incomplete
    assert recipe["limits"]["turns"] == 5


@pytest.mark.parametrize(
    "options",
    [
        "--config-path=conf --config-name=my",
        "--config-path conf --config-name my.yaml",
        "-cp conf -cn my",
        "--config-dir=conf -cn=my",
    ],
)
def test_the_file_of_a_configuration_is_read_with_its_defaults(tmp_path, options):
    files = {
        "run.sh": HYDRA.format(options, "data.train_files=t.parquet"),
        "conf/my.yaml": MY,
        "conf/tools/fast.yaml": FAST,
    }
    found, recipe = converted(tmp_path, files)
    assert found.complete
    assert recipe["limits"] == {
        "turns": 5,
        "prompt_tokens": 100,
        "episode_tokens": 100,
        "turn_tokens": 100,
    }
    assert (recipe["rollout"]["temperature"], recipe["rollout"]["top_p"]) == (0.7, 0.9)
    assert recipe["rollout"]["group_size"] == 16  # `_self_` comes last
    assert recipe["env"][0]["args"]["reward"] == "score.py:compute_score"


@pytest.mark.parametrize("place", ["$(pwd)/conf", "$PWD/conf", "${PWD}/conf", "$DIR/conf"])
def test_a_configuration_under_the_working_folder_is_read(tmp_path, place):
    script = 'DIR="$(pwd)"\n' + HYDRA.format(
        f'--config-path="{place}" --config-name=my', "data.train_files=t.parquet"
    )
    files = {"bin/run.sh": script, "conf/my.yaml": MY, "conf/tools/fast.yaml": FAST}
    found, recipe = converted(tmp_path, files, "bin/run.sh")
    assert found.complete
    assert recipe["limits"]["turns"] == 5


def test_overrides_change_add_and_take_away(tmp_path):
    words = (
        f"++{ROLLOUT}.n=3 ~{ROLLOUT}.multi_turn +actor_rollout_ref.actor.clip_ratio_high=0.3 "
        "~custom_reward_function "
        "data.max_prompt_length=50 data.train_files=t.parquet"
    )
    files = {
        "run.sh": HYDRA.format("-cp conf -cn my", words),
        "conf/my.yaml": MY,
        "conf/tools/fast.yaml": FAST,
    }
    _, recipe = converted(tmp_path, files)
    assert recipe["rollout"]["group_size"] == 3
    assert recipe["limits"]["turns"] == 1
    assert recipe["train"]["clip_high"] == 0.3
    assert recipe["limits"]["episode_tokens"] == 50
    assert "args" not in recipe["env"][0]


def test_a_configuration_that_is_not_there_is_said(tmp_path):
    script = HYDRA.format(
        "--config-path=/elsewhere --config-name=mine", "data.train_files=t.parquet"
    )
    found, recipe = converted(tmp_path, {"run.sh": script})
    assert says(found, "mine.yaml", "not found")
    assert recipe["env"][0]["use"].startswith("REPLACE")  # the file may name an agent loop
    assert "turns" not in recipe.get("limits", {})
    assert "unless a part that was not read sets it" in found.recipe


def test_a_part_of_a_configuration_that_is_not_there_is_said(tmp_path):
    files = {
        "run.sh": HYDRA.format("-cp conf -cn my", "data.train_files=t.parquet"),
        "conf/my.yaml": MY,
    }
    found, _ = converted(tmp_path, files)
    assert says(found, "tools/fast.yaml", "not found")


def test_a_configuration_of_verl_itself_is_known():
    found, _ = of(
        HYDRA.format(
            "--config-path=config --config-name=ppo_megatron_trainer.yaml",
            "data.train_files=t.parquet",
        )
    )
    assert found.complete


# Programs of the user's own

SKYRL = (
    "data.train_data=\"['t.parquet']\" trainer.policy.model.path=/m trainer.train_batch_size=8 "
    "trainer.policy_mini_batch_size=8 generator.n_samples_per_prompt=4 generator.max_turns=8"
)


@pytest.mark.parametrize(
    ("start", "program"),
    [
        (
            "uv run --isolated -m my_project.entrypoints.main_trials",
            "my_project.entrypoints.main_trials",
        ),
        ("python -m my_project.main", "my_project.main"),
        ("torchrun --nproc-per-node 8 recipe/mine/main.py", "recipe/mine/main.py"),
        (
            "ray job submit --address http://x -- python3 examples/mine/main_mine.py",
            "examples/mine/main_mine.py",
        ),
        ("bash -c 'python -m my_project.main {}'", "my_project.main"),
    ],
)
def test_a_program_of_its_own_is_named_and_no_environment_is_made_up(start, program):
    found, recipe = of(start.format(SKYRL) if "{}" in start else f"{start} {SKYRL}")
    assert found.system == "skyrl"
    assert says(found, program, "a program of its own")
    assert recipe["env"][0]["use"] == "REPLACE.py:Env"
    assert recipe["limits"]["turns"] == 8


@pytest.mark.parametrize(
    "program", ["skyrl.train.entrypoints.main_base", "skyrl_train.entrypoints.main_base"]
)
def test_a_program_of_the_system_is_no_such(program):
    found, recipe = of(f"uv run --isolated -m {program} {SKYRL} environment.env_class=search")
    assert found.complete
    assert recipe["env"][0]["use"] == "skyrl:search"


def test_an_environment_that_an_own_program_registers_is_found(tmp_path):
    entry = 'register(id="times", entry_point="proj.env:TimesEnv")\n'
    script = f"python -m proj.main {SKYRL} environment.env_class=times"
    found, recipe = converted(
        tmp_path, {"run.sh": script, "proj/main.py": entry, "proj/env.py": ""}
    )
    assert recipe["env"][0]["use"] == f"{tmp_path}/proj/env.py:TimesEnv"
    assert says(found, "proj.main")


def test_an_own_program_of_verl_and_of_slime():
    found, recipe = of(
        VERL.replace("verl.trainer.main_ppo", "recipe.mine.main_mine")
        + f"{ROLLOUT}.multi_turn.enable=True"
    )
    assert says(found, "recipe.mine.main_mine")
    assert recipe["env"][0]["use"].startswith("REPLACE")
    found, recipe = of(
        "python my_train.py --hf-checkpoint /m --prompt-data t.jsonl --rollout-batch-size 4 "
        "--num-rollout 3"
    )
    assert says(found, "my_train.py")
    assert recipe["env"][0]["use"].startswith("REPLACE")


# Launchers in Python

COMMON = """
FLAGS = "--n-samples-per-prompt 4 "


def rollout_args(args, steps=40):
    return f"--prompt-data train.jsonl --num-rollout {steps} --rollout-batch-size 8 " + FLAGS
"""
LAUNCH = """
import common as C


def execute(args):
    ckpt_args = "--hf-checkpoint /m "
    train_args = f"{ckpt_args} {C.rollout_args(args)} --lr {1e-6 if args.small else 1e-5} "
    U.execute_train(train_args=train_args, num_gpus_per_node=8)
"""
FORMS = {
    "import as": LAUNCH,
    "from import": LAUNCH.replace("import common as C", "from common import rollout_args").replace(
        "C.rollout", "rollout"
    ),
    "main": LAUNCH.replace("def execute(args)", "def main()")
    .replace("args.small", "False")
    .replace("(args)", "(None)")
    + '\n\nif __name__ == "__main__":\n    main()\n',
    "data class": "from dataclasses import dataclass\n"
    + LAUNCH.replace(
        "def execute(args)",
        "@dataclass\nclass Args:\n    small: bool = False\n\n\ndef execute(args: Args)",
    ),
    "argparse": LAUNCH.replace(
        "def execute(args):",
        "import argparse\n\n\ndef execute():\n    parser = argparse.ArgumentParser()\n"
        '    parser.add_argument("--small", action="store_true")\n    args = parser.parse_args()',
    )
    + "\n\nexecute()\n",
    "subprocess": 'import subprocess\nimport common as C\n\nsubprocess.run(["python", "train.py", '
    '"--hf-checkpoint", "/m", *C.rollout_args(None).split(), "--lr", "1e-5"])\n',
    "system": "import os\nfrom common import rollout_args\n\n"
    'os.system("python3 train.py --hf-checkpoint /m --lr 1e-5 " + rollout_args(0))\n',
    "join": LAUNCH.replace(
        'f"{ckpt_args} {C.rollout_args(args)} --lr',
        '" ".join([ckpt_args, C.rollout_args(args)]) + f" --lr',
    ).replace("args.small", "False"),
}


@pytest.mark.parametrize("form", FORMS)
def test_a_helper_that_a_launcher_imports_is_read(tmp_path, form):
    found, recipe = converted(tmp_path, {"run.py": FORMS[form], "common.py": COMMON}, "run.py")
    assert found.system == "slime"
    assert (
        recipe["train"]["steps"],
        recipe["rollout"]["groups"],
        recipe["rollout"]["group_size"],
    ) == (40, 8, 4)
    assert recipe["model"]["path"] == "/m"
    if form in ("import as", "from import"):  # nobody gives `args`
        assert "lr" not in recipe["train"] or says(found, "lr") or says(found, "small")
    else:
        assert recipe["train"]["lr"] == 1e-5
        assert found.complete


@pytest.mark.parametrize(
    "form",
    ["import as", "from import", "main", "data class", "argparse", "subprocess", "system", "join"],
)
def test_a_helper_that_is_not_there_is_named(tmp_path, form):
    found, recipe = converted(tmp_path, {"run.py": FORMS[form]}, "run.py")
    assert says(found, "rollout_args", "not read")
    assert recipe["env"][0]["use"].startswith("REPLACE")
    assert "steps" not in recipe["train"]


def test_nothing_of_a_launcher_and_its_helpers_is_executed(tmp_path):
    marker = tmp_path / "ran"
    helper = (
        f'open({str(marker)!r}, "w")\n' + COMMON + f'\nimport os\nos.system("touch {marker}")\n'
    )
    converted(tmp_path, {"run.py": FORMS["main"], "common.py": helper}, "run.py")
    assert not marker.exists()


def test_flags_under_a_condition_that_is_not_known_are_named(tmp_path):
    text = (
        'import mine\n\nargs = "--hf-checkpoint /m --num-rollout 3 --prompt-data t.jsonl "\nif '
        'mine.ready():\n    args += "--custom-generate-function-path a.generate '
        '"\nU.execute_train(train_args=args)\n'
    )
    found, recipe = converted(tmp_path, {"run.py": text}, "run.py")
    assert says(found, "mine_ready", "not read")
    assert recipe["env"][0]["use"].startswith("REPLACE")


def test_a_launcher_without_an_end_is_named(tmp_path):
    text = "def f(n):\n    return f(n + 1) + f(n + 2)\n\n\nx = f(0)\n"
    text += 'U.execute_train(train_args="--hf-checkpoint /m --num-rollout 2")\n'
    with pytest.raises(ConfigError, match=r"no known setting|no settings"):
        converted(tmp_path, {"run.py": text}, "run.py")


# slime and Miles

SLIME = (
    "--hf-checkpoint /m --prompt-data t.jsonl --rollout-batch-size 4 --n-samples-per-prompt "
    "8 --num-rollout 3 "
)


@pytest.mark.parametrize(
    ("start", "words", "mode"),
    [
        ("train.py", "", None),
        ("train_async.py", "", "one_step_off"),
        (
            "train_async.py",
            "--rollout-function-path fully_async_rollout.generate_rollout_fully_async",
            "async",
        ),
        (
            "train_async.py",
            "--rollout-function-path "
            "slime.rollout.fully_async_rollout.generate_rollout_fully_async",
            "async",
        ),
        (
            "train_async.py",
            "--rollout-function-path miles.rollout.fully_async_rollout.FullyAsyncRolloutFn",
            "async",
        ),
        ("train_async.py", "--fully-async --max-weight-staleness 3", "async"),
        ("train.py", "--rollout-function-path slime.rollout.sglang_rollout.generate_rollout", None),
    ],
)
def test_the_rollouts_of_the_systems_are_schedules(start, words, mode):
    found, recipe = of(f"python3 {start} {SLIME} {words}")
    assert found.complete
    assert recipe.get("schedule", {}).get("mode") == mode
    assert recipe.get("schedule", {}).get("staleness") == (3 if "staleness" in words else None)
    assert recipe["env"][0]["use"] == "slime:generate"


def test_a_function_for_a_step_is_named_with_the_hooks_in_its_place():
    found, recipe = of(f"python3 train.py {SLIME} --rollout-function-path mine.generate_rollout")
    assert says(found, "mine.generate_rollout", "custom generate function", "train.group_filter")
    assert recipe["env"][0]["use"].startswith("REPLACE")
    found, recipe = of(
        f"python3 train.py {SLIME} --rollout-function-path mine.generate_rollout "
        "--custom-generate-function-path a.generate"
    )
    assert says(found, "mine.generate_rollout")
    assert recipe["env"][0]["use"] == "a:generate"


@pytest.mark.parametrize(
    ("words", "named"),
    [
        ("--custom-agent-function-path mine.run", "custom-agent-function-path = mine.run"),
        ("--generate-tool-specs-path mine.specs", "generate-tool-specs-path = mine.specs"),
        (
            "--custom-reward-post-process-path mine.scale",
            "custom-reward-post-process-path = mine.scale",
        ),
        ("--data-source-path mine.Source", "data-source-path = mine.Source"),
        ("--custom-rollout-log-function-path mine.log", None),
    ],
)
def test_code_of_the_user_that_is_not_in_the_recipe_is_said(words, named):
    found, _ = of(f"python3 train.py {SLIME} {words}")
    assert found.complete if named is None else says(found, named)


@pytest.mark.parametrize(
    "words",
    [
        "--rollout-function-path slime.rollout.sft_rollout.generate_rollout",
        "--loss-type sft_loss",
    ],
)
def test_another_training_of_slime_is_refused(words):
    with pytest.raises(ConfigError, match="trains on given replies"):
        of(f"python3 train.py {SLIME} {words}")


def test_adapters_of_miles():
    found, recipe = of(
        f"python3 train.py {SLIME} --lora-rank 32 --lora-alpha 64 --lora-dropout 0.0 "
        "--target-modules all-linear"
    )
    assert found.complete
    assert (recipe["lora"]["rank"], recipe["lora"]["alpha"]) == (32, 64)
    assert "targets" not in recipe["lora"]
    _, recipe = of(f"python3 train.py {SLIME} --lora-rank 8 --target-modules q_proj,v_proj")
    # Its default alpha.
    assert recipe["lora"] == {
        "rank": 8,
        "alpha": 16,
        "targets": ["q_proj", "v_proj"],
    }
    _, recipe = of(f"python3 train.py {SLIME} --lora-rank 0 --lora-alpha 64")
    assert "lora" not in recipe
    found, recipe = of(f"python3 train.py {SLIME} --lora-rank 8 --target-modules linear_qkv")
    assert says(found, "linear_qkv")


def test_on_policy_distillation_of_slime_is_a_teacher():
    words = "--use-opd --opd-type sglang --opd-kl-coef 0.5 --rm-url http://h:1/generate "
    rewards = "--custom-rm-path slime.rollout.on_policy_distillation.reward_func"
    _, recipe = of(f"python3 train.py {SLIME} {words} {rewards}")
    assert recipe["teacher"] == [{"signal": "advantage", "weight": 0.5, "urls": ["http://h:1"]}]
    assert recipe["train"]["reward_weight"] == 0.0
    assert "args" not in recipe["env"][0]
    found, recipe = of(
        f"python3 train.py {SLIME} --use-opd --opd-type megatron --opd-teacher-load /t --rm-type "
        "math"
    )
    assert says(found, "opd-teacher-load", "Megatron")
    assert "reward_weight" not in recipe["train"]


# ms-swift

SWIFT = (
    "swift rlhf --model /m --dataset t.jsonl --max_steps 10 --per_device_train_batch_size 2 "
    "--tuner_type full "
)


@pytest.mark.parametrize(
    ("beta", "divergence"), [("0", "forward"), ("0.5", "js"), ("1.0", "reverse"), (None, "js")]
)
def test_distillation_from_own_replies_is_a_teacher(beta, divergence):
    words = "" if beta is None else f"--beta {beta}"
    found, recipe = of(
        f"{SWIFT} --rlhf_type gkd --teacher_model /t --lmbda 1 {words} --multi_turn_scheduler tips "
        "--max_turns 2"
    )
    assert found.complete
    assert recipe["teacher"] == [{"path": "/t", "signal": "loss", "divergence": divergence}]
    assert (recipe["rollout"]["group_size"], recipe["rollout"]["groups"]) == (1, 2)
    assert recipe["train"]["reward_weight"] == 0.0
    assert {"kl", "clip_low", "clip_high"}.isdisjoint(recipe["train"])
    assert (recipe["env"][0]["use"], recipe["limits"]["turns"]) == ("swift:tips", 2)


@pytest.mark.parametrize(
    ("words", "why"),
    [
        ("--teacher_model /t", "lmbda = 0.5"),
        ("--teacher_model /t --lmbda 0", "lmbda = 0 "),
        ("--teacher_model /t --lmbda 1 --seq_kd true", "seq_kd"),
        ("--teacher_model /t --lmbda 1 --sft_alpha 0.1", "sft_alpha"),
        ("--teacher_model /t --lmbda 1 --beta 0.3", "beta = 0.3"),
        ("--lmbda 1", "its own teacher"),
        ("--lmbda 1 --teacher_model /m", "its own teacher"),
        ("--lmbda 1 --teacher_model_server http://h:1", "gkd_logits_topk"),
    ],
)
def test_another_distillation_is_refused(words, why):
    with pytest.raises(ConfigError, match=why):
        of(f"{SWIFT} --rlhf_type gkd {words}")


def test_a_plugin_that_gives_the_teacher_a_prompt_is_refused(tmp_path):
    files = {
        "run.sh": f"{SWIFT} --rlhf_type gkd --lmbda 1 --teacher_model /t --external_plugins "
        "plugin.py",
        "plugin.py": "row['teacher_prompt'] = 1\n",
    }
    with pytest.raises(ConfigError, match="teacher_prompt"):
        converted(tmp_path, files)


@pytest.mark.parametrize("kind", ["dpo", "kto", "ppo", "rm", "cpo", "orpo", "simpo"])
def test_trainings_that_are_no_reinforcement_are_refused_by_name(kind):
    with pytest.raises(ConfigError, match=f"rlhf_type = {kind}"):
        of(f"{SWIFT} --rlhf_type {kind}")
    with pytest.raises(ConfigError, match=f"rlhf_type = {kind}"):
        of(f"rlhf_type: {kind}\nmodel: /m\ndataset: t.jsonl\nmax_turns: 2\n", "a.yaml")


@pytest.mark.parametrize(
    ("command", "what"),
    [("sft", "given replies"), ("pt", "given replies"), ("infer", "trains nothing")],
)
def test_other_commands_are_refused_by_name(command, what):
    with pytest.raises(ConfigError, match=f"swift {command} .*{what}"):
        of(f"swift {command} --model /m --dataset t.jsonl --max_length 100")


def test_commands_beside_the_training_are_not_read():
    text = (
        f"swift infer --model /other --max_length 7\n{SWIFT} --rlhf_type grpo --reward_funcs "
        "accuracy --num_generations 2\n"
    )
    found, recipe = of(text)
    assert recipe["model"]["path"] == "/m"
    assert "prompt_tokens" not in recipe["limits"]
    assert found.complete


def test_a_type_that_is_not_set_is_said():
    found, _ = of(f"{SWIFT} --num_generations 2 --reward_funcs accuracy")
    assert says(found, "rlhf_type", "dpo")


def test_a_teacher_beside_rewards():
    _, recipe = of(
        f"{SWIFT} --rlhf_type grpo --teacher_model /t --teacher_kl_coef 0.3 --num_generations 2 "
        "--reward_funcs accuracy"
    )
    assert recipe["teacher"] == [{"path": "/t", "signal": "advantage", "weight": 0.3}]
    assert "reward_weight" not in recipe["train"]
    _, recipe = of(f"{SWIFT} --rlhf_type grpo --teacher_model /t --num_generations 1")
    assert recipe["train"]["reward_weight"] == 0.0


def test_a_configuration_of_swift_is_read_under_the_flags(tmp_path):
    files = {
        "run.sh": "swift rlhf --config a.yaml --temperature 0.5",
        "a.yaml": "rlhf_type: grpo\nmodel: /m\ndataset: t.jsonl\ntemperature: 1\n",
    }
    found, recipe = converted(tmp_path, files)
    assert recipe["rollout"]["temperature"] == 0.5
    assert recipe["model"]["path"] == "/m"
    found, recipe = converted(
        tmp_path, {"run.sh": "swift rlhf --rlhf_type grpo --model /m --config b.yaml"}
    )
    assert says(found, "b.yaml", "not found")


def test_steps_of_the_optimizer_become_steps():
    words = (
        "--rlhf_type grpo --num_generations 2 --reward_funcs accuracy --steps_per_generation "
        "4 --save_steps 8"
    )
    found, recipe = of(f"{SWIFT} {words}")
    assert (
        recipe["train"]["minibatches"],
        recipe["train"]["steps"],
        recipe["checkpoint"]["every"],
    ) == (4, 3, 2)
    assert any("max_steps = 10 counts optimizer steps" in note for note in found.notes)


def test_arguments_that_a_script_makes_are_read():
    text = "from swift.llm import rlhf_main, RLHFArguments\n\n"
    text += "rlhf_main(RLHFArguments(rlhf_type='dpo', model='/m', dataset=['t.jsonl']))\n"
    with pytest.raises(ConfigError, match="rlhf_type = dpo"):
        of(text, "run.py")
    _, recipe = of(text.replace("'dpo'", "'grpo', num_generations=4, temperature=0.5"), "run.py")
    assert (recipe["rollout"]["group_size"], recipe["rollout"]["temperature"]) == (4, 0.5)


# TRL

TRL = '''
import argparse

from datasets import load_dataset
from peft import LoraConfig
from trl import GRPOConfig, GRPOTrainer
from trl.rewards import think_format_reward


class Maze:
    def reset(self, **kwargs):
        return "start"

    def go(self, where: str) -> str:
        """Go."""
        return where


def score(environments, **kwargs):
    return [0.0 for _ in environments]


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--lr", type=float, default=2e-6)
    args = parser.parse_args()
    INNER
    trainer = GRPOTrainer(
        model="org/model",
        train_dataset="rows.jsonl",
        reward_funcs=[score, think_format_reward],
        args=GRPOConfig(
            learning_rate=args.lr,
            num_generations=4,
            per_device_train_batch_size=4,
            gradient_accumulation_steps=2,
            max_steps=10,
            chat_template_kwargs={"enable_thinking": False},
            logging_steps=1,
        ),
        environment_factory=Maze,
        peft_config=LoraConfig(r=16, lora_alpha=32),
    )
    trainer.train()


if __name__ == "__main__":
    main()
'''


def test_a_script_with_a_trainer_of_trl(tmp_path):
    found, recipe = converted(
        tmp_path, {"train_maze.py": TRL.replace("    INNER\n", "")}, "train_maze.py"
    )
    assert found.system == "trl"
    assert found.complete
    env = recipe["env"][0]
    assert (env["use"], env["tasks"]) == (f"{tmp_path}/train_maze.py:Maze", "rows.jsonl")
    assert env["args"]["reward_funcs"] == [
        f"{tmp_path}/train_maze.py:score",
        "trl.rewards:think_format_reward",
    ]
    assert (recipe["train"]["lr"], recipe["train"]["steps"], recipe["train"]["minibatches"]) == (
        2e-6,
        10,
        1,
    )
    assert (recipe["rollout"]["group_size"], recipe["rollout"]["groups"]) == (4, 2)
    assert (recipe["lora"]["rank"], recipe["lora"]["alpha"]) == (16, 32)
    assert recipe["model"]["template_args"] == {"enable_thinking": False}


def test_a_class_inside_a_function_is_named_as_such(tmp_path):
    inner = "    class Maze:\n        def reset(self, **kwargs):\n            return None\n"
    found, recipe = converted(tmp_path, {"run.py": TRL.replace("    INNER\n", inner)}, "run.py")
    assert says(found, "Maze", "inside main()")
    assert recipe["env"][0]["use"].startswith("REPLACE")


def test_what_a_script_of_trl_computes_is_named(tmp_path):
    text = TRL.replace("    INNER\n", "").replace(
        '"rows.jsonl"', 'load_dataset("org/rows", split="train").map(shape)'
    )
    text = text.replace("num_generations=4,", "num_generations=count(),")
    found, recipe = converted(tmp_path, {"run.py": text}, "run.py")
    assert says(found, "train_dataset", "made by code")
    assert says(found, "count", "num_generations")
    assert "tasks" not in recipe["env"][0]
    assert recipe["env"][0]["use"].endswith("run.py:Maze")


def test_settings_of_trl_from_the_command_line_are_said(tmp_path):
    text = (
        "from trl import GRPOConfig, GRPOTrainer, TrlParser\n\n\ndef score(completions, "
        "**kwargs):\n    return [0.0]\n\n\n"
        "parser = TrlParser((GRPOConfig,))\n(training_args,) = parser.parse_args_and_config()\n"
        'GRPOTrainer(model="m", args=training_args, reward_funcs=score, '
        'train_dataset="rows.jsonl")\n'
    )
    found, _ = converted(tmp_path, {"run.py": text}, "run.py")
    assert says(found, "training_args", "command line")


def test_flags_of_a_script_of_trl_are_read_with_the_script(tmp_path):
    text = (
        "from trl import GRPOConfig, GRPOTrainer, TrlParser\n\n\n"
        "class Maze:\n    def reset(self, **kwargs):\n        return None\n\n\n"
        "def score(environments, **kwargs):\n    return [0.0]\n\n\nparser = "
        "TrlParser((GRPOConfig,))\n"
        "(training_args,) = parser.parse_args_and_config()\n"
        'GRPOTrainer(model="m", args=training_args, reward_funcs=score, '
        'train_dataset="rows.jsonl", environment_factory=Maze)\n'
    )
    script = "accelerate launch --num_processes 2 maze.py --learning_rate 3e-6 --num_generations 4"
    found, recipe = converted(tmp_path, {"run.sh": script, "maze.py": text})
    assert found.system == "trl"
    assert found.complete
    assert (recipe["train"]["lr"], recipe["rollout"]["group_size"]) == (3e-6, 4)
    assert recipe["rollout"]["groups"] == 4  # 8 completions of each of 2 processes
    assert recipe["env"][0]["use"] == f"{tmp_path}/maze.py:Maze"
    found, recipe = converted(
        tmp_path,
        {"other.sh": f"{script} --model_name_or_path m".replace("maze.py", "gone.py")},
        "other.sh",
    )
    assert says(found, "gone.py")
    assert recipe["env"][0]["use"].startswith("REPLACE")


@pytest.mark.parametrize("trainer", ["SFTTrainer", "DPOTrainer", "GKDTrainer", "KTOTrainer"])
def test_other_trainers_of_trl_are_refused_by_name(trainer):
    text = f'from trl import {trainer}\n\n{trainer}(model="m", train_dataset="rows.jsonl")\n'
    with pytest.raises(ConfigError, match=trainer):
        of(text, "run.py")


# What only a shell knows

FLAGS = f"python train.py {SLIME}"


@pytest.mark.parametrize(
    ("script", "named"),
    [
        ("if [ -f /x ]; then G='--group-rm'; else G=''; fi\n" + FLAGS + " $G", "-f /x"),
        ("case $(hostname) in a) N=1;; *) N=2;; esac\n" + FLAGS + " --eps-clip 0.$N", "hostname"),
        ('[ "$(nproc)" -gt 4 ] && ARGS="--eps-clip 0.3"\n' + FLAGS + " $ARGS", "nproc"),
        (FLAGS + " $EXTRA_ARGS", "$EXTRA_ARGS"),
        (FLAGS + ' "${EXTRA[@]}"', None),
        (FLAGS + " --eps-clip $CLIP", "$CLIP"),
        (FLAGS + " --eps-clip $1", "$1"),
        (f"source settings.sh\n{FLAGS} $MINE", "settings.sh"),
        (f"{FLAGS}\npython train.py {SLIME} --eps-clip 0.4", "2 trainings"),
    ],
)
def test_what_depends_on_the_shell_is_said(script, named):
    found, _ = of(script)
    assert found.complete if named is None else says(found, named)


@pytest.mark.parametrize(
    ("script", "clip"),
    [
        (
            "K=a\ncase $K in\n  b|c) N=1 ;;\n  a*) N=2 ;;\n  *) N=3 ;;\nesac\n"
            + FLAGS
            + " --eps-clip 0.$N",
            0.2,
        ),
        ('A=1\n[ "$A" = 1 ] && N=3\n[ "$A" = 2 ] && N=4\n' + FLAGS + " --eps-clip 0.$N", 0.3),
        ('A=1\n[ "$A" = 2 ] || N=5\n' + FLAGS + " --eps-clip 0.$N", 0.5),
        (
            "N=3\nif [ $N -gt 2 ] && [ $N -lt 9 ]; then M=6; else M=7; fi\n"
            + FLAGS
            + " --eps-clip 0.$M",
            0.6,
        ),
        (
            'A=x\nif [ $A = y ] || { [ $A = x ] && ! [ -z "$A" ]; }; then M=1; fi\n'
            + FLAGS
            + " --eps-clip 0.$M",
            0.1,
        ),
        (
            "P=/a/b/c.sh\nB=${P##*/}\nif [ ${B%.sh} = c ]; then M=4; fi\n"
            + FLAGS
            + " --eps-clip 0.${M}",
            0.4,
        ),
        ("declare -a ARGS=(--eps-clip 0.7)\n" + FLAGS + ' "${ARGS[@]}" 2>&1 | tee log.txt', 0.7),
        (FLAGS + " --eps-clip ${1:-0.8}", 0.8),
        ("( cd /x && " + FLAGS + " --eps-clip 0.9 )", 0.9),
        ('eval "' + FLAGS + ' --eps-clip 0.15"', 0.15),
        ("if [ -f /x ]; then echo yes; else Z=1; fi\n" + FLAGS + " --eps-clip 0.25", 0.25),
    ],
)
def test_what_a_shell_would_choose_is_read(script, clip):
    found, recipe = of(script)
    assert recipe["train"]["clip_low"] == clip
    assert found.complete


def test_a_script_that_is_sourced_is_read(tmp_path):
    script = (
        'DIR="$(cd -- "$(dirname -- "${BASH_SOURCE[0]}")" &>/dev/null && pwd)"\nsource '
        '"$DIR/../lib/more.sh"\n' + FLAGS + " ${MORE[@]}"
    )
    found, recipe = converted(
        tmp_path, {"bin/run.sh": script, "lib/more.sh": "MORE=(--eps-clip 0.35)\n"}, "bin/run.sh"
    )
    assert recipe["train"]["clip_low"] == 0.35
    assert found.complete


def test_the_terminal_names_all_that_is_not_in_the_recipe(tmp_path, capsys):
    path = tmp_path / "run.sh"
    path.write_text(
        f"{FLAGS} --rollout-function-path mine.roll --loss-mask-type qwen --num-epok 3 --use-tis $X"
    )
    assert main(["convert", str(path)]) == 0
    lines = capsys.readouterr().err.splitlines()
    assert any(line.startswith("incomplete: rollout-function-path = mine.roll") for line in lines)
    assert any(line.startswith("not converted: loss-mask-type = qwen: ") for line in lines)
    assert "unknown setting num-epok: did you mean 'num-epoch'?" in lines


def test_a_refusal_is_one_line(tmp_path, capsys):
    path = tmp_path / "run.sh"
    path.write_text(f"{SWIFT} --rlhf_type gkd --teacher_model /t")
    assert main(["convert", str(path), "--out", str(tmp_path / "recipe.toml")]) == 2
    assert capsys.readouterr().err.count("\n") == 1
    assert not (tmp_path / "recipe.toml").exists()


# The dry run

ENV = """import turnwright as tw


class Shop(tw.Env):
    def __init__(self, port=1):
        BODY

    def reset(self, task, *, seed=None):
        return ""

    def step(self, action):
        return ""
"""


@pytest.mark.parametrize(
    ("body", "name", "code", "said"),
    [
        ("pass", "Shop", 0, ""),
        (
            'raise OSError("no\\nserver")',
            "Shop",
            2,
            "shop.py:Shop cannot be made: OSError: no server",
        ),
        ("pass", "Shopp", 2, "Shop"),
        ("pass", "REPLACE", 2, "REPLACE"),
    ],
)
def test_the_dry_run_makes_the_environment(tmp_path, capsys, body, name, code, said):
    (tmp_path / "shop.py").write_text(ENV.replace("BODY", body))
    (tmp_path / "rows.jsonl").write_text('{"prompt": "a"}\n')
    (tmp_path / "recipe.toml").write_text(
        f'[[env]]\nuse = "shop.py:{name}"\ntasks = "rows.jsonl"\n'
    )
    assert main(["train", str(tmp_path / "recipe.toml"), "--dry-run"]) == code
    shown = capsys.readouterr()
    assert "[[env]]" in shown.out
    assert said in shown.err
    assert shown.err.count("\n") == (1 if code else 0)


VALUES = ("3", "1e400", "None", "'a b'", "[]", "[1, 'a']", "{'a': 1}", "[[1]]", "undefined")
KNOWN_CALLS = [
    *(f"{name}({{}})" for name in (*launcher._FUNCTIONS, *launcher._TEXT_FUNCTIONS, "dict")),
    *(f"'a b'.{name}({{}})" for name in sorted(launcher._TEXT_METHODS)),
    *(f"[3].{name}({{}})" for name in ("append", "extend")),
]


@pytest.mark.parametrize("call", KNOWN_CALLS)
def test_a_known_function_of_a_wrong_value_ends_no_launcher(call):
    for count in (0, 1, 2):
        for values in itertools.product(VALUES, repeat=count):
            text = f"import shlex, textwrap\nx = {call.format(', '.join(values))}\n"
            launcher.Launcher(text, "launch.py").follow()
