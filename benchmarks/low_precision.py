"""Low precision on the quickstart: what trainer and engine differ by, what is learned, and whether files have the same bits.

    python benchmarks/low_precision.py [--out DIR] [--only NAME ...]

Trains recipes/quickstart.toml, seed 0, in full precision, with int4 and fp8 in trainer and engine, and with an engine alone in
low precision: once under the default guards, which must refuse it (`refused`), and with `train.correction = "tis"` and a
`max_mismatch` that allows it. A finished run in DIR is used again. Exports are read back and compared with the trainer's grid,
bit for bit; `transformers_bits_equal` is null without compressed-tensors (int4). fp8 products are emulated. Last line JSON.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import replace
from importlib.util import find_spec
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import torch

from turnwise.training.model.models import load
from turnwise.training.model.packed import quant_of, write_packed
from turnwise.training.model.quantize import quantize_for_sampling, quantize_for_training, quantized_names

ROOT = Path(__file__).resolve().parents[1]
INT4, FP8 = ("--quant.kind", "int4", "--quant.group", "32"), ("--quant.kind", "fp8", "--quant.block", "64")
ENGINE_ALONE = ("--quant.train", "false", "--train.correction", "tis")
ALLOWED = ("--train.max-mismatch", "100", "--train.max-mismatch-kl", "1")
RUNS = {
    "fp32": (),
    "int4_qat": INT4,
    "fp8": FP8,
    "int4_ptq": (*INT4, *ENGINE_ALONE),
    "int4_ptq_tis": (*INT4, *ENGINE_ALONE, *ALLOWED),
    "fp8_tis": (*FP8, *ENGINE_ALONE, *ALLOWED),
}


def trained(name: str, out: Path) -> dict[str, Any]:
    """Train a run unless it is finished; return its figures, or that it was refused."""
    run = out / name
    if not (run / "summary.json").is_file():
        shutil.rmtree(run, ignore_errors=True)
        command = [sys.executable, "-m", "turnwise", "train", str(ROOT / "recipes" / "quickstart.toml"), *RUNS[name]]
        environment = {**os.environ, "PYTHONPATH": str(ROOT)}
        done = subprocess.run([*command, "--out", str(run)], env=environment, capture_output=True, text=True, check=False)
        if done.returncode:
            refused = "disagree on sampled ids" in done.stderr + done.stdout
            return {"refused": refused, "message": done.stderr.strip().splitlines()[-1][:300] if done.stderr else ""}
    summary = json.loads((run / "summary.json").read_text())
    rows = [row for row in map(json.loads, (run / "metrics.jsonl").open()) if row.get("mismatch_max") is not None]
    over = [row["mismatch_max"] for row in rows]
    return {
        "success": summary["success_after"],
        "greedy": summary["greedy_after"],
        "cpu_s": round(summary["cpu_s"], 1),
        "mismatch_max": max(over),
        "mismatch_k3": max(row["mismatch_kl"] for row in rows),
        "ess_min": min(row["importance_ess"] for row in rows),
        "steps_over_1e3": sum(one > 1e-3 for one in over),
        "refused": False,
    }


def exported(run: Path) -> dict[str, Any]:
    """Pack a run's last checkpoint and compare what is read back with the trainer's values."""
    source = max((run / "checkpoints").glob("step-*"))
    quant, directory = quant_of(source), Path(tempfile.mkdtemp()) / "packed"
    write_packed(source, directory, quant)
    model, _ = load(source)
    names, want = quantized_names(model, quant), quantize_for_sampling(model, quant).state_dict()
    got, _ = load(directory)
    ids = torch.arange(200)[None] * 7 % 200
    from safetensors.torch import load_file

    tensors = load_file(directory / "model.safetensors")
    stems = tuple(name.removesuffix("weight") for name in names)
    packed_bytes = sum(t.numel() * t.element_size() for name, t in tensors.items() if name.startswith(stems))
    linears = sum(want[name].numel() for name in names)
    found: dict[str, Any] = {
        "bits_equal": want.keys() == got.state_dict().keys()
        and all(torch.equal(want[name], tensor) for name, tensor in got.state_dict().items()),
        "bytes_fp32": 4 * linears,
        "bytes_bf16": 2 * linears,
        "bytes_packed": packed_bytes,
        "linears_ratio": packed_bytes / (4 * linears),
        "transformers_bits_equal": None,
    }
    with torch.no_grad():
        logits = got(ids).logits
        quantize_for_training(model, replace(quant, activations=False))  # a file holds weights alone
        gap = model(ids).logits.log_softmax(-1) - logits.log_softmax(-1)
        found["logp_max_diff"] = float(gap.abs().max())
        if quant.kind == "fp8" or find_spec("compressed_tensors"):
            from transformers import AutoModelForCausalLM

            other = AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32).eval()
            found["transformers_bits_equal"] = torch.equal(other(ids).logits, logits)
    shutil.rmtree(directory.parent)
    return found


def main(argv: Sequence[str] | None = None) -> None:
    """Train, export, print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=None, help="directory of the runs; finished ones are used again")
    parser.add_argument("--only", nargs="+", choices=tuple(RUNS), default=tuple(RUNS))
    args = parser.parse_args(argv)
    out = args.out or Path(tempfile.mkdtemp(prefix="turnwise-low-precision-"))
    torch.set_num_threads(1)
    result: dict[str, Any] = {"emulated": True}
    for name in args.only:
        result[name] = trained(name, out)
        print(name, result[name], flush=True)
    for name, key in (("int4_qat", "int4_export"), ("fp8", "fp8_export")):
        if name in args.only:
            result[key] = exported(out / name)
            if "fp32" in args.only:
                result[name]["cpu_s_ratio"] = round(result[name]["cpu_s"] / result["fp32"]["cpu_s"], 2)
    print(json.dumps(result))


if __name__ == "__main__":
    main()
