"""Command pack: write a model directory, a checkpoint or a run in int4 or fp8.

The number formats, and how a directory is written, are in `turnwright.training.model.packed`.
"""

from __future__ import annotations

import argparse
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from turnwright.cli.options import Command, add_command
from turnwright.errors import UsageError

if TYPE_CHECKING:
    from turnwright.config.schema import QuantKind


def add_pack(subparsers: Any) -> None:
    """Register the command."""
    help = "write a model in int4 or fp8, as other engines read it"
    parser = add_command(subparsers, "pack", help, run_pack)

    model = "a model directory, a checkpoint or a run (its last checkpoint)"
    parser.add_argument("model", metavar="DIR", type=Path, help=model)
    parser.add_argument("--out", metavar="DIR", type=Path, required=True, help="directory to write")
    parser.add_argument(
        "--kind", choices=("int4", "fp8"), help="number format (default: the run's quant.kind)"
    )
    size = "inputs per scale (int4) or side of a block (fp8); default: the run's, or 128"
    parser.add_argument("--size", metavar="N", type=int, help=size)


def run_pack(args: argparse.Namespace) -> int:
    """Write the packed directory and print its name."""
    if args.size is not None and (args.size < 8 or args.size % 8):
        raise UsageError(f"--size {args.size}: must be a multiple of 8")

    pack_model(args.model, args.out, args.kind, args.size)
    print(args.out)
    return 0


def pack_model(
    model: Path, out: Path, kind: QuantKind | None = None, size: int | None = None
) -> None:
    """Write a model directory, a checkpoint or a run (its last checkpoint) as a packed directory.

    `kind` and `size` (int4: inputs per scale, fp8: side of a block) are by default those of the
    run.
    """
    from turnwright.training.checkpoint import model_of
    from turnwright.training.model.packed import quant_of, write_packed

    source = model_of(model)
    quant = quant_of(source)
    if kind is not None:
        quant = replace(quant, kind=kind)
    if size is not None:
        # Each format reads one of the two.
        quant = replace(quant, group=size, block=size)
    write_packed(source, out, quant)


COMMAND = Command(add_pack)
