"""What several verbs share: recipe and overrides, the display, and small ways to print."""

from __future__ import annotations

import argparse
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from turnwise.errors import UsageError

if TYPE_CHECKING:
    from turnwise.config import ResolvedConfig

DISPLAYS = ("auto", "rich", "plain", "none")
OVERRIDES = "Any key of the recipe can be overridden: --section.key VALUE (--train.lr 1e-4, --env.args.depth 3)."


def split_overrides(words: Sequence[str]) -> tuple[list[str], list[str]]:
    """Set the overrides (`--section.key value`, known by the dot) apart from the options of the verb."""
    kept: list[str] = []
    overrides: list[str] = []
    rest = list(words)
    while rest:
        word = rest.pop(0)
        if word == "--":
            return [*kept, word, *rest], overrides
        name, equals, _ = word.partition("=")
        if not (name.startswith("--") and "." in name):
            kept.append(word)
            continue
        overrides.append(word)
        if not equals and rest and not rest[0].startswith("--"):
            overrides.append(rest.pop(0))
    return kept, overrides


def add_command(
    subparsers: Any, name: str, help: str, run: Any, *, overrides: bool = False, epilog: str = ""
) -> argparse.ArgumentParser:
    """Register a verb: its parser, its function, and whether it reads overrides."""
    tail = "\n".join(filter(None, (epilog, OVERRIDES if overrides else "")))
    parser: argparse.ArgumentParser = subparsers.add_parser(
        name,
        help=help,
        description=help,
        epilog=tail,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    parser.set_defaults(run=run, takes_overrides=overrides)
    return parser


def add_recipe(parser: argparse.ArgumentParser) -> None:
    """The recipe and the two keys that stand in no section."""
    parser.add_argument("recipe", nargs="?", type=Path, help="a TOML recipe")
    parser.add_argument("--seed", help="the recipe's seed, overridden")
    parser.add_argument("--keys", action="store_true", help="list every recipe key, its default and its meaning, and leave")
    parser.add_argument("--dry-run", action="store_true", help="print every setting and its origin, and leave")


def add_display(parser: argparse.ArgumentParser) -> None:
    """How progress is shown."""
    parser.add_argument("--display", choices=DISPLAYS, default="auto", help="rich on a terminal, plain lines elsewhere (auto)")


def resolve(args: argparse.Namespace, *, training: bool) -> ResolvedConfig:
    """Read the recipe and the overrides that the arguments name.

    Raises:
        ConfigError: one line.
        UsageError: without a recipe and without an environment on the command line.
    """
    from turnwise.config import load

    words = list(args.overrides)
    for key in ("seed", "out"):
        value = getattr(args, key, None)
        if value is not None:
            words += [f"--{key}={value}"]
    if args.recipe is None and not any(word.startswith("--env.") for word in words):
        raise UsageError(f"turnwise {args.verb} needs a recipe: turnwise {args.verb} recipe.toml (or --env.use NAME)")
    return load(args.recipe, words, envs=builtin_envs(), templates=named_templates(), training=training)


def builtin_envs() -> Sequence[str]:
    """Names of the built-in environments."""
    from turnwise.envs.builtin import BUILTIN

    return sorted(BUILTIN)


def named_templates() -> Sequence[str]:
    """Names of the chat templates that can be named."""
    from turnwise.renderers.template import template_names

    return template_names()


def handled_early(args: argparse.Namespace) -> bool:
    """Print what `--keys` asks for."""
    if args.keys:
        from turnwise.config.dump import help_keys

        print("\n".join(help_keys()))
    return bool(args.keys)


def dry_run(resolved: ResolvedConfig) -> int:
    """Print a configuration with origins."""
    from turnwise.config.dump import to_toml

    print(to_toml(resolved), end="")
    return 0


def table(rows: Iterable[Sequence[str]]) -> list[str]:
    """Rows as lines of aligned columns, the first column to the left and the others to the right."""
    cells = [list(row) for row in rows]
    widths = [max(len(row[i]) for row in cells if i < len(row)) for i in range(max(map(len, cells), default=0))]
    return [
        "  ".join(
            cell.ljust(width) if i == 0 else cell.rjust(width) for i, (cell, width) in enumerate(zip(row, widths, strict=False))
        )
        for row in cells
    ]


def percent(value: float | None) -> str:
    """A share as a percentage."""
    return "-" if value is None else f"{100 * value:.1f}%"


def interval(ci: Sequence[float] | None) -> str:
    """A 95% interval as percentages."""
    return "" if ci is None else f"[{100 * ci[0]:.1f}, {100 * ci[1]:.1f}]"
