"""The quickstart, trained through real servers that the run starts itself."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import real_kit as kit

from turnwise.cli.main import main

pytestmark = [pytest.mark.engines, pytest.mark.timeout(3600)]
RECIPE = Path(__file__).parents[2] / "recipes" / "quickstart.toml"


@pytest.mark.parametrize("kind", ["vllm", "sglang"])
def test_the_quickstart_learns_through_a_server(kind, tmp_path, capsys):
    if not (kit.PLACE / kind).is_dir():
        pytest.skip(f"{kit.PLACE / kind}: not installed; `turnwise engines install {kind}`")
    words = ["train", str(RECIPE), "--out", str(tmp_path / "run"), "--engine.kind", kind, "--engine.home", str(kit.PLACE)]
    # heads of 32 numbers: vLLM's attention on a CPU has none of 16
    assert main([*words, "--model.heads", "2", "--model.kv-heads", "2", "--display", "none"]) == 0, capsys.readouterr().err
    summary = json.loads((tmp_path / "run" / "summary.json").read_text())
    print(kind, {name: summary[name] for name in ("success_before", "success_after", "wall_s", "cpu_s")})
    assert summary["success_before"] < 0.45
    assert summary["success_after"] > 0.85
    rows = [json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
    assert max(row["mismatch_max"] for row in rows if row["phase"] == "train") < 1e-3
