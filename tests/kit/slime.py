"""Episodes of slime's functions, played as a recipe plays them."""

from __future__ import annotations

import json
import textwrap

import turnwright as tw
from turnwright.config.schema import EnvConfig
from turnwright.envs.resolve import resolve_env

HEAD = """
from copy import copy, deepcopy
from functools import partial, wraps
import pickle

from slime.rollout.sglang_rollout import generate as one_reply
from slime.utils.types import Sample
"""


def played(
    folder,
    source,
    use="user.py:generate",
    *,
    replies=("hi",),
    row=None,
    args=None,
    files=None,
    **limits,
):
    """Write a user's files, and play one episode."""
    home = folder / "home"
    for name, text in {"user.py": HEAD + textwrap.dedent(source), **(files or {})}.items():
        path = home / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(textwrap.dedent(text))
    (home / "rows.jsonl").write_text(json.dumps(row or {"prompt": "Go.", "label": "7"}))
    path, _, name = use.partition(":")
    spec = resolve_env(
        EnvConfig(use=f"{path}:{name}", args=args or {}, tasks="rows.jsonl"), base=home
    )
    given = {"turns": 4, "turn_tokens": 200} | limits
    engine = tw.ScriptedEngine(list(replies))
    (found,) = tw.rollout(
        spec.agent_function or spec.factory, spec.tasks("train"), engine, limits=tw.Limits(**given)
    )
    return found
