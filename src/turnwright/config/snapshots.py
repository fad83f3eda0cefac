"""Model directories: of a path, of a GGUF file, and of a revision in local snapshots of
the Hugging Face hub."""

from __future__ import annotations

import hashlib
import re
import subprocess
import sys
import tempfile
from pathlib import Path, PurePosixPath

from turnwright.errors import ConfigError

_HUB_ID = re.compile(r"[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*")
OF_GGUF = 2
"""Version of the directories made of GGUF files."""
_FILES = ("*.json", "*.safetensors", "*.jinja", "*.model", "*.txt")
"""Files of a repository of the hub that a model directory needs."""


def is_hub_id(name: str, folder: Path = Path()) -> bool:
    """Return whether a name is of the form `organization/model` and no path in `folder`."""
    return _HUB_ID.fullmatch(name) is not None and not (folder / name.partition("/")[0]).exists()


def local_model(named: str | Path, revision: str | None = None) -> Path:
    """Return a model directory: the path itself, one made of a GGUF file, or the snapshot
    of a model of the hub, which `huggingface_hub` fetches unless it has it; raise
    `ConfigError` when it cannot."""
    name = str(named)
    if name.endswith(".gguf") and Path(named).is_file():
        return of_gguf(Path(named))
    if not is_hub_id(name):
        return Path(named)
    try:
        from huggingface_hub import snapshot_download
    except ImportError:
        why = "huggingface_hub is not installed"
    else:
        try:
            return Path(snapshot_download(name, revision=revision, allow_patterns=list(_FILES)))
        except Exception as error:  # many kinds, of the network and of the hub
            why = (
                (str(error).splitlines() or [type(error).__name__])[0]
                .partition(". ")[0][:160]
                .rstrip(" .:")
            )
    raise ConfigError(
        f"{name}: no such directory, and not fetched from the Hugging Face hub ({why}); run `hf "
        f"download {name} --local-dir {name}` where the hub can be reached, or name a model "
        "directory"
    )


def of_gguf(file: Path) -> Path:
    """Return the model directory of a GGUF file, in the user's cache, where it is
    made once for each content.

    The file is read to tell its content, an eighth of what loading the weights in float32
    reads (Q4). Raises `ConfigError` for a file that transformers cannot read, or without
    the packages that read it.
    """
    with file.open("rb") as opened:
        digest = hashlib.file_digest(opened, "sha256").hexdigest()
    cache = Path.home() / ".cache" / "turnwright" / "gguf"
    directory = cache / f"{file.stem}-{digest[:16]}-{OF_GGUF}"
    if directory.is_dir():
        return directory

    cache.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix=".writing-", dir=cache) as writing:
        draft = Path(writing) / "model"
        words = [
            sys.executable,
            "-m",
            "turnwright.training.model.from_gguf",
            str(file.resolve()),
            str(draft),
        ]
        done = subprocess.run(words, capture_output=True, text=True, check=False)
        if done.returncode:
            why = (
                done.stderr.strip().splitlines()
                or [f"the process that read it ended with status {done.returncode}"]
            )[-1]
            missing = (
                "" if "No module named" not in why else "; pip install 'turnwright[train,gguf]'"
            )
            raise ConfigError(f"{file}: not read as a model ({why[:400]}{missing})")
        try:
            draft.rename(directory)
        except OSError:
            if not directory.is_dir():  # else another process made the same
                raise
    return directory


SHORTEST = 7
"""Fewest characters of a commit's name."""


def snapshot(path: Path, revision: str | None) -> Path:
    """Return the directory of a revision: of a repository in the hub's cache, or the path
    itself if it is that revision.

    A repository of the cache (`models--org--name`) has commits in `snapshots` and names in `refs`.
    A download with `--local-dir` records the commit of each file. Raise `ConfigError` for anything
    else: its revision is unknown.
    """
    if revision is None:
        return path
    if (
        PurePosixPath(revision).is_absolute()
        or ".." in PurePosixPath(revision).parts
        or not revision.isprintable()
    ):
        raise ConfigError(
            f"model.revision = {revision!r}: must be a branch, a tag or a commit of the hub"
        )
    if (path / "snapshots").is_dir():
        return _of_repository(path, revision)
    if path.parent.name == "snapshots":
        found = _of_repository(path.parent.parent, revision)
        if found != path:
            raise ConfigError(
                f"model.revision = {revision!r}: {path} is another one; set model.path to {found}"
            )
        return path
    record = path / ".cache" / "huggingface" / "download" / "config.json.metadata"
    try:
        commit = record.read_text(encoding="utf-8").partition("\n")[0].strip()
    except (OSError, ValueError):
        raise ConfigError(
            f"model.revision = {revision!r}: {path} is no snapshot of the hub, so the revision of "
            "its files is unknown; leave the key out, or name a repository of the hub's cache "
            "(models--org--name)"
        ) from None
    if not _names(revision, commit):
        why = (
            f"{path} was downloaded from commit {commit[:40]}; name that, or download the revision"
        )
        raise ConfigError(f"model.revision = {revision!r}: {why}")
    return path


def _of_repository(repository: Path, revision: str) -> Path:
    commits = sorted(one.name for one in (repository / "snapshots").iterdir() if one.is_dir())
    named = repository / "refs" / revision
    commit = named.read_text(encoding="utf-8").strip() if named.is_file() else revision
    found = [one for one in commits if _names(commit, one)]
    if len(found) != 1:
        known = [
            str(one.relative_to(repository / "refs"))
            for one in sorted((repository / "refs").rglob("*"))
            if one.is_file()
        ]
        there = ", ".join([*known, *commits]) or "none"
        raise ConfigError(
            f"model.revision = {revision!r}: {repository} has no snapshot of it; there are "
            f"{there}. Download it with `hf download MODEL --revision {revision}`"
        )
    return repository / "snapshots" / found[0]


def _names(revision: str, commit: str) -> bool:
    return revision == commit or (len(revision) >= SHORTEST and commit.startswith(revision))
