"""Where a run would be played, what it needs for that, and what it does not import."""

from __future__ import annotations

import contextlib
import importlib
import io
import json
import sys

import pytest
from kit.forks import run_ranks
from kit.workers import write_recipe

import turnwright as tw
from turnwright.cli.main import main
from turnwright.config import RunConfig, ScaleConfig, load
from turnwright.envs.resolve import resolve_env
from turnwright.errors import ConfigError
from turnwright.records import RunDir
from turnwright_cluster.pool import WorkerPool


@pytest.mark.parametrize(
    ("words", "line"),
    [
        ([], "# environments and rewards: this process"),
        (
            ["--scale.listen=0.0.0.0:7070"],
            "# environments and rewards: workers that join at 0.0.0.0:7070 (turnwright worker "
            "--join)",
        ),
        (
            ["--scale.ray=auto", "--scale.ray-workers=8"],
            "# environments and rewards: 8 workers of 1 CPUs on the Ray cluster auto",
        ),
    ],
)
def test_the_dry_run_ends_with_where_everything_would_run(tmp_path, words, line, capsys):
    recipe = write_recipe(tmp_path)
    assert main(["train", str(recipe), "--dry-run", *words]) == 0
    printed = capsys.readouterr().out
    assert line in printed.splitlines()
    assert "# engine: this process" in printed
    again = tmp_path / "again.toml"
    again.write_text(printed)  # what it prints is a recipe
    assert load(again, words).config == load(recipe, words).config


def test_the_dry_run_names_the_cluster_of_the_servers(tmp_path, capsys):
    words = [
        "--scale.ray=auto",
        "--engine.kind=vllm",
        "--engine.servers=4",
        "--model.heads=1",
        "--model.kv-heads=1",
    ]
    assert main(["train", str(write_recipe(tmp_path)), "--dry-run", *words]) == 0
    printed = capsys.readouterr().out.splitlines()
    assert (
        "# engine: vllm servers, 4 started by the run on the Ray cluster auto, each with 1 CPUs "
        "and 1 GPUs" in printed
    )
    assert (
        "# environments and rewards: one worker a node of 1 CPUs on the Ray cluster auto" in printed
    )


@pytest.mark.parametrize(
    ("word", "why"),
    [
        (
            "--engine.update=group",
            'must be "disk" or "lora" for servers that the run starts on a Ray cluster',
        ),
        (
            "--engine.colocate=true",
            "is for servers on the trainer's device; leave it out with scale.ray",
        ),
        ("--scale.ray-engine-gpus=1.5", "must be an integer above 1"),
    ],
)
def test_what_servers_on_a_ray_cluster_cannot_do_is_refused(tmp_path, word, why, capsys):
    words = ["--scale.ray=auto", "--engine.kind=vllm", word]
    assert main(["train", str(write_recipe(tmp_path)), "--dry-run", *words]) == 2
    assert why in capsys.readouterr().err


def test_servers_of_several_policies_are_placed_for_training_only(tmp_path, capsys):
    recipe = write_recipe(tmp_path, more='[[policy]]\nname = "one"\n[[policy]]\nname = "two"\n')
    words = ["--scale.ray=auto", "--engine.kind=vllm", "--engine.update=lora", "--lora.rank=2"]
    assert main(["eval", str(recipe), *words]) == 2
    assert (
        "only turnwright train starts the servers of several policies there"
        in capsys.readouterr().err
    )


def test_a_port_of_relays_has_no_use_on_a_ray_cluster(tmp_path, capsys):
    words = ["--scale.ray=auto", "--engine.kind=vllm", "--engine.tree=true"]
    recipe = str(write_recipe(tmp_path))
    assert main(["train", recipe, "--dry-run", *words]) == 0
    assert main(["train", recipe, "--dry-run", *words, "--engine.relay-port=8100"]) == 2
    assert "leave it out with scale.ray, whose actors relay" in capsys.readouterr().err


def test_the_dry_run_names_the_list_of_servers(tmp_path, capsys):
    words = ["--engine.kind=auto", f"--engine.urls-file={tmp_path / 'engines.txt'}"]
    assert main(["train", str(write_recipe(tmp_path)), "--dry-run", *words]) == 0
    assert (
        f"# engine: auto servers, those that {tmp_path / 'engines.txt'} lists"
        in capsys.readouterr().out.splitlines()
    )


def train_without_ray(recipe, out, report):
    """Train with Ray, as if it were not installed, and alone; write the statuses
    and what is reported."""
    assert "ray" not in sys.modules
    sys.modules["ray"] = None
    importlib.import_module("turnwright_cluster.pool")
    importlib.import_module("turnwright_cluster.worker")
    words = ["train", str(recipe), "--out", str(out)]
    with contextlib.redirect_stderr(io.StringIO()) as said:
        statuses = main([*words, "--scale.ray=auto"]), main([*words, "--train.steps=0"])
    report.write_text(json.dumps([*statuses, said.getvalue()]))
    assert sys.modules["ray"] is None


def test_without_the_extra_nothing_imports_ray_and_the_recipe_is_the_same(alone, tmp_path):
    run_ranks(
        train_without_ray, 1, alone.parent / "recipe.toml", tmp_path / "run", tmp_path / "report"
    )
    *statuses, said = json.loads((tmp_path / "report").read_text())
    assert statuses == [2, 0]
    assert "scale.ray needs Ray (ray is missing): pip install 'turnwright[ray]'" in said
    assert "Traceback" not in said


@pytest.mark.parametrize("address", ["7070", "host", "host:", ":7070", "host:99999"])
def test_an_address_is_a_host_and_a_port(tmp_path, address):
    with pytest.raises(ConfigError, match="write host:port, such as"):
        load(write_recipe(tmp_path), [f"--scale.listen={address}"])


@pytest.mark.parametrize("key", ["lease_s=3", "wait_s=3", "stall_s=3", "ray_workers=3"])
def test_a_setting_of_workers_needs_workers(tmp_path, key):
    with pytest.raises(ConfigError, match="has no effect"):
        load(write_recipe(tmp_path), [f"--scale.{key}"])


def test_environments_are_sent_by_their_names(tmp_path):
    config = load(write_recipe(tmp_path), ["--scale.listen=127.0.0.1:0"]).config
    specs = [resolve_env(env) for env in config.env]
    with RunDir(tmp_path / "run") as run:
        with pytest.raises(ConfigError, match=r"two are called World; set env\.name"):
            WorkerPool(config, specs * 2, run, tmp_path, note=print)
        objects = RunConfig(scale=ScaleConfig(listen="127.0.0.1:0"))
        with pytest.raises(ConfigError, match="name the environment in"):
            WorkerPool(objects, specs, run, tmp_path, note=print)


def test_train_with_an_object_says_that_workers_cannot_have_it(tmp_path):
    def play(task, model): ...

    with pytest.raises(ConfigError, match="name the environment in"):
        tw.train(
            env=tw.tool_env(tools=[], reward=lambda t: 0.0),
            tasks=[tw.Task("a"), tw.Task("b")],
            out=tmp_path / "run",
            model=tw.tiny(hidden=32),
            eval={"tasks": 1},
            scale={"listen": "127.0.0.1:0"},
            display="none",
        )
