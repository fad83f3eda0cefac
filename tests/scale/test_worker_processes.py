"""Workers in processes of their own: equal weights, kills in the middle, and who may join."""

from __future__ import annotations

import signal
import time
from collections import Counter
from pathlib import Path

from kit.workers import (
    events,
    final_weights,
    finished,
    free_port,
    kill,
    processes,
    start,
    wait_for,
    write_recipe,
)

from turnwright.records.serialization import read_trajectories


def trained_once(run: Path) -> Counter:
    """Groups of the training batches by how often an episode of theirs was closed."""
    return Counter(tuple(event["k"]) for event in events(run, "closed"))


def begun(acts, pid):
    """Training episodes of which a worker has made the first step, and not yet the second."""
    steps = (
        [line.split()[2] for line in acts.read_text().splitlines() if f" {pid} train" in line]
        if acts.exists()
        else []
    )
    first = {step.removesuffix("/1") for step in steps if step.endswith("/1")}
    return first - {step.removesuffix("/2") for step in steps}


def suspended_in_the_middle(acts, worker):
    """Suspend a worker in the middle of a training episode; let it go on if it ended the
    episode before it was."""
    if not begun(acts, worker.pid):
        return False
    worker.send_signal(signal.SIGSTOP)
    if begun(acts, worker.pid):
        return True
    worker.send_signal(signal.SIGCONT)
    return False


def test_one_worker_gives_the_weights_of_one_process_bit_for_bit(alone, tmp_path):
    recipe, log, port = write_recipe(tmp_path), tmp_path / "log", free_port()
    with processes() as started:
        started.append(
            start(
                "train",
                recipe,
                "--out",
                tmp_path / "run",
                "--scale.listen",
                f"127.0.0.1:{port}",
                # The run without workers records none, and its weights are the same.
                "--rollout.alternatives",
                "3",
                log=log,
            )
        )
        started.append(
            start(
                "worker",
                "--join",
                f"http://127.0.0.1:{port}",
                "--name",
                "one",
                log=tmp_path / "one",
            )
        )
        finished(started[0], log)
        finished(started[1], tmp_path / "one")  # it ends with the run
    assert final_weights(tmp_path / "run") == final_weights(alone)
    assert set(trained_once(tmp_path / "run").values()) == {1}
    assert not events(tmp_path / "run", "asked_again")
    for trajectory in read_trajectories(tmp_path / "run"):
        for span in trajectory.spans:
            assert [len(likely) for likely in span.alternatives] == [3] * sum(span.mask)


def test_a_worker_killed_in_the_middle_of_its_groups_costs_no_group(alone, tmp_path):
    recipe, log, port, acts = (
        write_recipe(tmp_path, pause=0.3),
        tmp_path / "log",
        free_port(),
        tmp_path / "acts",
    )
    run, url = tmp_path / "run", f"http://127.0.0.1:{port}"
    with processes() as started:
        words = ["--scale.listen", f"127.0.0.1:{port}", "--env.args.effects", acts]
        started.append(start("train", recipe, "--out", run, *words, log=log))
        workers = [
            start("worker", "--join", url, "--name", name, log=tmp_path / name)
            for name in ("one", "two")
        ]
        started += workers
        wait_for(lambda: suspended_in_the_middle(acts, workers[0]), why=log.read_text)
        kill(workers[0])
        finished(started[0], log)
    assert final_weights(run) == final_weights(alone)  # same key, same seed
    assert set(trained_once(run).values()) == {1}
    assert events(run, "asked_again")
    assert "worker one: its connection broke" in log.read_text()


def test_a_killed_run_is_resumed_on_workers_that_waited_for_it(alone, tmp_path):
    recipe, log, port = write_recipe(tmp_path, pause=0.3), tmp_path / "log", free_port()
    run, url = tmp_path / "run", f"http://127.0.0.1:{port}"
    with processes() as started:
        started.append(
            start("train", recipe, "--out", run, "--scale.listen", f"127.0.0.1:{port}", log=log)
        )
        started.append(start("worker", "--join", url, "--name", "one", log=tmp_path / "one"))
        wait_for(
            lambda: [e for e in events(run, "turn") if e["k"][0] == "train"], why=log.read_text
        )
        kill(started[0])
        started.append(start("train", "--resume", run, log=log))
        finished(started[2], log)
        finished(started[1], tmp_path / "one")
    assert final_weights(run) == final_weights(alone)


def test_nobody_joins_without_the_token_or_with_other_code(tmp_path):
    recipe, log, port = write_recipe(tmp_path), tmp_path / "log", free_port()
    url = f"http://127.0.0.1:{port}"
    other = write_recipe(tmp_path / "other").parent
    (other / "world.py").write_text((other / "world.py").read_text() + "\nVERSION = 2\n")
    with processes() as started:
        started.append(
            start(
                "train",
                recipe,
                "--out",
                tmp_path / "run",
                "--scale.listen",
                f"127.0.0.1:{port}",
                log=log,
            )
        )
        wait_for(lambda: "workers join with" in log.read_text(), why=log.read_text)
        stale = start("worker", "--join", url, "--root", other, log=tmp_path / "stale")
        guess = start(
            "worker", "--join", url, log=tmp_path / "guess", TURNWRIGHT_WORKER_TOKEN="a guess"
        )
        started += [stale, guess]
        assert stale.wait(60) == 1
        assert guess.wait(60) == 1
    assert "differs from the run's: world.py" in (tmp_path / "stale").read_text()
    assert "its code differs from the run's (world.py)" in log.read_text()
    assert "401" in (tmp_path / "guess").read_text()


def test_another_worker_goes_on_with_effects_only_after_the_lease_of_a_killed_one(alone, tmp_path):
    recipe, log, port, acts = (
        write_recipe(tmp_path, pause=0.4),
        tmp_path / "log",
        free_port(),
        tmp_path / "acts",
    )
    run, lease_s = tmp_path / "run", 1.5
    with processes() as started:
        words = ["--scale.listen", f"127.0.0.1:{port}", "--scale.lease_s", lease_s]
        words += ["--env.effects", "true", "--env.args.effects", acts]
        started.append(start("train", recipe, "--out", run, *words, log=log))
        workers = [
            start("worker", "--join", f"http://127.0.0.1:{port}", log=tmp_path / name)
            for name in ("one", "two")
        ]
        started += workers
        wait_for(lambda: suspended_in_the_middle(acts, workers[0]), why=log.read_text)
        killed = time.time()
        kill(workers[0])
        finished(started[0], log)
    assert final_weights(run) == final_weights(alone)  # every episode went on from its state
    lines = [line.split() for line in acts.read_text().splitlines()]
    # Evaluations before and after have equal seeds.
    lines = [line for line in lines if line[2].startswith("train")]
    mine = {step.rpartition("/")[0] for _, pid, step in lines if int(pid) == workers[0].pid}
    later = [
        float(at)
        for at, pid, step in lines
        if int(pid) == workers[1].pid and step.rpartition("/")[0] in mine
    ]
    assert later, "the killed worker had nothing in the middle"
    assert min(later) > killed + lease_s * 0.9  # its last word may be a little older than the kill
    repeated = len(lines) - len({step for _, _, step in lines})
    assert repeated <= sum(
        event["metrics"].get("resume_steps_in_doubt", 0) for event in events(run, "closed")
    )


def test_a_worker_with_effects_that_was_suspended_ends_its_process(alone, tmp_path):
    recipe, log, port, acts = (
        write_recipe(tmp_path, pause=0.4),
        tmp_path / "log",
        free_port(),
        tmp_path / "acts",
    )
    run = tmp_path / "run"
    with processes() as started:
        words = ["--scale.listen", f"127.0.0.1:{port}", "--scale.lease_s", 1.0]
        words += ["--env.effects", "true", "--env.args.effects", acts]
        started.append(start("train", recipe, "--out", run, *words, log=log))
        workers = [
            start("worker", "--join", f"http://127.0.0.1:{port}", log=tmp_path / name)
            for name in ("one", "two")
        ]
        started += workers
        wait_for(lambda: suspended_in_the_middle(acts, workers[0]), why=log.read_text)
        wait_for(lambda: events(run, "asked_again"), why=log.read_text)
        workers[0].send_signal(signal.SIGCONT)
        assert workers[0].wait(30) == 3
        finished(started[0], log)
    assert "sent nothing for" in log.read_text()
    assert "this process ends with what its environments do" in (tmp_path / "one").read_text()
    assert final_weights(run) == final_weights(alone)


SEES = """\
[model]
vision = true
hidden = 32
heads = 4
layers = 1
[[env]]
use = "radar"
args = { reach = 2 }
[limits]
turns = 2
turn_tokens = 6
on_turn_length = "continue"
[rollout]
groups = 2
group_size = 2
[train]
steps = 1
[eval]
tasks = 2
greedy = false
"""


def test_images_travel_by_hash(tmp_path):
    recipe, port, weights = tmp_path / "recipe.toml", free_port(), []
    recipe.write_text(SEES)
    for name, words in {"alone": [], "remote": ["--scale.listen", f"127.0.0.1:{port}"]}.items():
        log = tmp_path / f"{name}.log"
        with processes() as started:
            started.append(start("train", recipe, "--out", tmp_path / name, *words, log=log))
            if words:
                started.append(
                    start("worker", "--join", f"http://127.0.0.1:{port}", log=tmp_path / "one")
                )
            finished(started[0], log)
        weights.append(final_weights(tmp_path / name))
    assert weights[0] == weights[1]
    images = [
        {path.name for path in (tmp_path / name / "media").glob("*.png")}
        for name in ("alone", "remote")
    ]
    assert images[0] == images[1]
    assert images[0]
