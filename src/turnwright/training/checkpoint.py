"""Checkpoints: Hugging Face model directories with the state for an exact resume.

`Checkpoints` are those of a run: written (`save`), resumed from (`newest`), played (`policy`). What
a checkpoint holds of the model is written by `save_model`, of the optimizer by `Trainer.save`. Each
file has a checksum, so that a damaged checkpoint is refused before anything is trained on it.

`check_run_template` is for the run's directory: a resumed run must render as it began.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import zlib
from collections.abc import Iterable, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

from safetensors import SafetensorError

from turnwright import files
from turnwright.config.snapshots import local_model
from turnwright.errors import ConfigError, ModelError, TraceError
from turnwright.records import RunDir
from turnwright.renderers.chat_renderer import ChatRenderer
from turnwright.training.checkpoint_files import (
    BEST_FILE,
    STATE_FILE,
    Checkpoint,
    best_checkpoint,
    read_checkpoint,
    read_checkpoints,
)
from turnwright.training.model.directory import ADAPTER_FILE
from turnwright.training.model.models import copy_extras, silence_transformers
from turnwright.training.policies import Policies
from turnwright.training.trainer.trainer import Trainer

FORMAT = 1
_NAME = re.compile(r"warmup|warmed|step-\d+")
"""Names that runs give to checkpoints."""


class Checkpoints:
    """Checkpoints of one run in `root`: the last `keep`, and the best, with tokenizer and chat
    template of `source`.

    A checkpoint is written under a hidden name, flushed to disk, then renamed. So any visible
    checkpoint is complete, even after a kill or on a full disk.
    """

    def __init__(self, root: str | Path, source: str | Path, *, keep: int = 2) -> None:
        self.root = Path(root)
        self.source = Path(source)
        self.keep = max(keep, 1)

    def all(self) -> list[Checkpoint]:
        """Return complete checkpoints, oldest first."""
        return read_checkpoints(self.root)

    def latest(self) -> Checkpoint | None:
        """Return the newest complete checkpoint."""
        return max(self.all(), key=lambda checkpoint: checkpoint.serial, default=None)

    def newest(self) -> Checkpoint | None:
        """Return the newest checkpoint to resume from; raise `TraceError`, which names the one
        before, when it is damaged."""
        newest_first = self.all()[::-1]

        damaged: dict[Path, str] = {}
        for path in self.root.iterdir() if self.root.is_dir() else ():
            if _NAME.fullmatch(path.name) and read_checkpoint(path) is None:
                damaged[path] = f"its {STATE_FILE} cannot be read"
        if newest_first:
            damage = _damage(newest_first[0].path)
            if damage:
                damaged[newest_first[0].path] = damage
                newest_first = newest_first[1:]
        if not damaged:
            return newest_first[0] if newest_first else None

        offer = "there is no other, so the run restarts from its journal"
        for checkpoint in newest_first:
            if not _damage(checkpoint.path):
                offer = f"{checkpoint.path.name} is intact"
                break
        path, reason = next(iter(damaged.items()))
        raise TraceError(
            f"checkpoint {path} is damaged: {reason}. Restore it from a copy, or move it away "
            f"(mv {path} {self.root.parent / path.name}.damaged) and resume with --resume: "
            f"{offer}, and later steps are trained again on the journal's episodes"
        )

    def save(
        self,
        name: str,
        trainer: Trainer | Policies,
        cursor: Mapping[str, Any],
        template: str | None = None,
    ) -> Path:
        """Write a checkpoint in place of one of this name; drop those beyond the last `keep`,
        except the best.

        Args:
            name: its directory in `root`.
            trainer: what it holds; each policy with a name has a directory of that name in it.
            cursor: any JSON, returned by `Checkpoint.cursor`.
            template: replaces the model directory's chat template.

        Raises:
            TraceError: when it cannot be written; earlier checkpoints are unchanged.
        """
        if not re.fullmatch(r"\w[\w.-]*", name):
            raise ValueError(
                f"a checkpoint's name consists of letters, digits, '_', '-' and '.', not {name!r}"
            )

        draft = self.root / f".{name}.writing"
        try:
            self.root.mkdir(parents=True, exist_ok=True)
            self.remove_partial()
            draft.mkdir()
            newest = self.latest()
            state = {
                "format": FORMAT,
                "serial": newest.serial + 1 if newest else 0,
                "cursor": dict(cursor),
            }
            self._write(draft, trainer, state, template)
            final = self._publish(draft, name)
        except (OSError, SafetensorError) as error:
            shutil.rmtree(draft, ignore_errors=True)
            raise self._failure(name, error) from error
        self._drop_old()
        return final

    def best(self) -> tuple[str, float] | None:
        """Return name and score of the best checkpoint; None if none is marked or it is gone."""
        return best_checkpoint(self.root)

    def policy(self) -> Checkpoint | None:
        """Return the checkpoint to play: the newest, or the best where the run ended with a worse
        policy; raise as `newest`."""
        best = self.best()
        if best is not None and files.read_json(self.root / BEST_FILE).get("rolled_back"):
            return read_checkpoint(self.root / best[0])
        return self.newest()

    def mark_best(self, name: str, score: float, *, rolled_back: bool = False) -> None:
        """Mark a checkpoint as the best, so that it is kept, and with `rolled_back` as the policy
        of the run.

        Raises `TraceError` when the mark cannot be written.
        """
        mark = {"name": name, "score": score, "rolled_back": rolled_back}
        draft = self.root / f".{BEST_FILE}.tmp"
        try:
            draft.write_text(json.dumps(mark) + "\n", encoding="utf-8")
            flush(draft)
            os.replace(draft, self.root / BEST_FILE)
        except OSError as error:
            raise TraceError(
                f"{self.root / BEST_FILE}: cannot be written ({error.strerror}); free space, then "
                "resume with --resume"
            ) from error
        self._drop_old()

    def _drop_old(self) -> None:
        best = self.best()
        for old in self.all()[: -self.keep]:
            if best is None or old.path.name != best[0]:
                remove_directory(old.path)

    def remove_partial(self) -> None:
        """Remove leftovers of a killed save; restore a checkpoint that was being replaced."""
        for path in self.root.glob(".*.replaced"):
            final = self.root / path.name[1 : -len(".replaced")]
            if not final.exists():
                path.rename(final)
        for kind in ("replaced", "writing", "dropped"):
            for path in self.root.glob(f".*.{kind}"):
                shutil.rmtree(path, ignore_errors=True)

    def _write(
        self,
        draft: Path,
        trainer: Trainer | Policies,
        state: Mapping[str, Any],
        template: str | None,
    ) -> None:
        parts: Iterable[tuple[str, Trainer, Path | None]]
        parts = [("", trainer, None)] if isinstance(trainer, Trainer) else trainer.saved_parts()
        for name, part, source in parts:
            directory = draft / name
            directory.mkdir(exist_ok=True)
            save_model(part, source or self.source, directory, template)
            part.save(directory)

        # The state names the checksum of each file, and has one of its own.
        checksums = {}
        for path in sorted(draft.rglob("*")):
            if path.is_file():
                checksums[str(path.relative_to(draft))] = _checksum(path)
        sealed = dict(state) | {"files": checksums}
        text = json.dumps(sealed | {"crc": _seal(sealed)}, indent=1)
        (draft / STATE_FILE).write_text(text + "\n", encoding="utf-8")

        # safetensors creates files that only the owner can read; give them the user's default
        # permissions.
        permissions = (draft / STATE_FILE).stat().st_mode & 0o777
        for path in draft.rglob("*"):
            if path.is_file():
                path.chmod(permissions)
            flush(path)
        flush(draft)

    def _publish(self, draft: Path, name: str) -> Path:
        final = self.root / name
        replaced = self.root / f".{name}.replaced"
        if final.exists():
            final.rename(replaced)
        draft.rename(final)
        if replaced.exists():
            shutil.rmtree(replaced, ignore_errors=True)
        flush(self.root)
        return final

    def _failure(self, name: str, error: Exception) -> TraceError:
        reason = files.why_not_written(error) or " ".join(str(error).split())
        intact = self.latest()
        remains = "there is no earlier one"
        if intact is not None:
            remains = f"the last good one, {intact.path}, remains"
        return TraceError(
            f"checkpoint {self.root / name} could not be written: {reason}; {remains}. Free space "
            f"(checkpoint.keep = {self.keep} are kept, and one more while saving), then resume "
            "with --resume"
        )


def _checksum(path: Path) -> str:
    """Return the CRC-32 of a file."""
    checksum = 0
    with path.open("rb") as file:
        while piece := file.read(1 << 22):
            checksum = zlib.crc32(piece, checksum)
    return f"{checksum:08x}"


def _seal(state: Mapping[str, Any]) -> str:
    """Return the CRC-32 of a state, independent of its formatting."""
    return f"{zlib.crc32(json.dumps(state, sort_keys=True).encode()):08x}"


def _damage(path: Path) -> str:
    """Describe the damage of a checkpoint's files; empty if there is none."""
    state = files.read_json(path / STATE_FILE)
    if state.pop("crc", "") != _seal(state):
        return f"{STATE_FILE} is not what was written (its checksum differs)"
    for name, checksum in state["files"].items():
        file = path / name
        if not file.is_file():
            return f"{name} is missing"
        if _checksum(file) != checksum:
            return f"{name} is not what was written (its checksum differs)"
    return ""


def policies_of(path: Path) -> list[str]:
    """Return the names of the policies in a checkpoint; empty if it is the model of one."""
    model_files = ("config.json", ADAPTER_FILE)
    names = []
    for directory in path.iterdir():
        if directory.is_dir() and any((directory / file).is_file() for file in model_files):
            names.append(directory.name)
    return sorted(names)


def last_checkpoint(path: Path) -> Path:
    """Return the checkpoint with the policy of a run, or the model directory that `path` names."""
    path = local_model(path)
    if not (path / "checkpoints").is_dir():
        return path

    latest = Checkpoints(path / "checkpoints", path).policy()
    if latest is None:
        raise ModelError(
            f"{path}: the run has no checkpoint yet; train it further with --resume {path}"
        )
    return latest.path


def model_of(path: Path) -> Path:
    """Return the model directory of a checkpoint or a run; raise `ModelError` if it holds several
    policies."""
    last = last_checkpoint(path)
    several = policies_of(last)
    if several:
        names = ", ".join(str(last / name) for name in several)
        raise ModelError(f"{last}: it holds several policies; name one of {names}")
    return last


def save_model(
    trainer: Trainer, source: Path, directory: Path, template: str | None = None
) -> None:
    """Write a model, or its LoRA in peft's layout, as a directory with tokenizer and (by default)
    template of `source`."""
    with silence_transformers():
        trainer.save_weights(directory, source)

    left_out = set()
    if template is not None:
        # transformers, and so every server, prefers this file to other places of a template.
        (directory / "chat_template.jinja").write_text(template, encoding="utf-8")
        left_out.add("chat_template.json")
    if trainer.adapter is not None:
        # With a config, transformers would expect a full model here.
        left_out.add("config.json")
    copy_extras(source, directory, leave_out=left_out)


def remove_directory(path: Path) -> None:
    """Remove a directory; a kill leaves nothing partial under its name."""
    dropped = path.with_name(f".{path.name}.dropped")
    with suppress(OSError):
        path.rename(dropped)
        shutil.rmtree(dropped, ignore_errors=True)


def flush(path: Path) -> None:
    """Flush a file or a directory to disk."""
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


_REMEDY = {
    "template": "restore the chat template (model.template, model.template_args, or the model "
    "directory's own)",
    "tokenizer": "restore the tokenizer (tokenizer.json of the model directory)",
    "settings": "restore the settings (stop ids of generation_config.json; another version of "
    "Turnwright may have others)",
}


def check_run_template(run: RunDir, renderer: ChatRenderer, *, resumed: bool) -> None:
    """Write the hashes of a run's template, tokenizer and settings into its `config.json`, or check
    a resumed run's.

    Raises:
        ConfigError: with those that differ and the remedy.
        TraceError: when the file cannot be read or written.
    """
    now = {
        "hash": renderer.fingerprint,
        "origin": renderer.template.origin,
        **renderer.fingerprints,
    }
    path = run.path / "config.json"
    try:
        row: dict[str, Any] = files.read_json(path) if path.exists() else {}
    except (OSError, ValueError) as error:
        raise TraceError(
            f"{path}: cannot be read ({error}); restore it or start a new run"
        ) from error

    began_with = row.get("template")
    # A resumed run that was killed early has none.
    if not resumed or not isinstance(began_with, dict):
        run.write_json("config.json", row | {"template": now})
        return
    if began_with.get("hash") == now["hash"]:
        return

    changed = [name for name in _REMEDY if began_with.get(name) != now[name]]
    names = " and ".join("chat template" if name == "template" else name for name in changed)
    remedies = "; ".join(_REMEDY[name] for name in changed)
    if not changed:
        names = "renderer"
        remedies = "use the version of Turnwright that started it"
    raise ConfigError(
        f"--resume {run.given_path}: the run was started with another {names} (hash "
        f"{began_with.get('hash')}, now {now['hash']}), so its episodes would differ from those "
        f"sampled now; {remedies}, or start a new run"
    )
