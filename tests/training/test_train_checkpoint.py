"""Checkpoints: complete or not there, whatever happens while one is written."""

import errno
import json
import os
import random
import re
import resource
import signal
import sys
import time
from pathlib import Path

import pytest
import torch
from kit.training import fingerprint, random_groups

from turnwright.config import TrainConfig
from turnwright.errors import TraceError
from turnwright.training import Checkpoints, Trainer
from turnwright.training import checkpoint as module
from turnwright.training.checkpoint_files import read_checkpoint
from turnwright.training.model import models

CONFIG = TrainConfig(max_mismatch=1e9)


@pytest.fixture
def trainer(tiny_model):
    made = Trainer(tiny_model, CONFIG)
    made.supervised(random_groups(0)[0].trajectories, lr=1e-3)
    return made


@pytest.fixture
def kept(tmp_path, tiny_dir):
    return Checkpoints(tmp_path / "checkpoints", tiny_dir, keep=2)


def names(kept):
    return sorted(path.name for path in kept.root.iterdir())


def test_a_checkpoint_is_a_model_directory(kept, trainer, tiny_dir):
    path = kept.save("step-0001", trainer, {"step": 1, "phase": "reinforce", "drawn": [[1, "a"]]})
    assert kept.latest().path == path
    assert kept.latest().cursor == {"step": 1, "phase": "reinforce", "drawn": [[1, "a"]]}
    model, _ = models.load(path)
    assert fingerprint(model) == fingerprint(trainer.model)
    assert (
        model.generation_config.eos_token_id
        == models.load(tiny_dir)[0].generation_config.eos_token_id
    )
    for name in ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja"):
        assert (path / name).read_bytes() == (tiny_dir / name).read_bytes()
    from transformers import AutoModelForCausalLM

    plain = AutoModelForCausalLM.from_pretrained(path)
    assert fingerprint(plain) == fingerprint(trainer.model)


def test_every_file_may_be_read_by_whom_the_user_lets(kept, trainer, tmp_path):
    plain = tmp_path / "plain"
    plain.touch()
    path = kept.save("a", trainer, {"step": 1})
    assert {file.stat().st_mode for file in path.iterdir()} == {plain.stat().st_mode}


def test_a_checkpoint_of_a_checkpoint_carries_no_old_state(kept, trainer, tmp_path):
    path = kept.save("a", trainer, {"step": 1})
    (path / "reference.safetensors").write_bytes(b"old")
    other = Checkpoints(tmp_path / "other", path).save("b", trainer, {"step": 2})
    assert sorted(p.name for p in other.iterdir()) == sorted(
        p.name for p in path.iterdir() if p.name != "reference.safetensors"
    )
    assert read_checkpoint(other).cursor == {"step": 2}


@pytest.mark.parametrize("memory", [0, 10])
def test_resume_goes_on_bit_for_bit(kept, trainer, memory):
    config = TrainConfig(max_mismatch=1e9, kl=0.1, minibatches=2, gradient_signal_steps=memory)
    whole = Trainer(trainer.model, config, seed=3)
    whole.reference()
    for step in range(8):
        rate = whole.step(random_groups(1), step=step, steps=12).metrics["lr"]
    assert rate > 0
    path = kept.save("step-0001", whole, {})
    resumed = Trainer(models.load(path)[0], config, seed=3)
    resumed.load(path)
    assert resumed.updates == whole.updates
    assert [one.state() for one in resumed.signals] == [one.state() for one in whole.signals]
    assert all((one.average > 0) == (memory > 0) for one in whole.signals)
    for step in (8, 9, 10):
        first, second = (
            t.step(random_groups(step % 3), step=step, steps=12).metrics for t in (whole, resumed)
        )
        unlike = {name for name in first if first[name] != second[name]}
        assert unlike <= {"train_s", "tokens_per_s"}
    assert fingerprint(whole.model) == fingerprint(resumed.model)


def test_resume_in_bfloat16_keeps_what_the_weights_cannot_hold(kept, tiny_dir):
    config = TrainConfig(lr=2e-5, max_mismatch=1e9)
    whole = Trainer(models.load(tiny_dir, dtype=torch.bfloat16)[0], config)
    whole.step(random_groups(1), step=0, steps=30)
    path = kept.save("a", whole, {})
    resumed = Trainer(models.load(path, dtype=torch.bfloat16)[0], config)
    resumed.load(path)
    for step in range(1, 20):
        for t in (whole, resumed):
            t.step(random_groups(step), step=step, steps=30)
    assert fingerprint(whole.model) == fingerprint(resumed.model)


def test_the_last_k_stay(kept, trainer):
    for step in range(5):
        kept.save(f"step-{step}", trainer, {"step": step})
    assert names(kept) == ["step-3", "step-4"]
    assert [c.cursor["step"] for c in kept.all()] == [3, 4]
    # A run that went back to an earlier one counts on from there.
    kept.save("step-3", trainer, {"step": 33})
    assert [c.cursor["step"] for c in kept.all()] == [4, 33]
    assert kept.latest().path.name == "step-3"


def test_the_best_stays_too(kept, trainer):
    assert kept.best() is None
    for step, score in enumerate([0.1, 0.7, 0.3, 0.2, 0.6]):
        kept.save(f"step-{step}", trainer, {"step": step})
        if kept.best() is None or score >= kept.best()[1]:
            kept.mark_best(f"step-{step}", score)
    assert names(kept) == ["best.json", "step-1", "step-3", "step-4"]
    assert kept.best() == ("step-1", 0.7)
    assert kept.latest().cursor == {"step": 4}
    # Another one takes its place.
    kept.mark_best("step-3", 0.8)
    assert names(kept) == ["best.json", "step-3", "step-4"]
    for step in (5, 6):
        kept.save(f"step-{step}", trainer, {"step": step})
    assert names(kept) == ["best.json", "step-3", "step-5", "step-6"]
    # What is gone or unreadable is no best one, and keeps nothing.
    for text in ('{"name": "step-0", "score": 1}', "{", "[]", '{"name": "step-3"}'):
        (kept.root / "best.json").write_text(text)
        assert kept.best() is None
    kept.save("step-7", trainer, {"step": 7})
    assert names(kept) == ["best.json", "step-6", "step-7"]


def test_nothing_there(kept):
    assert kept.latest() is None
    assert kept.all() == []
    kept.remove_partial()


def test_half_written_ones_are_ignored_and_removed(kept, trainer):
    kept.save("step-1", trainer, {"step": 1})
    half = kept.root / ".step-2.writing"
    half.mkdir()
    (half / "model.safetensors").write_bytes(b"half")
    (kept.root / "notes").mkdir()  # not ours
    assert kept.latest().cursor == {"step": 1}
    kept.save("step-3", trainer, {"step": 3})
    assert names(kept) == ["notes", "step-1", "step-3"]


def test_killed_between_the_two_renames_of_a_replacement(kept, trainer, monkeypatch):
    kept.save("best", trainer, {"step": 1})
    (kept.root / "best").rename(kept.root / ".best.replaced")
    assert kept.latest() is None
    kept.remove_partial()
    assert kept.latest().cursor == {"step": 1}
    # And where the new one was already in place, it is the one.
    kept.save("other", trainer, {"step": 2})
    (kept.root / "other").rename(kept.root / ".best.replaced")
    kept.remove_partial()
    assert names(kept) == ["best"]
    assert kept.latest().cursor == {"step": 1}


@pytest.mark.parametrize("fails", ["model", "optimizer", "flush", "rename"])
@pytest.mark.parametrize("code", [errno.ENOSPC, errno.EDQUOT])
def test_a_full_disk_leaves_the_last_good_one(kept, trainer, monkeypatch, fails, code):
    good = kept.save("step-1", trainer, {"step": 1})

    def full(*args, **more):
        raise OSError(code, os.strerror(code))

    with monkeypatch.context() as patch:
        if fails == "model":
            patch.setattr(type(trainer.model), "save_pretrained", full)
        elif fails == "optimizer":
            patch.setattr(Trainer, "save", full)
        elif fails == "flush":
            patch.setattr(module, "flush", full)
        else:
            patch.setattr(Checkpoints, "_publish", full)
        with pytest.raises(
            TraceError, match=r"step-2 could not be written: the disk (is full|quota)"
        ) as caught:
            kept.save("step-2", trainer, {"step": 2})
    assert str(good) in str(caught.value)
    assert "\n" not in str(caught.value)
    assert names(kept) == ["step-1"]
    assert fingerprint(models.load(good)[0]) == fingerprint(trainer.model)
    kept.save("step-2", trainer, {"step": 2})
    assert kept.latest().cursor == {"step": 2}


def child(body):
    """Run `body` in a forked process, which has torch loaded already; returns (process id,
    reading end of its pipe)."""
    reader, writer = os.pipe()
    pid = os.fork()
    if pid:
        os.close(writer)
        return pid, os.fdopen(reader, "rb")
    try:
        os.close(reader)
        body(writer)
    finally:
        os._exit(0)


@pytest.mark.parametrize("limit", [100_000, 300_000])
def test_a_file_that_cannot_grow(kept, trainer, limit):
    """A real failure of the system in the middle of a file: of the model's,
    and of the optimizer's."""
    good = kept.save("step-1", trainer, {"step": 1})
    sizes = [
        (good / name).stat().st_size for name in ("model.safetensors", "optimizer.safetensors")
    ]
    assert sum(size < limit for size in sizes) == (limit == 300_000)

    def body(writer):
        sys.dont_write_bytecode = True  # else modules would be cut off too
        resource.setrlimit(resource.RLIMIT_FSIZE, (limit, limit))
        try:
            kept.save("step-2", trainer, {})
        except TraceError as error:
            os.write(writer, str(error).encode())

    pid, pipe = child(body)
    said = pipe.read().decode()
    os.waitpid(pid, 0)
    assert re.search(
        r"step-2 could not be written: a file may not grow so large; the last good one, .*step-1, remains",  # noqa: E501
        said,
    )
    assert names(kept) == ["step-1"]
    assert kept.latest().cursor == {"step": 1}


def test_killed_while_saving(kept, trainer):
    """Kills at random instants of a process that does nothing but save: what bears a name
    is complete, each time."""
    rng = random.Random(0)
    expected = fingerprint(trainer.model)

    def body(writer):
        for step in range(1_000_000):
            kept.save(f"step-{step % 3}", trainer, {"step": step})
            os.write(writer, b"saved")

    for _ in range(8):
        pid, pipe = child(body)
        assert pipe.read(5) == b"saved"
        time.sleep(0.05 * rng.random())
        os.kill(pid, signal.SIGKILL)
        os.waitpid(pid, 0)
        pipe.close()
        kept.remove_partial()
        assert kept.all()
        for found in kept.all():
            model, _ = models.load(found.path)
            assert fingerprint(model) == expected
            Trainer(model, CONFIG).load(found.path)
        assert not [name for name in names(kept) if name.startswith(".")]


def test_killed_while_dropping_an_old_one(kept, trainer, monkeypatch):
    """What is dropped loses its name before its files."""
    for step in range(2):
        kept.save(f"step-{step}", trainer, {"step": step})

    def half(path, **_):
        (Path(path) / "tokenizer.json").unlink()
        raise KeyboardInterrupt

    monkeypatch.setattr("turnwright.training.checkpoint.shutil.rmtree", half)
    with pytest.raises(KeyboardInterrupt):
        kept.save("step-2", trainer, {"step": 2})
    monkeypatch.undo()
    assert [found.path.name for found in kept.all()] == ["step-1", "step-2"]
    assert all((found.path / "tokenizer.json").is_file() for found in kept.all())
    kept.remove_partial()
    assert names(kept) == ["step-1", "step-2"]


def test_names(kept, trainer):
    for name in ("", ".hidden", "a/b", "../a"):
        with pytest.raises(ValueError, match="letters, digits"):
            kept.save(name, trainer, {})


def test_a_state_that_is_no_state_is_no_checkpoint(kept, trainer):
    path = kept.save("a", trainer, {"step": 1})
    for text in ("", "{", "[]", json.dumps({"serial": "x"})):
        (path / "state.json").write_text(text)
        assert read_checkpoint(path) is None
    assert kept.latest() is None
