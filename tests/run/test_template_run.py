"""A run is of one chat template: it is written down, saved with checkpoints, and no
other one goes on with it."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest
from kit.runs import train
from kit.viewing import SentPage

from turnwright.cli.main import main
from turnwright.renderers import load_renderer, template_source
from turnwright.types import Message

SMALL = """\
[model]
hidden = 32
template = "mine.jinja"
[model.template_args]
enable_thinking = false
[[env]]
use = "hop"
[limits]
turns = 2
turn_tokens = 6
[rollout]
groups = 2
group_size = 2
sanity_share = 1.0
[warmup]
demos = 20
steps = 1
batch = 4
gate_success = 0.0
gate_every = 1
gate_tasks = 4
[train]
steps = 1
[eval]
tasks = 4
"""


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("run")
    (folder / "mine.jinja").write_text(template_source("qwen3_with_thinking"))
    (folder / "small.toml").write_text(SMALL)
    train(folder / "small.toml", folder / "out")
    return folder


def refused(capsys: pytest.CaptureFixture[str], *words: str) -> str:
    capsys.readouterr()
    assert main(words) == 2
    said = capsys.readouterr().err
    assert said.count("\n") == 1, said
    return said


def test_the_hash_stands_in_the_configuration_and_in_every_trajectory(run: Path) -> None:
    row = json.loads((run / "out" / "config.json").read_text())["template"]
    assert set(row) == {"hash", "origin", "template", "tokenizer", "settings"}
    assert row["origin"] == str(run / "mine.jinja")
    found = [
        json.loads(line)["template"]
        for line in (run / "out" / "trajectories.jsonl").read_text().splitlines()
    ]
    assert found
    assert set(found) == {row["hash"]}


def test_a_checkpoint_brings_its_template_along_arguments_and_all(run: Path) -> None:
    checkpoints = sorted(path for path in (run / "out" / "checkpoints").iterdir() if path.is_dir())
    assert checkpoints
    for path in checkpoints:
        renderer = load_renderer(path)
        assert (
            renderer.fingerprint
            == json.loads((run / "out" / "config.json").read_text())["template"]["hash"]
        )
        assert renderer.decode(renderer.open([Message("user", "Hi")]).ids).endswith(
            "assistant\n<think>\n\n</think>\n\n"
        )
    transformers = pytest.importorskip("transformers")
    tokenizer = transformers.AutoTokenizer.from_pretrained(checkpoints[-1])
    served = tokenizer.apply_chat_template(
        [{"role": "user", "content": "Hi"}], add_generation_prompt=True
    )
    assert (
        list(served["input_ids"])
        == load_renderer(checkpoints[-1]).open([Message("user", "Hi")]).ids
    )


@pytest.mark.beside("view")
def test_the_sanity_check_counts_in_metrics(run: Path) -> None:
    rows = [json.loads(line) for line in (run / "out" / "metrics.jsonl").read_text().splitlines()]
    (step,) = [row for row in rows if row["phase"] == "train"]
    assert step["render_checks"] == 4
    causes = {
        name.removeprefix("render_mismatch_")
        for row in rows
        for name in row
        if name.startswith("render_mismatch_")
    }
    kept = [json.loads(line) for line in (run / "out" / "sanity.jsonl").read_text().splitlines()]
    assert len(kept) == len({row["cause"] for row in kept})
    assert causes <= {row["cause"] for row in kept}
    # With enable_thinking = false the generation prompt closes a thought that
    # no finished turn shows.
    assert "prefill" in {row["cause"] for row in kept}
    page = SentPage((run / "out" / "report.html").read_text())
    told = page.data["overviews"]["out"]["findings"]
    assert {row["cause"] for row in kept} == {finding["cause"] for finding in told}


def test_another_template_does_not_go_on_with_a_run(
    run: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file, out = run / "mine.jinja", str(run / "out")
    source = file.read_text()
    try:
        file.write_text(source.replace("# Tools", "# TOOLS"))
        said = refused(capsys, "train", "--resume", out, "--display", "none")
        assert re.search(r"started with another chat template \(hash \w{16}, now \w{16}\)", said)
        assert "tokenizer" not in said
        # A checkpoint has its own copy: it is played with the template that it was trained with.
        capsys.readouterr()
        assert (
            main(["eval", "--run", out, "--samples", "1", "--tasks", "2", "--display", "none"]) == 0
        )
        said = refused(
            capsys, "eval", "--run", out, "--model.template", "chatm", "--display", "none"
        )
        assert "did you mean 'chatml'" in said
        file.unlink()
        assert "cannot be read (No such file" in refused(
            capsys, "train", "--resume", out, "--display", "none"
        )
    finally:
        file.write_text(source)
    assert main(["train", "--resume", out, "--display", "none"]) == 0


def test_another_tokenizer_or_other_stop_ids_do_not_go_on_with_a_run(
    run: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    model, out = run / "out" / "model", str(run / "out")
    for name, change, what in (
        (
            "tokenizer.json",
            lambda text: text.replace('"version":', '"truncation": null, "version":', 1),
            "",
        ),
        (
            "tokenizer.json",
            lambda text: text.replace('"content": "<|image_pad|>"', '"content": "<|imag_pad|>"'),
            "tokenizer",
        ),
        (
            "generation_config.json",
            lambda text: re.sub(r'"eos_token_id": \[[^]]*\]', '"eos_token_id": [5]', text),
            "settings",
        ),
        (
            "tokenizer_config.json",
            lambda text: text.replace("{", '{"bos_token": "<|endoftext|>",', 1),
            "chat template",
        ),
    ):
        text = (model / name).read_text()
        try:
            (model / name).write_text(change(text))
            assert change(text) != text
            if what:
                assert f"started with another {what} " in refused(
                    capsys, "train", "--resume", out, "--display", "none"
                )
            else:
                assert main(["train", "--resume", out, "--display", "none"]) == 0
        finally:
            (model / name).write_text(text)


def test_episodes_of_another_template_are_not_trained_on(
    run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    journal = run / "out" / "journal.jsonl"
    text = journal.read_text()
    hash_ = json.loads((run / "out" / "config.json").read_text())["template"]["hash"]
    try:
        journal.write_text(text.replace(hash_, "0123456789abcdef", 3))
        said = refused(capsys, "train", "--resume", str(run / "out"), "--display", "none")
        assert "of another chat template, tokenizer or settings (hash 0123456789abcdef" in said
    finally:
        journal.write_text(text)


def test_mistakes_are_found_before_anything_is_loaded(
    run: Path, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    recipe, out = str(run / "small.toml"), str(tmp_path / "new")
    for words, said in (
        (["--model.template", "qwen3_without_thinkin"], "did you mean 'qwen3_without_thinking'"),
        (["--model.template", "qwen3.jinja"], "no such file"),
        (["--model.template-args.enable_thinkin", "true"], "did you mean 'enable_thinking'"),
    ):
        assert said in refused(capsys, "train", recipe, "--out", out, "--display", "none", *words)
        assert not Path(out).exists()
    assert "did you mean 'chatml'" in refused(
        capsys, "train", recipe, "--dry-run", "--model.template", "chatm"
    )
