"""Workers play whatever a recipe names: group rewards, agent functions, other frameworks' schedulers; also asynchronously."""

from __future__ import annotations

import asyncio

import pytest
from scale.test_lying_workers import end, run_with_workers, sampled, worker
from scale_kit import events, final_weights, finished, free_port, processes, start, write_recipe

from turnwise.config import load
from turnwise.rollouts import EpisodeSpec
from turnwise.types import EpisodeKey

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
'''
HEAD = "import asyncio\nfrom swift.rollout.multi_turn import MultiTurnScheduler\n"


def recipe_of(folder, use):
    """Write a recipe of another object of the file, and return its path."""
    recipe = write_recipe(folder)
    world = folder / "world.py"
    world.write_text(world.read_text().replace("import os\n", HEAD + "import os\n") + MORE)
    (folder / "tasks.jsonl").write_text("".join(f'{{"prompt": "say {i}", "answer": "{i}"}}\n' for i in range(12)))
    recipe.write_text(recipe.read_text().replace("world.py:World", f"world.py:{use}").replace("[env.args]\npause = 0.0\n", ""))
    return recipe


async def play_both(folder, alone, use):
    """Play one group here and on a worker; return both."""
    found = []
    for name in ("here", "there"):
        recipe = recipe_of(folder / name, use)
        config = [f"--env.tasks={folder / name / 'tasks.jsonl'}"] if use == "Scheduler" else []
        async with run_with_workers(folder / name, alone, *config, elsewhere=name == "there", recipe=recipe) as run:
            tasks = run.spec.tasks("train", 4, 0)
            keys = [(task, EpisodeKey("train", 0, task.id, sample)) for task in tasks[:2] for sample in range(3)]
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
    run, words = tmp_path / "run", ["--schedule.mode", "async", "--train.correction", "tis", "--eval.every", "2"]
    with processes() as started:
        started.append(start("train", recipe, "--out", run, *words, "--scale.listen", f"127.0.0.1:{port}", log=log))
        for name in ("one", "two"):
            started.append(start("worker", "--join", f"http://127.0.0.1:{port}", "--name", name, log=tmp_path / name))
        finished(started[0], log)
    assert len(events(run, "trained")) == 4
    assert final_weights(run)
    assert not events(run, "asked_again")
    assert load(recipe).config.rollout.groups * 4 == sum(len(event["keys"]) for event in events(run, "batch"))
