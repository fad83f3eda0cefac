"""A policy's weights as a GGUF file: transformers reads from it what was written, of every kind of
model that is written."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import gguf
import pytest
import torch
from gguf import GGUFReader, GGUFWriter
from hypothesis import given, settings
from hypothesis import strategies as st
from test_from_gguf import add_sizes
from transformers import AutoModelForCausalLM, LlamaConfig, Qwen2Config, Qwen3Config

from turnwright.config import EngineConfig, EnvConfig, RunConfig
from turnwright.engines.remote.llamacpp import LIKELIEST
from turnwright.errors import ConfigError
from turnwright.training.model.gguf_files import HEADER, GgufDirectories, copy_header
from turnwright.training.model.weight_export import unique_weights
from turnwright.training.servers import _expected_scores

CONFIGS = {"llama": LlamaConfig, "qwen2": Qwen2Config, "qwen3": Qwen3Config}
WORDS = [f"w{number}" for number in range(64)]


def made(architecture: str, heads: int, kv_heads: int, *, tied: bool, seed: int) -> Any:
    torch.manual_seed(seed)
    head_dim = 128 if architecture == "qwen3" else 8  # what transformers reads of a qwen3 file
    sizes = {
        "vocab_size": len(WORDS),
        "hidden_size": 8 * heads,
        "intermediate_size": 24,
        "num_hidden_layers": 2,
    }
    sizes |= {"head_dim": head_dim, "num_attention_heads": heads, "num_key_value_heads": kv_heads}
    config = CONFIGS[architecture](**sizes, tie_word_embeddings=tied, max_position_embeddings=64)
    model = AutoModelForCausalLM.from_config(config)
    with torch.no_grad():  # norms and biases too
        for parameter in model.parameters():
            parameter.add_(torch.randn_like(parameter), alpha=0.3)
    return model


def header_of(model: Any, architecture: str, folder: Path) -> Path:
    """Write the key-values of a model, as `turnwright.training.model.from_gguf` leaves
    them in its directory."""
    config, source = model.config, folder / "source.gguf"
    file = GGUFWriter(source, architecture)
    add_sizes(file, config)
    file.add_key_length(config.head_dim if architecture != "qwen2" else 8)
    file.add_tokenizer_model("gpt2")
    file.add_tokenizer_pre("default")
    file.add_token_list(WORDS)
    file.add_token_merges(["w 0"])
    file.add_tensor("rope_freqs.weight", torch.arange(1.0, 5.0).numpy())
    file.add_tensor("token_embd.weight", torch.zeros(2, 2).numpy())
    file.write_header_to_file()
    file.write_kv_data_to_file()
    file.write_tensors_to_file()
    file.close()
    directory = folder / "model"
    directory.mkdir()
    copy_header(source, directory / HEADER)
    return directory


@settings(max_examples=12, deadline=None)
@given(
    architecture=st.sampled_from(sorted(CONFIGS)),
    heads=st.sampled_from(((2, 1), (4, 2), (3, 3))),
    tied=st.booleans(),
    half=st.booleans(),
    seed=st.integers(0, 99),
)
def test_transformers_reads_what_was_written(
    tmp_path_factory: pytest.TempPathFactory,
    architecture: str,
    heads: tuple[int, int],
    tied: bool,
    half: bool,
    seed: int,
) -> None:
    folder = tmp_path_factory.mktemp("gguf")
    model = made(architecture, *heads, tied=tied, seed=seed)
    source = header_of(model, architecture, folder)
    model = model.bfloat16() if half else model
    given = dict(unique_weights(model))

    directory, _ = GgufDirectories(folder / "weights", source).write(given.items(), 1)
    kinds = {tensor.tensor_type.name for tensor in GGUFReader(directory / "model.gguf").tensors}
    assert kinds == ({"F32", "BF16"} if half else {"F32"})

    read = AutoModelForCausalLM.from_pretrained(
        directory, gguf_file="model.gguf", dtype=next(iter(given.values())).dtype
    )
    found = dict(unique_weights(read))
    for name, tensor in given.items():
        assert torch.equal(found[name], tensor), name


def test_key_values_and_tensors_that_are_no_weights_stay(tmp_path: Path) -> None:
    model = made("llama", 4, 2, tied=True, seed=0)
    source = header_of(model, "llama", tmp_path)
    directory, _ = GgufDirectories(tmp_path / "weights", source).write(unique_weights(model), 3)
    before, after = GGUFReader(tmp_path / "source.gguf"), GGUFReader(directory / "model.gguf")
    for key, field in before.fields.items():
        if not key.startswith("GGUF."):
            assert after.fields[key].contents() == field.contents(), key
    (factors,) = [tensor for tensor in after.tensors if tensor.name == "rope_freqs.weight"]
    assert factors.data.tolist() == [1.0, 2.0, 3.0, 4.0]


def test_a_file_that_reads_back_differently_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from turnwright.errors import SyncError

    model = made("llama", 4, 2, tied=True, seed=0)
    directories = GgufDirectories(tmp_path / "weights", header_of(model, "llama", tmp_path))
    monkeypatch.setattr(
        gguf.GGUFWriter,
        "add_file_type",
        lambda self, kind: self.add_tensor("blk.9.x", torch.ones(2).numpy()),
    )
    directories.write(unique_weights(model), 1)
    stored = GgufDirectories._stored

    def damaged(self: Any, name: str, tensor: Any, *, back: bool = False) -> Any:
        return stored(
            self, name, tensor if back or "q_proj" not in name else tensor + 1e-6, back=back
        )

    monkeypatch.setattr(GgufDirectories, "_stored", damaged)
    with pytest.raises(SyncError, match="read back differ"):
        directories.write(unique_weights(model), 2)


def test_a_model_that_was_no_gguf_file_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="trains a model that came as a GGUF file"):
        GgufDirectories(tmp_path, tmp_path)


def test_an_architecture_that_is_not_known_is_refused(tmp_path: Path) -> None:
    model = made("llama", 4, 2, tied=True, seed=0)
    source = header_of(model, "gemma2", tmp_path)
    with pytest.raises(ConfigError, match="gemma2 models are not written"):
        GgufDirectories(tmp_path, source)


def test_llamacpp_is_for_a_trainer_of_one_process() -> None:
    """Its expected scores are those of the whole model, and several ranks
    have a part of it each."""
    config = RunConfig(
        env=(EnvConfig(use="hop"),), engine=EngineConfig(kind="llamacpp", missing_logprobs="mask")
    )
    model = made("llama", 2, 1, tied=True, seed=0)
    assert len(_expected_scores(config, model, None)([1, 2, 3])) == 2 * LIKELIEST
    with pytest.raises(ConfigError, match="a trainer of one process"):
        _expected_scores(config, model, lambda ids: [0.0 for _ in ids])
