"""Directories of weights that servers read: one per policy, complete or absent."""

from __future__ import annotations

import json
import os
import shutil
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

from turnwise.engines.remote.weight_sync import DiskAdapter, DiskWeights, WeightsSource
from turnwise.errors import SyncError

HEAD, UNTIED_MARKER = "lm_head.weight", "tied.txt"
WEIGHTS = (".safetensors", ".bin", ".pt", ".pth", ".gguf", ".h5", ".msgpack")


Fingerprint = Callable[[Iterable[tuple[str, Any]]], str]
"""Function of named weights."""


class WeightDirectories(ABC):
    """Writes one directory per policy; an unfinished directory has a temporary name.

    Args:
        root: parent of the directories; servers must see it under the same path.
        keep: number of policies to keep; the oldest are deleted first.
        fingerprint: fingerprint function; the trainer's by default.
    """

    def __init__(self, root: str | Path, *, keep: int = 2, fingerprint: Fingerprint | None = None) -> None:
        self.root = Path(root).absolute()
        self.keep = max(1, keep)
        self._fingerprint = fingerprint

    def write(self, weights: Iterable[tuple[str, Any]], version: int) -> tuple[Path, str]:
        """Write weights, verify them by reading them back, and rename the directory.

        Args:
            weights: (Hugging Face name, torch tensor) pairs; tied ones once.

        Returns:
            The directory and the fingerprint of its content.

        Raises:
            SyncError: when writing fails or the content read back differs.
        """
        fingerprint = self._fingerprint or _fingerprint()
        final = self.root / f"policy-{version}"
        draft = self.root / f".policy-{version}.{os.getpid()}.writing"
        rows = {name: tensor.detach().to("cpu").contiguous() for name, tensor in weights}
        try:
            shutil.rmtree(draft, ignore_errors=True)
            draft.mkdir(parents=True)
            sent = fingerprint(rows.items())
            written = fingerprint(self._write(draft, rows).items())
            if written != sent:
                raise SyncError(f"{draft}: the weights read back differ from those written; check the disk")
            shutil.rmtree(final, ignore_errors=True)
            os.replace(draft, final)
        except OSError as error:
            raise SyncError(f"could not write the weights of policy {version} to {final}: {error}") from error
        finally:
            shutil.rmtree(draft, ignore_errors=True)
        self._tidy()
        return final, written

    @abstractmethod
    def as_source(self, directory: Path, version: int) -> WeightsSource:
        """Return the source by which servers load a directory."""

    @abstractmethod
    def _write(self, draft: Path, rows: dict[str, Any]) -> dict[str, Any]:
        """Fill a directory and read it back."""

    def _tidy(self) -> None:
        found = [path for path in self.root.glob("policy-*") if path.name[7:].isdigit()]
        for path in sorted(found, key=lambda path: path.stat().st_mtime_ns)[: -self.keep]:
            shutil.rmtree(path, ignore_errors=True)


class ModelDirectories(WeightDirectories):
    """Writes each policy's weights as a Hugging Face model directory.

    Args:
        root, keep, fingerprint: as in `WeightDirectories`.
        source: model directory at the start of the run, for config and tokenizer.
        untie: write the output matrix separately although it equals the embedding, and say so in the config. vLLM on a CPU
            needs it: after a reload of a tied model it keeps the old output matrix. The server must start from such a
            directory too (`untie_output_head`).
    """

    def __init__(
        self,
        root: str | Path,
        source: str | Path,
        keep: int = 2,
        *,
        untie: bool = False,
        fingerprint: Fingerprint | None = None,
    ) -> None:
        super().__init__(root, keep=keep, fingerprint=fingerprint)
        self.source, self.untie = Path(source), untie

    def as_source(self, directory: Path, version: int) -> WeightsSource:
        """Return `DiskWeights`."""
        return DiskWeights(directory, version)

    def _write(self, draft: Path, rows: dict[str, Any]) -> dict[str, Any]:
        from safetensors.torch import load_file, save_file

        for file in sorted(self.source.iterdir()):
            if file.is_file() and not file.name.endswith((*WEIGHTS, ".index.json")) and not file.name.startswith("."):
                shutil.copy2(file, draft / file.name)
        if self.untie:
            untie_output_head(draft, rows)
        save_file(rows, draft / "model.safetensors", metadata={"format": "pt"})
        _to_disk(draft / "model.safetensors")
        found: dict[str, Any] = load_file(draft / "model.safetensors")
        if self.untie and (draft / UNTIED_MARKER).exists():
            found.pop(HEAD)
        return found


class AdapterDirectories(WeightDirectories):
    """Writes each policy's LoRA adapter in peft's layout, with peft's tensor names.

    Args:
        root, keep, fingerprint: as in `WeightDirectories`.
        config: returns the content of adapter_config.json.
    """

    def __init__(
        self,
        root: str | Path,
        config: Callable[[], Mapping[str, Any]],
        *,
        keep: int = 2,
        fingerprint: Fingerprint | None = None,
    ) -> None:
        super().__init__(root, keep=keep, fingerprint=fingerprint)
        self._config = config

    def as_source(self, directory: Path, version: int) -> WeightsSource:
        """Return `DiskAdapter`."""
        return DiskAdapter(directory, version)

    def _write(self, draft: Path, rows: dict[str, Any]) -> dict[str, Any]:
        from safetensors.torch import load_file, save_file

        (draft / "adapter_config.json").write_text(json.dumps(dict(self._config()), indent=2), encoding="utf-8")
        save_file(rows, draft / "adapter_model.safetensors", metadata={"format": "pt"})
        _to_disk(draft / "adapter_model.safetensors")
        return dict(load_file(draft / "adapter_model.safetensors"))


def untie_output_head(directory: Path, rows: dict[str, Any]) -> None:
    """Give a tied model a separate output matrix, in its weights and in a directory's config.json.

    An untied model is left unchanged.
    """
    path = directory / "config.json"
    config = json.loads(path.read_text(encoding="utf-8"))
    if not add_output_head(config, rows):
        return
    path.write_text(json.dumps(config | {"tie_word_embeddings": False}, indent=2), encoding="utf-8")
    (directory / UNTIED_MARKER).write_text(
        "This model's output matrix is its embedding; stored here twice.\n", encoding="utf-8"
    )


def add_output_head(config: dict[str, Any], rows: dict[str, Any]) -> bool:
    """Add the output matrix as a copy of the embedding; return False for an untied model."""
    embedding = next((name for name in rows if name.endswith("embed_tokens.weight")), None)
    if HEAD in rows or embedding is None or not config.get("tie_word_embeddings", False):
        return False
    rows[HEAD] = rows[embedding].clone()
    return True


def _fingerprint() -> Callable[[Iterable[tuple[str, Any]]], str]:
    from turnwise.engines.local.weights import fingerprint

    return fingerprint


def _to_disk(path: Path) -> None:
    with path.open("rb") as file:
        os.fsync(file.fileno())
