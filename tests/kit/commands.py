"""Command lines of documents and scripts, held to the parser and the schema."""

from __future__ import annotations

import argparse

from turnwright.cli.main import build_parser
from turnwright.cli.options import split_overrides
from turnwright.config.recipe import ConfigMerge, parse_overrides


def parse_command(words: list[str]) -> argparse.Namespace:
    """Return what the words behind `turnwright` mean; raise where an option or a key of a recipe is
    unknown."""
    words, overrides = split_overrides(words)
    if words in (["--help"], ["--version"]):
        return argparse.Namespace(verb=None)

    args = build_parser().parse_args(words)
    merged = ConfigMerge()
    merged.tree["env"] = [{}]
    for dotted, text in parse_overrides(overrides):
        merged.override(dotted, text)
    return args
