"""Directories of weights that servers read: one per policy, complete or absent."""

from __future__ import annotations

import json
import os
import shutil
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any, ClassVar

from turnwright.engines.remote.weight_sync import DiskAdapter, DiskWeights, OnDisk
from turnwright.errors import SyncError

HEAD = "lm_head.weight"
WEIGHTS = (".safetensors", ".bin", ".pt", ".pth", ".gguf", ".h5", ".msgpack")
Fingerprint = Callable[[Iterable[tuple[str, Any]]], str]


class WeightDirectories(ABC):
    """Writes one directory per policy; an unfinished directory has a temporary name.

    Args:
        root: parent of the directories; servers must see it under the same path.
        keep: number of policies to keep; the oldest are deleted first.
        fingerprint: of named weights; the trainer's by default.
    """

    file: ClassVar[str]
    """Name of the file of weights."""
    as_source: ClassVar[type[OnDisk]]
    """Source by which servers load a directory."""

    def __init__(
        self, root: str | Path, *, keep: int = 2, fingerprint: Fingerprint | None = None
    ) -> None:
        self.root = Path(root).absolute()
        self.keep = max(1, keep)
        self._fingerprint = fingerprint
        self._written: tuple[int, str] | None = None
        """Version and fingerprint of the latest directory."""

    def pack(self, weights: Iterable[tuple[str, Any]], version: int) -> tuple[OnDisk, str]:
        """Write a directory, as `write` does.

        Return it as the source that servers load, and the fingerprint of its content.
        """
        directory, digest = self.write(weights, version)
        return self.as_source(directory, version), digest

    def write(self, weights: Iterable[tuple[str, Any]], version: int) -> tuple[Path, str]:
        """Write (Hugging Face name, torch tensor) pairs, tied ones once, to a directory.

        They are read back before the directory gets its name. Return it and the fingerprint of its
        content. Raises `SyncError` when writing fails or the content read back differs.
        """
        if self._fingerprint is None:
            from turnwright.engines.local.weights import fingerprint

            self._fingerprint = fingerprint
        final = self.root / f"policy-{version}"
        draft = self.root / f".policy-{version}.{os.getpid()}.writing"
        rows = {name: tensor.detach().to("cpu").contiguous() for name, tensor in weights}
        try:
            shutil.rmtree(draft, ignore_errors=True)
            draft.mkdir(parents=True)
            digest = self._fingerprint(rows.items())
            if self._written == (version, digest) and final.is_dir():
                # A server that joins may be reading it.
                return final, digest

            names = list(rows)  # without those that `_fill` adds
            path = draft / self.file
            self._fill(draft, rows)
            self._save(rows, path)
            with path.open("rb") as file:
                os.fsync(file.fileno())
            written = self._read(path, rows)
            is_intact = written.keys() == rows.keys() and digest == self._fingerprint(
                (name, written[name]) for name in names
            )
            if not is_intact:
                raise SyncError(
                    f"{draft}: the weights read back differ from those written; check the disk"
                )

            shutil.rmtree(final, ignore_errors=True)
            os.replace(draft, final)
            self._written = (version, digest)
        except OSError as error:
            raise SyncError(
                f"could not write the weights of policy {version} to {final}: {error}"
            ) from error
        finally:
            shutil.rmtree(draft, ignore_errors=True)
        self._delete_oldest()
        return final, digest

    def _delete_oldest(self) -> None:
        """Delete all directories but the latest `keep`."""
        policies = [path for path in self.root.glob("policy-*") if path.name[7:].isdigit()]
        policies.sort(key=lambda path: path.stat().st_mtime_ns)
        for path in policies[: -self.keep]:
            shutil.rmtree(path, ignore_errors=True)

    @abstractmethod
    def _fill(self, draft: Path, rows: dict[str, Any]) -> None:
        """Write the other files of a directory; may add weights that servers have twice."""

    def _save(self, rows: dict[str, Any], path: Path) -> None:
        """Write the file of weights."""
        from safetensors.torch import save_file

        save_file(rows, path, metadata={"format": "pt"})

    def _read(self, path: Path, rows: dict[str, Any]) -> dict[str, Any]:
        """Read the file of weights; `rows` are those that were written."""
        from safetensors.torch import load_file

        tensors: dict[str, Any] = load_file(path)
        return tensors


class ModelDirectories(WeightDirectories):
    """Writes each policy's weights as a Hugging Face model directory.

    Args:
        root, keep, fingerprint: as in `WeightDirectories`.
        source: model directory at the start of the run, for config and tokenizer.
        untie: write the output matrix separately although it equals the embedding, and say so in
            the config. vLLM on a CPU needs it: after a reload of a tied model it keeps the old
            output matrix. The server must start from such a directory too.
        quantization: `quantization_config` of the directories, for packed weights; without it they
            have none.
    """

    file = "model.safetensors"
    as_source = DiskWeights

    def __init__(
        self,
        root: str | Path,
        source: str | Path,
        keep: int = 2,
        *,
        untie: bool = False,
        quantization: Mapping[str, Any] | None = None,
        **options: Any,
    ) -> None:
        super().__init__(root, keep=keep, **options)
        self.source = Path(source)
        self.untie = untie
        self.quantization = quantization

    def _fill(self, draft: Path, rows: dict[str, Any]) -> None:
        # Everything of the source but its weights.
        for file in sorted(self.source.iterdir()):
            is_weights = file.name.endswith((*WEIGHTS, ".index.json"))
            if file.is_file() and not is_weights and not file.name.startswith("."):
                shutil.copy2(file, draft / file.name)

        # The source may be packed; the config states how these weights are stored.
        path = draft / "config.json"
        source_config = json.loads(path.read_text(encoding="utf-8"))
        config = dict(source_config)
        config.pop("quantization_config", None)
        if self.quantization is not None:
            config["quantization_config"] = dict(self.quantization)
        if self.untie and add_output_head(config, rows):
            config["tie_word_embeddings"] = False
            text = "This model's output matrix is its embedding; stored here twice.\n"
            (draft / "tied.txt").write_text(text, encoding="utf-8")
        if config != source_config:
            path.write_text(json.dumps(config, indent=2), encoding="utf-8")


class AdapterDirectories(WeightDirectories):
    """Writes each policy's LoRA adapter in peft's layout and names.

    `config` returns the content of adapter_config.json.
    """

    file = "adapter_model.safetensors"
    as_source = DiskAdapter

    def __init__(
        self, root: str | Path, config: Callable[[], Mapping[str, Any]], **options: Any
    ) -> None:
        super().__init__(root, **options)
        self._config = config

    def _fill(self, draft: Path, rows: dict[str, Any]) -> None:
        config = json.dumps(dict(self._config()), indent=2)
        (draft / "adapter_config.json").write_text(config, encoding="utf-8")


def add_output_head(config: dict[str, Any], rows: dict[str, Any]) -> bool:
    """Add the output matrix as a copy of the embedding; return False for an untied model."""
    embeddings = [name for name in rows if name.endswith("embed_tokens.weight")]
    if HEAD in rows or not embeddings or not config.get("tie_word_embeddings", False):
        return False
    rows[HEAD] = rows[embeddings[0]].clone()
    return True
