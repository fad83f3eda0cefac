"""Real servers of a tiny model, started as `turnwright engines start` starts them."""

from __future__ import annotations

import itertools
import json
import os
import time
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch

import turnwright as tw
from kit import gguf_files
from kit import real_servers as kit
from kit.long_world import LONG
from turnwright.config import Limits, ModelConfig, TrainConfig
from turnwright.engines.remote import Fleet, LlamaCppEngine, SglangEngine, VllmEngine
from turnwright.engines.remote.fleet_settings import WeightDelivery
from turnwright.engines.remote.managed import HOME, ServerProcess, how_to_install
from turnwright.engines.remote.weight_files import ModelDirectories
from turnwright.renderers import load_renderer
from turnwright.rollouts import arollout
from turnwright.training import Trainer, create_tiny_model, score_with_model, unique_weights
from turnwright.training.model.models import load

PLACE = Path(os.environ.get("TURNWRIGHT_ENGINES", HOME))
CLIENTS = {"vllm": VllmEngine, "sglang": SglangEngine, "llamacpp": LlamaCppEngine}
TEXTS = [
    f"code of amber {n}\nlookup birch\nsee cedar {n * 7 % 10}\nanswer {n % 10}\nlook again"
    for n in range(60)
]
CONTEXT = 1024


class Talk(tw.Env):
    """Goes on for four turns, whatever is said."""

    def reset(self, task, *, seed=None):
        self.turn = 0
        return f"code of {task.id}"

    def step(self, action):
        self.turn += 1
        word = ("amber", "birch", "cedar", "dune")[self.turn % 4]
        return tw.Step(f"see {word}", reward=float(len(action.text)), terminated=self.turn == 4)


LIMITS = Limits(turns=4, turn_tokens=24, on_turn_length="continue")


class Model:
    """A tiny model: a directory that servers read, the trainer's module, its renderer."""

    def __init__(
        self, root: Path, name: str = "tiny", seed: int = 5, *, vision: bool = False
    ) -> None:
        self.root = root
        self.source = create_tiny_model(
            ModelConfig(hidden=64, heads=2, kv_heads=2, vision=vision),
            TEXTS,
            root / name,
            seed=seed,
        )
        self.module, self.meta = load(self.source)
        self.renderer = load_renderer(self.source)
        # A model of random weights would end most episodes with a control token out of place.
        unused = frozenset(range(self.meta.tokens, self.meta.vocabulary))
        self.renderer.banned_ids |= (unused | self.renderer.invalid_ids) - self.renderer.stop_ids
        self.trainer = Trainer(self.module, TrainConfig(), banned_ids=self.renderer.banned_ids)
        self.directories = ModelDirectories(root / f"{name}-weights", self.source, untie=True)
        # vLLM on a CPU does not take new weights of a tied model.
        self.untied = self.directories.write(unique_weights(self.module), 0)[0]

    def expect(self):
        return score_with_model(self.module)

    def forward(self, ids, start, temperature=1.0, banned=(), module=None):
        """log p of ids[start:], in float32."""
        with torch.no_grad():
            logits = (module or self.module)(torch.tensor([list(ids)])).logits[
                0, start - 1 : -1
            ] / temperature
        logits[:, sorted(banned)] = -torch.inf
        return (
            logits.log_softmax(-1)
            .gather(1, torch.tensor(list(ids[start:]))[:, None])[:, 0]
            .tolist()
        )

    def gap(self, trajectories):
        return gap(self.trainer, trajectories)

    def nudge(self):
        """A step of training that moves the weights."""
        with torch.no_grad():
            for parameter in self.module.parameters():
                parameter += 0.02 * torch.randn(parameter.shape)


def gap(trainer, trajectories):
    """Largest |logprob of engine - of trainer| of what was sampled, and how many ids that is of."""
    gaps = []
    for trajectory, wanted in zip(trajectories, trainer.logprobs(trajectories), strict=True):
        said = [
            p for s in trajectory.samples() for p, w in zip(s.logprobs, s.weights, strict=True) if w
        ]
        assert len(said) == len(wanted)
        gaps += [abs(p - w) for p, w in zip(said, wanted, strict=True)]
    return max(gaps), len(gaps)


def fleet(model: Model, make, server: ServerProcess) -> Fleet:
    """One server as an engine that takes the model's weights."""
    delivery = WeightDelivery(directories=model.directories, expected_logprobs=model.expect())
    return Fleet([make(server.url, renderer=model.renderer)], delivery=delivery)


@contextmanager
def server(kind: str, directory: Path, logs: Path, **options):
    """A server that answers, or a skip where its environment is missing."""
    if not (PLACE / kind).is_dir():
        pytest.skip(f"{PLACE / kind}: not installed; `{how_to_install(kind, gpu=False)}`")
    running = ServerProcess(
        kind, PLACE, logs / f"{kind}.log", context=CONTEXT, gpu=False, **options
    )
    try:
        running.start(directory)
        wait_for(running)
        yield running
    finally:
        running.stop()


def wait_for(running: ServerProcess, seconds: float = 900.0) -> None:
    import httpx2

    end = time.monotonic() + seconds
    while True:
        try:
            if httpx2.get(f"{running.url}/health", timeout=10, trust_env=False).status_code == 200:
                return
        except httpx2.HTTPError:
            pass
        assert not running.ended, running.output_tail()
        assert time.monotonic() < end, running.output_tail()
        time.sleep(1.0)


def llama_file(model: Model) -> Path:
    return gguf_files.write(model.source, model.root / "tiny.gguf")


CLOSE = 1e-3
PROMPT = list(range(10, 42))


def play(engine, model, tasks=8, **options):
    made = [tw.Task(f"amber {n}", id=f"t{n}") for n in range(tasks)]
    return arollout(
        kit.Talk, made, engine, renderer=model.renderer, limits=kit.LIMITS, samples=2, **options
    )


def well(trajectories):
    assert [str(t.stop) for t in trajectories] == ["done"] * len(trajectories), [
        t.error for t in trajectories
    ]
    assert all(len(t.turns) == 4 for t in trajectories)


def adapter(model, directory, seed):
    """A LoRA adapter as peft writes it, and the model with it merged."""
    import copy

    from safetensors.torch import save_file

    torch.manual_seed(seed)
    merged, rows, rank, alpha = copy.deepcopy(model.module), {}, 4, 8
    for name, module in merged.named_modules():
        if name.endswith(("q_proj", "v_proj", "down_proj")):
            a, b = (
                torch.randn(rank, module.in_features) * 0.1,
                torch.randn(module.out_features, rank) * 0.1,
            )
            (
                rows[f"base_model.model.{name}.lora_A.weight"],
                rows[f"base_model.model.{name}.lora_B.weight"],
            ) = a, b
            with torch.no_grad():
                module.weight += alpha / rank * b @ a
    directory.mkdir()
    save_file(rows, directory / "adapter_model.safetensors")
    config = {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "r": rank,
        "lora_alpha": alpha,
        "lora_dropout": 0.0,
        "bias": "none",
    }
    config |= {
        "target_modules": ["q_proj", "v_proj", "down_proj"],
        "base_model_name_or_path": str(model.source),
    }
    (directory / "adapter_config.json").write_text(json.dumps(config))
    return directory, merged


def train_long_world(folder: Path) -> list[str]:
    """Write the world whose replies go on, and return the words that train a small model on it, of
    heads that vLLM on a CPU can play."""
    (folder / "long.py").write_text(LONG)
    settings = {
        "--env.use": f"{folder / 'long.py'}:Long",
        "--limits.turns": "2",
        "--limits.turn-tokens": "4",
        "--limits.on-turn-length": "continue",
        "--model.heads": "2",
        "--model.kv-heads": "2",
        "--display": "none",
    }
    return ["train", *itertools.chain(*settings.items())]
