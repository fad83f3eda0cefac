"""Calls on untrusted text are bounded in processor time and memory, from any thread."""

import math
import operator
import threading

import pytest

from turnwise.envs.isolation.bounded import BoundExceeded, call_bounded


def test_a_call_returns_what_the_function_returns():
    assert call_bounded(math.gcd, 12, 18) == 6


def test_an_error_of_the_function_has_its_type_and_message():
    with pytest.raises(RuntimeError, match=r"ZeroDivisionError: "):
        call_bounded(operator.truediv, 1, 0)


@pytest.mark.parametrize(
    ("function", "args"), [(math.factorial, (10**9,)), (operator.mul, ("x", 10**11)), (math.comb, (10**9, 10**8))]
)
def test_what_exceeds_its_bounds_is_an_error_and_the_next_call_works(function, args):
    with pytest.raises(BoundExceeded):
        call_bounded(function, *args)
    assert call_bounded(math.gcd, 12, 18) == 6


def test_threads_share_the_helpers():
    found = {}

    def ask(number):
        found[number] = [call_bounded(operator.add, number, one) for one in range(20)]

    threads = [threading.Thread(target=ask, args=(number,)) for number in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert found == {number: [number + one for one in range(20)] for number in range(8)}
