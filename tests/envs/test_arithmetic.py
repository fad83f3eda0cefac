"""`arithmetic`: Python's own values for what is arithmetic, a ValueError for everything else."""

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st
from kit.cpu import own_cost

from turnwright.envs import arithmetic

numbers = (
    st.integers(0, 99).map(str)
    | st.floats(0, 99, allow_nan=False).map(lambda x: f"{x:.3f}")
    | st.just("1e2")
)
expressions = st.recursive(
    numbers,
    lambda inner: st.one_of(
        st.tuples(inner, st.sampled_from(["+", "-", "*", "/", "//", "%", " + ", " * "]), inner).map(
            "".join
        ),
        st.tuples(st.sampled_from("+-"), inner).map("".join),
        inner.map(lambda text: f"({text})"),
        st.tuples(inner, st.integers(-3, 4)).map(lambda pair: f"({pair[0]})**{pair[1]}"),
    ),
    max_leaves=8,
)


def outcome(expression):
    """The value and no words, or no value and what the error says."""
    try:
        return arithmetic(expression), ""
    except ValueError as error:
        return None, str(error)


@given(expressions)
def test_it_computes_what_python_computes(expression):
    try:
        expected = eval(expression)  # our own text, in a test
    except (ZeroDivisionError, OverflowError):
        expected = None
    huge = isinstance(expected, int) and expected.bit_length() > 4096
    if (
        expected is None
        or huge
        or isinstance(expected, complex)
        or not math.isfinite(expected)
        or len(expression) > 500
    ):
        with pytest.raises(ValueError, match=r"."):
            arithmetic(expression)
        return
    found, said = outcome(expression)
    if found is None:
        assert "not a real number" in said or "too large" in said  # a bound was met on the way
        return
    assert found == expected
    assert type(found) is type(expected)


@given(st.text(max_size=40) | st.text("0123456789+-*/%(). eE_", max_size=40))
def test_any_text_gives_a_number_or_a_value_error(text):
    value, said = outcome(text)
    if value is None:
        assert said
        assert "\n" not in said
    else:
        assert type(value) in (int, float)
        assert math.isfinite(value)


HOSTILE = [
    "__import__('os').system('true')",
    "().__class__",
    "open('x')",
    "lambda: 1",
    "[1]*9",
    "'a'*9",
    "x",
    "1 if 2 else 3",
    "True",
    "None",
    "1j",
    "9**9**9",
    "9**9**9**9",
    "2**99999",
    "(2**4000)*(2**4000)",
    "10**400*1.0",
    "1e999",
    "(-8)**0.5",
    "1/0",
    "0**-1",
    "1//0",
    "1%0",
    "0.0**-1",
    "(" * 240 + "1" + ")" * 240,
    "-" * 400 + "1",
    "1+" * 240 + "1",
    "1" * 501,
    "",
    "   ",
    "()",
    "1,2",
    "1 2",
    "2^3",
    "1;2",
    "1\n2",
    "a:=1",
    "f'{1}'",
    "1 @ 2",
    "1 << 9",
    "~1",
    "1 < 2",
    "not 1",
    "\x00",
    "１+1",
    "0x10",
    "1e",
    "1__0",
    "007",
    "1 # 2",
    "2**-99999.5e300*1e",
    "1.2.3",
    "e",
    "E+1",
]


@pytest.mark.parametrize("expression", HOSTILE, ids=lambda text: repr(text[:30]))
def test_what_is_hostile_or_wrong_costs_nothing_and_says_why(expression):
    with own_cost() as cost, pytest.raises(ValueError, match=r"\w") as caught:
        arithmetic(expression)
    assert cost.seconds < 0.2
    assert len(str(caught.value)) < 200


def test_what_is_no_string_is_told():
    with pytest.raises(ValueError, match="a string, not int"):
        arithmetic(6 * 7)


def test_values_keep_their_kind():
    assert str(arithmetic("6 * 7")) == "42"
    assert str(arithmetic("84 / 2")) == "42.0"
    assert arithmetic("-3 ** 2") == -9
    assert arithmetic(" 7 // 2\n") == 3
