"""Episodes of user files of slime and Miles, and what the original loops make of them.

    python slime_episodes.py SLIME_TREE MILES_TREE > slime_oracle.json

plays each under the original's own loop and `Sample`, with scripted replies in place of servers.
Neither system has a package, so the trees are checked out by hand; `slime_oracle.json` holds the
ids that came out, with the commits.
"""

import asyncio
import importlib
import importlib.util
import json
import subprocess
import sys
import tempfile
import types
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import Any

HERE = Path(__file__).parent
sys.path[:0] = [str(HERE), str(HERE.parent)]

SCHEMA = {"type": "object", "properties": {}}
ADD = {"type": "function", "function": {"name": "add", "description": "Add.", "parameters": SCHEMA}}
CALL = '<tool_call>{"name": "add", "arguments": {"numbers": [2, 5]}}</tool_call>'
SCORE = '<tool_call>{"name": "calc_score", "arguments": {"answer": "8"}}</tool_call>'
INDEX = {"index": {"amber": "seven", "salt": "two"}}
COLOURS = {"metadata": {"colours": ["red", "blue"]}}


@dataclass(frozen=True)
class Played:
    """One episode: a user file's `build_env` or generate function, a row, and the replies."""

    use: str
    replies: tuple[str, ...]
    row: dict[str, Any] = field(default_factory=dict)
    turns: int = 4
    args: dict[str, Any] = field(default_factory=dict)
    vision: bool = False
    system: str = "slime"
    picture: bool = False
    """Whether the prompt has a picture."""
    reward: str = ""
    """Function of the file that is the run's reward, for an episode whose rewards are compared."""
    cut: int = 4096
    """Most ids of a reply."""


EPISODES = {
    "a number, asked twice": Played("guess_env.py:build_env", ("hm", "\\boxed{7}"), {"label": "7"}),
    "the most turns": Played("guess_env.py:build_env", ("a", "b", "c"), {"label": "7"}, turns=3),
    "a long episode": Played(
        "guess_env.py:build_env", (*"abcdefghijklmnopqrs", "\\boxed{7}"), {"label": "7"}, turns=20
    ),
    "a tool of the row": Played(
        "tool_env.py:build_env", (CALL, "It is 7"), {"label": "7", "metadata": {"tools": [ADD]}}
    ),
    "a judge": Played("judge_env.py:build_env", ("good", "bad"), {"metadata": {"question": "q"}}),
    "pictures of steps": Played(
        "picture_env.py:build_env", ("red", "blue", "red"), COLOURS, vision=True
    ),
    "texts with stops": Played(
        "search_generate.py:generate",
        ("<search>amber</search>", "<answer>seven</answer>"),
        {"label": "seven"},
        args=INDEX,
    ),
    "texts, the most turns": Played(
        "search_generate.py:generate",
        ("<search>amber</search>", "<search>salt</search>"),
        {"label": "x"},
        2,
        INDEX,
    ),
    "ids and inputs of pictures": Played(
        "vision_generate.py:generate",
        ("green", "red", "blue"),
        COLOURS,
        args={"shift": 0},
        vision=True,
        picture=True,
    ),
    "several samples": Played("others.py:fan_out", ("a", "b")),
    "a removed sample": Played("others.py:removed", ("a",)),
    "lists in place": Played("ways.py:in_place", ("a", "bc"), {"label": "7"}, reward="length"),
    "a sample's own method": Played("ways.py:appended", ("abc",), {"label": "8"}, reward="length"),
    "a reply that is cut": Played(
        "ways.py:appended", ("abcdefgh",), {"label": "7"}, reward="length", cut=3
    ),
    "a status as a text": Played("ways.py:worded", ("ab",), {"label": "7"}, reward="length"),
    "a cut status as a text": Played(
        "ways.py:worded", ("abcdefgh",), {"label": "7"}, reward="length", cut=3
    ),
    "samples rewarded together": Played(
        "ways.py:several", ("a", "bcd", "e"), {"label": "7"}, reward="length"
    ),
    "a tool that scores": Played(
        "scoring_env.py:build_env", (SCORE, SCORE.replace("8", "7"), "7"), {"label": "7"}
    ),
    "an environment that is cut": Played(
        "guess_env.py:build_env", ("hm", "abcdefghijkl"), {"label": "7"}, cut=6
    ),
    "Miles, a reply that is cut": Played(
        "miles_turns.py:generate", ("a", "abcdefgh"), {"label": "7"}, 2, system="miles", cut=3
    ),
    "Miles, an environment that is cut": Played(
        "miles_env.py:build_env", ("hm", "abcdefghijkl"), {"label": "7"}, system="miles", cut=6
    ),
    "Miles, an environment": Played(
        "miles_env.py:build_env", ("hm", "\\boxed{7}"), {"label": "7"}, system="miles"
    ),
    "Miles, of one input": Played(
        "miles_generate.py:generate", ("\\boxed{7}",), {"label": "7"}, system="miles"
    ),
    "Miles, of three arguments": Played(
        "miles_turns.py:generate", ("a", "b"), {"label": "7"}, 2, system="miles"
    ),
}


class Servers:
    """Answers `post` with the replies of a script, and keeps the contexts."""

    def __init__(self, replies, encode, decode, cut):
        self.cut = cut
        self.replies, self.encode, self.decode, self.contexts = list(replies), encode, decode, []

    async def post(self, url, payload, *_, **options):
        text = self.replies[len(self.contexts)]
        ids = list(self.encode(text))
        if text.endswith(tuple((payload.get("sampling_params") or {}).get("stop") or ())):
            ids.pop()  # before its end token
        finish, ids = ("length" if len(ids) > self.cut else "stop"), ids[: self.cut]
        self.contexts.append(payload.get("input_ids", payload.get("text")))
        self.contexts[-1] = (
            self.contexts[-1]
            if isinstance(self.contexts[-1], str)
            else [int(i) for i in self.contexts[-1]]
        )
        rows = [[-0.5, one, None] for one in ids]
        meta = {
            "id": "x",
            "finish_reason": {"type": finish},
            "output_token_logprobs": rows,
            "completion_tokens": len(ids),
        }
        return {
            "text": self.decode(ids),
            "output_ids": ids,
            "meta_info": meta | {"weight_version": "1", "prompt_tokens": 1},
        }


def _stub(name, **names):
    module = types.ModuleType(name)
    vars(module).update(names)
    vars(module)["__getattr__"] = _anything
    sys.modules[name] = module


def _anything(name):
    if name.startswith("__"):
        raise AttributeError(name)
    return SimpleNamespace()


def _tokenizer(vision, folder):
    if vision:
        from kit.vision import tiny_vlm_directory
        from transformers import AutoTokenizer

        path = tiny_vlm_directory(Path(folder) / "vlm")
        made = AutoTokenizer.from_pretrained(path)
        return made, Processor(made, path)
    from kit.rollouts import bpe
    from transformers import PreTrainedTokenizerFast

    from turnwright.renderers import CHATML

    made = PreTrainedTokenizerFast(
        tokenizer_object=bpe(), eos_token="<|im_end|>", pad_token="<|im_end|>"
    )
    made.chat_template = CHATML
    render = made.apply_chat_template
    made.apply_chat_template = lambda messages, **options: render(
        [_as_text(one) for one in messages], **options
    )
    return made, None


def _as_text(message):
    """Return a message whose parts, which are all texts, are one text: templates of
    released models take either."""
    content = message["content"]
    return (
        message
        if isinstance(content, str)
        else {**message, "content": "".join(part["text"] for part in content)}
    )


class Processor:
    """The image processor of transformers, and a placeholder for each of its features; the complete
    one needs torchvision."""

    def __init__(self, tokenizer, path):
        from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import (
            Qwen2VLImageProcessorPil,
        )

        settings = json.loads((Path(path) / "preprocessor_config.json").read_text())
        self.tokenizer, self.image_processor = (
            tokenizer,
            Qwen2VLImageProcessorPil.from_dict(settings),
        )

    def __call__(self, text=None, images=None, **options):
        made = dict(self.image_processor(images=images, return_tensors="pt")) if images else {}
        for grid in made.get("image_grid_thw", ()):
            count = int(grid.prod()) // self.image_processor.merge_size**2
            text = text.replace("<|image_pad|>", "<|place|>" * count, 1)
        ids = self.tokenizer(text.replace("<|place|>", "<|image_pad|>"), add_special_tokens=False)[
            "input_ids"
        ]
        return {"input_ids": [ids], "attention_mask": [[1] * len(ids)], **made}


def _renderer(vision, folder):
    from kit.rollouts import renderer

    from turnwright.renderers import load_renderer

    return load_renderer(Path(folder) / "vlm") if vision else renderer("bpe")


class State:
    """`GenerateState` without servers."""

    tokenizer = processor = None

    def __init__(self, args):
        self.args, self.sampling_params = args, {}


def _images_of(messages, **_):
    parts = [
        part for one in messages if isinstance(one["content"], list) for part in one["content"]
    ]
    return [part["image"] for part in parts if "image" in part], None


def _install(system, servers):
    """Put what needs servers, Ray or Megatron out of the way of the original modules."""
    State.tokenizer, State.processor = servers.tokenizer, servers.processor
    post = servers.post
    for name in ("slime", "miles"):
        _stub(f"{name}.rollout.sglang_rollout", GenerateState=State)
        _stub(f"{name}.utils.http_utils", post=post, get=post)
    _stub("miles.rollout.data_source", DataSource=object)
    _stub("miles.rollout.inference_rollout", __path__=[])
    _stub("miles.rollout.inference_rollout.inference_rollout_common", GenerateState=State)
    _stub("qwen_vl_utils", process_vision_info=_images_of)
    return importlib.import_module(f"{system}.utils.types")


def _arguments(one, tokenizer):
    known = {
        "max_turns": one.turns,
        "rollout_max_response_len": 4096,
        "rollout_max_context_len": None,
        "rollout_interaction_env_path": None,
        "partial_rollout": False,
        "apply_chat_template": True,
        "apply_chat_template_kwargs": {},
        "reward_key": None,
        "sglang_router_ip": "x",
        "sglang_router_port": 1,
        "sglang_router_policy": None,
        "hf_checkpoint": None,
        "use_rollout_routing_replay": False,
        "use_rollout_indexer_replay": False,
        "rollout_top_p": 1.0,
    }
    return SimpleNamespace(**{**known, **one.args})


def _loop(system, file):
    """Return the original's loop over a `build_env`. Its call for observations gives logprobs,
    which `Sample` refuses (that example fails at its first observation): they are left out."""
    name = {
        "slime": "examples.geo3k_vlm_multi_turn.rollout",
        "miles": "examples.geo3k_vlm.multi_turn.rollout",
    }[system]
    loop = importlib.import_module(name)
    append = loop._append_to_sample
    if system == "slime":

        def without(sample, response_tokens, tokens, logprobs, loss_mask_val, **rest):
            append(
                sample,
                response_tokens,
                tokens,
                logprobs if loss_mask_val else None,
                loss_mask_val=loss_mask_val,
                **rest,
            )

        loop._append_to_sample = without
    return loop.generate


def _message(one):
    if not one.picture:
        return {"role": "user", "content": "Go."}
    return {"role": "user", "content": [{"type": "image"}, {"type": "text", "text": "Which?"}]}


def picture():
    """Return the picture of a prompt."""
    from PIL import Image

    return Image.new("RGB", (84, 56), "green")


def theirs(one: Played, tree: str) -> dict[str, Any]:
    """Play an episode under the original's loop, in this process."""
    folder = tempfile.mkdtemp()
    tokenizer, processor = _tokenizer(one.vision, folder)
    render = _renderer(one.vision, folder)
    servers = Servers(one.replies, render.encode_reply, tokenizer.decode, one.cut)
    servers.tokenizer, servers.processor = tokenizer, processor
    sys.path.insert(0, tree)
    Sample = _install(one.system, servers).Sample
    file, _, name = one.use.partition(":")
    path = Path(file) if Path(file).is_absolute() else HERE / "users/slime" / file
    sys.path.insert(0, str(path.parent))
    args = _arguments(one, tokenizer)
    if name == "build_env":
        args.rollout_interaction_env_path = str(path)
        generate = _loop(one.system, path)
    else:
        spec = importlib.util.spec_from_file_location("user_file", path)
        module = importlib.util.module_from_spec(spec)
        sys.modules["user_file"] = module
        spec.loader.exec_module(module)
        generate = getattr(module, name)
    row = json.loads(json.dumps(one.row))
    tools = row.get("metadata", {}).get("tools")
    prompt = tokenizer.apply_chat_template(
        [_message(one)], tools=tools, tokenize=False, add_generation_prompt=True
    )
    sample = Sample(prompt=prompt, label=row.get("label"), metadata=row.get("metadata") or {})
    if one.picture:
        sample.multimodal_inputs = {"images": [picture()], "videos": None}
    params = {"max_new_tokens": 4096, "stop": None, "skip_special_tokens": False}
    if list(importlib.import_module("inspect").signature(generate).parameters) == ["input"]:
        base = importlib.import_module("miles.rollout.base_types")
        made = asyncio.run(
            generate(base.GenerateFnInput(State(args), sample, params, False))
        ).samples
    else:
        made = asyncio.run(generate(args, sample, params))
    samples = made if isinstance(made, list) else [made]
    if one.reward:
        # As slime's `generate_and_rm` calls it: a list where generate returned one.
        hub = importlib.import_module(f"{one.system}.rollout.rm_hub")
        args.custom_rm_path, args.group_rm = f"user_file.{one.reward}", False
        rewards = asyncio.run(
            hub.batched_async_rm(args, made) if isinstance(made, list) else hub.async_rm(args, made)
        )
        for sample, reward in zip(
            samples, rewards if isinstance(made, list) else [rewards], strict=True
        ):
            sample.reward = reward
    rows = [_row(sample) | ({"reward": sample.reward} if one.reward else {}) for sample in samples]
    return {"contexts": [_context(one, rows) for one in servers.contexts], "samples": rows}


def _context(given, rows):
    """Return a text, or the number of ids: they are the first ids of a sample."""
    assert isinstance(given, str) or any(row["tokens"][: len(given)] == given for row in rows)
    return given if isinstance(given, str) else len(given)


def _row(sample):
    return {
        "tokens": [int(one) for one in sample.tokens],
        "response_length": sample.response_length,
        "loss_mask": [1] * sample.response_length
        if sample.loss_mask is None
        else [int(one) for one in sample.loss_mask],
        "status": getattr(sample.status, "value", sample.status),
        "removed": bool(sample.remove_sample),
    }


def main(slime: str, miles: str) -> None:
    trees = {"slime": slime, "miles": miles}
    found: dict[str, Any] = {"commits": {}, "episodes": {}}
    for system, tree in trees.items():
        head = subprocess.run(
            ["git", "-C", tree, "rev-parse", "HEAD"], capture_output=True, text=True, check=False
        ).stdout
        found["commits"][system] = head.strip()
    for name, one in EPISODES.items():
        command = [sys.executable, __file__, "--one", name, trees[one.system]]
        made = subprocess.run(command, capture_output=True, text=True, check=False)
        assert made.returncode == 0, (name, made.stderr[-3000:])
        found["episodes"][name] = json.loads(made.stdout.splitlines()[-1])
    episodes = ",\n".join(
        f"{json.dumps(name)}: {json.dumps(one)}" for name, one in found["episodes"].items()
    )
    print(f'{{"commits": {json.dumps(found["commits"])},\n"episodes": {{\n{episodes}\n}}}}')


if __name__ == "__main__":
    if sys.argv[1] == "--one":
        from kit import originals

        originals.use()
        print(json.dumps(theirs(EPISODES[sys.argv[2]], sys.argv[3])))
    else:
        main(*sys.argv[1:])
