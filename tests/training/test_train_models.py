"""Tiny models and model directories: the same files each time, and errors that say what to do."""

import dataclasses
import hashlib
import json
import shutil
import subprocess
import sys
import threading
from concurrent.futures import ThreadPoolExecutor
from itertools import pairwise

import pytest
import torch
from kit.forks import run_ranks
from kit.training import example_texts
from safetensors.torch import load_file, save_file
from tokenizers import Tokenizer
from transformers import PreTrainedModel
from transformers.utils.chat_template_utils import _compile_jinja_template

from turnwright.config import ModelConfig, tiny
from turnwright.errors import ConfigError, ModelError
from turnwright.training import load_model_and_renderer
from turnwright.training.model import models
from turnwright.types import Message


@pytest.fixture
def copy(tiny_dir, tmp_path):
    return shutil.copytree(tiny_dir, tmp_path / "copy")


def digests(directory):
    return {
        path.name: hashlib.sha256(path.read_bytes()).hexdigest()
        for path in sorted(directory.iterdir())
    }


def create(out):
    return models.create_tiny_model(ModelConfig(hidden=32, layers=2), example_texts(), out)


def test_the_same_arguments_give_the_same_files_in_another_process(tiny_dir, tmp_path):
    run_ranks(create, 1, tmp_path / "again")
    assert digests(tmp_path / "again") == digests(tiny_dir)


def test_the_seed_is_the_weights(tiny_dir, tmp_path):
    state = torch.get_rng_state()
    other = models.create_tiny_model(
        ModelConfig(hidden=32, layers=2), example_texts(), tmp_path / "other", seed=1
    )
    assert torch.equal(torch.get_rng_state(), state)
    changed = {name for name, digest in digests(other).items() if digests(tiny_dir)[name] != digest}
    assert changed == {"model.safetensors"}


def test_what_is_loaded(tiny_dir):
    model, meta = models.load(tiny_dir)
    tokenizer = Tokenizer.from_file(str(tiny_dir / "tokenizer.json"))
    assert meta.vocabulary == meta.tokens == tokenizer.get_vocab_size()
    assert model.generation_config.eos_token_id == [
        tokenizer.token_to_id(t) for t in ("<|im_end|>", "<|endoftext|>")
    ]
    assert (type(model).__name__, model.dtype, model.device.type) == (
        "Qwen3ForCausalLM",
        torch.float32,
        "cpu",
    )
    assert model.config.max_position_embeddings == 4096
    assert model.config._attn_implementation == "sdpa"
    std = model.model.layers[0].mlp.up_proj.weight.std().item()
    assert std == pytest.approx(0.8 * 32**-0.5, rel=0.05)


def test_tiny_spec_needs_no_torch():
    assert tiny() == ModelConfig()
    assert tiny(hidden=32, layers=1) == ModelConfig(hidden=32, layers=1)
    code = "import turnwright.config, turnwright.training.advantages, sys; turnwright.config.tiny()"
    code += "; assert 'torch' not in sys.modules"
    subprocess.run([sys.executable, "-c", code], check=True)


def test_tokenizer(tiny_dir):
    tokenizer = Tokenizer.from_file(str(tiny_dir / "tokenizer.json"))
    # A word of the texts, in the form in which they have it, and each digit, is one id.
    assert [len(tokenizer.encode(word).ids) for word in (" amber", "lookup", " jade", "7")] == [
        1
    ] * 4
    assert tokenizer.encode("answer 742").tokens == ["answer", "Ġ", "7", "4", "2"]
    for text in ("Ünïcödé 東京 🙂 \x00\n", "<tool_call>{}</tool_call>"):
        assert tokenizer.decode(tokenizer.encode(text).ids, skip_special_tokens=False) == text
    added = json.loads((tiny_dir / "tokenizer.json").read_text())["added_tokens"]
    assert {row["content"]: row["special"] for row in added} == {
        "<|endoftext|>": True,
        "<|im_start|>": True,
        "<|im_end|>": True,
        "<|image_pad|>": True,
        "<tool_call>": False,
        "</tool_call>": False,
        "<tool_response>": False,
        "</tool_response>": False,
        "<think>": False,
        "</think>": False,
    }


def test_transformers_reads_the_tokenizer(tiny_dir):
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(tiny_dir)
    text = tokenizer.apply_chat_template(
        [{"role": "user", "content": "code of amber"}], tokenize=False, add_generation_prompt=True
    )
    assert text == "<|im_start|>user\ncode of amber<|im_end|>\n<|im_start|>assistant\n"
    assert tokenizer.eos_token == "<|im_end|>"
    assert (
        tokenizer(text).input_ids
        == Tokenizer.from_file(str(tiny_dir / "tokenizer.json")).encode(text).ids
    )


TOOL = {
    "type": "function",
    "function": {
        "name": "look",
        "description": "Look.",
        "parameters": {"type": "object", "properties": {}},
    },
}
CALL = {"type": "function", "id": "1", "function": {"name": "look", "arguments": {"key": "amber"}}}
TALK = [
    {"role": "system", "content": "Be brief."},
    {
        "role": "user",
        "content": [
            {"type": "text", "text": "What is "},
            {"type": "image", "image": "0"},
            {"type": "text", "text": "?"},
        ],
    },
    {
        "role": "assistant",
        "content": "Hm.",
        "reasoning_content": "I look.",
        "tool_calls": [CALL, CALL],
    },
    {"role": "tool", "content": "birch", "tool_call_id": "1"},
    {"role": "tool", "content": "cedar", "tool_call_id": "1"},
    {"role": "assistant", "content": "A birch."},
    {"role": "user", "content": "Sure?"},
]


@pytest.mark.parametrize("tools", [None, [TOOL]])
@pytest.mark.parametrize("first", [0, 1])
def test_the_template_only_appends(tiny_dir, tools, first):
    # As transformers runs it.
    template = _compile_jinja_template((tiny_dir / "chat_template.jinja").read_text())
    talk = TALK[first:]
    texts = [template.render(messages=talk[:n], tools=tools) for n in range(1, len(talk) + 1)]
    for shorter, longer in pairwise(texts):
        assert longer.startswith(shorter)
    assert (
        template.render(messages=talk, tools=tools, add_generation_prompt=True)
        == texts[-1] + "<|im_start|>assistant\n"
    )
    assert texts[-1].count("<|im_start|>system") == (1 if tools or not first else 0)
    assert texts[-1].count("Be brief.") == 1 - first


def test_the_template_says_what_was_said(tiny_dir):
    # As transformers runs it.
    template = _compile_jinja_template((tiny_dir / "chat_template.jinja").read_text())
    text = template.render(messages=TALK)
    call = '<tool_call>\n{"name": "look", "arguments": {"key": "amber"}}\n</tool_call>'
    assert text == (
        "<|im_start|>system\nBe brief.<|im_end|>\n"
        "<|im_start|>user\nWhat is <|image_pad|>?<|im_end|>\n"
        f"<|im_start|>assistant\n<think>\nI look.\n</think>\n\nHm.\n{call}\n{call}<|im_end|>\n"
        "<|im_start|>user\n<tool_response>\nbirch\n</tool_response><|im_end|>\n"
        "<|im_start|>user\n<tool_response>\ncedar\n</tool_response><|im_end|>\n"
        "<|im_start|>assistant\nA birch.<|im_end|>\n<|im_start|>user\nSure?<|im_end|>\n"
    )


@pytest.mark.parametrize(
    ("lost", "message"),
    [
        ("config.json", r"no config\.json; it is no Hugging Face model directory"),
        ("model.safetensors", r"no weights \(\*\.safetensors\); download"),
        ("tokenizer.json", r"no tokenizer\.json; save the tokenizer there"),
    ],
)
def test_missing_files(copy, lost, message):
    (copy / lost).unlink()
    with pytest.raises(ModelError, match=message) as caught:
        models.load(copy)
    assert str(copy) in str(caught.value)


def test_a_model_without_a_template_takes_one_by_name(copy):
    (copy / "chat_template.jinja").unlink()
    with pytest.raises(
        ModelError,
        match=r"no chat template; name one with model\.template, add chat_template\.jinja",
    ):
        load_model_and_renderer(copy, copy, ModelConfig())
    _, renderer = load_model_and_renderer(copy, copy, ModelConfig(template="qwen3_with_thinking"))
    assert renderer.decode(renderer.open([Message("user", "Hi.")]).ids).endswith(
        "Hi.<|im_end|>\n<|im_start|>assistant\n"
    )


def test_no_directory(tmp_path):
    with pytest.raises(
        ModelError, match=r"does not exist; model\.path is a Hugging Face model directory"
    ):
        models.load(tmp_path / "nowhere")
    (tmp_path / "file").touch()
    with pytest.raises(ModelError, match="is a file"):
        models.load(tmp_path / "file")


def test_a_template_inside_tokenizer_config_serves(copy):
    template = (copy / "chat_template.jinja").read_text()
    (copy / "chat_template.jinja").unlink()
    settings = json.loads((copy / "tokenizer_config.json").read_text())
    (copy / "tokenizer_config.json").write_text(json.dumps(settings | {"chat_template": template}))
    models.load(copy)


def test_pickled_weights_are_named(copy):
    (copy / "model.safetensors").rename(copy / "pytorch_model.bin")
    with pytest.raises(
        ModelError, match=r"pytorch_model\.bin would have to be converted to safetensors"
    ):
        models.load(copy)


@pytest.mark.parametrize("name", ["config.json", "tokenizer.json", "model.safetensors"])
def test_unreadable_files(copy, name):
    (copy / name).write_bytes(b"\x00torn")
    with pytest.raises(ModelError) as caught:
        models.load(copy)
    assert str(copy) in str(caught.value)
    assert "\n" not in str(caught.value)


def test_a_tokenizer_that_does_not_fit(copy):
    tokenizer = Tokenizer.from_file(str(copy / "tokenizer.json"))
    tokenizer.add_tokens(["another"])
    tokenizer.save(str(copy / "tokenizer.json"))
    with pytest.raises(
        ModelError, match=r"the tokenizer does not fit the model: tokenizer\.json has ids up to \d+"
    ):
        models.load(copy)


def test_weights_that_are_not_all_there(copy):
    tensors = load_file(copy / "model.safetensors")
    tensors.pop("model.layers.1.mlp.up_proj.weight")
    save_file(tensors, copy / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(ModelError, match=r"lack 1 tensors .*layers\.1\.mlp\.up_proj"):
        models.load(copy)


def test_an_unknown_architecture(copy):
    (copy / "config.json").write_text(
        json.dumps({"model_type": "nonesuch", "architectures": ["Nonesuch"]})
    )
    with pytest.raises(ModelError, match="cannot load it as a causal language model"):
        models.load(copy)


@pytest.mark.parametrize(
    ("sizes", "message"),
    [
        ({"hidden": 63}, "does not split into 2 heads"),
        ({"kv_heads": 3}, "is no multiple"),
        ({"layers": 0}, "at least 1"),
    ],
)
def test_sizes_that_do_not_fit(sizes, message, tmp_path):
    with pytest.raises(ConfigError, match=message):
        models.create_tiny_model(ModelConfig(**sizes), ["a"], tmp_path)


def test_place():
    threads = torch.get_num_threads()
    try:
        assert models.device_and_dtype(ModelConfig(device="cpu")) == ("cpu", torch.float32)
        assert models.device_and_dtype(ModelConfig(device="cpu", dtype="bfloat16")) == (
            "cpu",
            torch.bfloat16,
        )
        if not torch.cuda.is_available():
            assert models.device_and_dtype(ModelConfig())[0] == "cpu"
            with pytest.raises(ConfigError, match="no CUDA device"):
                models.device_and_dtype(ModelConfig(device="cuda:0"))
        with pytest.raises(ConfigError, match="give auto, cpu"):
            models.device_and_dtype(ModelConfig(device="gpu"))
    finally:
        torch.set_num_threads(threads)


def test_a_tiny_model_that_sees_is_a_whole_directory(tmp_path):
    sizes = ModelConfig(hidden=32, heads=4, vision=True)
    path = models.create_tiny_model(sizes, example_texts(), tmp_path / "a")
    model, _ = models.load(path)
    assert type(model).__name__ == "Qwen3VLForConditionalGeneration"
    assert model.config.get_text_config().max_position_embeddings == models.TINY_CONTEXT
    assert len(model.generation_config.eos_token_id) == 2
    other = models.create_tiny_model(sizes, example_texts(), tmp_path / "b")
    assert (other / "model.safetensors").read_bytes() == (path / "model.safetensors").read_bytes()
    settings = json.loads((path / "preprocessor_config.json").read_text())
    assert settings["size"] == {"shortest_edge": 256, "longest_edge": 1024}
    assert float(model.model.visual.pos_embed.weight.detach().std()) == pytest.approx(
        models.POSITION_STD, rel=0.2
    )
    for changes, message in (
        ({"image_side": 40}, "no multiple of 2"),
        ({"heads": 8}, r"no multiple of 8 \* model.heads"),
    ):
        with pytest.raises(ConfigError, match=message):
            models.create_tiny_model(
                dataclasses.replace(sizes, **changes), example_texts(), tmp_path / "c"
            )


def test_threads_may_load_models_at_once(tiny_dir):
    """transformers replaces methods of its classes while it loads a model."""
    before, together = PreTrainedModel.tie_weights, threading.Barrier(6)

    def load(_):
        together.wait()
        return models.load(tiny_dir)[0]

    with ThreadPoolExecutor(6) as pool:
        loaded = [model for _ in range(4) for model in pool.map(load, range(6))]
    assert PreTrainedModel.tie_weights is before
    assert all(model.lm_head.weight is model.model.embed_tokens.weight for model in loaded)
