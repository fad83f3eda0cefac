"""The recipe of a slime environment with pictures and a judge over HTTP: its dry run, and episodes
that wait for the judge."""

import importlib.util
import json
import runpy
import shutil
import threading
from dataclasses import replace
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest
from kit.vision import tiny_vlm_directory

import turnwright as tw
from turnwright.cli.main import main
from turnwright.config.recipe import load
from turnwright.envs.resolve import resolve_env
from turnwright.renderers import load_renderer

HOME = Path(__file__).parents[2] / "recipes/compat"
TOGETHER = 8


@pytest.fixture
def home(tmp_path):
    for name in ("slime_radar.toml", "slime_radar.py", "slime_rows.py", "slime_judge.py"):
        shutil.copy(HOME / name, tmp_path)
    runpy.run_path(str(tmp_path / "slime_rows.py"), run_name="__main__")
    return tmp_path


def play(home, judge, rows):
    """Play held-out rows, every reply "up", with the recipe's limits and retries."""
    config = load(home / "slime_radar.toml").config
    made = resolve_env(replace(config.env[0], args={"args": {"judge": judge}}))
    _, held_out = made.train_and_eval_tasks(0, 0)
    found = tw.rollout(
        made.factory,
        held_out[:rows],
        tw.ScriptedEngine(["up"] * config.limits.turns),
        renderer=load_renderer(tiny_vlm_directory(home / "vlm")),
        limits=config.limits,
        rules=config.env[0],
    )
    assert [one.error for one in found] == [None] * rows
    return found


def test_the_dry_run(home, capsys):
    assert main(["train", str(home / "slime_radar.toml"), "--dry-run"]) == 0
    assert "slime_radar.py:build_env" in capsys.readouterr().out


class Overloaded(BaseHTTPRequestHandler):
    """Answers the first requests only when `TOGETHER` wait, and these with 503; all
    later ones with a score."""

    lock = threading.Lock()

    def do_POST(self):
        asked = self.rfile.read(int(self.headers["Content-Length"]))
        with self.lock:
            self.server.asked.append(json.loads(asked))
            early = len(self.server.asked) <= TOGETHER
        if early:
            self.server.barrier.wait()
        body = json.dumps({"error": "overloaded"} if early else {"score": 1.0}).encode()
        self.send_response(503 if early else 200)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *args):
        """Log nothing."""


def test_no_episode_waits_while_another_is_in_its_synchronous_step(home):
    server = ThreadingHTTPServer(("127.0.0.1", 0), Overloaded)
    server.asked, server.barrier = [], threading.Barrier(TOGETHER, timeout=60)
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    try:
        found = play(home, f"127.0.0.1:{server.server_address[1]}", TOGETHER)
    finally:
        server.shutdown()
        server.server_close()
        thread.join()
    assert not server.barrier.broken
    assert [[turn.retries for turn in one.turns] for one in found] == [[1, 0]] * TOGETHER
    assert [one.reward for one in found] == [1.0] * TOGETHER
    assert all(
        "answered 503: overloaded" in failure.message for one in found for failure in one.failures
    )
    assert len(server.asked) == 3 * TOGETHER


def test_nothing_is_lost_when_the_judge_fails_now_and_then(home):
    spec = importlib.util.spec_from_file_location("judge_of_the_recipe", home / "slime_judge.py")
    judge = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(judge)
    judge.FAILS = 0.1
    found = play(home, judge.start(), 32)
    for one in found:
        right = [picture["goal"][1] > 0 for picture in one.task.info["metadata"]["pictures"]]
        assert one.reward == sum(right) / len(right)
        assert [turn.info["score"] for turn in one.turns] == [float(value) for value in right]
        assert [len(message.images) for message in one.messages if message.role == "user"] == [1, 1]
    retries = sum(turn.retries for one in found for turn in one.turns)
    assert retries == sum(len(one.failures) for one in found) > 0
