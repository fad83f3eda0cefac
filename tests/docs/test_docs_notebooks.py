"""The notebooks run from top to bottom in a real kernel, and show what they say."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import nbformat
import pytest
from nbclient import NotebookClient

pytestmark = pytest.mark.beside("view")

FOLDER = Path(__file__).parents[2] / "docs" / "notebooks"
NAMES = ("1_first_rollout", "2_train_and_curves", "3_why_episodes_failed")


def run(name: str, folder: Path) -> tuple[list[str], str]:
    """Run a notebook; return what its cells draw with us, and all text that they show."""
    notebook = nbformat.read(FOLDER / f"{name}.ipynb", as_version=4)
    resources = {"metadata": {"path": str(folder)}}
    NotebookClient(notebook, timeout=240, kernel_name="python3", resources=resources).execute()

    drawn = []
    text = ""
    for cell in notebook.cells:
        for output in cell.get("outputs", ()):
            data: dict[str, Any] = output.get("data", {})
            text += output.get("text", "") + data.get("text/plain", "")
            html = data.get("text/html", "")
            if html.startswith('<div class="tw-out">'):
                drawn.append(html)
    return drawn, text


def test_these_are_the_notebooks_and_they_are_stored_without_outputs() -> None:
    assert sorted(path.stem for path in FOLDER.glob("*.ipynb")) == list(NAMES)
    for name in NAMES:
        notebook = nbformat.read(FOLDER / f"{name}.ipynb", as_version=4)
        nbformat.validate(notebook)
        code = [cell for cell in notebook.cells if cell.cell_type == "code"]
        assert [cell for cell in code if cell.outputs or cell.execution_count] == []


def test_the_first_rollout_shows_a_trajectory_a_group_and_an_evaluation(tmp_path: Path) -> None:
    (trajectory, group, evaluation), text = run("1_first_rollout", tmp_path)
    assert "Guess my number, from 0 to 99." in trajectory
    assert len(re.findall("tw-message", trajectory)) > 3
    assert 'class="tw-trained"' in trajectory
    assert group.count("<tr>") == 5
    assert "pass@8" in evaluation
    assert 'class="whisker"' in evaluation
    assert "rollout: 100%" in text


@pytest.mark.slow  # it trains
def test_training_shows_curves_and_columns(tmp_path: Path) -> None:
    (drawn,), text = run("2_train_and_curves", tmp_path)
    assert drawn.count('class="chart"') >= 3
    assert "<strong>hop</strong>" in drawn
    first, last = map(float, re.findall(r"'([\d.]+) at the first step, ([\d.]+) at", text)[0])
    assert last < first / 2
    assert "after sampled" in text


def test_why_episodes_failed_shows_one_of_each_failure_and_that_both_are_mended(
    tmp_path: Path,
) -> None:
    drawn, text = run("3_why_episodes_failed", tmp_path)
    missing, again, group, evaluation = drawn
    assert "KeyError in step" in missing
    assert "amber again" in again
    assert group.count("reward not computed") == 4
    assert "100.0%" in evaluation
    assert "'env_error'" in text
