"""Directories of weights that servers read: one per policy, whole or not there at all."""

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

HEAD, TIED = "lm_head.weight", "tied.txt"
WEIGHTS = (".safetensors", ".bin", ".pt", ".pth", ".gguf", ".h5", ".msgpack")


Fingerprint = Callable[[Iterable[tuple[str, Any]]], str]
"""Of named weights."""


class WeightDirectories(ABC):
    """Writes what each policy is made of into a directory, under a draft's name until it is whole.

    Args:
        root: where the directories stand; servers have to see it under the same path.
        keep: how many policies stay; the oldest go first.
        fingerprint: the trainer's by default.
    """

    def __init__(self, root: str | Path, *, keep: int = 2, fingerprint: Fingerprint | None = None) -> None:
        self.root = Path(root).absolute()
        self.keep = max(1, keep)
        self._fingerprint = fingerprint

    def write(self, weights: Iterable[tuple[str, Any]], version: int) -> tuple[Path, str]:
        """Write weights, read them again, and give the directory its name.

        Args:
            weights: (Hugging Face name, torch tensor) pairs; tied ones once.

        Returns:
            The directory, and the fingerprint of what stands in it.

        Raises:
            SyncError: when the disk holds something else than was written, or cannot be written.
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
                raise SyncError(f"{draft}: what was read back is not what was written")
            shutil.rmtree(final, ignore_errors=True)
            os.replace(draft, final)
        except OSError as error:
            raise SyncError(f"the weights of policy {version} could not be written to {final}: {error}") from error
        finally:
            shutil.rmtree(draft, ignore_errors=True)
        self._tidy()
        return final, written

    @abstractmethod
    def as_source(self, directory: Path, version: int) -> WeightsSource:
        """What servers are given of a directory that stands here."""

    @abstractmethod
    def _write(self, draft: Path, rows: dict[str, Any]) -> dict[str, Any]:
        """Fill a directory, and read it again."""

    def _tidy(self) -> None:
        found = [path for path in self.root.glob("policy-*") if path.name[7:].isdigit()]
        for path in sorted(found, key=lambda path: path.stat().st_mtime_ns)[: -self.keep]:
            shutil.rmtree(path, ignore_errors=True)


class ModelDirectories(WeightDirectories):
    """Writes each policy's weights as a Hugging Face model directory.

    Args:
        root, keep, fingerprint: as of `WeightDirectories`.
        source: the model directory that the run began with, for config and tokenizer.
        untie: write the output matrix although it is the embedding's, and a config that says so. vLLM on a CPU needs it:
            it goes on with the old output matrix after a reload where that is the embedding. Its server is started from such
            a directory as well (`untie_output_head`).
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
        """As `WeightDirectories.as_source`."""
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
        if self.untie and (draft / TIED).exists():
            found.pop(HEAD)
        return found


class AdapterDirectories(WeightDirectories):
    """Writes each policy's LoRA adapter, by the names that peft gives its matrices, in peft's layout.

    Args:
        root, keep, fingerprint: as of `WeightDirectories`.
        config: gives what stands in adapter_config.json.
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
        """As `WeightDirectories.as_source`."""
        return DiskAdapter(directory, version)

    def _write(self, draft: Path, rows: dict[str, Any]) -> dict[str, Any]:
        from safetensors.torch import load_file, save_file

        (draft / "adapter_config.json").write_text(json.dumps(dict(self._config()), indent=2), encoding="utf-8")
        save_file(rows, draft / "adapter_model.safetensors", metadata={"format": "pt"})
        _to_disk(draft / "adapter_model.safetensors")
        return dict(load_file(draft / "adapter_model.safetensors"))


def untie_output_head(directory: Path, rows: dict[str, Any]) -> None:
    """Give a tied model an output matrix of its own: in its weights, and in the config.json of a directory.

    A model that has one is left alone.
    """
    path = directory / "config.json"
    config = json.loads(path.read_text(encoding="utf-8"))
    if not add_output_head(config, rows):
        return
    path.write_text(json.dumps(config | {"tie_word_embeddings": False}, indent=2), encoding="utf-8")
    (directory / TIED).write_text("This model's output matrix is its embedding; it stands here twice.\n", encoding="utf-8")


def add_output_head(config: dict[str, Any], rows: dict[str, Any]) -> bool:
    """Put the output matrix beside the embedding that it is; False for a model that has one of its own."""
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
