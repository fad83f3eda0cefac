"""Trackers as bad as they come, and one that writes down what it hears; also for
benchmarks/trackers.py."""

from __future__ import annotations

import json
import os
import time


class Hears:
    """Writes each row into the run directory."""

    def start(self, run, project, name, config):
        self.file = (run / "heard.jsonl").open("a")
        self.file.write(json.dumps(["start", project, name, bool(config["env"])]) + "\n")

    def log(self, phase, step, figures):
        self.file.write(json.dumps([phase, step, figures]) + "\n")
        self.file.flush()

    def finish(self):
        self.file.write(json.dumps(["finish"]) + "\n")
        self.file.close()


class Silent:
    def start(self, run, project, name, config):
        pass

    def log(self, phase, step, figures):
        pass

    def finish(self):
        pass


class Hangs(Silent):
    def log(self, phase, step, figures):
        time.sleep(3600)


class Raises(Silent):
    def log(self, phase, step, figures):
        raise RuntimeError("\x1b[2Jno such project")


class Slow(Silent):
    def log(self, phase, step, figures):
        time.sleep(1.0)


class Full(Silent):
    """The kernel's own full disk."""

    def log(self, phase, step, figures):
        with open("/dev/full", "w") as file:
            file.write("x")


class Dies(Silent):
    def log(self, phase, step, figures):
        os.abort()
