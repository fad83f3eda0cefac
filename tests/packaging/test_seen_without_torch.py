"""Vision-language models are rendered for in an environment that has no torch."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

HERE = Path(__file__).parent
sys.path.insert(0, str(HERE.parent))

pytest.importorskip("transformers")
pytest.importorskip("PIL")

from kit.vision import tiny_vlm_directory  # noqa: E402


def test_images_are_rendered_and_processed_without_torch(tmp_path):
    made = [
        tiny_vlm_directory(tmp_path / name, name, weights=False)
        for name in ("qwen2_5_vl", "qwen3_vl", "llava", "smolvlm")
    ]
    environment = os.environ | {"PYTHONPATH": str(HERE.parents[1] / "src")}
    command = [sys.executable, str(HERE / "seen_without_torch.py"), *map(str, made)]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr[-2000:]
    assert done.stdout.splitlines()[-1] == "seen without torch"
    rows = dict(line.split(" ", 1) for line in done.stdout.splitlines()[:-1])
    assert rows["qwen2_5_vl"].startswith("12 ")
    assert "'pixel_values_videos': (24, 1536)" in rows["qwen2_5_vl"]
    assert rows["llava"] == "32 {'pixel_values': (2, 3, 56, 56)}"
