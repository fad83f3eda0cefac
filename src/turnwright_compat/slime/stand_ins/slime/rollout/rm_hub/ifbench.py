"""Instructions of IFBench, which its own package checks."""

from __future__ import annotations

import importlib
from collections.abc import Mapping, Sequence
from typing import Any


def compute_ifbench_reward(response: str | None, label: Any, metadata: Mapping[str, Any] | None = None) -> float:
    """Return 1 if a reply follows all instructions of `metadata`: `instruction_id_list`, `kwargs`, `prompt_text`; else 0.

    Raises:
        ImportError: without IFBench's `evaluation_lib`; slime clones it, we do not.
    """
    info = metadata or {}
    names = [str(name).strip() for name in info.get("instruction_id_list") or () if name is not None and str(name).strip()]
    if response is None or not names:
        return 0.0
    try:
        library = importlib.import_module("evaluation_lib")
    except ImportError as error:
        raise ImportError(
            f"rm_type = ifbench needs IFBench's evaluation_lib ({error}); clone https://github.com/allenai/IFBench, install "
            "its requirements, and add its folder to PYTHONPATH"
        ) from error

    prompt = "" if info.get("prompt_text") is None else str(info["prompt_text"])
    example = library.InputExample(
        key=int(info.get("record_id") or 0),
        instruction_id_list=names,
        prompt=prompt,
        kwargs=_arguments(info.get("kwargs"), len(names)),
    )
    checked = library.test_instruction_following_strict(example, {prompt: str(response)})
    return float(bool(checked.follow_all_instructions))


def _arguments(given: Any, count: int) -> list[dict[str, Any]]:
    """Return arguments for each instruction, without nulls: one mapping is for all, and the last one for those without."""
    if isinstance(given, Mapping):
        rows: Sequence[Any] = [given] * count
    else:
        rows = given if isinstance(given, list) else []
    known = [dict(row) if isinstance(row, Mapping) else {} for row in rows][:count]
    known += [dict(known[-1]) if known else {} for _ in range(count - len(known))]
    return [{key: value for key, value in row.items() if value is not None} for row in known]
