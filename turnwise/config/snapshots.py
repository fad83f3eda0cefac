"""Revisions of a model in local snapshots of the Hugging Face hub."""

from __future__ import annotations

from pathlib import Path, PurePosixPath

from turnwise.errors import ConfigError

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
