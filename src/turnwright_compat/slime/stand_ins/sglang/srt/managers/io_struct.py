"""Tools, under an older name."""

from sglang.srt.entrypoints.openai.protocol import Function, Tool

__all__ = ["Function", "Tool"]
