"""Recipes become configurations, and every mistake is one line that says what to do."""

from __future__ import annotations

import json
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

from turnwright.config import RetryRules, RunConfig, load
from turnwright.config.dump import help_keys, load_run_config, to_json_dict, to_toml
from turnwright.config.fields import field_docs, known_keys
from turnwright.config.recipe import flatten
from turnwright.errors import ConfigError

HOP = '[[env]]\nuse = "hop"\n'
ENVS = ("hop", "hop_json")


def write(folder: Path, text: str, name: str = "recipe.toml") -> Path:
    path = folder / name
    path.write_text(text, encoding="utf-8")
    return path


def refusal(folder: Path, text: str, *words: str) -> str:
    """The message of the error, after checking that it is one line."""
    with pytest.raises(ConfigError) as caught:
        load(write(folder, text), words, envs=ENVS)
    message = str(caught.value)
    assert "\n" not in message
    return message


def test_values_come_from_recipe_command_line_and_defaults(tmp_path):
    text = (
        HOP + "[env.args]\ndepth = 3\n[train]\nlr = 1e-4\nbetas = [0.8, 0.9]\n[limits]\ncontext = "
        '"none"\n'
    )
    words = [
        "--rollout.group-size",
        "4",
        "--train.lr=1e-6",
        "--env.args.rules",
        "true",
        "--model.device",
        "cpu",
    ]
    resolved = load(write(tmp_path, text), words, envs=ENVS)
    config, origins = resolved.config, resolved.origins
    assert (config.train.lr, config.rollout.group_size, config.train.betas) == (1e-6, 4, (0.8, 0.9))
    assert dict(config.env[0].args) == {"depth": 3, "rules": True}
    assert config.limits.context is None
    assert origins["train.lr"] == origins["env.0.args.rules"] == "command line"
    assert (
        origins["train.betas"]
        == origins["env.0.args.depth"]
        == origins["limits.context"]
        == "recipe.toml"
    )
    assert origins["train.steps"] == "default"
    assert set(origins) == {key for key, _ in flatten(config)}


def test_a_single_env_table_is_one_environment(tmp_path):
    assert load(write(tmp_path, '[env]\nuse = "hop"\n')).config.env[0].use == "hop"


def test_an_environment_can_come_from_the_command_line_alone():
    resolved = load(
        None, ["--env.use", "hop", "--env.1.use", "hop_json", "--env.1.weight", "2"], envs=ENVS
    )
    assert [(env.use, env.weight) for env in resolved.config.env] == [
        ("hop", 1.0),
        ("hop_json", 2.0),
    ]


def test_a_recipe_overrides_the_defaults_of_a_command(tmp_path):
    path = write(tmp_path, HOP + "[eval]\ntasks = 8\n")
    config = load(path, defaults={"eval": {"tasks": 4, "samples": 3}}).config
    assert (config.eval.tasks, config.eval.samples) == (8, 3)


def test_strings_are_not_read_as_numbers_where_the_field_is_text(tmp_path):
    config = load(
        write(tmp_path, HOP),
        ["--env.name", "123", "--out", "true", "--train.lr", ".5", "--env.args.x", "a b"],
    ).config
    assert (config.env[0].name, config.out, config.train.lr, config.env[0].args["x"]) == (
        "123",
        "true",
        0.5,
        "a b",
    )


def test_paths_of_a_recipe_are_relative_to_it(tmp_path, monkeypatch):
    write(tmp_path, "class World: ...\n", "world.py")
    write(tmp_path, "{}\n", "rows.jsonl")
    (tmp_path / "model").mkdir()
    write(tmp_path / "model", "{}", "config.json")
    recipe = write(
        tmp_path, '[model]\npath = "model"\n[[env]]\nuse = "world.py:World"\ntasks = "rows.jsonl"\n'
    )
    monkeypatch.chdir("/")
    config = load(recipe).config
    assert config.model.path == str(tmp_path / "model")
    assert config.env[0].use == f"{tmp_path}/world.py:World"
    assert config.env[0].tasks == str(tmp_path / "rows.jsonl")
    monkeypatch.chdir(tmp_path)
    env = load(None, ["--env.use", "world.py:World"]).config.env[0]
    # As a resumed run may start elsewhere.
    assert (env.use, env.name) == (
        f"{tmp_path}/world.py:World",
        "World",
    )


@pytest.mark.parametrize(
    ("text", "words", "expected"),
    [
        (
            HOP + "[rollout]\ngroup_sise = 4",
            (),
            ["recipe.toml", "'rollout.group_sise'", "did you mean 'rollout.group_size'"],
        ),
        (HOP + "[rolout]\ngroups = 4", (), ["recipe.toml", "'rolout'", "did you mean '[rollout]'"]),
        (HOP + "[train]\ngroup_size = 4", (), ["did you mean 'rollout.group_size'"]),
        ("lr = 1\n" + HOP, (), ["'lr'", "did you mean 'train.lr'"]),
        ("zzz = 1\n" + HOP, (), ["'zzz'", "sections are model, env"]),
        (
            HOP + '[rollout]\ngroups = "16"',
            (),
            ["recipe.toml", 'rollout.groups = "16"', "an integer", "groups = 16 without quotes"],
        ),
        (HOP + "[rollout]\ngroups = true", (), ["rollout.groups = true", "an integer"]),
        (HOP + "[rollout]\ngroups = 1.5", (), ["rollout.groups = 1.5", "write groups = 2"]),
        (HOP + "[eval]\ngreedy = 1", (), ["eval.greedy = 1", "true or false"]),
        (HOP + '[eval]\ngreedy = "true"', (), ["write greedy = true without quotes"]),
        (
            HOP + "[train]\ngradient_signal_steps = 4",
            (),
            ["train.gradient_signal_steps = 4", "0 or at least 10"],
        ),
        (HOP + "[train]\nbetas = [1]", (), ["train.betas = [1]", "a list of 2 numbers"]),
        (
            HOP + '[train]\nschedule = "linar"',
            (),
            ['one of "linear", "cosine", "constant"', "did you mean 'linear'"],
        ),
        (HOP + "[train.lr]\nx = 1", (), ["train.lr", "a number", "a table"]),
        (HOP + "[env.args]\nday = 2020-01-01", (), ["2020-01-01", "put it in quotes"]),
        ("train = 3\n" + HOP, (), ["train = 3", "[train]"]),
        ('env = "hop"', (), ["[[env]]", 'use = "hop"']),
        (
            '[[env]]\nuse = "hpo"',
            (),
            ["env.0.use", '"hpo"', "no such environment", "did you mean 'hop'"],
        ),
        ('[[env]]\nuse = "gone.py:A"', (), ["env.0.use", "no such file"]),
        ('[[env]]\nuse = "gone.py"', (), ["env.0.use", "gone.py:Name"]),
        (HOP + 'tasks = "gone.jsonl"', (), ["env.0.tasks", "gone.jsonl", "no such file"]),
        (HOP + HOP, (), ["env.1.name", "its own name"]),
        (HOP + "weight = 0", (), ["env.0.weight", "above 0"]),
        ("[train]\nsteps = 3", (), ["no environment", "[[env]]"]),
        (HOP + '[model]\npath = "gone"', (), ["model.path", "no such directory"]),
        (HOP + '[model]\ndevice = "gpu"', (), ["model.device", '"cuda"']),
        (HOP + "[model]\nhidden = 65", (), ["model.hidden", "model.heads = 2"]),
        (HOP + "[model]\nheads = 3\nhidden = 66", (), ["model.kv_heads", "model.heads = 3"]),
        (HOP + "[rollout]\ngroup_size = 1", (), ["rollout.group_size = 1", "at least 2"]),
        (
            HOP + "[rollout]\ngroup_size = 2\n[train]\nmin_group = 3",
            (),
            ["train.min_group = 3", "rollout.group_size = 2"],
        ),
        (HOP + "[train]\nminibatches = 1000", (), ["train.minibatches", "128 episodes"]),
        (HOP + "[train]\nlr = nan", (), ["train.lr", "finite"]),
        (HOP + "[warmup]\ngate_success = 1.5", (), ["warmup.gate_success", "from 0 to 1"]),
        (
            HOP + "[limits]\ncontext = 100",
            (),
            ["limits.turn_tokens", "(the default)", "limits.context = 100"],
        ),
        (HOP + "[eval]\ntasks = 0", (), ["eval.tasks = 0", "at least 1"]),
        (
            "x = ",
            (),
            [
                "recipe.toml",
                "not TOML",
                "line" if sys.version_info >= (3, 14) else "end of document",
            ],
        ),
        ("[train]\nlr 3\n", (), ["not TOML", "line 2", "column 4"]),
        ("", (), ["recipe.toml", "empty", 'use = "hop"']),
        (HOP, ("--rollout.grp-size", "3"), ["command line", "did you mean '--rollout.group-size'"]),
        (HOP, ("--rollout.group-size", "many"), ["--rollout.group-size many", "an integer"]),
        (
            HOP,
            ("--rollout.group-size", "1"),
            ["command line", "--rollout.group-size 1", "at least 2"],
        ),
        (HOP, ("--rollout.group-size",), ["--rollout.group-size needs a value"]),
        (HOP, ("--train.algorithm", "gprpo"), ["there are grpo, dr_grpo", "did you mean 'grpo'"]),
        (HOP, ("--envs.use", "x"), ["[envs]", "did you mean '--env.use'"]),
        (HOP, ("--env.arg.x", "x"), ["'--env.arg.x'", "did you mean '--env.args'"]),
        (HOP, ("--env.args", "x"), ["--env.args.KEY VALUE"]),
        (HOP, ("--env.retries", "2"), ["--env.retries is a section", "--env.retries.turn say"]),
        (
            HOP,
            ("--env.retries.trun", "2"),
            ["'--env.retries.trun'", "did you mean '--env.retries.turn'"],
        ),
        (HOP + "retries = 2", (), ["env.retries = 2 is a section", "[env.retries]"]),
        (HOP + "[env.retries]\nturn = -1", (), ["env.0.retries.turn = -1", "at least 0"]),
        (
            HOP + "[env.retries]\nepisode = 3",
            (),
            ["env.0.retries.episode = 3", "it needs env.retries.turn > 0, or"],
        ),
        (HOP, ("--env.5.use", "x"), ["no such environment"]),
        (
            HOP + '[[env]]\nuse = "hop_json"',
            ("--env.weight", "3"),
            ["2 environments", "--env.1 (hop_json)"],
        ),
        (HOP, ("train.lr", "3"), ["'train.lr'", "--section.key value"]),
    ],
)
def test_mistakes_name_the_place_and_the_remedy(tmp_path, text, words, expected):
    message = refusal(tmp_path, text, *words)
    for piece in expected:
        assert piece in message, message


def test_files_that_are_no_recipes(tmp_path):
    write(tmp_path, HOP, "hop.toml")
    for path, expected in (
        (tmp_path / "hopp.toml", "did you mean 'hop.toml'"),
        (tmp_path, "is a directory"),
    ):
        with pytest.raises(ConfigError, match=expected):
            load(path)
    (tmp_path / "bytes.toml").write_bytes(b"x = '\xff'")
    with pytest.raises(ConfigError, match="not UTF-8"):
        load(tmp_path / "bytes.toml")


def test_evaluation_needs_no_groups_of_two(tmp_path):
    path = write(tmp_path, HOP + "[rollout]\ngroup_size = 1\n")
    assert load(path, training=False).config.rollout.group_size == 1


def test_the_rendered_configuration_is_a_recipe_with_origins(tmp_path):
    text = (
        HOP + '[env.args]\ndepth = 3\n"a.b" = "\\"x\\""\nsub = { x = [1, 2] }\n[train]\nlr = 1e-4\n'
    )
    resolved = load(write(tmp_path, text), ["--seed", "7"])
    rendered = to_toml(resolved)
    assert any(
        line.startswith("lr = 0.0001") and line.endswith("# recipe.toml")
        for line in rendered.splitlines()
    )
    assert any(
        line.startswith("seed = 7") and line.endswith("# command line")
        for line in rendered.splitlines()
    )
    assert any(
        line.startswith("steps = 60") and line.endswith("# default")
        for line in rendered.splitlines()
    )
    tomllib.loads(rendered)
    assert load(write(tmp_path, rendered, "again.toml")).config == resolved.config


def test_a_run_directory_gives_its_configuration_back(tmp_path):
    resolved = load(write(tmp_path, HOP + "[env.args]\nx = 3\n"), ["--train.lr", "1e-5"])
    (tmp_path / "config.json").write_text(json.dumps(to_json_dict(resolved) | {"versions": {}}))
    again = load_run_config(tmp_path)
    assert again.config == resolved.config
    assert again.origins == resolved.origins


def test_a_run_of_an_earlier_version_has_the_keys_of_today(tmp_path):
    row = json.loads(json.dumps(to_json_dict(load(write(tmp_path, HOP)))))
    row["config"]["schedule"]["selection"] = "complete"
    row["config"]["rollout"] |= {"sanity_every": "turn", "sanity_share": 0.5}
    row["config"]["env"][0].pop("retries")
    row["config"]["env"][0] |= {
        "max_engine_retries_per_turn": 2,
        "max_engine_retries": 3,
        "max_env_retries": 8,
    }
    row["config"]["env"][0] |= {"max_env_retries_per_turn": 0, "retry_wait_s": 0.25}
    row["origins"] |= {"schedule.selection": "default", "rollout.sanity_every": "recipe.toml"}
    (tmp_path / "config.json").write_text(json.dumps(row))
    again = load_run_config(tmp_path)
    assert again.config.rollout.sanity_share == "turns"
    assert again.config.env[0].retries == RetryRules(engine=2, episode=3, wait_s=0.25)
    assert set(again.origins) == {key for key, _ in flatten(again.config)}

    row["config"]["schedule"]["selection"] = "discard"
    (tmp_path / "config.json").write_text(json.dumps(row))
    with pytest.raises(
        ConfigError, match=r'config.json: schedule.selection = "discard": is no setting any more'
    ):
        load_run_config(tmp_path)


@pytest.mark.parametrize(
    "content", [None, "{", "[]", '{"config": {"trian": {}}}', '{"config": {"seed": "x"}}']
)
def test_a_run_directory_that_is_none(tmp_path, content):
    if content is not None:
        (tmp_path / "config.json").write_text(content)
    with pytest.raises(ConfigError, match=r"config\.json"):
        load_run_config(tmp_path)
    with pytest.raises(ConfigError, match="no such run directory"):
        load_run_config(tmp_path / "gone")


def test_every_field_is_documented():
    docs = field_docs()
    missing = [key for key in known_keys() if not docs.get(key, "").endswith((".", "!", "?"))]
    assert not missing
    assert all(docs.get(name) for name in RunConfig.__dataclass_fields__)
    assert len(list(help_keys())) == len(list(known_keys()))


def test_importing_the_configuration_needs_no_pydantic():
    code = "import turnwright.config, sys; sys.exit('pydantic' in sys.modules)"
    subprocess.run([sys.executable, "-c", code], check=True)


def test_a_template_is_a_name_or_a_file_and_its_arguments_are_a_table(tmp_path):
    (tmp_path / "mine.jinja").write_text("{{ messages }}")
    recipe = tmp_path / "r.toml"
    recipe.write_text(
        '[model]\ntemplate = "mine.jinja"\n[model.template_args]\nenable_thinking = false\ndeep = '
        '{a = [1]}\n[[env]]\nuse = "hop"\n'
    )
    found = load(recipe, ["--model.template-args.other", "3", "--model.template_args.word", "x"])
    assert found.config.model.template == str(tmp_path / "mine.jinja")
    assert found.config.model.template_args == {
        "enable_thinking": False,
        "deep": {"a": [1]},
        "other": 3,
        "word": "x",
    }
    assert found.origins["model.template_args.other"] == "command line"
    assert found.origins["model.template_args.enable_thinking"] == "r.toml"
    again = tmp_path / "again.toml"
    again.write_text(to_toml(found))
    assert load(again).config == found.config
    (tmp_path / "config.json").write_text(json.dumps(to_json_dict(found)))
    assert load_run_config(tmp_path).config == found.config
    for words, expected in (
        (
            ["--model.template", "qwen3_with_thinkin"],
            "no such template; did you mean 'qwen3_with_thinking'",
        ),
        (["--model.template", "mein.jinja"], "no such file"),
        (["--model.template-args", "3"], "must be a table"),
        (["--model.template-arg.x", "3"], "template_arg"),
    ):
        with pytest.raises(ConfigError, match=expected.replace(".", r"\.")):
            load(recipe, words, templates=["chatml", "qwen3_with_thinking"])
    assert (
        load(recipe, ["--model.template", "chatml"], templates=["chatml"]).config.model.template
        == "chatml"
    )


def test_the_sanity_check_is_asked_for_by_its_peers_words_too(tmp_path):
    for word in ("strict", "ignore_strippable", "off", "disable"):
        assert load(write(tmp_path, HOP), ["--rollout.sanity", word]).config.rollout.sanity == word
    for words, expected in (
        (["--rollout.sanity", "strickt"], "did you mean 'strict'"),
        (["--rollout.sanity-share", "steps"], 'must be a number or one of "turns"; '),
        (["--rollout.sanity-share", "1.5"], "must be from 0 to 1"),
    ):
        with pytest.raises(ConfigError, match=expected):
            load(write(tmp_path, HOP), words)


@pytest.mark.parametrize(
    ("engine", "expected"),
    [
        ('urls = ["http://a:1"]', 'needs engine.kind = "auto"'),
        ("speculate = -1", "at least 0"),
        (
            'kind = "vllm"\nurls = ["http://a"]\nspeculate = 4',
            "set speculation of your own server at the server",
        ),
        (
            'kind = "llamacpp"\nurls = ["http://a"]\nspeculate = 4',
            "is for the local engine and for servers started by the run",
        ),
        ('kind = "vllm"\nurls = ["a:1"]', "'a:1' is not a URL"),
        ('urls_file = "engines.txt"', 'needs engine.kind = "auto"'),
        (
            'kind = "vllm"\nurls = ["http://a:1"]\ntree = true\nupdate = "group"',
            "sends directories of weights",
        ),
        ('kind = "auto"', "needs engine.urls"),
        ('kind = "chat"\nurls = ["http://a:1/v1"]', "must name the model"),
        ('kind = "chat"\nurls = ["http://a:1/v1"]\nmodel = "m"', "cannot be trained with"),
        ('kind = "llamacpp"\nurls = ["http://a:1"]', "accepts no weight updates"),
        ('kind = "vllm"\nservers = 0', "must be at least 1"),
        (
            'kind = "vllm"\nmissing_logprobs = "recompute"\n[train]\nold_logprobs = "engine"',
            "since the engine's are missing",
        ),
        (
            'kind = "vllm"\nmissing_logprobs = "recompute"\n[train]\ncorrection = "tis"',
            "for train.correction to weigh such",
        ),
        (
            'kind = "sglang"\n[rollout]\ntop_p = 0.9',
            "logprobs of the distribution before truncation",
        ),
        ('kind = "sglang"\n[rollout]\ntop_k = 20', "rollout.top_k = 20"),
        (
            'kind = "llamacpp"\nmissing_logprobs = "mask"\n[rollout]\nalternatives = 3',
            'reports the most likely ids, and "llamacpp" does not',
        ),
        ("[rollout]\nalternatives = 21", "must be from 0 to 20"),
        ("[rollout]\ntop_p = 0.0", "must be above 0 and at most 1"),
        ('kind = "vlm"', "did you mean 'vllm'?"),
        ('kind = "vllm"\nurl = "http://a:1"', "did you mean 'engine.urls'"),
        ('kind = "chat"\nupdate = "lora"\n[lora]\nrank = 4', "adapters go to vLLM and SGLang only"),
        ('kind = "vllm"\nupdate = "lora"', "there is no adapter to send; set lora.rank"),
        (
            'kind = "vllm"\nupdate = "lora"\ncolocate = true\n[lora]\nrank = 4',
            "releases the adapter's base model",
        ),
        ('kind = "vllm"\nupdate = "tensors"', "no other server accepts weights in requests"),
        ('update = "lora"\n[lora]\nrank = 4', 'is for servers: engine.kind = "vllm"'),
    ],
)
def test_engines_that_cannot_be_are_refused(tmp_path, engine, expected):
    assert expected in refusal(tmp_path, f"{HOP}[engine]\n{engine}\n")


def test_engines_are_told_from_recipe_and_command_line(tmp_path):
    path = write(tmp_path, f'{HOP}[engine]\nkind = "vllm"\nurls = ["http://a:1", "http://b:2"]\n')
    engine = load(path, ["--engine.concurrency", "8"], envs=ENVS).config.engine
    assert (engine.kind, engine.urls, engine.concurrency) == (
        "vllm",
        ("http://a:1", "http://b:2"),
        8,
    )
    listed = write(
        tmp_path,
        f'{HOP}[engine]\nkind = "auto"\nurls_file = "engines.txt"\ntree = true\n',
        "listed.toml",
    )
    assert load(listed).config.engine.urls_file == str(tmp_path / "engines.txt")
    started = write(
        tmp_path, f'{HOP}[engine]\nkind = "vllm"\ninstall_dir = "envs"\n', "started.toml"
    )
    assert load(started).config.engine.install_dir == str(tmp_path / "envs")
    words = ["--engine.kind", "chat", "--engine.urls", '["http://a:1/v1"]', "--engine.model", "m"]
    assert load(write(tmp_path, HOP), words, envs=ENVS, training=False).config.engine.model == "m"
