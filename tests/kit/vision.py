"""Vision-language model directories of real architectures, made from configs:
no weights are fetched."""

from __future__ import annotations

import json
from pathlib import Path

from tokenizers import AddedToken, Tokenizer, decoders, pre_tokenizers
from tokenizers.models import BPE
from tokenizers.trainers import BpeTrainer

QWEN_SPECIAL = (
    "<|endoftext|>",
    "<|im_start|>",
    "<|im_end|>",
    "<|vision_start|>",
    "<|vision_end|>",
    "<|image_pad|>",
    "<|video_pad|>",
)
MARKUP = (
    "<tool_call>",
    "</tool_call>",
    "<tool_response>",
    "</tool_response>",
    "<think>",
    "</think>",
)
LLAVA_SPECIAL = ("<s>", "</s>", "<image>", "<pad>")
TILE_SPECIAL = (
    "<|im_start|>",
    "<end_of_utterance>",
    "<fake_token_around_image>",
    "<global-img>",
    "<image>",
)
TILE_SPECIAL += tuple(f"<row_{row}_col_{column}>" for row in range(1, 7) for column in range(1, 7))
WORDS = (
    "the agent sees a figure and a goal ; it moves up down left right . <0.5 seconds> User: "
    "Assistant: user assistant tool "
)

# What the public formats of these families look like, written for these tests.
_PARTS = """
{%- macro show(content) -%}
  {%- if content is string -%}{{- content -}}
  {%- else -%}
    {%- for part in content -%}
      {%- if part.type == 'image' -%}{{- IMAGE -}}
      {%- elif part.type == 'video' -%}{{- VIDEO -}}
      {%- elif part.text is defined -%}{{- part.text -}}
      {%- endif -%}
    {%- endfor -%}
  {%- endif -%}
{%- endmacro -%}
"""
QWEN_TEMPLATE = (
    _PARTS.replace("IMAGE", "'<|vision_start|><|image_pad|><|vision_end|>'").replace(
        "VIDEO", "'<|vision_start|><|video_pad|><|vision_end|>'"
    )
    + """
{%- if tools -%}
  {{- '<|im_start|>system\\n' -}}
  {%- if messages[0].role == 'system' -%}{{- show(messages[0].content) + '\\n\\n' -}}{%- endif -%}
  {{- '# Tools\\n<tools>' -}}
  {%- for tool in tools -%}{{- '\\n' + (tool | tojson) -}}{%- endfor -%}
  {{- '\\n</tools><|im_end|>\\n' -}}
{%- endif -%}
{%- for message in messages -%}
  {%- if message.role == 'tool' -%}
    {%- if loop.first or messages[loop.index0 - 1].role != 'tool' -%}{{- '<|im_start|>user' -}}{%- endif -%}
    {{- '\\n<tool_response>\\n' -}}{{- TOOL -}}{{- '\\n</tool_response>' -}}
    {%- if loop.last or messages[loop.index0 + 1].role != 'tool' -%}{{- '<|im_end|>\\n' -}}{%- endif -%}
  {%- elif not (tools and loop.first and message.role == 'system') -%}
    {{- '<|im_start|>' + message.role + '\\n' -}}
    {{- show(message.content) -}}
    {%- for call in message.tool_calls or [] -%}
      {%- if message.content or not loop.first -%}{{- '\\n' -}}{%- endif -%}
      {{- '<tool_call>\\n{"name": "' + call.function.name + '", "arguments": ' + (call.function.arguments | tojson)
          + '}\\n</tool_call>' -}}
    {%- endfor -%}
    {{- '<|im_end|>\\n' -}}
  {%- endif -%}
{%- endfor -%}
{%- if add_generation_prompt -%}{{- '<|im_start|>assistant\\n' -}}{%- endif -%}
"""  # noqa: E501
)
LLAVA_TEMPLATE = (
    _PARTS.replace("IMAGE", "'<image>\\n'").replace("VIDEO", "''")
    + """
{%- for message in messages -%}
  {%- if message.role == 'user' -%}{{- 'USER: ' -}}{{- show(message.content) -}}{{- ' ' -}}
  {%- elif message.role == 'assistant' -%}{{- 'ASSISTANT: ' -}}{{- show(message.content) -}}{{- '</s>' -}}
  {%- else -%}{{- show(message.content) -}}{{- ' ' -}}
  {%- endif -%}
{%- endfor -%}
{%- if add_generation_prompt -%}{{- 'ASSISTANT: ' -}}{%- endif -%}
"""  # noqa: E501
)
TILE_TEMPLATE = (
    _PARTS.replace("IMAGE", "'<image>'").replace("VIDEO", "''")
    + """
{{- '<|im_start|>' -}}
{%- for message in messages -%}
  {{- message.role | capitalize -}}{{- ': ' -}}{{- show(message.content) -}}{{- '<end_of_utterance>\\n' -}}
{%- endfor -%}
{%- if add_generation_prompt -%}{{- 'Assistant: ' -}}{%- endif -%}
"""  # noqa: E501
)


def tiny_vlm_directory(
    path: str | Path,
    family: str = "qwen3_vl",
    *,
    weights: bool = True,
    tool_images: bool = True,
    patch: int = 16,
    max_pixels: int = 256 * 256,
    hidden: int = 64,
    layers: int = 2,
    seed: int = 0,
) -> Path:
    """Write a model directory: config.json, tokenizer.json, chat template, settings of the
    processors and, if asked, weights.

    Args:
        family: qwen2_vl, qwen2_5_vl, qwen3_vl, llava, smolvlm or idefics3.
        weights: whether to make and save a model, which needs torch; else nothing here does.
        tool_images: whether the template shows images in the results of tools (Qwen alone).
        patch: pixels along the side of a patch (Qwen alone).
        max_pixels: that an image is scaled down to (Qwen alone).
    """
    root = Path(path)
    root.mkdir(parents=True, exist_ok=True)
    qwen = family.startswith("qwen")
    special = QWEN_SPECIAL if qwen else LLAVA_SPECIAL if family == "llava" else TILE_SPECIAL
    tokenizer = _tokenizer(special)
    tokenizer.save(str(root / "tokenizer.json"))
    end = "<|im_end|>" if qwen else "</s>" if family == "llava" else "<end_of_utterance>"
    pad = "<|endoftext|>" if qwen else "<pad>" if family == "llava" else "<|im_start|>"
    template = QWEN_TEMPLATE if qwen else LLAVA_TEMPLATE if family == "llava" else TILE_TEMPLATE
    template = template.replace(
        "TOOL", "show(message.content)" if tool_images else "''.join(TEXTS)"
    )
    if not tool_images:
        texts = (
            "message.content if message.content is string else message.content | "
            "selectattr('text', 'defined') | "
        )
        template = template.replace("''.join(TEXTS)", texts + "map(attribute='text') | join('')")
    _write(
        root / "tokenizer_config.json",
        {"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": end, "pad_token": pad},
    )
    (root / "chat_template.jinja").write_text(template, encoding="utf-8")
    config = _config(family, tokenizer, end, pad, patch, hidden, layers)
    _write(root / "config.json", config)
    _write(
        root / "generation_config.json",
        {"eos_token_id": [tokenizer.token_to_id(end)], "pad_token_id": tokenizer.token_to_id(pad)},
    )
    for name, settings in _processors(family, patch, max_pixels).items():
        _write(root / f"{name}.json", settings)
    if weights:
        _weights(root, config, seed)
    return root


def _tokenizer(special: tuple[str, ...]) -> Tokenizer:
    """A byte-level BPE with the family's added tokens."""
    tokenizer = Tokenizer(BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer.train_from_iterator(
        [WORDS] * 3, BpeTrainer(vocab_size=320, initial_alphabet=alphabet, show_progress=False)
    )
    tokenizer.add_special_tokens(
        [AddedToken(token, special=True, normalized=False) for token in special]
    )
    if "<|im_end|>" in special:
        tokenizer.add_tokens(
            [AddedToken(token, special=False, normalized=False) for token in MARKUP]
        )
    return tokenizer


def _config(
    family: str, tokenizer: Tokenizer, end: str, pad: str, patch: int, hidden: int, layers: int
) -> dict:
    """A small model of the family."""
    token = tokenizer.token_to_id
    text = {
        "vocab_size": tokenizer.get_vocab_size(),
        "hidden_size": hidden,
        "intermediate_size": 2 * hidden,
        "num_hidden_layers": layers,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "max_position_embeddings": 4096,
        "initializer_range": 0.1,
        "pad_token_id": token(pad),
        "eos_token_id": token(end),
        "bos_token_id": None,
    }
    if family.startswith("qwen"):
        return _qwen_config(family, text, token, patch, hidden)
    vision = {
        "hidden_size": 32,
        "intermediate_size": 64,
        "num_hidden_layers": 2,
        "num_attention_heads": 2,
        "image_size": 56,
    }
    if family == "llava":
        return {
            "model_type": "llava",
            "architectures": ["LlavaForConditionalGeneration"],
            "text_config": {"model_type": "llama", **text},
            "vision_config": {
                "model_type": "clip_vision_model",
                "patch_size": 14,
                "projection_dim": 32,
                **vision,
            },
            "image_token_index": token("<image>"),
            "image_seq_length": 16,
            "vision_feature_select_strategy": "default",
        }
    return {
        "model_type": family,
        "architectures": [
            "SmolVLMForConditionalGeneration"
            if family == "smolvlm"
            else "Idefics3ForConditionalGeneration"
        ],
        "text_config": {"model_type": "llama", **text},
        "vision_config": {
            "model_type": f"{family}_vision" if family == "idefics3" else "smolvlm_vision",
            "patch_size": 14,
            **vision,
        },
        "image_token_id": token("<image>"),
        "scale_factor": 2,
        "pad_token_id": text["pad_token_id"],
        "tie_word_embeddings": False,
    }


def _qwen_config(family: str, text: dict, token, patch: int, hidden: int) -> dict:
    names = {"qwen2_vl": "Qwen2VL", "qwen2_5_vl": "Qwen2_5_VL", "qwen3_vl": "Qwen3VL"}
    head = hidden // 4
    rope = {
        "rope_type": "default",
        "rope_theta": 10_000.0,
        "mrope_section": [head // 8, head // 8 * 2 - head // 8, head // 8 * 2],
    }
    rope["mrope_section"] = [head // 2 - 2 * (head // 6), head // 6, head // 6]
    if family == "qwen3_vl":
        text = {**text, "head_dim": head}
        rope["mrope_interleaved"] = True
    vision = {
        "depth": 2,
        "num_heads": 2,
        "patch_size": patch,
        "spatial_merge_size": 2,
        "temporal_patch_size": 2,
    }
    if family == "qwen2_vl":
        vision |= {"embed_dim": 32, "hidden_size": hidden, "mlp_ratio": 2}
    else:
        vision |= {"hidden_size": 32, "intermediate_size": 64, "out_hidden_size": hidden}
    if family == "qwen2_5_vl":
        vision |= {"window_size": 4 * patch, "fullatt_block_indexes": [1], "tokens_per_second": 2}
    if family == "qwen3_vl":
        vision |= {
            "num_position_embeddings": 256,
            "deepstack_visual_indexes": [0],
            "initializer_range": 0.1,
        }
    return {
        "model_type": family,
        "architectures": [f"{names[family]}ForConditionalGeneration"],
        "text_config": {"model_type": f"{family}_text", **text, "rope_parameters": rope},
        "vision_config": {
            "model_type": f"{family}_vision" if family == "qwen2_vl" else family,
            **vision,
        },
        "image_token_id": token("<|image_pad|>"),
        "video_token_id": token("<|video_pad|>"),
        "vision_start_token_id": token("<|vision_start|>"),
        "vision_end_token_id": token("<|vision_end|>"),
        "tie_word_embeddings": False,
    }


def _processors(family: str, patch: int, max_pixels: int) -> dict[str, dict]:
    """The files that say how images are processed."""
    if family.startswith("qwen"):
        half = {"image_mean": [0.5] * 3, "image_std": [0.5] * 3} if family == "qwen3_vl" else {}
        shared = {"patch_size": patch, "merge_size": 2, "temporal_patch_size": 2, **half}
        size = {"shortest_edge": (2 * patch) ** 2, "longest_edge": max_pixels}
        kind = "Qwen3VLVideoProcessor" if family == "qwen3_vl" else "Qwen2VLVideoProcessor"
        return {
            "preprocessor_config": {
                "image_processor_type": "Qwen2VLImageProcessor",
                "size": size,
                **shared,
            },
            "video_preprocessor_config": {
                "video_processor_type": kind,
                "size": size,
                "do_sample_frames": False,
                **shared,
            },
        }
    if family == "llava":
        side = {"height": 56, "width": 56}
        own = {
            "patch_size": 14,
            "num_additional_image_tokens": 1,
            "vision_feature_select_strategy": "default",
        }
        image = {
            "image_processor_type": "CLIPImageProcessor",
            "size": {"shortest_edge": 56},
            "crop_size": side,
        }
        return {"preprocessor_config": image, "processor_config": own}
    name = "SmolVLM" if family == "smolvlm" else "Idefics3"
    image = {
        "image_processor_type": f"{name}ImageProcessor",
        "size": {"longest_edge": 4 * 56},
        "max_image_size": {"longest_edge": 56},
    }
    return {"preprocessor_config": image, "processor_config": {"image_seq_len": 4}}


def _weights(root: Path, config: dict, seed: int) -> None:
    import torch
    import transformers

    settings = transformers.AutoConfig.from_pretrained(root)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = getattr(transformers, config["architectures"][0])(settings)
    generation = (root / "generation_config.json").read_text()
    model.save_pretrained(root)
    (root / "generation_config.json").write_text(generation)


def _write(path: Path, value: dict) -> None:
    path.write_text(json.dumps(value, indent=1), encoding="utf-8")
