"""Settings of a Python script that makes a trainer itself: TRL's `GRPOTrainer`, or
ms-swift's `RLHFArguments`."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from turnwright_compat.convert.launcher import (
    Class,
    Function,
    Launcher,
    LauncherCall,
    Record,
    Unknown,
    source_of,
)

ARGUMENT_CLASSES = {
    "RLHFArguments": "swift rlhf",
    "MegatronRLHFArguments": "swift rlhf",
    "SftArguments": "swift sft",
    "TrainArguments": "swift sft",
}
"""Classes of arguments that a script gives to a trainer of ms-swift, and the
command that it replaces."""
_OBJECTS = ("environment_factory", "tools", "reward_funcs", "rollout_func")
_SERVED = (
    "processing_class",
    "callbacks",
    "optimizers",
    "reward_processing_classes",
    "compute_metrics",
)


@dataclass(slots=True)
class TrainerSettings:
    """What a script gives to its trainer."""

    program: str
    settings: list[tuple[str, Any]] = field(default_factory=list)
    missing: list[str] = field(default_factory=list)
    unresolved: list[str] = field(default_factory=list)
    """Texts that stand for values which only a run gives."""
    base_known: bool = True

    def lack(self, what: str) -> None:
        """Account for settings that are not read."""
        self.missing.append(what)
        self.base_known = False


def trainer_calls(launcher: Launcher) -> list[LauncherCall]:
    """Return the calls that make a trainer, or the arguments of one."""
    names = {call.name.rpartition(".")[2]: call for call in launcher.calls}
    found = [
        call
        for name, call in names.items()
        if re.fullmatch(r"[A-Z]\w*Trainer", name) or name in ARGUMENT_CLASSES
    ]
    return sorted(found, key=lambda call: not call.name.endswith("GRPOTrainer"))


def read_trainer(
    launcher: Launcher, calls: Sequence[LauncherCall], name: str, folder: Path | None
) -> TrainerSettings:
    """Return what the first trainer of a script is given."""
    call = calls[0]
    kind = call.name.rpartition(".")[2]
    made = TrainerSettings(ARGUMENT_CLASSES.get(kind, kind))
    if kind in ARGUMENT_CLASSES:
        _add_fields(made, call.kwargs, "")
        return made
    config = call.kwargs.get("args")
    if isinstance(config, Record):
        _add_fields(made, config.fields, "")
    elif config is not None:
        source = config.source if isinstance(config, Unknown) else "args"
        made.lack(
            f"the trainer's settings come from the command line ({source}): give them to convert "
            "as flags"
        )
    here = str((folder or Path()) / name) if folder is not None else name
    for key, value in call.kwargs.items():
        if key in _OBJECTS:
            _add_objects(made, key, value, here)
        elif key == "model":
            _add_model(made, value)
        elif key in ("train_dataset", "eval_dataset"):
            _add_data(made, key, value)
        elif key == "peft_config":
            _add_adapter(made, value)
        elif key in _SERVED:
            made.settings.append((key, source_of(value, key)))
        elif key == "**":
            made.lack(f"{value.source} is not known here, and the arguments in it are not read")
        elif key != "args":
            made.settings.append((key, _plain(value)))
    return made


def _add_fields(made: TrainerSettings, fields: Mapping[str, Any], prefix: str) -> None:
    for key, value in fields.items():
        if key == "**":
            made.lack(f"{value.source} is not known here, and the settings in it are not read")
        elif isinstance(value, Unknown):
            made.settings.append((f"{prefix}{key}", value.placeholder))
            made.unresolved.append(value.placeholder)
        else:
            made.settings.append((f"{prefix}{key}", _plain(value)))


def _plain(value: Any) -> Any:
    if isinstance(value, Unknown):
        return value.placeholder
    if isinstance(value, list | tuple):
        return [_plain(one) for one in value]
    if isinstance(value, Record | Class | Function):
        return value.kind if isinstance(value, Record) else value.name
    return value


def _add_model(made: TrainerSettings, value: Any) -> None:
    if isinstance(value, str):
        made.settings.append(("model", value))
    else:
        made.missing.append(
            f"the model is made by code ({source_of(value, 'model')}): set model.path"
        )


def _add_data(made: TrainerSettings, key: str, value: Any) -> None:
    if value is None:
        return
    if isinstance(value, str):
        made.settings.append((key, value))
        return
    source = source_of(value, key)
    part = "tasks" if key == "train_dataset" else "eval_tasks"
    made.missing.append(
        f"{key} is made by code ({source}): write its rows to a file, or a function (set [[env]] "
        f"{part})"
    )


def _add_adapter(made: TrainerSettings, value: Any) -> None:
    if isinstance(value, Record):
        made.settings.append(("use_peft", True))
        _add_fields(made, value.fields, "lora.")
    elif value is not None:
        made.missing.append(
            f"peft_config is known only when the script runs ({source_of(value, 'peft_config')}): "
            "set [lora]"
        )


def _add_objects(made: TrainerSettings, key: str, value: Any, here: str) -> None:
    """Add classes and functions by name; those that a function makes have none."""
    several = value if isinstance(value, list) else [value]
    names = []
    for one in several:
        named = _named(one, here)
        if named is not None:
            names.append(named)
        elif one is not None:
            what = one.name if isinstance(one, Class | Function) else source_of(one, str(one))
            where = one.scope.function if isinstance(one, Class | Function) else ""
            inside = (
                f"is made inside {where}(): move it to the top of the file"
                if where
                else "is made by code: name it"
            )
            script = (
                f'; or set use = "{here}:{made.program}", which runs the script up to its trainer'
            )
            made.missing.append(f"{key}: {what} {inside}, then set it in [[env]]{script}")
    if names:
        made.settings.append((key, names if isinstance(value, list) else names[0]))


def _named(value: Any, here: str) -> str | None:
    """Return `file.py:name`, or `module:name` of something imported; None for
    what has no such name."""
    if isinstance(value, Class | Function):
        if value.scope.function or (isinstance(value, Function) and value.name == "lambda"):
            return None
        return f"{value.scope.path or here}:{value.name}"
    if isinstance(value, Unknown) and re.fullmatch(r"[A-Za-z_]\w*(\.[A-Za-z_]\w*)+", value.source):
        module, _, name = value.source.rpartition(".")
        return f"{module}:{name}" if value.imported else None
    if isinstance(value, str):
        return value
    return None
