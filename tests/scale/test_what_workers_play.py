"""Workers play whatever a recipe names: group rewards, agent functions, other frameworks'
schedulers; also asynchronously."""

from __future__ import annotations

import asyncio
import json
from dataclasses import asdict

import pytest
from kit.workers import events, final_weights, finished, free_port, processes, start, write_recipe
from scale.test_faulty_workers import end, run_with_workers, sampled, worker

from turnwright.config import EnvConfig, RetryRules, load
from turnwright.rollouts import EpisodeSpec
from turnwright.types import EpisodeKey
from turnwright_cluster.worker import environments

MORE = '''

class Compared(World):
    """The longest conversation gets one point more."""

    def group_reward(self, trajectories):
        longest = max(len(t.final_text) for t in trajectories)
        return [float(len(t.final_text) == longest) for t in trajectories]


async def talk(task, model):
    first, second = await asyncio.gather(model.generate("one", agent="a"), model.generate("two", agent="b"))
    return len(first.text) / 10 + len(second.text)


talk.tasks = lambda split, n, seed: [tw.Task(f"{split} {i}") for i in range(n or 8)]


class Scheduler(MultiTurnScheduler):
    def step(self, infer_request, response_choice, current_turn):
        infer_request.messages.append({"role": "user", "content": f"turn {current_turn}"})
        return {"infer_request": infer_request}

    def check_finished(self, infer_request, response_choice, current_turn):
        return current_turn >= 3
'''  # noqa: E501
HEAD = "import asyncio\nfrom swift.rollout.multi_turn import MultiTurnScheduler\n"


def recipe_of(folder, use):
    """Write a recipe of another object of the file, and return its path."""
    recipe = write_recipe(folder)
    world = folder / "world.py"
    world.write_text(world.read_text().replace("import os\n", HEAD + "import os\n") + MORE)
    (folder / "tasks.jsonl").write_text(
        "".join(f'{{"prompt": "say {i}", "answer": "{i}"}}\n' for i in range(12))
    )
    recipe.write_text(
        recipe.read_text()
        .replace("world.py:World", f"world.py:{use}")
        .replace("[env.args]\npause = 0.0\n", "")
    )
    return recipe


async def play_both(folder, alone, use):
    """Play one group here and on a worker; return both."""
    found = []
    for name in ("here", "there"):
        recipe = recipe_of(folder / name, use)
        config = [f"--env.tasks={folder / name / 'tasks.jsonl'}"] if use == "Scheduler" else []
        async with run_with_workers(
            folder / name, alone, *config, elsewhere=name == "there", recipe=recipe
        ) as run:
            tasks = run.spec.tasks("train", 4, 0)
            keys = [
                (task, EpisodeKey("train", 0, task.id, sample))
                for task in tasks[:2]
                for sample in range(3)
            ]
            submitted = run.stream.submit([EpisodeSpec.of(run.spec, *given) for given in keys])
            workers = [worker(run)] if name == "there" else []
            found.append(await submitted)
            await end(*workers)
    return found


@pytest.mark.parametrize("use", ["World", "Compared", "talk", "Scheduler"])
def test_a_worker_plays_what_a_recipe_names(use, alone, tmp_path):
    here, there = asyncio.run(play_both(tmp_path, alone, use))
    assert sampled(there) == sampled(here)
    assert [t.reward for t in there] == [t.reward for t in here]
    assert all(t.error is None for t in there), there[0].error
    assert any(len(t.turns) > 1 for t in there)


def test_an_asynchronous_run_is_played_by_workers(tmp_path):
    recipe, log, port = write_recipe(tmp_path, steps=4), tmp_path / "log", free_port()
    run, words = (
        tmp_path / "run",
        ["--schedule.mode", "async", "--train.correction", "tis", "--eval.every", "2"],
    )
    with processes() as started:
        started.append(
            start(
                "train",
                recipe,
                "--out",
                run,
                *words,
                "--scale.listen",
                f"127.0.0.1:{port}",
                log=log,
            )
        )
        for name in ("one", "two"):
            started.append(
                start(
                    "worker",
                    "--join",
                    f"http://127.0.0.1:{port}",
                    "--name",
                    name,
                    log=tmp_path / name,
                )
            )
        finished(started[0], log)
    assert len(events(run, "trained")) == 4
    assert final_weights(run)
    assert not events(run, "asked_again")
    assert load(recipe).config.rollout.groups * 4 == sum(
        len(event["keys"]) for event in events(run, "batch")
    )


POLICIES = """\
import asyncio
import turnwright as tw

def tasks(split, n, seed):
    return [tw.Task(f"Say {split} {number}.") for number in range(8)]

async def play(task, model):
    names = ("asker", "rival", "judge")
    replies = await asyncio.gather(*(model.generate(task.messages, agent=name) for name in names))
    values = [float(sum(reply.ids) % 3) for reply in replies]
    return tw.Scores(sum(values), agents=dict(zip(names, values)))
"""
POLICIES_RECIPE = """\
[model]
hidden = 32
layers = 1
[[env]]
tasks = "play.py:tasks"
[[policy]]
name = "asker"
[[policy]]
name = "rival"
past = { of = "asker", every = 1, keep = 2 }
[[policy]]
name = "judge"
trained = false
[rollout]
function = "play.py:play"
groups = 3
group_size = 3
[limits]
turn_tokens = 3
on_turn_length = "continue"
[train]
steps = 3
lr = 1e-2
[eval]
tasks = 3
greedy = false
[checkpoint]
every = 1
"""


def test_workers_play_policies_that_are_trained_and_those_that_are_not(tmp_path):
    """The same weights as without workers, with opponents older than the trained policy."""
    (tmp_path / "play.py").write_text(POLICIES)
    (recipe := tmp_path / "recipe.toml").write_text(POLICIES_RECIPE)
    port = free_port()
    with processes() as started:
        for name, words in (("alone", []), ("run", ["--scale.listen", f"127.0.0.1:{port}"])):
            started.append(
                start(
                    "train", recipe, "--out", tmp_path / name, *words, log=tmp_path / f"{name}.log"
                )
            )
        started.append(
            start(
                "worker",
                "--join",
                f"http://127.0.0.1:{port}",
                "--name",
                "one",
                log=tmp_path / "one.log",
            )
        )
        finished(started[0], tmp_path / "alone.log")
        finished(started[1], tmp_path / "run.log")
    last = [
        tmp_path / name / "checkpoints" / "step-00003" / "asker" / "model.safetensors"
        for name in ("alone", "run")
    ]
    assert last[0].read_bytes() == last[1].read_bytes()
    assert not events(tmp_path / "run", "asked_again")
    turns = [event for event in events(tmp_path / "run", "turn") if event["k"][0] == "train"]
    versions = {agent: set() for agent in ("asker", "rival", "judge")}
    for event in turns:
        versions[event["turn"]["agent"]] |= {
            (event["k"][1], s["version"]) for s in event["spans"] if "logprobs" in s
        }
    assert versions["asker"] == {(step, step) for step in range(3)}
    assert versions["judge"] == {(step, 0) for step in range(3)}
    assert any(version < step for step, version in versions["rival"])


def test_a_worker_has_the_rules_of_an_environment_that_its_run_has(tmp_path):
    config = EnvConfig(use="hop", isolation="process", retries=RetryRules(turn=2, wait_s=0.1))
    sent = {"recipe": None, "rollout": {"function": None}, "env": [asdict(config)]}
    welcome = json.loads(json.dumps(sent))
    (spec,) = environments(welcome, tmp_path).values()
    assert spec.rules.isolation == "process"
    assert spec.rules.retries == RetryRules(turn=2, wait_s=0.1)
