"""Revisions of a model in local snapshots of the Hugging Face hub."""

from __future__ import annotations

import re
from pathlib import Path, PurePosixPath

from turnwright.errors import ConfigError

_HUB_ID = re.compile(r"[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*")
_FILES = ("*.json", "*.safetensors", "*.jinja", "*.model", "*.txt")
"""Files of a repository of the hub that a model directory needs."""


def is_hub_id(name: str, folder: Path = Path()) -> bool:
    """Return whether a name is of the form `organization/model` and no path in `folder`."""
    return _HUB_ID.fullmatch(name) is not None and not (folder / name.partition("/")[0]).exists()


def local_model(named: str | Path, revision: str | None = None) -> Path:
    """Return a model directory: the path itself, or the snapshot of a model of the hub, which `huggingface_hub` fetches unless
    it has it; raise `ConfigError` when it cannot."""
    name = str(named)
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
            why = (str(error).splitlines() or [type(error).__name__])[0].partition(". ")[0][:160].rstrip(" .:")
    raise ConfigError(
        f"{name}: no such directory, and not fetched from the Hugging Face hub ({why}); run `hf download {name} --local-dir "
        f"{name}` where the hub can be reached, or name a model directory"
    )


SHORTEST = 7
"""Fewest characters of a commit's name."""


def snapshot(path: Path, revision: str | None) -> Path:
    """Return the directory of a revision: of a repository in the hub's cache, or the path itself if it is that revision.

    A repository of the cache (`models--org--name`) has commits in `snapshots` and names in `refs`. A download with
    `--local-dir` records the commit of each file. Raise `ConfigError` for anything else: its revision is unknown.
    """
    if revision is None:
        return path
    if PurePosixPath(revision).is_absolute() or ".." in PurePosixPath(revision).parts or not revision.isprintable():
        raise ConfigError(f"model.revision = {revision!r}: must be a branch, a tag or a commit of the hub")
    if (path / "snapshots").is_dir():
        return _of_repository(path, revision)
    if path.parent.name == "snapshots":
        found = _of_repository(path.parent.parent, revision)
        if found != path:
            raise ConfigError(f"model.revision = {revision!r}: {path} is another one; set model.path to {found}")
        return path
    record = path / ".cache" / "huggingface" / "download" / "config.json.metadata"
    try:
        commit = record.read_text(encoding="utf-8").partition("\n")[0].strip()
    except (OSError, ValueError):
        raise ConfigError(
            f"model.revision = {revision!r}: {path} is no snapshot of the hub, so the revision of its files is unknown; leave "
            "the key out, or name a repository of the hub's cache (models--org--name)"
        ) from None
    if not _names(revision, commit):
        why = f"{path} was downloaded from commit {commit[:40]}; name that, or download the revision"
        raise ConfigError(f"model.revision = {revision!r}: {why}")
    return path


def _of_repository(repository: Path, revision: str) -> Path:
    commits = sorted(one.name for one in (repository / "snapshots").iterdir() if one.is_dir())
    named = repository / "refs" / revision
    commit = named.read_text(encoding="utf-8").strip() if named.is_file() else revision
    found = [one for one in commits if _names(commit, one)]
    if len(found) != 1:
        known = [str(one.relative_to(repository / "refs")) for one in sorted((repository / "refs").rglob("*")) if one.is_file()]
        there = ", ".join([*known, *commits]) or "none"
        raise ConfigError(
            f"model.revision = {revision!r}: {repository} has no snapshot of it; there are {there}. Download it with "
            f"`hf download MODEL --revision {revision}`"
        )
    return repository / "snapshots" / found[0]


def _names(revision: str, commit: str) -> bool:
    return revision == commit or (len(revision) >= SHORTEST and commit.startswith(revision))
