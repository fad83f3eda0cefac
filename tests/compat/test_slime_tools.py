"""An interaction environment of slime whose rows bring tools."""

import json

from kit.rollouts import renderer
from kit.stand_ins import USERS

import turnwright as tw
from turnwright.config.schema import EnvConfig
from turnwright.envs.resolve import resolve_env

ADD = {
    "type": "function",
    "function": {
        "name": "add",
        "description": "Add numbers.",
        "parameters": {
            "type": "object",
            "properties": {"numbers": {"type": "array", "items": {"type": "integer"}}},
        },
    },
}
CALL = '<tool_call>{"name": "add", "arguments": {"numbers": [2, 5]}}</tool_call>'


def play(replies, info, **args):
    args = {
        "custom_rm_path": "tool_env.py:reward",
        "reward_key": "weight",
        "args": {"weight": 0.5},
        **args,
    }
    made = resolve_env(EnvConfig(use="tool_env.py:build_env", args=args), base=USERS / "slime")
    limits = tw.Limits(turns=3, turn_tokens=200)
    task = tw.Task("2 + 5?", "7", info=info)
    (found,) = tw.rollout(
        made.factory, [task], tw.ScriptedEngine(replies), renderer=renderer("bpe"), limits=limits
    )
    assert found.error is None, found.error
    return found


def test_results_of_a_tool_of_the_row_and_a_reward_by_key():
    found = play([CALL, "It is 7"], {"metadata": {"tools": [ADD]}})
    opening = renderer("bpe").decode(found.spans[0].ids)
    assert "# Tools" in opening
    assert "Add numbers." in opening
    written = play([CALL, "It is 7"], {"metadata": {"tools": [ADD]}, "tools": json.dumps([ADD])})
    assert written.spans[0].ids == found.spans[0].ids
    assert [(one.role, one.text) for one in found.messages[2:]] == [
        ("tool", "7"),
        ("assistant", "It is 7"),
    ]
    assert (found.reward, found.rewards["right"], found.stop) == (0.5, 1.0, "done")
    assert found.turns[0].info == {
        "calls": 1,
        "call": {"name": "add", "arguments": {"numbers": [2, 5]}},
    }
    assert play([CALL, "It is 8"], {"metadata": {"tools": [ADD]}}, reward_key="right").reward == 0.0
