"""A real model on one thread: the engine against `generate`, training against TRL, mixed
precision against float32.

    python benchmarks/real_model.py --trl-python PYTHON [--rounds 3] [--steps 12]
    python benchmarks/real_model.py --only engine trainer roofline

The model is SmolLM2-135M-Instruct (`contrib/smollm2.py`; `--model` names another Llama). Parts,
each described in its file:

- `engine` (real_model_engine.py): sampled ids a CPU second at 1, 16 and 64 calls, against
  transformers' `generate`;
- `trainer` (real_model_training.py): trained ids a CPU second and CPU seconds of a step;
- `roofline` (real_model_limits.py): what products and memory allow the two above;
- `trl` (real_model_training.py, real_model_trl.py): CPU seconds of a step, and until 80% of a
  step's episodes succeed in two steps in a row, against TRL's `GRPOTrainer`. PYTHON has
  trl==1.16.0, torch==2.13.0 and the packages that turnwright requires.

All sides of a part take turns in one run; a figure is the median of its rounds or steps. CPU
seconds are those of all threads of a process. Ratios compare the fastest type of each side. Mixed
precision is skipped where the processor has no bfloat16, and with it what compares it with float32.
The last line is JSON, null where a figure was not measured.
"""

from __future__ import annotations

import argparse
import gc
import json
import sys
import tempfile
from pathlib import Path

import torch
from real_model_common import ROOT, Kind, make_warmed, usable_kinds

sys.path.insert(0, str(ROOT / "src"))
sys.path.insert(0, str(ROOT / "contrib"))
import smollm2
from real_model_engine import EnginePart, make_work
from real_model_limits import ENGINE_ROWS, LimitsPart
from real_model_training import Settings, TrainerPart, TrlPart, make_sides

from turnwright.config.snapshots import local_model

PARTS = ("engine", "trainer", "roofline", "trl")
MINIMUMS: dict[str, float | None] = {
    "engine_vs_generate": 1.5,
    "engine_bf16_vs_fp32": 2.5,
    "trainer_bf16_vs_fp32": 2.0,
    "cpu_per_step_vs_trl": 3.0,
    "cpu_to_80_vs_trl": 3.0,
    "of_roofline_engine_64": None,
    "of_roofline_trainer": None,
}
"""Figures of the last line, and what is required of them."""
Figures = dict[str, float | None]


def parse_options() -> argparse.Namespace:
    """Read the command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--only", nargs="+", choices=PARTS, default=PARTS, help="parts to measure")
    parser.add_argument(
        "--rounds", type=int, default=3, help="rounds of engine, trainer and roofline"
    )
    parser.add_argument(
        "--calls", nargs="+", type=int, default=[1, 16, 64], help="numbers of calls at a time"
    )
    parser.add_argument("--steps", type=int, default=12, help="most training steps of part trl")
    parser.add_argument("--seed", type=int, default=0, help="seed of part trl")
    parser.add_argument("--trl-python", type=Path, help="Python that has TRL; part trl needs it")
    parser.add_argument(
        "--trl-kinds",
        nargs="+",
        choices=("float32", "autocast", "bfloat16"),
        default=["float32", "autocast", "bfloat16"],
        help="types of TRL's side; the fastest counts",
    )
    parser.add_argument(
        "--device",
        choices=("cpu", "cuda"),
        default="cpu",
        help="where part trl trains; cuda measures seconds",
    )
    parser.add_argument(
        "--patience",
        type=float,
        default=1800,
        help="seconds of silence after which a side has hung",
    )
    parser.add_argument(
        "--model", type=Path, default=smollm2.FILE, help="GGUF file or model directory"
    )
    parser.add_argument(
        "--warmed",
        type=Path,
        default=ROOT / ".cache" / "real_model" / "warmed",
        help="directory of the warmed weights, made if it is not there",
    )
    options = parser.parse_args()
    if options.device == "cuda" and set(options.only) != {"trl"}:
        parser.error("only part trl runs on a GPU: --only trl")
    if "trl" in options.only and options.trl_python is None:
        parser.error("part trl needs --trl-python; leave it out by --only engine trainer roofline")
    if not options.model.exists():
        parser.error(
            f"{options.model} is not there; make quickstart-llm fetches it, or name a model by "
            "--model"
        )
    return options


def measure_rounds(options: argparse.Namespace, model: Path, kinds: list[Kind]) -> Figures:
    """Measure the parts that take turns round by round."""
    engine = EnginePart(model, kinds, options.calls) if "engine" in options.only else None
    trainer = None
    if "trainer" in options.only:
        trainer = TrainerPart({"story": model, "hop": make_warmed(model, options.warmed)}, kinds)
    limits = LimitsPart(model, kinds) if "roofline" in options.only else None

    for part in (engine, trainer):
        if part is not None:
            part.warm_up()
    for number in range(options.rounds):
        for part in (engine, trainer, limits):
            if part is not None:
                part.play_round(number)

    figures: Figures = {}
    if engine is not None:
        figures |= engine.figures()
    if trainer is not None:
        figures |= trainer.figures()
    if limits is not None:
        figures |= compare_with_limits(limits, engine, trainer, kinds)
    return figures


def compare_with_limits(
    limits: LimitsPart, engine: EnginePart | None, trainer: TrainerPart | None, kinds: list[Kind]
) -> Figures:
    """Return the shares of what is allowed that the best kind of engine and trainer reach."""
    figures: Figures = {}
    if engine is not None and ENGINE_ROWS in engine.calls:
        work = make_work(ENGINE_ROWS, engine.vocabulary, 0)
        allowed = {kind: limits.engine_ids_allowed(kind, work) for kind in kinds}
        best = max(kinds, key=lambda kind: engine.rate(f"engine {kind}", ENGINE_ROWS))
        figures["of_roofline_engine_64"] = (
            engine.rate(f"engine {best}", ENGINE_ROWS) / allowed[best]
        )
    if trainer is not None:
        needed = {}
        for kind in kinds:
            size = trainer.passes["story", kind]
            needed[kind] = limits.trainer_seconds_needed(kind, size.positions, size.predicting)
        best = max(kinds, key=lambda kind: trainer.rate("story", kind))
        figures["of_roofline_trainer"] = needed[best] / trainer.step_s("story", best)
    return figures


def measure_trl(options: argparse.Namespace, model: Path, kinds: list[Kind]) -> Figures:
    """Train our sides and TRL's in turn."""
    warmed = make_warmed(model, options.warmed, options.device)
    settings = Settings(warmed, options.device, options.steps, options.seed, options.patience)
    with tempfile.TemporaryDirectory() as folder:
        sides = make_sides(settings, kinds, options.trl_python, options.trl_kinds, Path(folder))
        part = TrlPart(sides, settings)
        part.play()
        return part.figures()


def main() -> None:
    """Measure, and print the figures beside what is required."""
    options = parse_options()
    torch.set_num_threads(1)
    model = local_model(options.model)
    kinds = usable_kinds(model, options.device)

    figures: Figures = dict.fromkeys(MINIMUMS)
    if set(options.only) != {"trl"}:
        figures |= measure_rounds(options, model, kinds)
        gc.collect()  # engines and trainers make room for the processes of the next part
    if "trl" in options.only:
        figures |= measure_trl(options, model, kinds)

    for name, minimum in MINIMUMS.items():
        value = figures[name]
        measured = "not measured" if value is None else f"{value:.2f}"
        required = "" if minimum is None else f" (required: {minimum:g})"
        print(f"{name}: {measured}{required}")
    print(
        json.dumps(
            {name: None if value is None else round(value, 2) for name, value in figures.items()}
        )
    )


if __name__ == "__main__":
    main()
