"""One turn of an environment crosses the modules of `rollouts` that docs/architecture.md walks
through, and no other."""

import re
import sys
import threading
from pathlib import Path
from types import FrameType
from typing import Any

import turnwright as tw

PAGE = Path(__file__).parents[2] / "docs" / "architecture.md"


class TurnTrace:
    """Collects the modules of `turnwright.rollouts` that are called while `on` is set."""

    def __init__(self) -> None:
        self.on = False
        self.modules: set[str] = set()

    def __call__(self, frame: FrameType, event: str, _: Any) -> None:
        name = frame.f_globals.get("__name__", "")
        if self.on and event == "call" and name.startswith("turnwright.rollouts."):
            self.modules.add(name.removeprefix("turnwright.").replace(".", "/") + ".py")


def test_a_turn_crosses_the_modules_of_its_walk(tmp_path: Path) -> None:
    trace, env = TurnTrace(), tw.resolve_env("hop")
    task = env.tasks("eval", 1)[0]

    class Engine(tw.ScriptedEngine):
        async def generate(self, request: tw.Request) -> tw.Generation:
            trace.on = False  # from the first answer to the next request
            generation = await super().generate(request)
            trace.on = not trace.modules
            return generation

    profiles = sys.getprofile(), threading.getprofile()
    sys.setprofile(trace)
    threading.setprofile(trace)
    try:
        (trajectory,) = tw.rollout(
            env.factory, [task], engine=Engine(env.solver), out=tmp_path / "run"
        )
    finally:
        sys.setprofile(profiles[0])
        threading.setprofile(profiles[1])
    assert len(trajectory.turns) > 1
    walk = (
        PAGE.read_text(encoding="utf-8")
        .partition("## One turn of an environment")[2]
        .partition("\n## ")[0]
    )
    assert trace.modules == set(re.findall(r"`(rollouts/\w+\.py):", walk))
    assert len(trace.modules) <= 11
