"""`[env] media_root`: pictures of rows may lie there too, and nowhere else."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from PIL import Image as Pillow

import turnwright as tw
from turnwright.config import load
from turnwright.envs.resolve import resolve_env
from turnwright.errors import ConfigError, TaskError


@pytest.fixture
def folder(tmp_path):
    """A dataset's folder, a directory of pictures beside it, and a picture outside of both."""
    for name in ("data", "media/deep"):
        (tmp_path / name).mkdir(parents=True)
    for place in ("data/own.png", "media/a.png", "media/deep/b.png", "media/own.png", "secret.png"):
        Pillow.new("RGB", (4, 4), (len(place), 0, 0)).save(tmp_path / place)
    os.symlink(tmp_path / "secret.png", tmp_path / "media" / "link.png")
    os.symlink("a.png", tmp_path / "media" / "alias.png")
    return tmp_path


def tasks(folder: Path, image: str, **options):
    path = folder / "data" / "rows.jsonl"
    path.write_text(json.dumps({"prompt": "<image>?", "images": [image]}) + "\n")
    return tw.load_tasks(path, **options)


@pytest.mark.parametrize("read", [True, False])
@pytest.mark.parametrize(
    ("image", "file"),
    [
        ("own.png", "data/own.png"),  # the dataset's own first
        ("a.png", "media/a.png"),
        ("deep/b.png", "media/deep/b.png"),
        ("alias.png", "media/a.png"),
        ("{media}/a.png", "media/a.png"),
        ("{media}/own.png", "media/own.png"),
    ],
)
def test_pictures_lie_in_the_datasets_folder_or_in_media_root(folder, image, file, read):
    name = image.format(media=folder / "media")
    (task,) = tasks(folder, name, media_root=folder / "media", return_multi_modal_inputs=read)
    (picture,) = task.images
    assert (picture.value if read else picture.value.read_bytes()) == (folder / file).read_bytes()
    assert picture.name == name


@pytest.mark.parametrize(
    "image",
    ["../secret.png", "../media/a.png", "{home}/secret.png", "{media}/../secret.png", "{media}/link.png",  # noqa: E501
     "{home}/data/own.png", "C:\\a.png", "deep\\b.png", "/etc/hostname", "//etc/hostname"],
)  # fmt: skip
def test_nothing_else_is_read(folder, image):
    name = image.format(media=folder / "media", home=folder)
    with pytest.raises(
        TaskError,
        match=r"line 1: .*leads out of the dataset's folder .*data and media_root .*media; ",
    ):
        tasks(folder, name, media_root=folder / "media")
    with pytest.raises(
        TaskError, match=r"leads out of the dataset's folder .*or set \[env\] media_root"
    ):
        tasks(folder, str(folder / "media" / "a.png"))
    with pytest.raises(
        TaskError,
        match=r"no file 'link.png' in .*media; a path or a link that leads out of them is not followed",  # noqa: E501
    ):
        tasks(folder, "link.png", media_root=folder / "media")
    with pytest.raises(TaskError, match=r"no file 'none.png' in .*data or .*media$"):
        tasks(folder, "none.png", media_root=folder / "media")


def test_rows_of_python_have_only_media_root(folder):
    row = {"prompt": "<image>?", "images": ["a.png"]}
    (task,) = tw.load_tasks([row], media_root=folder / "media")
    assert task.images[0].value == (folder / "media" / "a.png").read_bytes()
    with pytest.raises(
        TaskError, match=r"leads out of media_root .*media; give paths inside of it"
    ):
        tw.load_tasks([{**row, "images": ["../secret.png"]}], media_root=folder / "media")
    with pytest.raises(
        TaskError, match=r"'a.png' is text; rows not read from a file .*or \[env\] media_root"
    ):
        tw.load_tasks([row])


RECIPE = '[[env]]\nuse = "geometry"\ntasks = "data/rows.jsonl"\n'


def test_a_recipe_names_it(folder):
    tasks(folder, "own.png")
    (folder / "data" / "rows.jsonl").write_text(
        json.dumps({"prompt": "<image>?", "images": ["deep/b.png"], "answer": 1}) + "\n"
    )
    file = folder / "run.toml"
    file.write_text(RECIPE + 'media_root = "media"\n')
    resolved = load(file)
    (task,) = resolve_env(resolved.config.env[0], base=folder).tasks("train", 0, 0)
    assert task.images[0].value == (folder / "media/deep/b.png").read_bytes()
    assert any(key.endswith("media_root") for key in resolved.origins)
    for wrong, said in (
        ('media_root = "medai"\n', r"media_root = .*no such file; did you mean 'media'"),
        (
            'media_root = "media/a.png"\n',
            r"media_root = .*is a file; name the directory of the pictures",
        ),
        ('media_roto = "media"\n', r"media_roto.*did you mean .*media_root"),
    ):
        file.write_text(RECIPE + wrong)
        with pytest.raises(ConfigError, match=said):
            load(file)
    file.write_text('[[env]]\nuse = "hop"\nmedia_root = "media"\n')
    with pytest.raises(ConfigError, match=r"media_root.*has no effect: it needs env\.tasks given"):
        load(file)


def test_check_reads_the_pictures(folder):
    row = {"prompt": "<image>?", "images": ["../secret.png"], "answer": "1"}
    (folder / "data" / "rows.jsonl").write_text(json.dumps(row) + "\n")
    (folder / "world.py").write_text(
        "import turnwright as tw\nenv = tw.tool_env([], reward=lambda t: 1.0)\n"
    )
    (folder / "run.toml").write_text(
        '[[env]]\nuse = "world.py:env"\ntasks = "data/rows.jsonl"\nmedia_root = "media"\n'
    )
    command = [sys.executable, "-m", "turnwright.cli.main", "check", "run.toml"]
    done = subprocess.run(command, cwd=folder, capture_output=True, text=True)
    assert done.returncode == 2
    assert "leads out of the dataset's folder" in done.stderr
    assert done.stderr.count("\n") == 1
