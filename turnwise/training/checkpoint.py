"""Checkpoints: Hugging Face model directories with what is needed to go on beside the weights."""

from __future__ import annotations

import errno
import json
import os
import re
import shutil
import zlib
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from safetensors import SafetensorError

from turnwise.errors import TraceError
from turnwise.training.model.models import STATE_FILE, copy_extras, silence_transformers
from turnwise.training.trainer.trainer import Trainer

FORMAT = 1
BEST_FILE = "best.json"

_FULL = {
    errno.ENOSPC: "the disk is full",
    errno.EDQUOT: "the disk quota is used up",
    errno.EFBIG: "a file may not grow so large",
}


@dataclass(frozen=True, slots=True)
class Checkpoint:
    """One complete checkpoint; `path` can be given as `--model.path`."""

    path: Path
    serial: int
    """Counts the saves of a run; the highest is the newest."""
    cursor: Mapping[str, Any]
    """What the run gave when it saved."""


class Checkpoints:
    """The checkpoints of one run, in `root`; the last `keep` stay, and the one that was marked as the best.

    A checkpoint is written under a name that begins with a dot, flushed to the disk, and then renamed, so that whatever bears a
    checkpoint's name is complete, at whatever instant the process was killed or the disk was full.

    Args:
        source: the model directory whose tokenizer and chat template go along.
    """

    def __init__(self, root: str | Path, source: str | Path, *, keep: int = 2) -> None:
        self.root = Path(root)
        self.source = Path(source)
        self.keep = max(keep, 1)

    def all(self) -> list[Checkpoint]:
        """Complete checkpoints, oldest first."""
        if not self.root.is_dir():
            return []
        found = [read_checkpoint(path) for path in self.root.iterdir() if not path.name.startswith(".")]
        return sorted((checkpoint for checkpoint in found if checkpoint), key=lambda checkpoint: checkpoint.serial)

    def latest(self) -> Checkpoint | None:
        """The newest complete checkpoint."""
        return max(self.all(), key=lambda checkpoint: checkpoint.serial, default=None)

    def newest(self) -> Checkpoint | None:
        """The newest checkpoint, for going on.

        Raises:
            TraceError: when it is damaged; the message offers the one before.
        """
        good = self.all()[::-1]
        named = (path for path in self.root.iterdir() if _NAME.fullmatch(path.name)) if self.root.is_dir() else ()
        wrong = {path: f"its {STATE_FILE} cannot be read" for path in named if read_checkpoint(path) is None}
        if good and (told := _damage(good[0].path)):
            wrong[good[0].path] = told
            good = good[1:]
        for path, told in wrong.items():
            before = next((one.path for one in good if not _damage(one.path)), None)
            offer = f"{before.name} is whole" if before else "there is no other, so the run begins anew from its journal"
            raise TraceError(
                f"checkpoint {path} is damaged: {told}. Put it back from a copy, or move it away "
                f"(mv {path} {self.root.parent / path.name}.damaged) and go on with --resume: {offer}, and steps since then "
                "are trained again on the journal's episodes"
            )
        return good[0] if good else None

    def save(self, name: str, trainer: Trainer, cursor: Mapping[str, Any], template: str | None = None) -> Path:
        """Write one checkpoint, then drop those beyond the last `keep` that are not the best.

        Args:
            name: of its directory, such as `step-0010`. A newer save under the same name takes the older one's place.
            cursor: any JSON; `latest().cursor` gives it back.
            template: source of another chat template that goes along in place of the source's.

        Raises:
            TraceError: when it cannot be written; earlier checkpoints are as they were.
        """
        if not re.fullmatch(r"\w[\w.-]*", name):
            raise ValueError(f"a checkpoint's name is made of letters, digits, '_', '-' and '.', not {name!r}")
        draft = self.root / f".{name}.writing"
        try:
            self.root.mkdir(parents=True, exist_ok=True)
            self.remove_partial()
            draft.mkdir()
            newest = self.latest()
            state = {"format": FORMAT, "serial": newest.serial + 1 if newest else 0, "cursor": dict(cursor)}
            self._write(draft, trainer, state, template)
            final = self._publish(draft, name)
        except (OSError, SafetensorError) as error:
            shutil.rmtree(draft, ignore_errors=True)
            raise self._failure(name, error) from error
        self._drop_old()
        return final

    def best(self) -> tuple[str, float] | None:
        """The name and the score of the checkpoint that was marked as the best; None where none was, or it is gone."""
        try:
            row = json.loads((self.root / BEST_FILE).read_text(encoding="utf-8"))
            name, score = str(row["name"]), float(row["score"])
        except (OSError, ValueError, KeyError, TypeError):
            return None
        return (name, score) if read_checkpoint(self.root / name) is not None else None

    def mark_best(self, name: str, score: float) -> None:
        """Keep a checkpoint as the best, whatever comes later, and let the one go that was.

        Raises:
            TraceError: when that cannot be written.
        """
        draft = self.root / f".{BEST_FILE}.tmp"
        try:
            draft.write_text(json.dumps({"name": name, "score": score}) + "\n", encoding="utf-8")
            _flush(draft)
            os.replace(draft, self.root / BEST_FILE)
        except OSError as error:
            raise TraceError(
                f"{self.root / BEST_FILE}: cannot be written ({error.strerror}); make room, then --resume"
            ) from error
        self._drop_old()

    def _drop_old(self) -> None:
        best = self.best()
        for old in self.all()[: -self.keep]:
            if best is None or old.path.name != best[0]:
                _drop(old.path)

    def remove_partial(self) -> None:
        """Remove what a killed save left behind; a checkpoint that was being replaced gets its name back."""
        for path in self.root.glob(".*.replaced") if self.root.is_dir() else ():
            final = self.root / path.name[1 : -len(".replaced")]
            if final.exists():
                shutil.rmtree(path, ignore_errors=True)
            else:
                path.rename(final)
        for kind in ("writing", "dropped"):
            for path in self.root.glob(f".*.{kind}") if self.root.is_dir() else ():
                shutil.rmtree(path, ignore_errors=True)

    def _write(self, draft: Path, trainer: Trainer, state: Mapping[str, Any], template: str | None) -> None:
        save_model(trainer, self.source, draft, template)
        trainer.save(draft)
        files = {path.name: _checksum(path) for path in sorted(draft.iterdir()) if path.is_file()}
        whole = dict(state) | {"files": files}
        (draft / STATE_FILE).write_text(json.dumps(whole | {"crc": _seal(whole)}, indent=1) + "\n", encoding="utf-8")
        # safetensors makes files that only their owner can read; these get the rights that any file of this user gets.
        rights = (draft / STATE_FILE).stat().st_mode & 0o777
        for path in draft.iterdir():
            path.chmod(rights)
            _flush(path)
        _flush(draft)

    def _publish(self, draft: Path, name: str) -> Path:
        final = self.root / name
        if final.exists():
            aside = self.root / f".{name}.replaced"
            final.rename(aside)
            draft.rename(final)
            shutil.rmtree(aside, ignore_errors=True)
        else:
            draft.rename(final)
        _flush(self.root)
        return final

    def _failure(self, name: str, error: Exception) -> TraceError:
        number = error.errno if isinstance(error, OSError) else _number(error)
        what = _FULL.get(number or 0, " ".join(str(error).split()))
        good = self.latest()
        stays = f"the last good one, {good.path}, stays" if good else "there is no earlier one"
        return TraceError(
            f"checkpoint {self.root / name} could not be written: {what}; {stays}. Make room (checkpoint.keep = {self.keep} "
            "are kept, and one more while saving), then go on with --resume"
        )


_NAME = re.compile(r"warmup|warmed|step-\d+")


def _checksum(path: Path) -> str:
    """The CRC-32 of a file."""
    found = 0
    with path.open("rb") as file:
        while piece := file.read(1 << 22):
            found = zlib.crc32(piece, found)
    return f"{found:08x}"


def _seal(state: Mapping[str, Any]) -> str:
    """The CRC-32 of a state, however it is laid out."""
    return f"{zlib.crc32(json.dumps(state, sort_keys=True).encode()):08x}"


def _damage(path: Path) -> str:
    """What is wrong with a checkpoint's files; empty for nothing, and for one of a release that wrote no checksums."""
    state = json.loads((path / STATE_FILE).read_text(encoding="utf-8"))
    if "crc" in state and state.pop("crc") != _seal(state):
        return f"{STATE_FILE} is not what was written (its checksum differs)"
    for name, said in state.get("files", {}).items():
        file = path / name
        if not file.is_file():
            return f"{name} is missing"
        if _checksum(file) != said:
            return f"{name} is not what was written (its checksum differs)"
    return ""


def _drop(path: Path) -> None:
    """Remove a checkpoint; it loses its name first, so that one killed in between leaves nothing half there under it."""
    aside = path.with_name(f".{path.name}.dropped")
    with suppress(OSError):
        path.rename(aside)
        shutil.rmtree(aside, ignore_errors=True)


def read_checkpoint(path: str | Path) -> Checkpoint | None:
    """A checkpoint by its directory; None where there is none that is complete."""
    path = Path(path)
    try:
        state = json.loads((path / STATE_FILE).read_text(encoding="utf-8"))
        return Checkpoint(path, int(state["serial"]), state["cursor"])
    except (OSError, ValueError, KeyError, TypeError):
        return None


def save_model(trainer: Trainer, source: Path, directory: Path, template: str | None = None) -> None:
    """Write a model's weights and configs as a Hugging Face directory, or its LoRA as one of peft's, with the tokenizer and
    template of `source`.

    Args:
        template: the source of the chat template that the model was trained with, where it is not that of `source`.
    """
    with silence_transformers():
        trainer.save_weights(directory, source)
    if template is not None:  # transformers, and so every server, prefers this file to all other places of a template
        (directory / "chat_template.jinja").write_text(template, encoding="utf-8")
    left_out = {"chat_template.json"} if template is not None else set()
    if trainer.adapter is not None:
        left_out.add("config.json")  # with one, transformers would look for a whole model here
    copy_extras(source, directory, leave_out=left_out)


def _flush(path: Path) -> None:
    """Have a file or a directory written to the disk now."""
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def _number(error: Exception) -> int | None:
    """The errno that safetensors writes into its message."""
    found = re.search(r"os error (\d+)", str(error))
    return int(found.group(1)) if found else None
