"""TextWorld's games by file, made and played by its own package. `make test-compat`."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

import turnwright as tw
from turnwright.cli.main import main
from turnwright.config import load
from turnwright.config.schema import EnvConfig
from turnwright.envs.resolve import resolve_env
from turnwright.errors import ConfigError

pytestmark = pytest.mark.compat
HOME = (
    Path(os.environ.get("TURNWRIGHT_COMPAT") or Path.home() / ".cache/turnwright/compat")
    / "registries/textworld"
)
MAKE = """
import sys, textworld
options = textworld.GameOptions()
options.seeds, options.path, options.nb_rooms, options.nb_objects, options.quest_length = 7, sys.argv[1], 2, 3, 2
game = textworld.generator.make_game(options)
textworld.generator.compile_game(game, options)
print("|".join(game.walkthrough))
"""  # noqa: E501


@pytest.fixture(scope="module")
def game(tmp_path_factory):
    """A game and the commands that win it."""
    if not (HOME / "ready").exists():
        pip = [
            sys.executable,
            "-m",
            "pip",
            "install",
            "--quiet",
            "--disable-pip-version-check",
            "--upgrade",
        ]
        subprocess.run([*pip, "--target", str(HOME), "textworld==1.7.0"], check=True)
        (HOME / "ready").touch()
    sys.path.append(str(HOME))
    path = tmp_path_factory.mktemp("games") / "quest.z8"
    env = {**os.environ, "PYTHONPATH": str(HOME)}
    made = subprocess.run(
        [sys.executable, "-c", MAKE, str(path)], capture_output=True, text=True, check=True, env=env
    )
    return path, made.stdout.strip().splitlines()[-1].split("|")


def play(spec, replies):
    (task,) = spec.tasks("train", 1, 0)
    (found,) = tw.rollout(
        spec.factory, [task], tw.ScriptedEngine(replies), limits=tw.Limits(turns=9, turn_tokens=200)
    )
    assert found.error is None, found.error
    return found


def test_the_walkthrough_wins_and_texts_are_those_of_textworld(game):
    path, commands = game
    import textworld

    spec = resolve_env(EnvConfig(use="textworld:quest.z8"), base=path.parent)
    found = play(spec, ["I look around.\nlook", *commands])
    original = textworld.start(str(path))
    texts = [original.reset()["feedback"]]
    texts += [original.step(command)[0]["feedback"] for command in ("look", *commands)]
    original.close()
    seen = [message.text for message in found.messages if message.role == "user"]
    assert seen == [text.strip() for text in texts[: len(seen)]]
    assert len(seen) >= len(commands)
    assert (found.reward, found.turns[-1].info["won"]) == (1.0, True)
    assert play(spec, ["look", "inventory"] + ["look"] * 7).reward == 0.0


def test_a_recipe_names_a_game_next_to_it(game, capsys):
    path, _ = game
    recipe = path.with_name("run.toml")
    recipe.write_text('[[env]]\nuse = "textworld:quest.z8"\n')
    assert load(recipe).config.env[0].use == f"textworld:{path}"
    assert main(["check", "--recipe", str(recipe)]) == 0
    assert main(["check", f"textworld:{path}"]) == 0
    capsys.readouterr()


def test_what_is_no_game_is_one_line(game):
    for use, said in (
        ("textworld:none.z8", "no game; name a .z8"),
        ("textworld:quest.json", "no game; name a .z8"),
    ):
        with pytest.raises(ConfigError, match=said):
            resolve_env(EnvConfig(use=use), base=game[0].parent)
    with pytest.raises(ConfigError, match="has no argument 'game'; did you mean 'games'"):
        resolve_env(EnvConfig(use="textworld:quest.z8", args={"game": "a.z8"}), base=game[0].parent)
