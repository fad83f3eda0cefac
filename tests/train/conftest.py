from __future__ import annotations

import random
import sys
from pathlib import Path

import pytest
import torch

from turnwise.config import ModelConfig
from turnwise.train import models

sys.path.insert(0, str(Path(__file__).parents[1]))  # for strategies, which all folders share

WORDS = ["amber", "birch", "cedar", "dune", "ember", "fjord", "grove", "heath", "islet", "jade"]


def example_texts(count: int = 60) -> list[str]:
    rng = random.Random(0)
    return [
        f"<|im_start|>user\ncode of {rng.choice(WORDS)}<|im_end|>\n<|im_start|>assistant\nlookup {rng.choice(WORDS)}"
        f"<|im_end|>\n<|im_start|>user\nsee {rng.choice(WORDS)}<|im_end|>\n<|im_start|>assistant\n"
        f"answer {rng.randint(0, 9)}<|im_end|>"
        for _ in range(count)
    ]


@pytest.fixture(scope="session", autouse=True)
def _one_thread():
    torch.set_num_threads(1)


@pytest.fixture(scope="session")
def tiny_dir(tmp_path_factory):
    return models.tiny(ModelConfig(hidden=32, layers=2), example_texts(), tmp_path_factory.mktemp("tiny") / "model")


@pytest.fixture
def tiny_model(tiny_dir):
    return models.load(tiny_dir)[0]
