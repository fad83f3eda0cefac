"""Tasks, messages and trajectories by themselves."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from kit.strategies import trajectories

import turnwright as tw
from turnwright.types import Status, as_messages

ODD = """
import turnwright as tw
class Thing: pass
print([task.id for task in (
    tw.Task("x", answer={"b", "a", "c", "dd"}), tw.Task("x", info={"thing": Thing(), "f": len}),
    tw.Task("x", info={1: 2, "a": 3}),
    tw.Task("x", answer=b"1"), tw.Task([{"role": "user", "content": "\\ud800"}]),
)])
"""


def test_a_task_has_the_same_id_in_every_process():
    """A run that goes on finds its episodes again by them, and their noise depends on them."""
    runs = [
        subprocess.run(
            [sys.executable, "-c", ODD],
            env=os.environ | {"PYTHONHASHSEED": seed},
            capture_output=True,
            check=True,
        )
        for seed in ("1", "2", "3")
    ]
    assert len({run.stdout for run in runs}) == 1


def test_equal_rows_are_equal_tasks_and_others_are_not():
    assert tw.Task("x", answer=1) == tw.Task([tw.Message("user", "x")], answer=1)
    ids = {tw.Task(*args, **kwargs).id for args, kwargs in [
        (("x",), {}), (("y",), {}), (("x",), {"answer": 1}), (("x",), {"answer": "1"}), (("x",), {"info": {"a": 1}}),  # noqa: E501
        (("x",), {"env": "e"}),
    ]}  # fmt: skip
    assert len(ids) == 6
    circle: list = []
    circle.append(circle)
    assert tw.Task("x", answer=circle).id


@pytest.mark.parametrize(
    "value",
    [5, None, {"content": "x"}, {"role": 1}, {"role": "user", "content": [{"type": "video"}]}],
)
def test_what_is_no_message_is_told(value):
    with pytest.raises((TypeError, ValueError), match=r"message|content part"):
        tw.Message.of(value)


names = st.text("abc", min_size=1, max_size=3)
texts = st.text(max_size=5)
calls = st.builds(
    tw.ToolCall, names, st.dictionaries(names, st.integers() | texts, max_size=2), names
)
messages = st.builds(
    tw.Message, names, texts | st.lists(texts, max_size=2).map(tuple), st.lists(calls, max_size=2).map(tuple),  # noqa: E501
    st.none() | names, st.none() | names, st.none() | texts,
)  # fmt: skip


@given(message=messages)
def test_a_message_and_its_dict_say_the_same(message):
    assert tw.Message.of(message.to_dict()) == message
    assert as_messages([message, message.to_dict()]) == (message, message)
    assert tw.Message.of(message) is message


@settings(max_examples=200, deadline=None)
@given(trajectory=trajectories())
def test_paths_cover_every_id_and_samples_train_each_sampled_one_once(trajectory):
    trained = 0
    leaves = trajectory.leaves()
    covered = {
        (index, offset)
        for leaf in leaves
        for index, used in trajectory.chain(leaf)
        for offset in range(used)
    }
    assert covered == {
        (i, offset) for i, span in enumerate(trajectory.spans) for offset in range(len(span.ids))
    }
    for leaf in leaves:
        assert len(trajectory.path(leaf)) == trajectory.spans[leaf].end
    for row in trajectory.samples():
        assert (
            len(row.ids)
            == len(row.mask)
            == len(row.weights)
            == len(row.logprobs)
            == len(row.versions)
        )
        trained += sum(row.weights)
    kept = sum(
        len(span.ids) for span in trajectory.spans if span.sampled and span.untrained is None
    )
    assert trained == kept


def test_every_stop_reason_has_a_sentence_and_a_status():
    for reason in tw.StopReason:
        assert reason.sentence.endswith(".")
        assert isinstance(reason.status, Status)
        assert reason.failed == (reason.status in ("failed", "aborted"))
