"""Run by the packaging tests in an interpreter of its own: the core does its work with
nothing heavy to import.

With `--block` the heavy packages are made impossible to import; without it they must
not be installed at all.
"""

from __future__ import annotations

import sys
from importlib.abc import MetaPathFinder

HEAVY = ("torch", "transformers", "numpy", "PIL", "numba", "safetensors", "ray")


class Wall(MetaPathFinder):
    """Refuses the heavy packages as if they were not installed."""

    def find_spec(self, fullname, path=None, target=None):
        if fullname.partition(".")[0] in HEAVY:
            raise ModuleNotFoundError(f"No module named {fullname!r}", name=fullname)
        return


if "--block" in sys.argv:
    sys.meta_path.insert(0, Wall())

for name in HEAVY:
    try:
        __import__(name)
    except ModuleNotFoundError:
        continue
    raise SystemExit(f"{name} can be imported: this proves nothing")

import importlib  # noqa: E402
import json  # noqa: E402
import tempfile  # noqa: E402
from pathlib import Path  # noqa: E402

import turnwright as tw  # noqa: E402

for room in (
    "types",
    "errors",
    "config",
    "media",
    "renderers",
    "renderers.vision",
    "records",
    "envs",
    "engines",
    "rollouts",
    "display",
    "cli.main",
    "runs",
    "api",
):
    importlib.import_module(f"turnwright.{room}")
for name in tw.__all__:
    if name != "train":
        # A verb of the floor with torch: it is there, and says what it needs when it is called.
        getattr(tw, name)

world = tw.resolve_env("hop")
tasks = world.tasks("eval", 5)
with tempfile.TemporaryDirectory() as folder:
    trajectories = tw.rollout(
        world.factory, tasks, engine=tw.ScriptedEngine(world.solver), samples=2, out=folder
    )
    events = [
        json.loads(line) for line in (Path(folder) / "journal.jsonl").read_text().splitlines()
    ]
assert [t.reward for t in trajectories] == [1.0] * 10
assert sum(event["e"] == "turn" for event in events) == sum(len(t.turns) for t in trajectories)
for trajectory in trajectories:
    (sample,) = trajectory.samples()
    assert sum(sample.mask) == trajectory.sampled_tokens

from turnwright.errors import UsageError  # noqa: E402
from turnwright.media import MediaStore  # noqa: E402

shown = tw.Task([{"role": "user", "content": ["What is it? ", tw.Image(b"\x89PNG", alt="a cat")]}])
(trajectory,) = tw.rollout(lambda: tw.tool_env([])(), [shown], engine=tw.ScriptedEngine(["a cat"]))
assert trajectory.messages[0].text == "What is it? a cat", trajectory.error
try:
    said = str(MediaStore().put(tw.Image(b"\x89PNG")))
except UsageError as error:
    said = str(error)
assert "pip install 'turnwright[vision]'" in said, said

from turnwright.cli.main import main  # noqa: E402

assert main(["--help"]) == 0
assert main(["check", "hop"]) == 0
assert main(["train", "--env.use", "hop", "--dry-run"]) == 0
# In one line that names the extra.
assert main(["train", "--env.use", "hop", "--display", "none"]) == 2
loaded = [name for name in HEAVY if name in sys.modules]
assert not loaded, loaded
print("the core is enough")
