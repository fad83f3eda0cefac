"""What a training script of TRL gives its trainer: the script runs as a
program, up to the call of `train`.

Scripts often define their environment inside `main`, where no other code can reach it; the
trainer gets it all the same. Imports of `trl` give the script a `_ModuleOfTrl`, whose trainers
only keep their arguments. What is made of them is in `adapter.py`.
"""

from __future__ import annotations

import sys
import threading
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import ModuleType
from typing import Any

from turnwright.envs import user_imports
from turnwright.errors import ConfigError, class_name, words

TRAINERS = ("GRPOTrainer", "AsyncGRPOTrainer", "RLOOTrainer")
POSITIONS = (
    "model",
    "reward_funcs",
    "args",
    "train_dataset",
    "eval_dataset",
    "processing_class",
    "reward_processing_classes",
    "callbacks",
    "optimizers",
    "peft_config",
    "tools",
    "rollout_func",
    "environment_factory",
)
"""Parameters of TRL's trainers, in order (trl 1.16.0)."""


def trainer_arguments(path: Path, argv: Sequence[str], where: str) -> dict[str, Any]:
    """Run a script as a program; return what it gives the first trainer that it makes.

    The script waits in its call of `train` from then on, so that servers which it started go on.

    Raises:
        ConfigError: if the script cannot be read, fails, or ends without a trainer.
    """
    if not path.is_file():
        raise ConfigError(f"{where}: no such file; check the path")
    script = _Script(path.resolve(), [str(argument) for argument in argv])
    arguments = script.run()
    if arguments is None:
        raise ConfigError(
            f"{where}: the script {script.failure}; give what it needs by [env.args] argv"
        )
    return arguments


class _Script:
    """One script, in a thread of its own."""

    def __init__(self, path: Path, argv: Sequence[str]) -> None:
        self._path = path
        self._argv = [str(path), *argv]
        self._arguments: dict[str, Any] | None = None
        """What the first trainer was made with."""
        self._is_known = threading.Event()
        self.failure = "ends without a trainer"

    def run(self) -> dict[str, Any] | None:
        """Run up to `train`, or to the end; return the trainer's arguments."""
        before = sys.argv
        sys.argv = self._argv
        try:
            thread = threading.Thread(
                target=self._execute, name=f"turnwright-script {self._path.name}", daemon=True
            )
            thread.start()
            self._is_known.wait()
        finally:
            sys.argv = before
        return self._arguments

    def _execute(self) -> None:
        module = ModuleType("__main__")
        module.__file__ = str(self._path)
        module.__package__ = user_imports.private_package(self._path)
        user_imports.prepare(module)
        module.__dict__["__builtins__"]["__import__"] = self._import

        try:
            code = compile(self._path.read_text(encoding="utf-8"), str(self._path), "exec")
            exec(code, module.__dict__)  # the user's own program, as Python would run it
        except SystemExit as end:
            self.failure = f"ends before it makes a trainer (exit status {end.code})"
        except BaseException as error:
            missing = user_imports.missing_module(error)
            if missing:
                why = f"no module named {missing[0]!r}; {missing[1]}"
            else:
                why = f"{class_name(error)}: {words(error)}"
            self.failure = f"fails before it makes a trainer: {why}"
        finally:
            self._is_known.set()

    def _import(
        self, name: str, globals: Any = None, locals: Any = None, fromlist: Any = (), level: int = 0
    ) -> Any:
        module = user_imports.import_for_user(name, globals, locals, fromlist, level)
        if name.partition(".")[0] == "trl" and not level:
            return _ModuleOfTrl(module, self)
        return module

    def keep(self, args: Sequence[Any], options: Mapping[str, Any]) -> None:
        """Keep what a trainer is made with; later ones do not count."""
        if not self._is_known.is_set():
            self._arguments = {**dict(zip(POSITIONS, args, strict=False)), **options}

    def wait(self) -> None:
        """Tell that the trainer is known, and wait for the end of the process."""
        self._is_known.set()
        threading.Event().wait()


class _ModuleOfTrl(ModuleType):
    """A module of TRL whose trainers only keep what they are made with; what TRL's stand-in lacks
    keeps what it is given."""

    def __init__(self, module: ModuleType, script: _Script) -> None:
        super().__init__(module.__name__)
        self.__dict__.update(_module=module, _script=script)

    def __getattr__(self, key: str) -> Any:
        module, script = self.__dict__["_module"], self.__dict__["_script"]
        if key in TRAINERS:
            return _trainer_of(script, key)
        is_stand_in = module.__name__.startswith(user_imports.STAND_INS)
        if is_stand_in and key == "TrlParser":
            return _Parser

        value = getattr(module, key, None) if is_stand_in else getattr(module, key)
        if isinstance(value, ModuleType):
            return _ModuleOfTrl(value, script)
        if not isinstance(value, type):
            return value
        if is_stand_in and value.__mro__[1].__name__ == "_NotInstalled":
            return type(key, (_Kept,), {})
        return _tolerant(value) if key.endswith("Config") else value


def _trainer_of(script: _Script, name: str) -> type:
    class Trainer:
        """A trainer that keeps its arguments and waits at `train`."""

        def __init__(self, *args: Any, **options: Any) -> None:
            script.keep(args, options)

        def __getattr__(self, key: str) -> Any:
            return _Kept()

        def train(self, *args: Any, **options: Any) -> None:
            """Wait: what is to be trained is known."""
            script.wait()

    Trainer.__name__ = Trainer.__qualname__ = name
    return Trainer


class _Kept:
    """An object that keeps what it is made with; other attributes are None."""

    def __init__(self, *args: Any, **options: Any) -> None:
        self.__dict__.update(options)

    def __getattr__(self, key: str) -> Any:
        if key.startswith("__"):
            raise AttributeError(key)
        return None

    def __call__(self, *args: Any, **options: Any) -> None:
        return None


def _tolerant(config: type) -> type:
    """Return a configuration of TRL that keeps what it is given where TRL refuses it, such as
    bfloat16 without a GPU."""

    class Config(config):  # type: ignore[misc]  # of TRL
        def __new__(cls, *args: Any, **options: Any) -> Any:
            try:
                return config(*args, **options)
            except Exception:  # what it asks of the machine is the trainer's, which does not run
                return _Kept(**options)

    Config.__name__ = config.__name__
    return Config


class _Parser:
    """`TrlParser` where TRL is not installed: every group of settings has all options of the
    command line, as texts."""

    def __init__(self, dataclass_types: Any = (), **options: Any) -> None:
        self._count = len(dataclass_types) if isinstance(dataclass_types, (list, tuple)) else 1

    def parse_args_and_config(self, *args: Any, **options: Any) -> Any:
        """Return one object for each group of settings."""
        settings: dict[str, Any] = {
            "dataset_train_split": "train",
            "dataset_test_split": "test",
            "eval_strategy": "no",
        }
        left = list(sys.argv[1:])
        while left:
            name = left.pop(0).removeprefix("--")
            name, equals, value = name.partition("=")
            if not equals:
                value = left.pop(0) if left and not left[0].startswith("--") else "True"
            settings[name.replace("-", "_")] = value
        return tuple(_Kept(**settings) for _ in range(self._count))

    parse_args_into_dataclasses = parse_args_and_config


def find_script(target: Any, where: str, base: Path) -> Path | None:
    """Return the script of `file.py:GRPOTrainer`; None for anything else."""
    file, _, name = where.rpartition(":")
    if name not in TRAINERS or not file.endswith(".py") or getattr(target, "__name__", "") != name:
        return None
    return base / file
