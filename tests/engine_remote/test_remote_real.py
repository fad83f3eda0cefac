"""Real servers, where they run: their sampled logprobs against Hugging Face's forward of the same directory.

Start one (`turnwise engines start vllm --model DIR`) and say where it is and what it serves:
`TURNWISE_ENGINE_URL=http://localhost:8000 TURNWISE_ENGINE_MODEL=DIR pytest -m slow tests/engine_remote/test_remote_real.py`.
"""

from __future__ import annotations

import asyncio
import os

import pytest

from turnwise.engine import Request, Sampling
from turnwise.engine.contract import check_generation
from turnwise.engine.remote import Fleet, connect, probe

URL, MODEL = os.environ.get("TURNWISE_ENGINE_URL"), os.environ.get("TURNWISE_ENGINE_MODEL")
pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(not URL or not MODEL, reason="no server: set TURNWISE_ENGINE_URL and TURNWISE_ENGINE_MODEL"),
]
PROMPT = list(range(10, 42))


def forward(ids, start, temperature, banned):
    """log p of ids[start:] by transformers, in float32."""
    torch = pytest.importorskip("torch")
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(MODEL, dtype=torch.float32, local_files_only=True)
    with torch.no_grad():
        logits = model(torch.tensor([ids])).logits[0, start - 1 : -1] / (temperature or 1.0)
    logits[:, sorted(banned)] = -torch.inf
    return logits.log_softmax(-1).gather(1, torch.tensor(ids[start:])[:, None])[:, 0].tolist()


@pytest.mark.parametrize(
    ("temperature", "banned"), [(1.0, frozenset()), (0.7, frozenset()), (1.0, frozenset({5, 6, 7})), (0.0, frozenset())]
)
def test_sampled_logprobs_are_those_of_the_models_forward(temperature, banned):
    async def work():
        engine = await connect(URL, missing_logprobs="mask")
        request = Request(PROMPT, 64, frozenset(), 11, "real", sampling=Sampling(temperature), banned_ids=banned)
        found = await engine.generate(request)
        check_generation(found, request, engine.who)
        await engine.close()
        return found

    found = asyncio.run(work())
    assert len(found.ids) == 64 or found.finish == "abort"
    wanted = forward([*PROMPT, *found.ids], len(PROMPT), temperature, banned)
    known = [(p, w) for p, w in zip(found.logprobs, wanted, strict=True) if p is not None]
    assert len(known) >= len(found.ids) // 2
    assert max(abs(p - w) for p, w in known) < 1e-3


def test_what_it_can_do_is_found():
    async def work():
        engine = await connect(URL, missing_logprobs="mask")
        found = await probe(engine)
        await engine.close()
        return found

    found = asyncio.run(work())
    assert found.distribution == "sampled"
    assert not found.faults


def test_weights_that_are_loaded_are_the_ones_that_answer():
    torch = pytest.importorskip("torch")
    from transformers import AutoModelForCausalLM

    def expect(ids):
        model = AutoModelForCausalLM.from_pretrained(MODEL, dtype=torch.float32, local_files_only=True)
        with torch.no_grad():
            logp = model(torch.tensor([list(ids)])).logits[0, :-1].log_softmax(-1)
        return logp.gather(1, torch.tensor(list(ids[1:]))[:, None])[:, 0].tolist()

    async def work():
        engine = Fleet([await connect(URL)], expect=expect)
        if not (await probe(engine.members[0].engine)).updates:
            pytest.skip("this server takes no weights from a disk")
        await engine.load(MODEL, 7, changed=False)
        found = await engine.generate(Request(PROMPT, 4, frozenset(), 1, "real", min_version=7))
        await engine.close()
        return found

    assert asyncio.run(work()).version == 7
