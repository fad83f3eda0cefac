"""Installs the programs that the tests of marker `agents` run: `python real_programs.py FOLDER`."""

import os
import shutil
import subprocess
import sys
import venv
from pathlib import Path

PACKAGES = [
    "claude-agent-sdk==0.2.188",
    "openai==3.57.0",
    "anthropic==2.13.0",
    "openai-agents==0.24.0",
    "smolagents[openai]==1.26.0",
    "pydantic-ai-slim[openai,anthropic]==2.68.0",
    "mini-swe-agent==2.4.6",
]
"""Packages of the Python index. The wheel of `claude-agent-sdk` holds Claude Code."""
NODE_PACKAGES = ["@openai/codex@0.169.0", "opencode-ai@1.18.33"]


def folder() -> Path:
    """Return the folder of the programs."""
    return Path(os.environ.get("TURNWRIGHT_AGENTS") or Path.home() / ".cache/turnwright/agents")


def installed(name: str) -> str:
    """Return the path of a program: `python`, `mini`, `claude`, `codex` or `opencode`."""
    home = folder()
    if not (home / "ready").is_file():
        raise RuntimeError(f"{home} has no programs; run make test-agents")
    if name == "claude":
        (path,) = home.glob("python/lib/python3*/site-packages/claude_agent_sdk/_bundled/claude")
    else:
        path = home / (
            f"python/bin/{name}" if name in ("python", "mini") else f"node/node_modules/.bin/{name}"
        )
    return str(path)


def install(home: Path) -> None:
    """Install the programs; pip and npm are the ones of this machine."""
    shutil.rmtree(home, ignore_errors=True)
    venv.create(home / "python")
    pip = [
        sys.executable,
        "-m",
        "pip",
        "--python",
        str(home / "python/bin/python"),
        "install",
        "--quiet",
    ]
    subprocess.run([*pip, "--disable-pip-version-check", *PACKAGES], check=True)
    npm = shutil.which("npm")
    if npm is None:
        sys.exit("npm is missing: install Node.js, which Codex and OpenCode come with")
    subprocess.run(
        [npm, "install", "--prefix", str(home / "node"), "--no-audit", "--no-fund", *NODE_PACKAGES],
        check=True,
    )
    (home / "ready").touch()


if __name__ == "__main__":
    install(Path(sys.argv[1]))
