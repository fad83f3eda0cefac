"""The experts that servers tell of, in the form of each on the wire, in the
record of real episodes."""

from __future__ import annotations

import base64
import io
from functools import partial

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from kit import remote_engines as kit
from kit.routes import experts

from turnwright.engines import Request, check_generation
from turnwright.engines.remote import SglangEngine, VllmEngine
from turnwright.engines.remote.experts import sglang_experts, vllm_experts
from turnwright.engines.remote.response import (
    SampledVersions,
    ServerResponse,
    fault_of,
    verify_response,
)
from turnwright.errors import BackendContractError
from turnwright.types import ExpertRoutes

WANT = frozenset(["routes"])
BREACH = partial(fault_of, "a server")


def asked(routes_from=0, want=WANT):
    return Request([3, 1, 4, 1, 5], 4, frozenset({9}), 1, "s", extras=want, routes_from=routes_from)


def wire(array):
    """As vLLM sends it."""
    file = io.BytesIO()
    np.save(file, array)
    return base64.b64encode(file.getvalue()).decode()


@pytest.mark.parametrize(("kind", "make"), [("vllm", VllmEngine), ("sglang", SglangEngine)])
def test_two_turns_are_told_of_each_position(kind, make):
    async def talk(url):
        engine = make(url)
        try:
            one = await engine.generate(
                Request(kit.PROMPT, 6, frozenset({kit.END}), 1, "s", extras=WANT)
            )
            start, routes = one.extras["routes"]
            ids = [*kit.PROMPT, *one.ids, 2, 3]
            request = Request(
                ids, 6, frozenset({kit.END}), 2, "s", extras=WANT, routes_from=start + len(routes)
            )
            two = await engine.generate(request)
            check_generation(two, request, kind)
            plain = await engine.generate(Request(ids, 6, frozenset({kit.END}), 2, "s"))
        finally:
            await engine.close()
        return one, two, plain, ids

    with kit.servers(kind, KIT_EXPERTS="1") as server:
        one, two, plain, ids = kit.run(talk(server.url))
        bodies = [row["body"] for row in server.seen() if "generate" in row["path"]]
    whole = experts([*ids, *two.ids])
    assert not plain.extras
    for made, until in ((one, len(kit.PROMPT) + len(one.ids) - 1), (two, len(whole) - 1)):
        start, routes = made.extras["routes"]
        assert start + len(routes) == until
        assert (
            np.asarray(routes).reshape(len(routes), -1)
            == whole[start:until].reshape(len(routes), -1)
        ).all()
    if kind == "sglang":
        assert [body.get("routed_experts_start_len") for body in bodies] == [
            0,
            two.extras["routes"][0],
            None,
        ]


def test_nothing_is_read_unless_it_is_wanted():
    assert vllm_experts(wire(experts([1, 2])), asked(want=frozenset()), 1, BREACH) == {}
    assert sglang_experts("AAAA", asked(want=frozenset()), 1, BREACH) == {}
    assert vllm_experts(None, asked(), 1, BREACH) == sglang_experts(None, asked(), 1, BREACH) == {}


@given(
    dtype=st.sampled_from(["u1", "<u2", "<i2", "<i4", "<i8"]),
    shape=st.tuples(st.integers(1, 6), st.integers(1, 4), st.integers(1, 4)),
    seed=st.integers(0, 99),
)
def test_any_npy_of_integers_is_read(dtype, shape, seed):
    array = np.random.default_rng(seed).integers(0, 120, shape).astype(dtype)
    start, routes = vllm_experts(wire(array), asked(routes_from=5), 2, BREACH)["routes"]
    assert start == 6 - shape[0]
    assert (np.asarray(routes) == array).all()
    assert np.asarray(routes).dtype == np.uint8


@pytest.mark.parametrize(
    ("given", "why"),
    [
        ("not base64!", "not base64"),
        (7, "not base64"),
        (base64.b64encode(b"PK\3\4" * 9).decode(), "no .npy magic"),
        (wire(np.zeros((4, 2, 2))), "not an .npy file of integers"),
        (wire(np.zeros((4, 2), dtype=np.uint8)), "not an .npy file of integers"),
        (wire(np.full((4, 2, 2), -1, dtype=np.int32)), "negative"),
        (wire(np.full((4, 2, 2), 70000, dtype=np.int32)), "65535"),
        (wire(np.zeros((4, 2, 2), dtype=np.uint8))[:-8], "not an .npy file of integers"),
        (wire(np.zeros((9, 2, 2), dtype=np.uint8)), "start at position -1"),
        (wire(np.zeros((2, 2, 2), dtype=np.uint8)), "start at position 6"),
        (
            wire(np.asfortranarray(np.zeros((4, 2, 2), dtype=np.uint8))),
            "not an .npy file of integers",
        ),
        (base64.b64encode(b"\x93NUMPY\2\0\xff\xff\xff\xff" + b"{" * 40).decode(), "a header of"),
        (
            base64.b64encode(b"\x93NUMPY\1\0\x28\0" + b"{" * 40).decode(),
            "not an .npy file of integers",
        ),
        (wire(np.array([[["__import__"]]], dtype=object)), "not an .npy file of integers"),
    ],
)
def test_what_is_no_such_file_breaks_the_contract(given, why):
    with pytest.raises(BackendContractError, match=why):
        vllm_experts(given, asked(routes_from=2), 4, BREACH)


@pytest.mark.parametrize("data", [b"\0" * 23, b"\0" * 4, b"\xff" * 64, b""])
def test_numbers_that_do_not_fit_break_the_contract(data):
    with pytest.raises(BackendContractError, match="routed_experts"):
        sglang_experts(base64.b64encode(data).decode(), asked(routes_from=4), 8, BREACH)


def test_experts_behind_a_stop_id_are_left_out_with_their_ids():
    told = {"routes": (0, ExpertRoutes.of(experts([3, 1, 4, 1, 5, 7, 9, 2])))}
    answer = ServerResponse(
        [7, 9, 2, 6], [-1.0] * 4, "length", 5, SampledVersions(0), extras=told, trim=True
    )
    made, left = verify_response(answer, asked(), 4, "error", 2**31, BREACH)
    assert (made.ids, left) == ([7, 9], 2)
    assert len(made.extras["routes"][1]) == 6
