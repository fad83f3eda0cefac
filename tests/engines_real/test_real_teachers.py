"""Real vLLM and SGLang as teachers: they answer for the same ids as the same model in this
process, text and images."""

from __future__ import annotations

import pytest
from kit import real_servers as kit
from kit.sight import Gallery
from kit.teachers import CONFIGS, conversation, gap_to, pictured

from turnwright.errors import ConfigError

pytestmark = [pytest.mark.engines, pytest.mark.timeout(3600)]
CLOSE = 1e-4
NOTHING = frozenset()


@pytest.fixture(scope="module", params=["vllm", "sglang"])
def running(request, tmp_path_factory):
    model = kit.Model(tmp_path_factory.mktemp(request.param))
    with kit.server(request.param, model.untied, model.root) as server:
        yield request.param, model, server


@pytest.fixture(scope="module")
def seeing(tmp_path_factory):
    model = kit.Model(tmp_path_factory.mktemp("seeing"), vision=True)
    with kit.server("vllm", model.untied, model.root) as server:
        yield Gallery(model.source), server


@pytest.mark.parametrize("signal", CONFIGS)
def test_it_answers_as_the_model_in_this_process(running, signal):
    kind, model, server = running
    episodes = [conversation(seed) for seed in range(8)]
    found = gap_to(server.url, model.source, episodes, CONFIGS[signal], banned_ids=NOTHING)
    print(
        f"{kind}, {signal}: {found.ids} ids, at most {found.nats:.2g} nats from the teacher in "
        "this process"
    )
    assert found.nats < CLOSE
    assert found.first > 0.95


@pytest.mark.parametrize("signal", CONFIGS)
def test_banned_ids_are_left_out_or_refused(running, signal):
    kind, model, server = running
    given = server.url, model.source, [conversation(seed) for seed in range(8)], CONFIGS[signal]
    if kind == "vllm":
        with pytest.raises(ConfigError, match="30 ids are banned"):
            gap_to(*given, banned_ids=frozenset(range(200, 230)))
        return
    found = gap_to(*given, banned_ids=frozenset(range(200, 230)))
    print(f"{kind}, {signal}, 30 banned ids: at most {found.nats:.2g} nats")
    assert found.nats < CLOSE


@pytest.mark.parametrize("signal", CONFIGS)
def test_it_sees_the_images_of_the_policy(seeing, signal):
    gallery, server = seeing
    found = gap_to(
        server.url,
        gallery.path,
        pictured(gallery),
        CONFIGS[signal],
        pixels=gallery.pixels,
        banned_ids=NOTHING,
    )
    print(f"vllm, {signal}, images: {found.ids} ids, at most {found.nats:.2g} nats")
    assert found.nats < CLOSE
