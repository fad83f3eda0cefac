"""The files for containers and clusters name commands, extras and files that there are."""

from __future__ import annotations

import re
import shlex
import tomllib
from pathlib import Path

import pytest
import yaml
from kit.commands import parse_command

ROOT = Path(__file__).parents[2]
FOLDER = ROOT / "containers"


def commands():
    """(where, words) of every command of Turnwright in these files."""
    for name, service in yaml.safe_load((FOLDER / "compose.yaml").read_text())["services"].items():
        yield f"compose {name}", shlex.split(service["command"])
    for document in yaml.safe_load_all((FOLDER / "kubernetes.yaml").read_text()):
        pod = document["spec"].get("template", {}).get("spec", {"containers": []})
        for container in pod["containers"]:
            where = f"kubernetes {container['name']}"
            if container.get("command") != ["sh", "-c"]:
                yield where, container["args"]
                continue
            (script,) = container["args"]
            for what in re.findall(r'what="(.*?)"', script):
                called = re.search(r"exec turnwright (.*)", script)[1].replace("$what", what)
                yield where, shlex.split(called)
    text = (FOLDER / "slurm.sh").read_text().replace("\\\n", " ")
    for called in re.findall(r"^ *(?:srun .*)?turnwright (.*?)(?: &)?$", text, re.MULTILINE):
        for what in re.findall(r"what=\((.*)\)", text) if "what[@]" in called else [""]:
            called_so = called.replace('"${what[@]}"', what)
            yield "slurm", [word.replace("$", "") for word in shlex.split(called_so)]


FOUND = list(commands())


def test_all_commands_are_found():
    places = [where.partition(" ")[0] for where, _ in FOUND]
    assert [places.count(kind) for kind in ("compose", "kubernetes", "slurm")] == [3, 4, 3]


@pytest.mark.parametrize(("where", "words"), FOUND, ids=lambda value: str(value)[:40])
def test_its_commands_are_ours(where, words):
    assert parse_command(words).command == words[0]


def test_the_image_is_made_of_what_there_is():
    text = (FOLDER / "Dockerfile").read_text().replace("\\\n", " ")
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    extras = re.search(r"^ARG EXTRAS=(.*)$", text, re.MULTILINE)[1].split(",")
    assert set(extras) <= project["optional-dependencies"].keys()

    ignored = (ROOT / ".dockerignore").read_text().splitlines()
    for copied in re.findall(r"^COPY (?!--from)(?:--\S+ )?(.*) \S+$", text, re.MULTILINE):
        for name in copied.split():
            assert (ROOT / name).exists()
            assert f"!{name}" in ignored


def test_tokens_are_never_written_down():
    for path in FOLDER.iterdir():
        for name, value in re.findall(r"(TURNWRIGHT_\w+_TOKEN): *(.*)", path.read_text()):
            assert value.startswith("${") or "=$(head" in value, (path.name, name)
