"""All columns of a row reach the code that asks for them, also those that name a
task and its environment."""

from __future__ import annotations

import json

import pytest

import turnwright as tw
from turnwright.config.schema import EnvConfig
from turnwright.envs.resolve import resolve_env
from turnwright.types.trajectory import Task

TRL = '''
import json


class Games:
    def __init__(self):
        self.row = {}

    def reset(self, **row):
        self.row = row
        return f" You play {row.get('env', 'first')}."

    def move(self, to: str) -> str:
        """Move.

        Args:
            to: Where to.
        """
        return "ok"


def score(environments, **columns):
    rows = [one.row for one in environments]
    return [float([row["env"], row["id"], row["level"]] == ["second", 3, None]) for row in rows]


def named(completions, id, env, level, images, gold, **columns):
    return [float(id == [3] and env == ["second"] and level == [None] and len(images[0]) == 1 and gold == ["g"])]
'''  # noqa: E501
SKYRL = """
from skyrl_gym.envs.base_text_env import BaseTextEnv, BaseTextEnvStepOutput


class Columns(BaseTextEnv):
    def __init__(self, env_config=None, extras={}):
        super().__init__()
        self.extras = extras

    def step(self, action):
        found = {key: repr(self.extras.get(key, "missing")) for key in ("id", "env", "level", "problem")}
        found["pictures"] = len(self.extras["images"])
        return BaseTextEnvStepOutput(observations=[], reward=0.0, done=True, metadata=found)
"""  # noqa: E501
SWIFT = """
from swift.rewards import ORM, orms


class Seen(ORM):
    def __call__(self, completions, **kwargs):
        right = {"id": [3], "env": ["second"], "level": [None], "problem": ["p"]}
        return [float(all(kwargs[key] == value for key, value in right.items()))]


orms["seen_columns"] = Seen
"""
VERL = """
from verl.experimental.agent_loop.agent_loop import AgentLoopBase, AgentLoopOutput, register


@register("columns")
class Columns(AgentLoopBase):
    async def run(self, sampling_params, **kwargs):
        prompt = self.tokenizer.apply_chat_template(kwargs["raw_prompt"], add_generation_prompt=True, tokenize=True)
        output = await self.server_manager.generate("1", prompt_ids=prompt, sampling_params=sampling_params)
        seen = [kwargs[key] for key in ("id", "env", "level", "problem")] == [3, "second", None, "p"]
        return AgentLoopOutput(
            prompt_ids=prompt, response_ids=output.token_ids, response_mask=[1] * len(output.token_ids),
            reward_score=float(seen), num_turns=2, metrics={},
        )
"""  # noqa: E501
USER = [{"role": "user", "content": "Go."}]
ROW = {"prompt": USER, "id": 3, "env": "second", "level": None, "problem": "p"}
OTHER = {"prompt": USER, "id": 4, "env": "first", "level": 2, "problem": "q"}


def play(folder, code, use, rows, replies=("ok",), columns=None, faithful=False, **args):
    (folder / "user.py").write_text(code)
    (folder / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    config = EnvConfig(
        use=use,
        args=args,
        tasks=str(folder / "rows.jsonl"),
        columns=columns or {},
        faithful=faithful,
    )
    spec = resolve_env(config, base=folder)
    (task,) = (task for task in spec.tasks("train") if task.id == "3")
    engine = tw.ScriptedEngine(list(replies))
    (found,) = tw.rollout(
        spec.agent_function or spec.factory,
        [task],
        engine,
        limits=tw.Limits(turns=4, turn_tokens=2000),
    )
    assert found.error is None, found.error
    return found


@pytest.mark.parametrize("faithful", [False, True])
def test_reset_of_trl(tmp_path, faithful):
    found = play(
        tmp_path,
        TRL,
        "user.py:Games",
        [ROW, OTHER],
        faithful=faithful,
        reward_funcs=["user.py:score"],
    )
    assert found.messages[0].text == "Go. You play second."
    assert found.reward == 1.0


def test_rewards_of_trl_by_name(tmp_path):
    picture = {
        "images": [
            "data:image/png;base64,iVBORw0KGgoAAAANSUhEUgAAAAEAAAABCAIAAACQd1PeAAAADElEQVR4nGP4z8AAAAMBAQDJ/pLvAAAAAElFTkSuQmCC"
        ]
    }
    text = [{"role": "user", "content": [{"type": "image"}, {"type": "text", "text": "Go."}]}]
    (tmp_path / "user.py").write_text(TRL)
    rows = [{**ROW, **picture, "prompt": text, "gold": "g"}, {**OTHER, "gold": "h"}]
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    config = EnvConfig(
        use="trl:GRPOTrainer",
        args={"reward_funcs": ["user.py:named"]},
        tasks=str(tmp_path / "rows.jsonl"),
        columns={"answer": "gold"},
    )
    spec = resolve_env(config, base=tmp_path)
    (task,) = (task for task in spec.tasks("train") if task.id == "3")
    # The engine sees no pictures.
    task = Task("Go.", task.answer, id=task.id, info=task.info, other_columns=task.other_columns)
    (found,) = tw.rollout(spec.factory, [task], tw.ScriptedEngine(["a"]))
    assert found.error is None, found.error
    assert found.reward == 1.0


def test_extras_of_skyrl(tmp_path):
    row = {**ROW, "images": []}
    found = play(tmp_path, SKYRL, "user.py:Columns", [row, OTHER])
    seen = {"id": "3", "env": "'second'", "level": "None", "problem": "'p'", "pictures": 0}
    assert {key: found.turns[0].info[key] for key in seen} == seen


def test_rewards_of_ms_swift(tmp_path):
    rows = [{**row, "messages": row["prompt"]} for row in (ROW, OTHER)]
    for row in rows:
        del row["prompt"]
    found = play(
        tmp_path,
        SWIFT,
        "swift:single_turn",
        rows,
        external_plugins=["user.py"],
        reward_funcs=["seen_columns"],
    )
    assert found.reward == 1.0


def test_loops_of_verl(tmp_path):
    assert play(tmp_path, VERL, "user.py:Columns", [ROW, OTHER]).reward == 1.0


def test_environments_of_our_own(tmp_path):
    code = """
import turnwright as tw


class World(tw.Env):
    def reset(self, task, *, seed=None):
        self.right = [task.info["id"], task.info["env"], task.columns["level"]] == [3, "second", None]
        return task.messages

    def step(self, action):
        return tw.Step(None, float(self.right), True)
"""  # noqa: E501
    assert play(tmp_path, code, "user.py:World", [ROW, OTHER]).reward == 1.0


def test_columns_travel_with_a_task():
    from turnwright.media import MediaStore
    from turnwright.records.serialization import read_task, task_row
    from turnwright_cluster.codec import _read_task, _task_row

    first, _ = tw.load_tasks(
        [{**ROW, "gold": "g"}, {**OTHER, "gold": "h"}], columns={"answer": "gold"}
    )
    recorded = read_task(json.loads(json.dumps(task_row(first))))
    sent = _read_task(json.loads(json.dumps(_task_row(first, MediaStore()))), lambda ref: ref)
    assert recorded.columns == sent.columns == first.columns
    assert first.columns == {
        "id": 3,
        "env": "second",
        "level": None,
        "problem": "p",
        "gold": "g",
        "answer": "g",
    }
