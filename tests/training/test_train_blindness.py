"""The blindness probe: it passes a model that sees, and names one that does not."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from kit.vision import tiny_vlm_directory
from safetensors.torch import load_file, save_file

from turnwright.cli.main import main
from turnwright.errors import ModelError
from turnwright.training.self_checks import VisionCheck, check_vision, findings


@pytest.fixture(scope="module")
def seeing(tmp_path_factory) -> Path:
    return tiny_vlm_directory(tmp_path_factory.mktemp("seeing"), "qwen3_vl")


def blinded(source: Path, target: Path) -> Path:
    """The same model with a tower whose last layers give zeros, whatever they are shown."""
    for file in source.iterdir():
        (target / file.name).write_bytes(file.read_bytes())
    weights = load_file(source / "model.safetensors")
    mergers = [
        name
        for name in weights
        if ".visual." in name and "merger" in name and ".linear_fc2." in name
    ]
    assert mergers, sorted(weights)
    save_file(
        weights | {name: weights[name] * 0 for name in mergers},
        target / "model.safetensors",
        {"format": "pt"},
    )
    return target


def test_a_model_that_sees_passes_and_engine_and_trainer_agree(seeing):
    found = check_vision(seeing)
    assert found.disagreement < 1e-4
    assert all(found.depends_on_image(turn) and found.moved[turn] > 1e-3 for turn in (1, 3)), found
    assert [ok for ok, _ in findings(found)] == [True, True, True]


def test_a_blind_model_is_told_on_the_command_line(seeing, tmp_path, capsys):
    assert main(["check", "--images", "--model", str(blinded(seeing, tmp_path))]) == 1
    failed = [line for line in capsys.readouterr().out.splitlines() if line.startswith("FAIL")]
    assert [line.split()[1:3] for line in failed] == [["turn", "1:"], ["turn", "3:"]]
    assert "does not depend on the pixels" in failed[0]


def test_a_later_turn_gone_blind_and_a_mismatch_are_told_apart():
    later = VisionCheck(1e-6, 1e-3, {1: 0.4, 3: 2e-6})
    assert [ok for ok, _ in findings(later)] == [True, True, False]
    unlike = VisionCheck(0.2, 1e-3, {1: 0.4, 3: 3.0})
    assert [ok for ok, _ in findings(unlike)] == [False, False, True]


def test_a_model_of_text_alone_is_refused(seeing, tmp_path):
    config = json.loads((seeing / "config.json").read_text())
    for file in seeing.iterdir():
        (tmp_path / file.name).write_bytes(file.read_bytes())
    text = config["text_config"] | {"model_type": "qwen3", "architectures": ["Qwen3ForCausalLM"]}
    (tmp_path / "config.json").write_text(json.dumps(text))
    with pytest.raises(ModelError):
        check_vision(tmp_path)
