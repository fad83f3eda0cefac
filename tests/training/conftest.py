from __future__ import annotations

import pytest
import torch
from kit.training import example_texts

from turnwright.config import ModelConfig
from turnwright.training.model import models


@pytest.fixture(scope="session", autouse=True)
def _one_thread():
    torch.set_num_threads(1)


@pytest.fixture(scope="session")
def tiny_dir(tmp_path_factory):
    return models.create_tiny_model(
        ModelConfig(hidden=32, layers=2), example_texts(), tmp_path_factory.mktemp("tiny") / "model"
    )


@pytest.fixture
def tiny_model(tiny_dir):
    return models.load(tiny_dir)[0]
