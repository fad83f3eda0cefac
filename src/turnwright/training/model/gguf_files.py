"""Weights of a policy as GGUF files, which llama.cpp reads.

A model directory that was made of a GGUF file has its key-values (hyperparameters, tokenizer) in
`metadata.gguf` (`copy_header`). A policy's file is those, and the policy's tensors under the names
of the format (`GgufDirectories`). The directory itself is made in `from_gguf.py`.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from turnwright.engines.remote.managed import GGUF_FILE
from turnwright.engines.remote.weight_files import WeightDirectories
from turnwright.engines.remote.weight_sync import DiskWeights
from turnwright.errors import ConfigError, SyncError

HEADER = "metadata.gguf"
ROTATED_BY_PAIRS = {"llama": True, "qwen2": False, "qwen3": False}
"""Architectures that can be written, and whether the format stores queries and keys for rotation of
neighboring values."""
_OWN = ("GGUF.", "general.architecture", "general.file_type", "general.quantization_version")
"""Key-values that the writer sets itself."""
FILE_TYPES = {torch.float32: 0, torch.bfloat16: 32}
"""Values of `general.file_type`."""
KeyValues = list[tuple[str, Any, Any, Any]]
"""Key, value, type, and the type of an array's elements."""


def copy_header(file: Path, target: Path) -> None:
    """Write the key-values of a GGUF file, and those tensors that are no weights, as a file of its
    own."""
    from gguf import GGUFReader

    reader = GGUFReader(file)
    architecture = str(reader.fields["general.architecture"].contents())
    writer = _writer(target, architecture, _key_values(reader))
    for tensor in reader.tensors:
        # Factors of long contexts.
        if tensor.name.startswith("rope_"):
            writer.add_tensor(tensor.name, tensor.data, raw_dtype=tensor.tensor_type)
    _write(writer)


def _key_values(reader: Any) -> KeyValues:
    key_values = []
    for key, field in reader.fields.items():
        if not key.startswith(_OWN):
            element_type = field.types[-1] if len(field.types) > 1 else None
            key_values.append((key, field.contents(), field.types[0], element_type))
    return key_values


def _writer(target: Path, architecture: str, key_values: KeyValues) -> Any:
    from gguf import GGUFWriter

    writer = GGUFWriter(target, architecture)
    for key, value, value_type, element_type in key_values:
        writer.add_key_value(key, value, value_type, element_type)
    return writer


def _write(writer: Any) -> None:
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


class GgufDirectories(WeightDirectories):
    """Writes each policy's weights as a directory with a GGUF file in it.

    Args:
        root: as in `WeightDirectories`.
        source: model directory at the start of the run, made of a GGUF file.

    Raises `ConfigError` for a directory that was not made of one, and for an architecture that is
    not known here.
    """

    file = GGUF_FILE
    as_source = DiskWeights

    def __init__(self, root: str | Path, source: str | Path) -> None:
        super().__init__(root)
        from gguf import MODEL_ARCH_NAMES, GGUFReader, get_tensor_name_map

        header = Path(source) / HEADER
        if not header.is_file():
            raise ConfigError(
                f'{source}: engine.kind = "llamacpp" trains a model that came as a GGUF file; set '
                "model.path to one (llama.cpp's convert_hf_to_gguf.py makes it), or engine.kind "
                "to local, vllm or sglang"
            )

        reader = GGUFReader(header)
        values = {
            key: field.contents()
            for key, field in reader.fields.items()
            if not key.startswith("tokenizer.")
        }
        self._architecture = str(values["general.architecture"])
        if self._architecture not in ROTATED_BY_PAIRS:
            known = ", ".join(ROTATED_BY_PAIRS)
            raise ConfigError(
                f"{source}: {self._architecture} models are not written as GGUF files here; known "
                f"are {known}"
            )
        self._key_values = _key_values(reader)
        self._other_tensors = reader.tensors

        heads = values[f"{self._architecture}.attention.head_count"]
        key_heads = values.get(f"{self._architecture}.attention.head_count_kv", heads)
        self._heads = {"attn_q": int(heads), "attn_k": int(key_heads)}

        number = next(
            number for number, name in MODEL_ARCH_NAMES.items() if name == self._architecture
        )
        blocks = int(values[f"{self._architecture}.block_count"])
        self._names = get_tensor_name_map(number, blocks)

    def _fill(self, draft: Path, rows: dict[str, Any]) -> None:
        """Write nothing: a server of this kind reads the one file."""

    def _save(self, rows: dict[str, Any], path: Path) -> None:
        from gguf import GGMLQuantizationType

        writer = _writer(path, self._architecture, self._key_values)
        has_bfloat16 = any(tensor.dtype == torch.bfloat16 for tensor in rows.values())
        writer.add_file_type(FILE_TYPES[torch.bfloat16 if has_bfloat16 else torch.float32])
        for tensor in self._other_tensors:
            writer.add_tensor(tensor.name, tensor.data, raw_dtype=tensor.tensor_type)
        for name, tensor in rows.items():
            stored = self._stored(name, tensor).contiguous()
            if stored.dtype == torch.bfloat16 and stored.dim() > 1:
                bits = stored.view(torch.uint8).numpy()
                writer.add_tensor(self._name(name), bits, raw_dtype=GGMLQuantizationType.BF16)
            else:
                writer.add_tensor(self._name(name), stored.float().numpy())
        _write(writer)

    def _read(self, path: Path, rows: dict[str, Any]) -> dict[str, Any]:
        from gguf import GGMLQuantizationType, GGUFReader

        named = {self._name(name): name for name in rows}
        read = {}
        for tensor in GGUFReader(path).tensors:
            if tensor.name not in named:
                continue
            name = named[tensor.name]
            numbers = torch.from_numpy(tensor.data.copy())
            if tensor.tensor_type == GGMLQuantizationType.BF16:
                numbers = numbers.view(torch.bfloat16)
            stored = numbers.reshape(rows[name].shape).to(rows[name].dtype)
            read[name] = self._stored(name, stored, back=True).contiguous()
        return read

    def _name(self, name: str) -> str:
        """Return the format's name of a tensor."""
        format_name: str | None = self._names.get_name(name, try_suffixes=(".weight", ".bias"))
        if format_name is None:
            raise SyncError(f"{name}: the GGUF format has no name for this tensor")
        return format_name

    def _stored(self, name: str, tensor: Tensor, *, back: bool = False) -> Tensor:
        """Return a tensor in the format's order of rows, or `back` in that of Hugging Face."""
        part = self._name(name).rsplit(".", 2)[-2]
        if not ROTATED_BY_PAIRS[self._architecture] or part not in self._heads:
            return tensor

        # Rows of a head: its two halves one after the other, or value by value of both.
        heads = self._heads[part]
        halves = (-1, 2) if back else (2, -1)
        by_half = tensor.reshape(heads, *halves, *tensor.shape[1:])
        return by_half.transpose(1, 2).reshape(tensor.shape)
