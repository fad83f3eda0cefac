"""A run is of one template, one tokenizer and one set of their settings: ids of another one are never trained."""

from __future__ import annotations

import json
from collections.abc import Iterable
from typing import Any

from turnwise.errors import ConfigError, TraceError, UsageError
from turnwise.render.chat import ChatRenderer
from turnwise.trace import RunDir
from turnwise.types import Trajectory

_REMEDY = {
    "template": "put the chat template back as it was (model.template, model.template_args, or the model directory's own)",
    "tokenizer": "put the tokenizer back as it was (tokenizer.json of the model directory)",
    "settings": "put the settings back as they were (stop ids of generation_config.json; another version of Turnwise may have "
    "other ones)",
}


def check_run_template(run: RunDir, renderer: ChatRenderer, *, resumed: bool) -> None:
    """Write the hashes of a run's template, tokenizer and settings into its `config.json`, or hold a resumed run to them.

    Raises:
        ConfigError: when the run goes on with others; the message says which, and what to do.
        TraceError: when `config.json` cannot be read or written.
    """
    now = {"hash": renderer.fingerprint, "origin": renderer.template.origin, **renderer.fingerprints}
    path = run.path / "config.json"
    try:
        row: dict[str, Any] = json.loads(path.read_text(encoding="utf-8")) if path.exists() else {}
    except (OSError, ValueError) as error:
        raise TraceError(f"{path}: cannot be read ({error}); restore it or start anew") from error
    was = row.get("template")
    if not resumed or not isinstance(was, dict):  # a run that was stopped before it began has none yet
        run.write_json("config.json", row | {"template": now})
        return
    if was.get("hash") == now["hash"]:
        return
    changed = [name for name in _REMEDY if was.get(name) != now[name]]
    raise ConfigError(
        f"--resume {run.path}: the run was begun with another {_listed(changed) or 'renderer'} "
        f"(hash {was.get('hash')}, now {now['hash']}): its episodes would not be those that this one samples; "
        f"{'; '.join(_REMEDY[name] for name in changed) or 'use the version of Turnwise that began it'}, or start a new run"
    )


def check_fingerprints(fingerprint: str, trajectories: Iterable[Trajectory], where: str) -> None:
    """Refuse trajectories whose ids come from another template, tokenizer or settings than a fingerprint's.

    Raises:
        UsageError: for the first of them.
    """
    for trajectory in trajectories:
        if trajectory.template and trajectory.template != fingerprint:
            key = trajectory.key
            name = f"{key.phase}/{key.step}/{key.task}/{key.sample}"
            raise UsageError(
                f"{where} holds an episode ({name}) of another chat template, tokenizer or settings (hash "
                f"{trajectory.template}, here {fingerprint}), whose ids mean something else to this model: leave it out, or "
                "train with what it was sampled with"
            )


def _listed(names: list[str]) -> str:
    return " and ".join(["chat template" if name == "template" else name for name in names])
