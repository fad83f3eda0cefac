"""A tiny Qwen3 as a GGUF file, which llama.cpp reads: the format's header, and tensors in float32.

The format is that of ggml's docs/gguf.md, version 3.
"""

from __future__ import annotations

import json
import struct
from pathlib import Path

ALIGN = 32
U32, F32, STRING, ARRAY, I32, F32_TENSOR = 4, 6, 8, 9, 5, 0
NORMAL, CONTROL = 1, 3
NAMES = {
    "model.embed_tokens.weight": "token_embd.weight",
    "model.norm.weight": "output_norm.weight",
    "lm_head.weight": "output.weight",
    "input_layernorm": "attn_norm",
    "post_attention_layernorm": "ffn_norm",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "self_attn.q_norm": "attn_q_norm",
    "self_attn.k_norm": "attn_k_norm",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
}


def text(value: str) -> bytes:
    raw = value.encode()
    return struct.pack("<Q", len(raw)) + raw


def entry(key: str, value) -> bytes:
    if isinstance(value, str):
        return text(key) + struct.pack("<I", STRING) + text(value)
    if isinstance(value, float):
        return text(key) + struct.pack("<If", F32, value)
    if isinstance(value, int):
        return text(key) + struct.pack("<II", U32, value)
    strings = isinstance(value[0], str)
    head = text(key) + struct.pack("<IIQ", ARRAY, STRING if strings else I32, len(value))
    return head + b"".join(text(item) if strings else struct.pack("<i", item) for item in value)


def renamed(name: str) -> str:
    if name in NAMES:
        return NAMES[name]
    _, _, layer, rest = name.split(".", 3)
    return f"blk.{layer}.{NAMES[rest.removesuffix('.weight')]}.weight"


def metadata(directory: Path) -> dict:
    config = json.loads((directory / "config.json").read_text())
    tokenizer = json.loads((directory / "tokenizer.json").read_text())
    vocabulary = tokenizer["model"]["vocab"]
    special = {row["id"]: row["content"] for row in tokenizer["added_tokens"]}
    by_id = {number: token for token, number in vocabulary.items()} | special
    tokens = [by_id.get(number, f"<unused {number}>") for number in range(config["vocab_size"])]
    merges = [
        " ".join(pair) if isinstance(pair, list) else pair for pair in tokenizer["model"]["merges"]
    ]
    end = config["eos_token_id"]
    return {
        "general.architecture": "qwen3",
        "general.name": "tiny",
        "general.file_type": 0,
        "qwen3.block_count": config["num_hidden_layers"],
        "qwen3.context_length": config["max_position_embeddings"],
        "qwen3.embedding_length": config["hidden_size"],
        "qwen3.feed_forward_length": config["intermediate_size"],
        "qwen3.attention.head_count": config["num_attention_heads"],
        "qwen3.attention.head_count_kv": config["num_key_value_heads"],
        "qwen3.attention.key_length": config["head_dim"],
        "qwen3.attention.value_length": config["head_dim"],
        "qwen3.attention.layer_norm_rms_epsilon": float(config["rms_norm_eps"]),
        "qwen3.rope.freq_base": float(config["rope_parameters"]["rope_theta"]),
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.pre": "gpt-2",
        "tokenizer.ggml.tokens": tokens,
        "tokenizer.ggml.token_type": [
            CONTROL if number in special else NORMAL for number in range(len(tokens))
        ],
        "tokenizer.ggml.merges": merges or ["a b"],
        "tokenizer.ggml.eos_token_id": end if isinstance(end, int) else end[0],
    }


def write(directory: Path, path: Path) -> Path:
    """Turn a model directory into a file of float32."""
    from safetensors.torch import load_file

    rows = {
        renamed(name): tensor.float().numpy()
        for name, tensor in load_file(directory / "model.safetensors").items()
    }
    pairs = metadata(directory)
    out = (
        b"GGUF"
        + struct.pack("<IQQ", 3, len(rows), len(pairs))
        + b"".join(entry(*pair) for pair in pairs.items())
    )
    offset, data = 0, b""
    for name, tensor in rows.items():
        shape = tensor.shape[::-1]
        out += text(name) + struct.pack("<I", len(shape)) + struct.pack(f"<{len(shape)}Q", *shape)
        out += struct.pack("<IQ", F32_TENSOR, offset)
        raw = tensor.astype("<f4").tobytes()
        raw += bytes(-len(raw) % ALIGN)
        data, offset = data + raw, offset + len(raw)
    path.write_bytes(out + bytes(-len(out) % ALIGN) + data)
    return path
