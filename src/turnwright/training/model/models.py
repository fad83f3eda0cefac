"""Load a model (`load`), or create a tiny one (`create_tiny_model`).

A loaded model is a module of transformers in evaluation mode, on the device and in the precision
that `[model]` names (`device_and_dtype`); `choose_products` decides whether a large one multiplies
in bfloat16 on a CPU. A tiny model is written as a model directory like any other: tokenizer,
config, random weights, and for `model.vision` the settings of an image processor.
"""

from __future__ import annotations

import json
import math
import re
import shutil
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file
from tokenizers import AddedToken, Tokenizer, decoders, pre_tokenizers
from tokenizers.models import BPE
from tokenizers.trainers import BpeTrainer
from torch import Tensor, nn

from turnwright.config import ModelConfig
from turnwright.config.launch import local_rank, world_size
from turnwright.engines.local.fused_decoder import is_supported
from turnwright.engines.local.mixed_precision import multiplies_bfloat16, use_mixed_products
from turnwright.engines.local.quantization import from_directory
from turnwright.engines.local.vision import split_vlm
from turnwright.errors import ConfigError, ModelError
from turnwright.renderers.load import check_model_files
from turnwright.renderers.template import template_source
from turnwright.training.checkpoint_files import STATE_FILE
from turnwright.training.model.directory import ADAPTER_FILE, base_model_of, read_json, token_count
from turnwright.training.model.lora import load_adapter, unload

SPECIAL_TOKENS = ("<|endoftext|>", "<|im_start|>", "<|im_end|>", "<|image_pad|>")
"""Special as in Qwen's tokenizers: never part of a reply's text."""
MARKUP_TOKENS = (
    "<tool_call>",
    "</tool_call>",
    "<tool_response>",
    "</tool_response>",
    "<think>",
    "</think>",
)
"""Added but not special, as in Qwen's tokenizers: a reply's text may contain them."""
END_TOKEN, PAD_TOKEN = "<|im_end|>", "<|endoftext|>"

MAX_VOCABULARY = 1024
"""Maximum ids without control tokens.

Small environments need far fewer: merges stop at pairs that occur once.
"""


def train_tokenizer(texts: Iterable[str], extra: Iterable[str] = ()) -> Tokenizer:
    """Train a byte-level BPE tokenizer (Sennrich et al., arXiv 1508.07909) that can encode any
    text.

    Every digit is a token. A word has different tokens with and without a leading space, so an
    environment whose words are to be copied should write them in one form. Control tokens in texts
    are excluded. The same texts give the same tokenizer.
    """
    always = (*SPECIAL_TOKENS, *MARKUP_TOKENS)
    special = (*SPECIAL_TOKENS, *(token for token in extra if token not in always))

    tokenizer = Tokenizer(BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Digits(individual_digits=True),
            pre_tokenizers.ByteLevel(add_prefix_space=False),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    trainer = BpeTrainer(
        vocab_size=MAX_VOCABULARY,
        min_frequency=2,
        show_progress=False,
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
    )

    # Between control tokens only: merges across one could never be used.
    between = re.compile("|".join(map(re.escape, (*special, *MARKUP_TOKENS))))
    pieces = (piece for text in texts for piece in between.split(text) if piece)
    tokenizer.train_from_iterator(pieces, trainer)

    tokenizer.add_special_tokens(
        [AddedToken(token, special=True, normalized=False) for token in special]
    )
    tokenizer.add_tokens(
        [AddedToken(token, special=False, normalized=False) for token in MARKUP_TOKENS]
    )
    return tokenizer


def write_tokenizer(tokenizer: Tokenizer, directory: Path, template: str, context: int) -> None:
    """Write a tokenizer in transformers' layout: tokenizer.json, tokenizer_config.json,
    chat_template.jinja."""
    settings = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "eos_token": END_TOKEN,
        "pad_token": PAD_TOKEN,
        "model_max_length": context,
        "clean_up_tokenization_spaces": False,
    }
    tokenizer.save(str(directory / "tokenizer.json"))
    (directory / "tokenizer_config.json").write_text(
        json.dumps(settings, indent=2) + "\n", encoding="utf-8"
    )
    (directory / "chat_template.jinja").write_text(template, encoding="utf-8")


VISION_TOKENS = ("<|vision_start|>", "<|vision_end|>", "<|image_pad|>", "<|video_pad|>")
"""Special as in the tokenizers of Qwen-VL models."""
MERGE = 2
"""Patches per side that are merged into one token."""
CLIP_FRAMES = 32
"""Frames above which clips are scaled down."""


def vision_model(
    config: ModelConfig, sizes: Mapping[str, Any], token: Callable[[str], int | None]
) -> Any:
    """Create a Qwen3-VL with random weights; `sizes` are its decoder's, `token` returns the id of a
    special token."""
    from transformers import Qwen3VLConfig, Qwen3VLForConditionalGeneration

    # Time, height and width share half of a head's width.
    quarter = sizes["head_dim"] // 8
    rope = dict(sizes["rope_parameters"]) | {
        "mrope_section": [2 * quarter, quarter, quarter],
        "mrope_interleaved": True,
    }
    text = dict(sizes) | {"rope_parameters": rope}
    tied = text.pop("tie_word_embeddings")
    dtype = text.pop("dtype")

    side = config.image_side // config.patch
    vision = {
        "depth": config.layers,
        "hidden_size": config.hidden,
        "intermediate_size": 3 * config.hidden,
        "num_heads": config.heads,
        "in_channels": 3,
        "patch_size": config.patch,
        "spatial_merge_size": MERGE,
        # 2 in real models, where an image is doubled for it; in a tiny one half of the patch
        # weights would be useless.
        "temporal_patch_size": 1,
        "out_hidden_size": config.hidden,
        "num_position_embeddings": side * side,
        "deepstack_visual_indexes": [0],
        "initializer_range": text["initializer_range"],
    }

    model = Qwen3VLForConditionalGeneration(
        Qwen3VLConfig(
            text_config=text,
            vision_config=vision,
            image_token_id=token("<|image_pad|>"),
            video_token_id=token("<|video_pad|>"),
            vision_start_token_id=token("<|vision_start|>"),
            vision_end_token_id=token("<|vision_end|>"),
            tie_word_embeddings=tied,
            dtype=dtype,
        )
    )
    _init_positions(model.model.visual.pos_embed.weight, side)
    return model


POSITION_STD = 2.0
"""Standard deviation of the position codes of image patches.

A patch of one color has contents of about 1 in each channel. With codes of 0.3 a warm-up of 200
steps of 48 images learned nothing of where the only target of an image was (7% of 16 cells); with
1.5 it found 24%, with 2 96%, with 3 94%, and with 6 nothing again
(29 November 2026, by a script that is not kept).
"""


def _init_positions(table: Tensor, side: int) -> None:
    """Fill a table of positions, [side * side, width]: a random code of the row plus one of the
    column, so that what is learned in one place holds in its row and its column."""
    width = table.shape[1]
    scale = POSITION_STD / math.sqrt(2.0)
    rows = torch.randn(side, width) * scale
    columns = torch.randn(side, width) * scale
    with torch.no_grad():
        table.copy_((rows[:, None] + columns[None, :]).reshape(side * side, width))


def write_processor(config: ModelConfig, directory: Path) -> None:
    """Write the settings of the image and video processors in transformers' layout."""
    side_of_token = config.patch * MERGE
    shared = {
        "do_resize": True,
        "do_rescale": True,
        "do_normalize": True,
        "do_convert_rgb": True,
        "image_mean": [0.5, 0.5, 0.5],
        "image_std": [0.5, 0.5, 0.5],
        "patch_size": config.patch,
        "merge_size": MERGE,
        "temporal_patch_size": 1,
        "processor_class": "Qwen3VLProcessor",
    }

    def write(name: str, kind: dict[str, str], max_pixels: int) -> None:
        size = {"shortest_edge": side_of_token * side_of_token, "longest_edge": max_pixels}
        settings = kind | {"size": size} | shared
        (directory / name).write_text(json.dumps(settings, indent=2) + "\n", encoding="utf-8")

    max_pixels = config.image_side * config.image_side
    write(
        "preprocessor_config.json",
        {"image_processor_type": "Qwen2VLImageProcessor"},
        max_pixels,
    )
    # A video's are those of all its frames together.
    write(
        "video_preprocessor_config.json",
        {"video_processor_type": "Qwen3VLVideoProcessor"},
        CLIP_FRAMES * max_pixels,
    )


TINY_CONTEXT = 4096
"""Maximum positions of a tiny model."""
OPTIMIZER_FILE = "optimizer.safetensors"
REFERENCE_FILE = "reference.safetensors"
CRITIC_FILE = "critic.safetensors"
"""With `STATE_FILE`, the files of a checkpoint besides those of a model directory."""
_OWN = {OPTIMIZER_FILE, REFERENCE_FILE, CRITIC_FILE, STATE_FILE, ADAPTER_FILE}


@dataclass(frozen=True, slots=True)
class ModelInfo:
    """Ids of a loaded model."""

    vocabulary: int
    """Rows of the embedding matrix."""
    tokens: int
    """Number of tokenizer ids; never more than `vocabulary`."""


def tiny_template(config: ModelConfig) -> str:
    """Return the name of a tiny model's chat template."""
    return "qwen_vl" if config.vision else "chatml"


def create_tiny_model(
    config: ModelConfig, texts: Iterable[str], directory: str | Path, *, seed: int = 0
) -> Path:
    """Create a tokenizer from texts that the model will read and write, and a Qwen3 with random
    weights, as a model directory.

    With `config.vision` it is a Qwen3-VL with image processor settings. The inner width is
    3 * hidden. The same arguments give the same files.

    Raises:
        ConfigError: for sizes that do not fit together.
    """
    _check_sizes(config)
    directory = Path(directory)
    directory.mkdir(parents=True, exist_ok=True)
    tokenizer = train_tokenizer(texts, VISION_TOKENS if config.vision else ())
    write_tokenizer(tokenizer, directory, template_source(tiny_template(config)), TINY_CONTEXT)

    with silence_transformers(), torch.random.fork_rng(devices=[]):
        from transformers import GenerationConfig, Qwen3Config, Qwen3ForCausalLM

        torch.manual_seed(seed)
        end = tokenizer.token_to_id(END_TOKEN)
        pad = tokenizer.token_to_id(PAD_TOKEN)
        sizes = {
            "vocab_size": tokenizer.get_vocab_size(),
            "hidden_size": config.hidden,
            "intermediate_size": 3 * config.hidden,
            "num_hidden_layers": config.layers,
            "num_attention_heads": config.heads,
            "num_key_value_heads": config.kv_heads,
            "head_dim": config.hidden // config.heads,
            "max_position_embeddings": TINY_CONTEXT,
            "rope_parameters": {"rope_type": "default", "rope_theta": 10_000.0},
            "tie_word_embeddings": True,
            # transformers' 0.02 suits wide models; width 64 needs 0.1, or copying is not learned in
            # hundreds of steps.
            "initializer_range": 0.8 * config.hidden**-0.5,
            "eos_token_id": end,
            "pad_token_id": pad,
            "bos_token_id": None,
            "dtype": "float32",
        }

        if config.vision:
            model: Any = vision_model(config, sizes, tokenizer.token_to_id)
            write_processor(config, directory)
        else:
            model = Qwen3ForCausalLM(Qwen3Config(**sizes))
        model.generation_config = GenerationConfig(
            eos_token_id=[end, pad], pad_token_id=pad, do_sample=True
        )
        model.save_pretrained(directory)
    return directory


def load(
    path: str | Path, device: str = "cpu", dtype: torch.dtype | None = None
) -> tuple[nn.Module, ModelInfo]:
    """Load a Hugging Face directory of a causal or vision-language model; nothing is downloaded.

    The directory of a LoRA adapter gives its base model with the adapter merged in. `dtype` None is
    float32 on a CPU, bfloat16 elsewhere.

    Raises:
        ModelError: with the remedy, when something is missing or does not fit.
    """
    root = Path(path)
    base = base_model_of(root)
    if base is not None:
        model, info = load(base, device, dtype)
        unload(model, load_adapter(model, root))
        return model.requires_grad_(True), info

    _check_directory(root)
    dtype = dtype or (torch.float32 if device.startswith("cpu") else torch.bfloat16)
    with silence_transformers():
        try:
            # sdpa is exact enough (3.8e-6 in float32 against eager) and has a fused kernel on CPU
            # and CUDA.
            model, report = from_directory(
                root, dtype, attn_implementation="sdpa", output_loading_info=True
            )
        except Exception as error:
            # transformers raises nearly anything for a broken directory.
            reason = " ".join(str(error).split())[:300]
            raise ModelError(
                f"{root}: transformers cannot load it as a causal language model: {reason}"
            ) from error
    missing = sorted(report["missing_keys"])
    if missing:
        raise ModelError(
            f"{root}: the weights lack {len(missing)} tensors of config.json, {missing[0]!r} "
            "first; transformers would fill them with random numbers: copy config.json and "
            "*.safetensors from the same model"
        )

    model.to(device)
    model.requires_grad_(True)

    vocabulary = model.get_input_embeddings().weight.shape[0]
    tokens = token_count(root)
    if tokens > vocabulary:
        raise ModelError(
            f"{root}: the tokenizer does not fit the model: tokenizer.json has ids up to "
            f"{tokens - 1}, the embedding matrix {vocabulary} rows; use tokenizer and weights of "
            "the same model, or resize the embeddings"
        )
    return model, ModelInfo(vocabulary, tokens)


def freeze_vision(model: nn.Module) -> None:
    """Freeze the vision tower and its projection to text.

    Raises `ConfigError` for a model without one.
    """
    tower, why = split_vlm(model)
    if tower is None:
        raise ConfigError(f'train.vision = "frozen", but {why}')
    for _, parameter in tower.vision_parameters():
        parameter.requires_grad_(False)


def device_and_dtype(config: ModelConfig) -> tuple[str, torch.dtype]:
    """Resolve device and dtype of a model and set torch's threads; raise `ConfigError` for a
    device that is not here."""
    device = config.device
    if device == "auto":
        if not torch.cuda.is_available():
            device = "cpu"
        elif world_size() == 1:
            device = "cuda"
        else:
            device = f"cuda:{local_rank()}"
    try:
        kind = torch.device(device).type
    except RuntimeError as error:
        raise ConfigError(
            f"model.device is {config.device!r}; give auto, cpu, cuda or cuda:N"
        ) from error
    if kind == "cuda" and not torch.cuda.is_available():
        raise ConfigError(
            f"model.device is {config.device!r}, but torch finds no CUDA device here; use "
            "--model.device cpu"
        )

    torch.set_num_threads(config.threads)

    if config.dtype != "auto":
        if config.dtype == "mixed" and kind != "cpu":
            raise ConfigError(
                f'model.dtype = "mixed" is for CPUs, and the model is on {device}; set it to '
                '"bfloat16"'
            )
        return device, torch.bfloat16 if config.dtype == "bfloat16" else torch.float32
    return device, torch.bfloat16 if kind == "cuda" else torch.float32


MIXED_WEIGHTS = 20_000_000
"""Weights from which a model on a CPU multiplies in bfloat16 by default.

On a core with AMX random models of 0.3, 0.9, 5, 17, 34 and 67 million weights sampled 0.7, 1.2,
2.2, 2.8, 2.7 and 2.6 times as fast as in float32, and trained 1.1, 1.7, 2.2, 1.9, 1.7 and 2.0 times
as fast (32 calls; 16 rows of 96 ids). It would pay from 1 million; models that the recipes make are
smaller than 20 and keep the bits of float32.
"""


def choose_products(model: nn.Module, config: ModelConfig) -> str:
    """Let a model on a CPU multiply in bfloat16 where `model.dtype` says so or, by default, where
    that pays.

    Return what was chosen and why; empty for a model on another device, of another type, or too
    small for the question.
    """
    first = next(model.parameters())
    count = sum(parameter.numel() for parameter in model.parameters())
    if first.device.type != "cpu" or first.dtype != torch.float32:
        return ""
    if config.dtype not in ("auto", "mixed"):
        return ""
    if config.dtype == "auto" and count < MIXED_WEIGHTS:
        return ""
    if not multiplies_bfloat16():
        return (
            "float32: this processor has no fast products in bfloat16, or torch does not use them"
        )

    tower, _ = split_vlm(model)
    if config.dtype == "auto" and not is_supported(model, tower):
        return (
            'float32: products in bfloat16 (model.dtype = "mixed") are exact only in models '
            "like Llama, Qwen2 and Qwen3"
        )

    head = model.get_output_embeddings()
    decoder = model.model if tower is None else tower.text
    use_mixed_products(decoder, head if isinstance(head, nn.Module) else None)
    size = f"{count / 1e6:.0f} million weights"
    return (
        f'mixed: products in bfloat16, all else in float32 ({size}); model.dtype = "float32" '
        "rounds nothing"
    )


def read_tensors(path: Path) -> dict[str, Tensor]:
    """Read the tensors of a checkpoint file. Raises `ModelError` when it cannot be read."""
    try:
        return dict(load_file(path))
    except (OSError, SafetensorError) as error:
        raise ModelError(
            f"{path} cannot be read ({error}); resume from another checkpoint"
        ) from error


def copy_extras(source: Path, directory: Path, leave_out: Collection[str] = ()) -> None:
    """Copy a model directory's other files (tokenizer, template, license) unless they exist."""
    # Weights, their index and checkpoint files are written separately.
    separate = (".safetensors", ".bin", ".pt", ".pth", ".gguf", ".index.json")
    excluded = {*_OWN, *leave_out}
    for path in source.iterdir():
        if path.name in excluded or path.name.startswith(".") or path.name.endswith(separate):
            continue
        if path.is_file() and not (directory / path.name).exists():
            shutil.copyfile(path, directory / path.name)


def _check_sizes(config: ModelConfig) -> None:
    for name in ("hidden", "layers", "heads", "kv_heads"):
        value = getattr(config, name)
        if value < 1:
            raise ConfigError(f"model.{name} is {value}; it must be at least 1")
    if config.hidden % (2 * config.heads):
        raise ConfigError(
            f"model.hidden = {config.hidden} does not split into {config.heads} heads of even "
            "width (model.heads)"
        )
    if config.heads % config.kv_heads:
        raise ConfigError(
            f"model.heads = {config.heads} is no multiple of model.kv_heads = {config.kv_heads}"
        )
    if config.vision and (config.hidden // config.heads) % 8:
        raise ConfigError(
            f"model.hidden = {config.hidden} is no multiple of 8 * model.heads, as model.vision = "
            "true requires"
        )
    if config.vision and (
        config.patch < 1 or config.image_side < 1 or config.image_side % (2 * config.patch)
    ):
        raise ConfigError(
            f"model.image_side = {config.image_side} is no multiple of 2 * model.patch = "
            f"{2 * config.patch}"
        )


def _check_directory(root: Path) -> None:
    if not root.is_dir():
        what = "is a file" if root.exists() else "does not exist"
        raise ModelError(
            f"{root} {what}; model.path is a Hugging Face model directory (config.json, "
            "*.safetensors, tokenizer.json)"
        )
    check_model_files(root)
    read_json(root / "config.json", "it is no Hugging Face model directory")
    if not any(root.glob("*.safetensors")):
        convertible = sorted(path.name for path in root.glob("*.bin"))
        remedy = "download the weights too"
        if convertible:
            remedy = f"{convertible[0]} would have to be converted to safetensors"
        raise ModelError(f"{root}: no weights (*.safetensors); {remedy}")
    if not (root / "tokenizer.json").is_file():
        raise ModelError(
            f"{root}: no tokenizer.json; save the tokenizer there with transformers' "
            "AutoTokenizer.from_pretrained(...).save_pretrained(...)"
        )


@contextmanager
def silence_transformers() -> Iterator[None]:
    """Suppress transformers' progress bars and advice in this context."""
    from transformers.utils import logging

    bars_enabled = logging.is_progress_bar_enabled()
    level = logging.get_verbosity()
    logging.disable_progress_bar()
    logging.set_verbosity_error()
    try:
        yield
    finally:
        logging.set_verbosity(level)
        if bars_enabled:
            logging.enable_progress_bar()
