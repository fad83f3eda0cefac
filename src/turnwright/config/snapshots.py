"""Model directories: of a path, of a GGUF file, and of a model of the Hugging Face hub.

`local_model` finds the directory that `model.path` names. `snapshot` checks `model.revision`
against what is on this machine.
"""

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
    organization = name.partition("/")[0]
    return _HUB_ID.fullmatch(name) is not None and not (folder / organization).exists()


def local_model(named: str | Path, revision: str | None = None) -> Path:
    """Return a model directory: the path itself, one made of a GGUF file, or a snapshot of the hub.

    `huggingface_hub` fetches the snapshot unless it has it. Raises `ConfigError` when it cannot.
    """
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
            lines = str(error).splitlines() or [type(error).__name__]
            first_sentence = lines[0].partition(". ")[0]
            why = first_sentence[:160].rstrip(" .:")
    raise ConfigError(
        f"{name}: no such directory, and not fetched from the Hugging Face hub ({why}); run `hf "
        f"download {name} --local-dir {name}` where the hub can be reached, or name a model "
        "directory"
    )


def of_gguf(file: Path) -> Path:
    """Return the model directory of a GGUF file, made once for each content.

    It is in the user's cache. The file is read to tell its content, an eighth of what loading the
    weights in float32 reads (Q4). Raises `ConfigError` for a file that transformers cannot read, or
    without the packages that read it.
    """
    with file.open("rb") as stream:
        digest = hashlib.file_digest(stream, "sha256").hexdigest()
    cache = Path.home() / ".cache" / "turnwright" / "gguf"
    directory = cache / f"{file.stem}-{digest[:16]}-{OF_GGUF}"
    if directory.is_dir():
        return directory

    cache.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix=".writing-", dir=cache) as writing:
        # A process of its own: it imports torch, and its memory goes with it.
        draft = Path(writing) / "model"
        module = "turnwright.training.model.from_gguf"
        command = [sys.executable, "-m", module, str(file.resolve()), str(draft)]
        process = subprocess.run(command, capture_output=True, text=True, check=False)
        if process.returncode:
            lines = process.stderr.strip().splitlines()
            why = f"the process that read it ended with status {process.returncode}"
            if lines:
                why = lines[-1]
            remedy = "; pip install 'turnwright[train,gguf]'" if "No module named" in why else ""
            raise ConfigError(f"{file}: not read as a model ({why[:400]}{remedy})")

        try:
            draft.rename(directory)
        except OSError:
            if not directory.is_dir():  # else another process made the same
                raise
    return directory


SHORTEST = 7
"""Fewest characters of a commit's name."""


def snapshot(path: Path, revision: str | None) -> Path:
    """Return the directory of a revision of a model.

    It is that of a repository in the hub's cache, or the path itself if it is that revision. A
    repository of the cache (`models--org--name`) has commits in `snapshots` and names in `refs`. A
    download with `--local-dir` records the commit of each file.

    Raises `ConfigError` for anything else: its revision is unknown.
    """
    if revision is None:
        return path
    name = PurePosixPath(revision)
    if name.is_absolute() or ".." in name.parts or not revision.isprintable():
        raise ConfigError(
            f"model.revision = {revision!r}: must be a branch, a tag or a commit of the hub"
        )

    # A repository of the cache, or one of its snapshots.
    if (path / "snapshots").is_dir():
        return _of_repository(path, revision)
    if path.parent.name == "snapshots":
        meant = _of_repository(path.parent.parent, revision)
        if meant != path:
            raise ConfigError(
                f"model.revision = {revision!r}: {path} is another one; set model.path to {meant}"
            )
        return path

    # A download into a directory of its own.
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
    snapshots = repository / "snapshots"
    refs = repository / "refs"
    commits = sorted(folder.name for folder in snapshots.iterdir() if folder.is_dir())

    ref = refs / revision
    wanted = ref.read_text(encoding="utf-8").strip() if ref.is_file() else revision
    matching = [commit for commit in commits if _names(wanted, commit)]
    if len(matching) != 1:
        branches = [
            str(file.relative_to(refs)) for file in sorted(refs.rglob("*")) if file.is_file()
        ]
        there = ", ".join([*branches, *commits]) or "none"
        raise ConfigError(
            f"model.revision = {revision!r}: {repository} has no snapshot of it; there are "
            f"{there}. Download it with `hf download MODEL --revision {revision}`"
        )
    return snapshots / matching[0]


def _names(revision: str, commit: str) -> bool:
    """Return whether a revision is a commit, or the beginning of its name."""
    return revision == commit or (len(revision) >= SHORTEST and commit.startswith(revision))
