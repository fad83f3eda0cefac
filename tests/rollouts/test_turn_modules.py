"""One turn of an environment crosses the modules of `rollouts` that docs/architecture.md walks through, and no other."""

import faulthandler
import json
import re
import subprocess
import sys
import threading
from pathlib import Path
from types import FrameType
from typing import Any

import turnwise as tw

PAGE = Path(__file__).parents[2] / "docs" / "architecture.md"


class TurnTrace:
    """Collects the modules of `turnwise.rollouts` that are called while `on` is set."""

    def __init__(self) -> None:
        self.on = False
        self.modules: set[str] = set()

    def __call__(self, frame: FrameType, event: str, _: Any) -> None:
        name = frame.f_globals.get("__name__", "")
        if self.on and event == "call" and name.startswith("turnwise.rollouts."):
            self.modules.add(name.removeprefix("turnwise.").replace(".", "/") + ".py")


def trace_turn(out: Path) -> tuple[int, set[str]]:
    """Play an episode; return its turns, and the modules between an answer and the next request."""
    trace, env = TurnTrace(), tw.resolve_env("hop")
    task = env.tasks("eval", 1)[0]

    class Engine(tw.ScriptedEngine):
        async def generate(self, request: tw.Request) -> tw.Generation:
            trace.on = False  # from the first answer to the next request
            generation = await super().generate(request)
            trace.on = not trace.modules
            return generation

    sys.setprofile(trace)
    threading.setprofile(trace)
    (trajectory,) = tw.rollout(env.factory, [task], engine=Engine(env.solver), out=out)
    return len(trajectory.turns), trace.modules


def test_a_turn_crosses_the_modules_of_its_walk(tmp_path: Path) -> None:
    # In a process of its own: the hook sees all threads of its process, those that other tests left too.
    command = [sys.executable, __file__, str(tmp_path / "run")]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    turns, modules = json.loads(done.stdout.splitlines()[-1])
    assert turns > 1
    walk = PAGE.read_text(encoding="utf-8").partition("## One turn of an environment")[2].partition("\n## ")[0]
    assert set(modules) == set(re.findall(r"`(rollouts/\w+\.py):", walk))
    assert len(modules) <= 5


if __name__ == "__main__":
    faulthandler.dump_traceback_later(120, exit=True)
    turns, modules = trace_turn(Path(sys.argv[1]))
    print(json.dumps([turns, sorted(modules)]))
