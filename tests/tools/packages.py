"""Install the wheel in empty environments, alone and with each extra: `make test-packages`.

    python tests/tools/packages.py [--pythons 3.11 3.12 3.13] [--only EXTRA ...]

Needs a package index, and the interpreters, on the path or by pyenv. The wheel is built from the
source archive. Each environment gets what the index has today, but for torch, of which it gets the
version of constraints.txt. An extra that brings torch is tried with the first interpreter alone.
`smoke.py` imports what the extra asks for and all of ours, plays an episode, and trains where it
can. The last line is JSON.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
import time
import tomllib
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from packaging.requirements import Requirement

ROOT = Path(__file__).resolve().parents[2]
CORE = "(core)"
CORE_SECONDS = 60
"""Longest installation of the core."""


@dataclass(frozen=True)
class Tried:
    """One environment."""

    extra: str
    python: str
    packages: int = 0
    mib: int = 0
    """Size of what was installed."""
    install_s: float = 0.0
    has_torch: bool = False
    modules: int = 0
    """Modules of ours that were imported."""
    error: str = ""
    """Empty if all went well."""


def run(*words: object, cwd: Path | None = None) -> str:
    """Run a command and return its output; raise `CalledProcessError` with its errors."""
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    done = subprocess.run(
        [str(word) for word in words], capture_output=True, text=True, cwd=cwd, env=environment
    )
    if done.returncode:
        raise subprocess.CalledProcessError(done.returncode, words, done.stdout, done.stderr)
    return done.stdout


def find_python(version: str) -> Path:
    """Return an interpreter of a version; raise `SystemExit` where there is none."""
    found = shutil.which(f"python{version}")
    candidates = [Path(found)] if found else []
    home = Path(os.environ.get("PYENV_ROOT", Path.home() / ".pyenv"))
    candidates += sorted(home.glob(f"versions/{version}.*/bin/python{version}"))
    for candidate in candidates:
        # A shim of pyenv may stand for nothing.
        if subprocess.run([candidate, "--version"], capture_output=True).returncode == 0:
            return candidate
    raise SystemExit(f"there is no python{version}; leave it out of --pythons, or install it")


def build(folder: Path) -> Path:
    """Build the source archive of what git tracks, and the wheel of that archive; return it."""
    run("git", "clone", "--quiet", "--no-hardlinks", ROOT, folder / "clone")
    environment = folder / "build"
    run(sys.executable, "-m", "venv", environment)
    python = environment / "bin" / "python"
    run(python, "-m", "pip", "install", "--quiet", "build")
    run(python, "-m", "build", "--outdir", folder / "dist", folder / "clone")
    (wheel,) = (folder / "dist").glob("*.whl")
    return wheel


def constraints(folder: Path) -> Path:
    """Write the constraint on torch; return its file."""
    pins = (ROOT / "constraints.txt").read_text(encoding="utf-8")
    path = folder / "constraints.txt"
    path.write_text("".join(re.findall(r"^torch==.*\n", pins, re.MULTILINE)), encoding="utf-8")
    return path


def requirements(extra: str) -> list[str]:
    """Return the distributions that an extra asks for."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    wanted = project["dependencies"] if extra == CORE else project["optional-dependencies"][extra]
    return [Requirement(one).name for one in wanted]


def size_of(folder: Path) -> int:
    """Return the size of the files below a folder, in MiB."""
    files = (path for path in folder.rglob("*") if path.is_file() and not path.is_symlink())
    return round(sum(path.stat().st_size for path in files) / 2**20)


def attempt(extra: str, version: str, wheel: Path, folder: Path, with_torch: bool) -> Tried:
    """Install the wheel with an extra in an environment of its own, and use it."""
    environment = folder / f"{extra.strip('()')}-{version}"
    run(find_python(version), "-m", "venv", environment)
    python = environment / "bin" / "python"
    packages = environment / "lib" / f"python{version}" / "site-packages"
    empty = size_of(packages)
    wanted = str(wheel) if extra == CORE else f"{wheel}[{extra}]"
    install = [python, "-m", "pip", "install", "--quiet", "--constraint", constraints(folder)]

    try:
        report = run(*install, "--dry-run", "--report", "-", wanted)
        installed = [one["metadata"]["name"].lower() for one in json.loads(report)["install"]]
        has_torch = "torch" in installed
        tried = Tried(extra, version, packages=len(installed), has_torch=has_torch)
        if has_torch and not with_torch:
            return tried
        began = time.monotonic()
        run(*install, wanted)
        seconds = time.monotonic() - began
        work = environment / "work"
        work.mkdir()
        smoke = ROOT / "tests" / "tools" / "smoke.py"
        told = json.loads(run(python, smoke, *requirements(extra), cwd=work).splitlines()[-1])
        is_slow = extra == CORE and seconds > CORE_SECONDS
        return Tried(
            extra,
            version,
            packages=len(installed),
            mib=size_of(packages) - empty,
            install_s=round(seconds, 1),
            has_torch=has_torch,
            modules=told["modules"],
            error=f"took over {CORE_SECONDS} s" if is_slow else "",
        )
    except subprocess.CalledProcessError as error:
        text = (error.stderr or error.stdout or "").strip()
        return Tried(extra, version, error=text.splitlines()[-1] if text else str(error))
    finally:
        shutil.rmtree(environment, ignore_errors=True)


def parsed(extras: Sequence[str]) -> argparse.Namespace:
    """Return the arguments."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--pythons", nargs="+", default=["3.11", "3.12", "3.13"])
    parser.add_argument("--only", nargs="+", choices=extras, default=extras)
    return parser.parse_args()


def main() -> int:
    """Try everything and print a table; return whether something failed."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    # What the tests need is no extra for users.
    extras = [CORE, *(name for name in project["optional-dependencies"] if name != "dev")]
    args = parsed(extras)

    rows = []
    print("| extra | Python | packages | MiB | installed in, s | our modules | |", flush=True)
    print("|---|---|---|---|---|---|---|", flush=True)
    with tempfile.TemporaryDirectory(prefix="turnwright-packages-") as name:
        folder = Path(name)
        wheel = build(folder)
        for version in args.pythons:
            for extra in args.only:
                row = attempt(extra, version, wheel, folder, version == args.pythons[0])
                rows.append(row)
                told = row.error or ("resolved" if not row.modules else "works")
                print(
                    f"| `{row.extra}` | {row.python} | {row.packages} | {row.mib or '-'} | "
                    f"{row.install_s or '-'} | {row.modules or '-'} | {told[:160]} |",
                    flush=True,
                )

    failed = [row for row in rows if row.error]
    found = {"environments": len(rows), "failed": len(failed), "rows": [asdict(r) for r in rows]}
    print(json.dumps(found))
    return bool(failed)


if __name__ == "__main__":
    sys.exit(main())
