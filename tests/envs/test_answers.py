"""The checker of answers: what an answer is decides what it is compared with."""

import string
import threading

import pytest
from hypothesis import assume, example, given, settings
from hypothesis import strategies as st

import turnwright as tw
from turnwright.envs.builtin.answers import is_correct
from turnwright.envs.builtin.geometry import Geometry

SAME = [
    (r"\text{A}", "A"),
    ("A", r"\text{(A)}"),
    ("A.", "A"),
    ("(A)", "A"),
    ("a", "A"),
    (r"\mathrm{B}", "B"),
    (r"\textbf{C}", "(C)"),
    ("$5$", "5"),
    (r"\boxed{5}", "5"),
    ("5.", "5"),
    ("\u22125", "-5"),
    ("\uff15", "5"),
    ("5 cm", "5"),
    (r"5\text{ cm}", "5 cm"),
    (r"5\,\mathrm{cm}^2", "5 cm^2"),
    ("5 square meters", "5 m^2"),
    ("5 centimeters", "5 cm"),
    ("5 apples", "5"),
    ("10 m/s", "10"),
    (r"12\pi\text{ cm}^2", r"12\pi"),
    ("x=5", "5"),
    ("x = 5", "x=5"),
    ("2x+1", "y=2x+1"),
    (r"50\%", "50"),
    ("50%", "0.5"),
    (r"\$5", "5 dollars"),
    ("1,000", "1000"),
    ("1{,}000", "1000"),
    (r"1\,000", "1000"),
    ("1,234.5", "1234.5"),
    ("1 1/2", "1.5"),
    (r"1\frac{1}{2}", "3/2"),
    (r"-1\frac{1}{2}", "-1.5"),
    (r"30^\circ", "30 degrees"),
    ("30°", r"30^{\circ}"),
    ("no solution", r"\text{No solution}"),
    ("even", "Even."),
    ("(1,2)", r"\left(1, 2\right)"),
    (r"\{1,2\}", r"\{2,1\}"),
    ("1,2", "2 and 1"),
    (r"(-\infty,2]", "(-∞, 2]"),
    (r"(1,2)\cup(3,4)", r"(3,4)\cup(1,2)"),
    (r"\pm 3", "3,-3"),
    ("x = 3 or x = 4", "3, 4"),
    ("x^2-1", "(x-1)(x+1)"),
    ("1+x", "x+1"),
    ("sqrt(12)", r"2\sqrt{3}"),
    (r"\frac{\pi}{2}", "π/2"),
    (r"\ln 2", "ln 2"),
    (r"x \le 5", "x ≤ 5"),
    ("2^{10}", "1024"),
    ("3.14159", "3.14"),
    ("3:4", "3:4"),
    ("1.5e3", "1500"),
    (r"\frac{1}{2}x", "x/2"),
    ("2ab", "2ba"),
    ("xy+1", "1+xy"),
    ("y=mx+b", "y=b+mx"),
    ("5cm", "5 cm"),
    (r"x \in [1,2)", "[1,2)"),
    (r"\begin{pmatrix}1\\2\end{pmatrix}", r"\begin{pmatrix} 1 \\ 2 \end{pmatrix}"),
    (r"6\times 10^{5}", "600000"),
    ("A and C", r"\text{C, A}"),
    ("3 hours", r"3\text{ h}"),
    ("x=1, y=2", "x=1,y=2"),
]
OTHER = [
    (r"\text{B}", r"\text{A}"),
    ("(B)", "(A)"),
    ("yes", "no"),
    ("no", "on"),
    ("ab", "ba"),
    ("5", "five"),
    ("3", "A"),
    (r"\overline{AB}", r"\overline{CD}"),
    ("none", "none of these"),
    ("5 cm", "5 m"),
    ("5 cm", "5 cm^2"),
    ("5 apples", "5 pears"),
    ("3 cats", "4 cats"),
    ("x=5", "y=5"),
    ("x=1", "x=2"),
    ("2", "2x"),
    ("x", "y"),
    ("x+1", "y+1"),
    (r"\sin x", r"\cos x"),
    ("x>5", "x<5"),
    (r"\infty", r"-\infty"),
    ("(1,2)", "(2,1)"),
    ("(1,2)", "[1,2]"),
    ("(1,2,3)", "(1,2)"),
    ("1,2", "1,3"),
    ("12 12", "24"),
    ("-5", "5"),
    ("50", "0.6"),
    ("3:4", "4:3"),
    ("101_2", "101_3"),
    (r"\frac{1}{0}", r"\frac{1}{2}"),
    ("2ab", "2"),
    ("3xy", "3"),
    ("3!", "3"),
    ("|x|", "x"),
    ("H2O", "HO2"),
    ("no-go", "go-no"),
    ("(A, B)", "(B, A)"),
    (r"\sqrt{2}", r"\sqrt[3]{2}"),
    ("9**9**9**9", "5"),
    ("9^{9^{9}}", "9^{9^{8}}"),
    ("99999999999999999998", "99999999999999999999"),
]
EMPTY = [
    "",
    " ",
    "{}",
    "$",
    "$$",
    r"\text{}",
    r"\boxed{}",
    r"\text{ }",
    ".",
    "()",
    r"\{\}",
    r"\mathrm{\text{}}",
]


@pytest.mark.parametrize(("one", "other"), SAME)
def test_equal_answers_are_right_both_ways(one, other):
    assert is_correct(one, other)
    # A rounded answer allows half of its last place, an exact one nothing.
    assert is_correct(other, one) or other == "3.14"


@pytest.mark.parametrize(("one", "other"), OTHER)
def test_different_answers_are_wrong_both_ways(one, other):
    assert not is_correct(one, other)
    assert not is_correct(other, one)


@pytest.mark.parametrize("empty", EMPTY)
@pytest.mark.parametrize("other", ["A", r"\text{A}", "5", "0", *EMPTY])
def test_nothing_is_equal_to_an_empty_answer(empty, other):
    assert not is_correct(empty, other)
    assert not is_correct(other, empty)


WORDS = st.text(string.ascii_lowercase, min_size=2, max_size=8).filter(
    lambda word: word not in ("pi", "and", "or", "inf")
)
NUMBERS = st.one_of(
    st.integers(-(10**6), 10**6).map(str),
    st.tuples(st.integers(-99, 99), st.integers(2, 99)).map(lambda pair: f"{pair[0]}/{pair[1]}"),
    st.tuples(st.integers(-99, 99), st.integers(2, 99)).map(
        lambda pair: rf"\frac{{{pair[0]}}}{{{pair[1]}}}"
    ),
    st.tuples(st.integers(1, 99), st.integers(2, 99)).map(
        lambda pair: rf"{pair[0]}\sqrt{{{pair[1]}}}"
    ),
)
LETTERS = st.sampled_from(string.ascii_uppercase)
EXPRESSIONS = st.tuples(st.integers(1, 9), st.sampled_from("xyzn"), st.integers(1, 9)).map(
    lambda p: f"{p[0]}{p[1]}+{p[2]}"
)
ONE = st.one_of(WORDS, NUMBERS, LETTERS, EXPRESSIONS)
ANSWERS = st.one_of(
    ONE,
    st.tuples(NUMBERS, NUMBERS).map(lambda pair: f"({pair[0]}, {pair[1]})"),
    st.lists(NUMBERS, min_size=2, max_size=3).map(lambda parts: rf"\{{{', '.join(parts)}\}}"),
    st.tuples(st.integers(1, 999), st.sampled_from(["cm", "m", "kg", "apples"])).map(
        lambda pair: f"{pair[0]} {pair[1]}"
    ),
)
WRAPPERS = [
    "{}",
    " {} ",
    "${}$",
    r"\({}\)",
    r"\text{{{}}}",
    r"\mathrm{{{}}}",
    r"\textbf{{{}}}",
    r"\boxed{{{}}}",
    "{{{}}}",
    "{}.",
    r"\displaystyle {}",
]


@settings(max_examples=150, deadline=None)
@given(ANSWERS, st.lists(st.sampled_from(WRAPPERS), max_size=3), st.sampled_from(WRAPPERS))
@example("x+1", [r"\text{{{}}}"], "${}$")
def test_an_answer_is_equal_to_itself_in_any_wrapper(answer, wrappers, other):
    wrapped = answer
    for wrapper in wrappers:
        wrapped = wrapper.format(wrapped)
    assert is_correct(wrapped, other.format(answer))
    assert is_correct(other.format(answer), wrapped)


@settings(max_examples=150, deadline=None)
@given(
    st.one_of(WORDS, LETTERS),
    st.one_of(WORDS, LETTERS),
    st.sampled_from(WRAPPERS),
    st.sampled_from(WRAPPERS),
)
def test_different_letters_and_words_are_never_equal(one, other, wrapper, around):
    assume(one.lower() != other.lower())
    assert not is_correct(wrapper.format(one), around.format(other))


@settings(max_examples=150, deadline=None)
@given(ANSWERS, ANSWERS)
def test_the_checker_is_symmetric_and_the_same_in_a_thread(one, other):
    verdict = is_correct(one, other)
    assert is_correct(other, one) == verdict
    found = []
    thread = threading.Thread(target=lambda: found.append(is_correct(one, other)))
    thread.start()
    thread.join()
    assert found == [verdict]


COEFFICIENTS = st.tuples(st.integers(1, 20), st.integers(1, 20), st.integers(1, 20))
FORMS = [
    "{}x^2+{}x+{}",
    r"\frac{{{}x+{}}}{{{}}}",
    r"{}\sqrt{{{}x}}+{}",
    "{}ab+{}a+{}",
    r"{}\sin({}x)+{}",
    r"x \le {}y+{}-{}",
    r"({}x,{}y,{})",
    r"\{{{}a,{}b,{}c\}}",
    r"{}\pi x+{}+{}y",
]


@settings(max_examples=150, deadline=None)
@given(st.sampled_from(FORMS), COEFFICIENTS, COEFFICIENTS)
@example("{}ab+{}a+{}", (2, 1, 1), (3, 1, 1))
def test_expressions_with_other_numbers_are_different(form, one, other):
    assume(one[0] * other[2] != other[0] * one[2] or one[1] * other[2] != other[1] * one[2])
    assume("le" not in form or one[1] - one[2] != other[1] - other[2])
    assume("sqrt" not in form or one[2] != other[2])
    assume("pi" not in form or one != other)
    assert not is_correct(form.format(*one), form.format(*other))
    assert is_correct(form.format(*one), form.format(*one).replace("+", " + "))


HOSTILE = [
    "9**9**9**9",
    "9^9^9^9",
    r"9^{9^{9^{9}}}",
    "{" * 1_000_000,
    "}" * 1_000_000,
    r"\text{" * 100_000,
    "9" * 1_000_000,
    "9" * 399,
    "(" * 399,
    r"\frac{" * 60 + "}" * 60,
    r"\sqrt{" * 50 + "2" + "}" * 50,
    "99999999!",
    "9!!!!!!!!!",
    "(x+1)^{999}",
    "(x+1)^{99}(y+1)^{99}(z+1)^{99}",
    r"\binom{999999999}{99999999}",
    r"\sum_{i=1}^{999999}i",
    "1," * 199,
    r"\pm" * 100,
    "__import__('os').system('true')",
]


@pytest.mark.parametrize("text", HOSTILE, ids=lambda text: text[:16])
def test_a_hostile_answer_is_wrong_whatever_is_right(text):
    assert not is_correct(text, "5")
    assert not is_correct("x+5", text)


@pytest.mark.parametrize(
    ("answer", "reply", "right"),
    [
        (r"\text{A}", r"\boxed{\text{B}}", 0.0),
        (r"\text{A}", r"\boxed{}", 0.0),
        (r"\text{A}", r"\boxed{$}", 0.0),
        ("A", r"\boxed{\text{A}}", 1.0),
        (r"\text{A}", r"\boxed{A}", 1.0),
        ("-5", "\\boxed{\u22125}", 1.0),
        ("5", r"\boxed{x=5}", 1.0),
        ("50", r"\boxed{50\%}", 1.0),
        ("5", r"\boxed{9**9**9**9}", 0.0),
    ],
)
def test_geometry_rewards_by_the_checker(answer, reply, right):
    (trajectory,) = tw.rollout(
        Geometry, [tw.Task("A, B or C?", answer=answer)], engine=tw.ScriptedEngine([reply])
    )
    assert (trajectory.error, trajectory.reward) == (None, right)
