"""What tools return: what of it is a response, what is a reward, and what is data."""

from typing import NamedTuple

import numpy as np
import pytest

import turnwright as tw


class Place(NamedTuple):
    name: str
    longitude: float


class ToolResponse:
    """verl's, which is a model of pydantic with these fields."""

    def __init__(self, text=None, image=None, video=None):
        self.text, self.image, self.video = text, image, video


RESULTS = {
    "a response of text alone": (lambda: ToolResponse(text="17 °C"), "17 °C", 0.0),
    "with a reward": (lambda: (ToolResponse(text="17 °C"), 0.5, {}), "17 °C", 0.5),
    "with a reward of numpy": (lambda: ("17 °C", np.float32(0.5)), "17 °C", 0.5),
    "with a reward and metrics of numpy": (
        lambda: ("17 °C", np.float16(0.5), {"hits": np.int64(2)}),
        "17 °C",
        0.5,
    ),
    "an empty response": (lambda: (ToolResponse(), 0.5), "", 0.5),
    "an instance and its response": (
        lambda: ("instance-1", ToolResponse(text="17 °C")),
        "17 °C",
        0.0,
    ),
    "two numbers": (lambda: (48.85, 2.35), "[48.85, 2.35]", 0.0),
    "three numbers": (lambda: (1, 2, 3), "[1, 2, 3]", 0.0),
    "a list and a number": (lambda: ([1, 2], 3), "[[1, 2], 3]", 0.0),
    "a named tuple": (lambda: Place("Paris", 2.35), '["Paris", 2.35]', 0.0),
    "a text and a truth": (lambda: ("ok", True), '["ok", true]', 0.0),
    "numbers of numpy": (
        lambda: {"n": np.int64(3), "x": np.float32(0.5)},
        '{"n": 3, "x": 0.5}',
        0.0,
    ),
}


@pytest.mark.parametrize("form", RESULTS)
def test_a_result_is_read_as_what_it_is(form):
    make, said, reward = RESULTS[form]

    def look() -> object:
        """Look."""
        return make()

    call = '<tool_call>{"name": "look", "arguments": {}}</tool_call>'
    (trajectory,) = tw.rollout(
        tw.tool_env([look]), [tw.Task("Go.")], tw.ScriptedEngine([call, "done"])
    )
    assert trajectory.error is None, trajectory.error
    assert (trajectory.turns[1].messages[0].text, trajectory.reward) == (said, reward)


def test_what_create_returns_with_its_instance_is_shown():
    class Map(tw.StatefulTool):
        async def create(self):
            return "instance-1", ToolResponse(text="You are in Paris.")

        async def execute(self) -> str:
            """Look."""
            return "x"

    (trajectory,) = tw.rollout(tw.tool_env([Map]), [tw.Task("Go.")], tw.ScriptedEngine(["done"]))
    assert trajectory.messages[0].text == "Go.\nYou are in Paris."


@pytest.mark.parametrize(
    "value", [object(), {"found": [object()]}, lambda: 0], ids=["object", "inside", "function"]
)
def test_an_address_in_memory_is_never_shown_to_a_model(value):
    def look() -> object:
        """Look."""
        return value

    call = '<tool_call>{"name": "look", "arguments": {}}</tool_call>'
    (trajectory,) = tw.rollout(
        tw.tool_env([look]), [tw.Task("Go.")], tw.ScriptedEngine([call, "done"])
    )
    assert not any(" at 0x" in message.text for message in trajectory.messages)
    assert trajectory.error is not None
    assert "tool 'look' returned <" in trajectory.error.message


def test_a_number_is_a_number_and_nothing_else_is():
    from turnwright.envs.user_code import number_of

    for value in (1, 1.0, np.float16(1), np.float32(1), np.float64(1), np.int8(1), np.array(1.0)):
        assert number_of(value) == 1.0
        assert type(number_of(value)) is float
    for value in (
        None,
        True,
        np.True_,
        "1",
        b"1",
        np.str_("1"),
        [1],
        np.array([1.0]),
        np.array("1"),
        1j,
        object(),
    ):
        assert number_of(value) is None
    assert number_of(10**400) == float("inf")
