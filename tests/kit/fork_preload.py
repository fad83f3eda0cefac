"""Imported by the process that `forks` forks others from: what commands import, compile or
build at their first use.

That took each of them more CPU than a small run.
"""

import contextlib
import gc
from importlib import import_module
from pathlib import Path

from transformers import conversion_mapping

from turnwright.config import load

for name in (
    "array_api_compat.torch",
    "peft",
    "transformers.models.qwen3.modeling_qwen3",
    "turnwright.engines.local.numba_kernels",
    "turnwright.envs.builtin",
    "turnwright.renderers.template_sandbox",
    "turnwright.runs",
    "turnwright.training.configured_rollout",
    "turnwright.training.run",
    "turnwright_serve.serve",
    "turnwright.display.progress",
    "turnwright_view.web.one_file",
):
    with contextlib.suppress(ImportError):  # of an extra
        import_module(name)
load(Path(__file__).parents[2] / "recipes" / "quickstart.toml")  # builds the schema of recipes
# Compiles the patterns of every architecture.
conversion_mapping.get_checkpoint_conversion_mapping("qwen3")
gc.freeze()  # a collection would copy the pages of what is here
