"""Group with a tool that runs Python."""

from __future__ import annotations

import subprocess

from .core import ToolGroup, tool


class PythonCodeExecutorToolGroup(ToolGroup):
    """Runs code in a process of its own."""

    def __init__(self, timeout: float = 10.0) -> None:
        self.timeout = timeout
        super().__init__(name="PythonCodeExecutorToolGroup")

    @tool
    def python(self, code: str) -> str:
        """Return what the code writes, or its error."""
        failed = "Error executing Python code: "
        try:
            done = subprocess.run(["python", "-c", code], capture_output=True, text=True, timeout=self.timeout, check=False)
        except subprocess.TimeoutExpired:
            return f"{failed}Execution timed out after {self.timeout} seconds."
        return f"{failed}{done.stderr.strip()}" if done.stderr else done.stdout.strip()
