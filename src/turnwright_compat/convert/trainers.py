"""Read the settings of a Python script that makes a trainer itself: TRL's `GRPOTrainer`, or
ms-swift's `RLHFArguments`.

`trainer_calls` finds the calls among those that a `Launcher` followed, and `read_trainer` turns
the first one into settings. Classes and functions become names that a recipe can import; what code
makes when the script runs (a data set, a loaded model) is named as missing.
"""

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
"""Classes of arguments that a script gives to a trainer of ms-swift, and the command that it
replaces."""

_OBJECTS = ("environment_factory", "tools", "reward_funcs", "rollout_func")
"""Arguments of a trainer that are classes and functions of the user."""

_SERVED = (
    "processing_class",
    "callbacks",
    "optimizers",
    "reward_processing_classes",
    "compute_metrics",
)
"""Arguments of a trainer that are objects, and of which only the source is shown."""


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
    """Return the calls that make a trainer, or the arguments of one; `GRPOTrainer` comes first."""
    last_calls = {_class_name(call): call for call in launcher.calls}
    calls = [
        call
        for name, call in last_calls.items()
        if re.fullmatch(r"[A-Z]\w*Trainer", name) or name in ARGUMENT_CLASSES
    ]
    return sorted(calls, key=lambda call: not call.name.endswith("GRPOTrainer"))


def _class_name(call: LauncherCall) -> str:
    return call.name.rpartition(".")[2]


def read_trainer(
    launcher: Launcher, calls: Sequence[LauncherCall], name: str, folder: Path | None
) -> TrainerSettings:
    """Return what the first trainer of a script is given."""
    call = calls[0]
    class_name = _class_name(call)
    trainer = TrainerSettings(ARGUMENT_CLASSES.get(class_name, class_name))
    if class_name in ARGUMENT_CLASSES:
        _add_fields(trainer, call.kwargs, "")
        return trainer

    config = call.kwargs.get("args")
    if isinstance(config, Record):
        _add_fields(trainer, config.fields, "")
    elif config is not None:
        source = config.source if isinstance(config, Unknown) else "args"
        trainer.lack(
            f"the trainer's settings come from the command line ({source}): give them to convert "
            "as flags"
        )

    script = name if folder is None else str(folder / name)
    for key, value in call.kwargs.items():
        if key in _OBJECTS:
            _add_objects(trainer, key, value, script)
        elif key == "model":
            _add_model(trainer, value)
        elif key in ("train_dataset", "eval_dataset"):
            _add_data(trainer, key, value)
        elif key == "peft_config":
            _add_adapter(trainer, value)
        elif key in _SERVED:
            trainer.settings.append((key, source_of(value, key)))
        elif key == "**":
            trainer.lack(f"{value.source} is not known here, and the arguments in it are not read")
        elif key != "args":
            trainer.settings.append((key, _plain(value)))
    return trainer


def _add_fields(trainer: TrainerSettings, fields: Mapping[str, Any], prefix: str) -> None:
    for key, value in fields.items():
        if key == "**":
            trainer.lack(f"{value.source} is not known here, and the settings in it are not read")
        elif isinstance(value, Unknown):
            trainer.settings.append((f"{prefix}{key}", value.placeholder))
            trainer.unresolved.append(value.placeholder)
        else:
            trainer.settings.append((f"{prefix}{key}", _plain(value)))


def _plain(value: Any) -> Any:
    """Return a value as a recipe can hold it: objects by their names."""
    if isinstance(value, Unknown):
        return value.placeholder
    if isinstance(value, list | tuple):
        return [_plain(item) for item in value]
    if isinstance(value, Record):
        return value.kind
    if isinstance(value, Class | Function):
        return value.name
    return value


def _add_model(trainer: TrainerSettings, value: Any) -> None:
    if isinstance(value, str):
        trainer.settings.append(("model", value))
    else:
        trainer.missing.append(
            f"the model is made by code ({source_of(value, 'model')}): set model.path"
        )


def _add_data(trainer: TrainerSettings, key: str, value: Any) -> None:
    if value is None:
        return
    if isinstance(value, str):
        trainer.settings.append((key, value))
        return

    source = source_of(value, key)
    part = "tasks" if key == "train_dataset" else "eval_tasks"
    trainer.missing.append(
        f"{key} is made by code ({source}): write its rows to a file, or a function (set [[env]] "
        f"{part})"
    )


def _add_adapter(trainer: TrainerSettings, value: Any) -> None:
    if isinstance(value, Record):
        trainer.settings.append(("use_peft", True))
        _add_fields(trainer, value.fields, "lora.")
    elif value is not None:
        trainer.missing.append(
            f"peft_config is known only when the script runs ({source_of(value, 'peft_config')}): "
            "set [lora]"
        )


def _add_objects(trainer: TrainerSettings, key: str, value: Any, script: str) -> None:
    """Add classes and functions by name; those that a function makes have none."""
    names = []
    for item in value if isinstance(value, list) else [value]:
        name = _importable_name(item, script)
        if name is not None:
            names.append(name)
        elif item is not None:
            trainer.missing.append(_unnamed(trainer, key, item, script))

    if names:
        trainer.settings.append((key, names if isinstance(value, list) else names[0]))


def _unnamed(trainer: TrainerSettings, key: str, item: Any, script: str) -> str:
    """Return the clause on an object that no recipe can name, with its remedy."""
    if isinstance(item, Class | Function):
        what = item.name
        function = item.scope.function
    else:
        what = source_of(item, str(item))
        function = ""

    if function:
        reason = f"is made inside {function}(): move it to the top of the file"
    else:
        reason = "is made by code: name it"
    return (
        f"{key}: {what} {reason}, then set it in [[env]]; or set use = "
        f'"{script}:{trainer.program}", which runs the script up to its trainer'
    )


def _importable_name(value: Any, script: str) -> str | None:
    """Return `file.py:name`, or `module:name` of something imported; None for what has no such
    name."""
    if isinstance(value, Class | Function):
        is_lambda = isinstance(value, Function) and value.name == "lambda"
        if value.scope.function or is_lambda:
            return None
        return f"{value.scope.path or script}:{value.name}"

    if isinstance(value, Unknown) and re.fullmatch(r"[A-Za-z_]\w*(\.[A-Za-z_]\w*)+", value.source):
        module, _, name = value.source.rpartition(".")
        return f"{module}:{name}" if value.imported else None

    return value if isinstance(value, str) else None
