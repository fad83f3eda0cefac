"""Answers as real datasets have them: LaTeX, fractions, degrees; and text that is made to
hang whoever reads it."""

import base64

import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

import turnwright as tw
from turnwright.envs.builtin import geometry
from turnwright.media.images import encode_png

PICTURE = encode_png(np.zeros((28, 28, 3), np.uint8))
SAME = [
    (r"\boxed{2\sqrt{3}}", r"2 \sqrt { 3 }"),
    (r"So \boxed{2\sqrt{3}}.", r"\sqrt{12}"),
    (r"\boxed{\frac{1}{2}}", "0.5"),
    (r"\boxed{\frac { 1 } { 2 }}", r"\frac12"),
    (r"\boxed{30^\circ}", "30"),
    (r"\boxed{30}", r"30^{\circ}"),
    (r"\boxed{30°}", "30"),
    (r"\boxed{7/2}", "3.5"),
    (r"\boxed{\dfrac{9\sqrt{3}}{2}}", r"\frac { 9 \sqrt { 3 } } { 2 }"),
    (r"\boxed{9\pi}", r"9 \pi"),
    (r"\boxed{1{,}000}", "1000"),
    (r"\boxed{5\text{ cm}}", "5"),
    (r"\boxed{3.46}", "3.5"),
]
OTHER = [
    (r"\boxed{3.46}", r"2\sqrt{3}"),
    (r"\boxed{2\sqrt{5}}", r"2\sqrt{3}"),
    (r"\boxed{\frac{2}{1}}", r"\frac{1}{2}"),
    (r"\boxed{2\sqrt{3}", r"2\sqrt{3}"),
    (r"\boxed{2\sqrt{3}}\boxed{3}", r"2\sqrt{3}"),
    (r"\boxed{12 12}", "24"),
    (r"\boxed{\frac{1}{0}}", r"\frac{1}{2}"),
]


def played(answer, reply, messages="What is x?"):
    task = tw.Task(messages, answer=answer)
    (trajectory,) = tw.rollout(geometry.Geometry, [task], tw.ScriptedEngine([reply]))
    assert trajectory.error is None, trajectory.error
    return trajectory.reward


@pytest.mark.parametrize(("reply", "answer"), SAME)
def test_a_right_answer_is_rewarded_in_whatever_form(reply, answer):
    assert played(answer, reply) == 1.0


@pytest.mark.parametrize(("reply", "answer"), OTHER)
def test_a_wrong_answer_is_not(reply, answer):
    assert played(answer, reply) == 0.0


def test_rows_of_geometry3k_load_and_are_played(tmp_path):
    """As the converted datasets have them: bytes of images, or data URIs; spaces in LaTeX; a
    letter beside the answer."""
    import pyarrow
    import pyarrow.parquet

    row = {
        "images": [{"bytes": PICTURE, "path": None}],
        "problem": "<image>Find x.",
        "answer": r"2 \sqrt { 221 }",
        "id": 3,
    }
    table = pyarrow.Table.from_pylist([row | {"choices": ["1", "2"], "ground_truth": "B"}])
    pyarrow.parquet.write_table(table, tmp_path / "train.parquet")
    (task,) = tw.load_tasks(tmp_path / "train.parquet")
    uri = "data:image/png;base64," + base64.b64encode(PICTURE).decode()
    (other,) = tw.load_tasks([row | {"images": [uri]}])
    for one in (task, other):
        assert (one.answer, len(one.images)) == (r"2 \sqrt { 221 }", 1)
        env = geometry.Geometry()
        shown = env.reset(one)
        assert [type(part) for part in shown[-1].content] == [tw.Image, str]
        right = {"role": "assistant", "content": r"\boxed{2\sqrt{221}}"}
        step = env.step(tw.Action(right["content"], tw.Message.of(right)))
        assert (step.reward, step.terminated) == (1.0, True)


PIECES = (
    r"\frac",
    r"\sqrt",
    r"\sqrt[9]",
    r"\pi",
    r"\left(",
    r"\right)",
    "^",
    "^{9}",
    "{",
    "}",
    "(",
    ")",
    "9",
    "999999999",
    "*",
)
PIECES += (
    "**",
    "/",
    "+",
    "-",
    ".",
    " ",
    "!",
    "x",
    r"\sum",
    r"\int",
    "__import__('os')",
    "\u0669",
    "\\",
)


@settings(max_examples=150, deadline=None)
@given(st.lists(st.sampled_from(PIECES), max_size=30).map("".join))
@example("9^{9^{9^{9}}}")
@example("9**9**9**9")
@example("(" * 39 + ")" * 39)
@example(r"\sqrt{" * 11 + "2" + "}" * 11)
@example(r"\frac{\frac{\frac{1}{999999999}}{999999999}}{999999999}")
def test_no_text_hangs_or_breaks_the_reader(text):
    from turnwright.envs.builtin.answers import is_correct, value

    found = value(text)
    assert found is None or -1e100 < found < 1e100
    assert is_correct(text, "123456.5") is (
        found is not None and abs(found - 123456.5) <= 0.05 + 1e-6
    )
