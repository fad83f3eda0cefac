"""New weights in requests: what SGLang and `turnwright serve` read of them.

How they arrive is with process groups' tests.
"""

from __future__ import annotations

import asyncio
import base64
import io
import pickle

import pytest

pytest.importorskip("torch")
import torch
from hypothesis import given
from hypothesis import strategies as st

from turnwright.engines.remote import SglangEngine, VllmEngine
from turnwright.engines.remote.weight_sync import UNFINISHED
from turnwright.errors import SyncError
from turnwright.training import RequestWeightPacker
from turnwright.training.weight_transfer import decode_tensors, encode_tensors
from turnwright_serve.server import Endpoint, JsonHttpServer
from turnwright_serve.server.bodies import Body


class AsSglang(pickle.Unpickler):
    """Lets in what SGLang 0.5.19's reader does, of what concerns tensors."""

    def find_class(self, module, name):
        assert (module + ".").startswith(("torch.", "collections.", "builtins.")), (module, name)
        return super().find_class(module, name)


def as_sglang(text):
    return AsSglang(io.BytesIO(base64.b64decode(text, validate=True))).load()


DTYPES = (
    torch.float32,
    torch.bfloat16,
    torch.float16,
    torch.float8_e4m3fn,
    torch.int32,
    torch.uint8,
)
ROWS = st.lists(
    st.tuples(
        st.text(max_size=8),
        st.lists(st.integers(0, 4), max_size=3),
        st.sampled_from(DTYPES),
        st.integers(0, 2**32),
    ),
    max_size=4,
)


def tensor(shape, dtype, seed):
    bits = torch.randint(
        0,
        255,
        (*shape, dtype.itemsize),
        dtype=torch.uint8,
        generator=torch.Generator().manual_seed(seed),
    )
    return bits.view(dtype).reshape(shape)


def bits(one):
    return bytes(one.contiguous().flatten().view(torch.uint8).tolist()) if one.numel() else b""


@given(rows=ROWS)
def test_what_is_written_is_read_bit_for_bit_here_and_as_sglang_reads_it(rows):
    sent = [(name, tensor(shape, dtype, seed)) for name, shape, dtype, seed in rows]
    for read in (decode_tensors, as_sglang):
        got = read(encode_tensors(sent))
        assert [(n, t.dtype, t.shape, bits(t)) for n, t in got] == [
            (n, t.dtype, t.shape, bits(t)) for n, t in sent
        ]


RAN: list[str] = []


def run(what):
    RAN.append(what)


class Bad:
    def __reduce__(self):
        return run, ("owned",)


class Calls:
    def __init__(self, raw):
        self.raw = raw

    def __reduce__(self):
        return torch.storage._load_from_bytes, (self.raw,)


def saved(what):
    file = io.BytesIO()
    torch.save(what, file)
    return pickle.dumps(Calls(file.getvalue()))


@pytest.mark.parametrize(
    "raw",
    [pickle.dumps(Bad()), saved(Bad()), pickle.dumps([1]), saved({"a": 1}), saved([("a", 1)]), b""],
)
def test_a_text_of_others_is_refused_and_nothing_in_it_is_run(raw):
    RAN.clear()
    with pytest.raises(SyncError, match="the request body has no"):
        decode_tensors(base64.b64encode(raw).decode())
    assert not RAN
    pickle.loads(pickle.dumps(Bad()))
    assert RAN == ["owned"]  # so it would have been


@given(raw=st.binary(max_size=200))
def test_any_bytes_are_refused_with_one_error(raw):
    with pytest.raises(SyncError):
        decode_tensors(base64.b64encode(raw).decode())


def test_each_rank_gets_a_text_and_the_last_request_names_the_version():
    asked = []
    rows = [(f"layer.{n}", torch.full((8,), float(n), dtype=torch.bfloat16)) for n in range(5)]

    async def work():
        name = "default"

        def answer(path, told=None):
            async def handle(call):
                nonlocal name
                body = call.body.model_extra if call.body is not None else None
                asked.append((path, body))
                name = (body or {}).get("new_version") or (body or {}).get("weight_version") or name
                return (
                    {"weight_version": name, "model_path": "m"}
                    if path == "/model_info"
                    else told or {"success": True}
                )

            return Endpoint(handle, None if told else Body)

        info = {"version": "0.5.19", "tp_size": 2}
        routes = {
            ("GET", "/model_info"): answer("/model_info", {"a": 1}),
            ("GET", "/server_info"): answer("/server_info", info),
        }
        posts = (
            "pause_generation",
            "update_weight_version",
            "update_weights_from_tensor",
            "continue_generation",
        )
        routes |= {("POST", f"/{path}"): answer(f"/{path}") for path in posts}
        server = JsonHttpServer(routes, host="127.0.0.1", port=0)
        await server.start()
        client = SglangEngine(server.url)
        try:
            mail, _ = RequestWeightPacker(max_bytes=40).pack(rows, 7)
            await mail.send_to(client)
        finally:
            await client.close()
            await server.close()
        return client.version, client.label

    assert asyncio.run(work()) == (7, "7")
    posted = [(path, body) for path, body in asked if body is not None]
    letters = [body for path, body in posted if path == "/update_weights_from_tensor"]
    paths = [
        "pause_generation",
        "update_weight_version",
        *["update_weights_from_tensor"] * 3,
        "continue_generation",
    ]
    assert [path[1:] for path, _ in posted] == paths
    assert posted[1][1] == {"new_version": UNFINISHED.format(7)}
    assert all(len(body["serialized_named_tensors"]) == 2 for body in letters)
    assert all(
        body["serialized_named_tensors"][0] == body["serialized_named_tensors"][1]
        for body in letters
    )
    got = [row for body in letters for row in as_sglang(body["serialized_named_tensors"][0])]
    assert [(name, bits(one)) for name, one in got] == [(name, bits(one)) for name, one in rows]
    ends = [(body["flush_cache"], body.get("weight_version")) for body in letters]
    assert ends == [(False, None), (False, None), (True, "7")]


def test_other_servers_say_that_they_take_none():
    async def work():
        client = VllmEngine("http://127.0.0.1:9")
        client._opened = True  # nobody has to be there for it
        mail, _ = RequestWeightPacker().pack([("a", torch.zeros(1))], 1)
        try:
            with pytest.raises(SyncError, match="takes no weights in requests"):
                await mail.send_to(client)
        finally:
            await client.close()

    asyncio.run(work())
