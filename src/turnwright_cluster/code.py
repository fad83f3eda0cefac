"""Fingerprints of the code that plays episodes, so that a worker with other code than the run's is
noticed."""

from __future__ import annotations

import sys
from collections.abc import Iterable, Mapping
from functools import cache
from hashlib import blake2b
from pathlib import Path

import turnwright
from turnwright.envs.user_code import USER_MODULE
from turnwright.envs.user_imports import PACKAGE


def code_of(uses: Iterable[str]) -> dict[str, str]:
    """Return a hash of this package, and of each loaded file of user code by its name; `uses` are
    the recipe's environments."""
    hashes = {"turnwright": _package()}
    named = {use.rpartition(":")[0] for use in uses}
    for name, module in sorted(sys.modules.items()):
        file = module.__dict__.get("__file__")
        if file and (name.startswith((USER_MODULE, PACKAGE)) or name in named):
            # Files of one name share an entry, in the order of their modules.
            path = Path(file)
            hashes[path.name] = _digest([path], hashes.get(path.name, ""))
    return hashes


def difference(run: Mapping[str, str], worker: Mapping[str, str]) -> str:
    """Return the names of what differs, or an empty string; a file that only one of them has loaded
    so far does not count."""
    differing = [name for name in run if name in worker and run[name] != worker[name]]
    return ", ".join(sorted(differing))


@cache
def _package() -> str:
    root = Path(turnwright.__file__).parent
    return _digest(sorted(root.rglob("*.py")), "", root)


def _digest(paths: Iterable[Path], before: str, root: Path | None = None) -> str:
    digest = blake2b(before.encode(), digest_size=8)
    for path in paths:
        digest.update(str(path.relative_to(root)).encode() if root is not None else b"")
        digest.update(b"\0" + path.read_bytes())
    return digest.hexdigest()
