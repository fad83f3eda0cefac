"""`model.revision` and `model.parser`."""

import pytest

from turnwright.config import ModelConfig, load
from turnwright.config.names import PARSERS as NAMES
from turnwright.config.snapshots import snapshot
from turnwright.errors import ConfigError
from turnwright.renderers.load import load_renderer
from turnwright.renderers.parsers import PARSERS
from turnwright.training.model.models import create_tiny_model

FIRST, SECOND = "a" * 40, "b" * 40


@pytest.fixture
def repository(tmp_path):
    """Lay out a repository of the hub's cache with two snapshots."""
    root = tmp_path / "models--org--name"
    for commit in (FIRST, SECOND):
        (root / "snapshots" / commit).mkdir(parents=True)
        (root / "snapshots" / commit / "config.json").write_text("{}")
    (root / "refs" / "refs" / "pr").mkdir(parents=True)
    (root / "refs" / "main").write_text(SECOND)
    (root / "refs" / "refs" / "pr" / "81").write_text(FIRST + "\n")
    return root


@pytest.mark.parametrize(
    ("revision", "commit"), [("main", SECOND), ("refs/pr/81", FIRST), ("aaaaaaa", FIRST)]
)
def test_a_revision_selects_a_snapshot_of_the_cache(repository, revision, commit):
    assert snapshot(repository, revision) == repository / "snapshots" / commit
    assert snapshot(repository / "snapshots" / commit, revision).name == commit


@pytest.mark.parametrize("revision", ["v2", "aaaa", "c" * 40, "../main", "/etc/passwd"])
def test_a_revision_that_is_not_there_is_refused(repository, revision):
    with pytest.raises(ConfigError, match=r"model\.revision"):
        snapshot(repository, revision)


def test_a_snapshot_of_another_revision_is_refused_and_the_right_one_is_named(repository):
    with pytest.raises(ConfigError, match=f"set model.path to .*{SECOND}"):
        snapshot(repository / "snapshots" / FIRST, "main")


def test_a_plain_directory_has_a_revision_only_with_a_record_of_its_download(tmp_path):
    (tmp_path / "config.json").write_text("{}")
    with pytest.raises(ConfigError, match="no snapshot of the hub"):
        snapshot(tmp_path, "main")
    record = tmp_path / ".cache" / "huggingface" / "download"
    record.mkdir(parents=True)
    (record / "config.json.metadata").write_text(f"{FIRST}\netag\n0.0\n")
    assert snapshot(tmp_path, FIRST[:8]) == tmp_path
    with pytest.raises(ConfigError, match="downloaded from commit aaaa"):
        snapshot(tmp_path, "main")


def test_a_recipe_with_a_revision_names_the_snapshot(repository, tmp_path):
    recipe = tmp_path / "recipe.toml"
    recipe.write_text(
        f'[model]\npath = "{repository}"\nrevision = "refs/pr/81"\n[[env]]\nuse = "hop"\n'
    )
    assert load(recipe).config.model.directory == repository / "snapshots" / FIRST
    recipe.write_text('[model]\nrevision = "main"\n[[env]]\nuse = "hop"\n')
    with pytest.raises(
        ConfigError, match=r'model\.revision = "main": has no effect: it needs model.path given'
    ):
        load(recipe)


def test_the_schema_names_every_reply_format():
    assert tuple(PARSERS) == NAMES
    with pytest.raises(ConfigError, match="did you mean 'hermes'"):
        load(None, ["--env.use", "hop", "--model.parser", "hermess"])


def test_the_chosen_parser_reads_replies_whatever_the_template_writes(tmp_path):
    model = create_tiny_model(
        ModelConfig(hidden=32, layers=1), ["some text"] * 50, tmp_path / "model"
    )
    tools = (
        {
            "type": "function",
            "function": {"name": "f", "parameters": {"type": "object", "properties": {}}},
        },
    )
    reply = "[f(x=1)]"
    own, chosen = load_renderer(model), load_renderer(model, parser="pythonic")
    assert own.call_format[0] == "hermes"
    assert chosen.call_format[0] == "pythonic"
    assert [
        call.name
        for call in chosen.parse(
            list(chosen.codec.encode_plain(reply, "control")), tools
        ).tool_calls
    ] == ["f"]
    assert not own.parse(list(own.codec.encode_plain(reply, "control")), tools).tool_calls
    assert own.fingerprint != chosen.fingerprint
