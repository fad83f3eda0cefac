"""Files of a user as modules."""

from __future__ import annotations

import hashlib
import importlib.util
import sys
from pathlib import Path
from types import ModuleType

from turnwise.env.near import suggest_or_list
from turnwise.errors import ConfigError


def load_user_module(path: Path, shown: str) -> ModuleType:
    """Execute a file once per version of it, under a module name of its own; modules beside it can be imported."""
    path = path.expanduser().resolve()
    if not path.is_file():
        beside = [entry.name for entry in path.parent.glob("*.py")] if path.parent.is_dir() else []
        near = suggest_or_list(path.name, beside)
        raise ConfigError(f"{shown}: no such file; {near if near.startswith('did') else 'check the path'}")
    version = hashlib.blake2b(f"{path}\0{path.stat().st_mtime_ns}".encode(), digest_size=6).hexdigest()
    name = f"turnwise_user_{path.stem}_{version}"
    if name in sys.modules:
        return sys.modules[name]
    spec = importlib.util.spec_from_file_location(name, path)
    if spec is None or spec.loader is None:
        raise ConfigError(f"{shown}: not a Python file")
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    sys.path.insert(0, str(path.parent))
    try:
        spec.loader.exec_module(module)
    except BaseException as error:
        del sys.modules[name]
        if not isinstance(error, (Exception, SystemExit)):
            raise
        raise ConfigError(f"{shown}: {_place(error, path)}{type(error).__name__}: {error}") from error
    finally:
        sys.path.remove(str(path.parent))
    return module


def _place(error: BaseException, path: Path) -> str:
    """The last line of a file that an exception passed through."""
    lines = [error.lineno] if isinstance(error, SyntaxError) and error.filename == str(path) else []
    trace = error.__traceback__
    while trace is not None:
        if trace.tb_frame.f_code.co_filename == str(path):
            lines.append(trace.tb_lineno)
        trace = trace.tb_next
    return f"line {lines[-1]}: " if lines else ""
