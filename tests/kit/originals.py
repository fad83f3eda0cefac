"""Installs the packages that the tests of marker `compat` compare with:
`python originals.py FOLDER`."""

import os
import shutil
import subprocess
import sys
from pathlib import Path

FIRST = ["antlr4-python3-runtime==4.9.3"]
"""Packages that must come before those of the environment, which has another version."""
ORIGINALS = ["ms-swift==4.6.0", "skyrl-gym==0.4.0", "skyrl==0.3.0", "trl==1.16.0", "verl==0.9.1"]
NEEDED = [
    "accelerate",
    "aiohappyeyeballs",
    "aiohttp",
    "aiosignal",
    "attrs",
    "av",
    "cachetools",
    "cloudpickle",
    "codetiming",
    "dacite",
    "datasets",
    "dill",
    "einops",
    "fastapi",
    "frozenlist",
    "func_timeout",
    "httpcore",
    "httpx",
    "hydra-core",
    "idna",
    "importlib_metadata",
    "jaxtyping",
    "json_repair",
    "loguru",
    "modelscope",
    "modelscope_hub",
    "msgpack",
    "multidict",
    "multiprocess",
    "omegaconf",
    "orjson",
    "pandas",
    "propcache",
    "psutil",
    "protobuf",
    "pybase64",
    "pylatexenc",
    "python-dateutil",
    "pytz",
    "pyvers",
    "ray",
    "requests",
    "charset_normalizer",
    "urllib3",
    "certifi",
    "six",
    "starlette",
    "tensordict",
    "torchdata",
    "tzdata",
    "wadler_lindig",
    "xxhash",
    "yarl",
    "zipp",
    "click",
    "jsonschema",
    "jsonschema-specifications",
    "referencing",
    "rpds-py",
]


def folder() -> Path:
    """Return the folder of the originals."""
    return Path(os.environ.get("TURNWRIGHT_COMPAT") or Path.home() / ".cache/turnwright/compat")


def use() -> None:
    """Make the originals importable, behind what the environment has itself."""
    home = folder()
    if not (home / "ready").is_file():
        raise RuntimeError(f"{home} has no originals; run make test-compat")
    sys.path.insert(0, str(home / "first"))
    sys.path.append(str(home / "packages"))


def install(home: Path) -> None:
    """Install the originals, without what they depend on but for the packages above."""
    shutil.rmtree(home, ignore_errors=True)
    pip = [
        sys.executable,
        "-m",
        "pip",
        "install",
        "--quiet",
        "--disable-pip-version-check",
        "--no-deps",
        "--target",
    ]
    subprocess.run([*pip, str(home / "first"), *FIRST], check=True)
    subprocess.run([*pip, str(home / "packages"), *ORIGINALS, *NEEDED], check=True)
    (home / "ready").touch()


if __name__ == "__main__":
    install(Path(sys.argv[1]))
