"""The model that sees is a Qwen3-VL of real architecture, its weights left out."""

import pytest


@pytest.fixture(scope="session")
def vlm(tmp_path_factory):
    """The renderer of a model that sees."""
    from kit.vision import tiny_vlm_directory

    from turnwright.renderers import load_renderer

    return load_renderer(
        tiny_vlm_directory(tmp_path_factory.mktemp("vlm"), "qwen3_vl", weights=False)
    )
