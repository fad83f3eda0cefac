"""Servers that decode speculatively: how they are started, what they are asked, and what they
tell of their drafts."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest
from kit import remote_engines as kit

import turnwright as tw
from turnwright.engines import Request
from turnwright.engines.remote import SglangEngine, VllmEngine, managed, probe_server
from turnwright.errors import ConfigError, EngineError, UsageError
from turnwright.records import rollout_metrics
from turnwright.renderers import byte_renderer

CLIENTS = {"vllm": VllmEngine, "sglang": SglangEngine}
KNOWN = SimpleNamespace(codec=SimpleNamespace(vocab_size=30, control={"<end>": kit.IDS - 1}))
"""A renderer whose tokenizer has a gap before its last id."""


def ask(make, url, *, banned=(), renderer=None, look=False):
    async def work():
        engine = make(url, renderer=renderer)
        request = Request(kit.PROMPT, 24, frozenset(), 1, "a", banned_ids=frozenset(banned))
        try:
            found = await engine.generate(request)
            return found, engine.counts.copy(), await probe_server(engine) if look else None
        finally:
            await engine.close()

    return kit.run(work())


@pytest.mark.parametrize("kind", list(CLIENTS))
def test_what_was_drafted_for_a_reply_is_counted(kind):
    with kit.servers(kind, KIT_DRAFTS="answers") as server:
        found, counts, _ = ask(CLIENTS[kind], server.url)
    assert (found.drafted, found.accepted) == (48, 12)
    assert (counts["draft_ids"], counts["draft_ids_accepted"]) == (48, 12)


@pytest.mark.parametrize("kind", list(CLIENTS))
def test_a_server_without_drafts_counts_none(kind):
    with kit.servers(kind) as server:
        found, counts, seen = ask(CLIENTS[kind], server.url, look=True)
    assert (found.drafted, found.accepted) == (0, 0)
    assert "draft_ids" not in counts
    assert seen.drafts is None
    assert not any("drafted" in text for _, text in seen.findings())


def test_what_servers_drafted_reaches_the_metrics():
    class Say(tw.Env):
        def reset(self, task, *, seed=None):
            return "go"

        def step(self, action):
            return tw.Step(reward=1.0, terminated=True)

    class Within(VllmEngine):
        """The server has fewer ids than the renderer: it is asked the same thing
        about ids that it has."""

        async def _sample(self, request, *more):
            return await super()._sample(
                replace(request, ids=[one % kit.IDS for one in request.ids]), *more
            )

        def _read(self, raw, request, held):
            answer = super()._read(raw, request, held)
            answer.prompt = len(answer.prompt)
            return answer

    with kit.servers("vllm", KIT_DRAFTS="answers") as server:
        limits = tw.Limits(turn_tokens=8, on_turn_length="continue")
        tasks = [tw.Task("go", id=f"{n}") for n in range(3)]
        found = tw.rollout(
            Say,
            tasks,
            engine=Within(server.url, renderer=byte_renderer(), context=256),
            limits=limits,
        )
    assert [str(t.stop) for t in found] == ["done"] * 3, [t.error for t in found]
    assert [(t.metrics["draft_ids"], t.metrics["draft_ids_accepted"]) for t in found] == [
        (16, 4)
    ] * 3
    assert rollout_metrics(found)["draft_acceptance"] == 0.25


def test_a_server_that_tells_totals_alone_tells_them_to_who_asks():
    with kit.servers("vllm", KIT_DRAFTS="totals") as server:
        found, counts, seen = ask(VllmEngine, server.url, look=True)
    assert (found.drafted, found.accepted) == (0, 0)
    assert "draft_ids" not in counts
    drafted, accepted = seen.drafts
    assert drafted >= 48 > accepted > 0
    assert any(f"{accepted} of {drafted} drafted ids" in text for _, text in seen.findings())


def test_ids_are_banned_by_naming_all_others_where_vllm_drafts():
    with kit.servers("vllm", KIT_DRAFTS="answers") as server:
        found, _, _ = ask(VllmEngine, server.url, banned=range(5, 28), renderer=KNOWN)
        assert not set(found.ids) & set(range(5, 28))
        sampling = server.seen("/inference/v1/generate")[-1]["body"]["sampling_params"]
        assert sampling["allowed_token_ids"] == [*range(5), 28, 29, 30, 31]
        assert "logit_bias" not in sampling
        with pytest.raises(EngineError, match="needs the model's renderer"):
            ask(VllmEngine, server.url, banned=[7])


def started(kind, home, **options):
    (home / kind).mkdir(parents=True, exist_ok=True)
    return managed.start_command(kind, home, Path("model"), host="127.0.0.1", port=1, **options)


def test_vllm_is_started_with_drafts_that_are_told_of(tmp_path):
    with pytest.raises(
        UsageError, match=r"recreate it with `python contrib/cpu_servers.py install vllm`"
    ):
        started("vllm", tmp_path, speculate=5)
    fixed = managed.packages(tmp_path / "vllm") / f"{managed.DRAFTS}.py"
    fixed.parent.mkdir(parents=True)
    fixed.touch()
    (command,) = started("vllm", tmp_path, speculate=5).commands
    told = command[command.index("--speculative-config") + 1]
    assert '"method": "ngram"' in told
    assert '"num_speculative_tokens": 5' in told
    assert command[command.index("--per-request-spec-decode-metrics") + 1] == "summary"
    assert "--speculative-config" not in started("vllm", tmp_path).commands[0]


def test_sglang_drafts_on_a_gpu_alone(tmp_path):
    (command,) = started("sglang", tmp_path, speculate=5, gpu=True).commands
    # The id before them counts.
    assert command[command.index("--speculative-num-draft-tokens") + 1] == "6"
    with pytest.raises(UsageError, match="kernels that need a GPU"):
        started("sglang", tmp_path, speculate=5)
    with pytest.raises(UsageError, match="llamacpp is not supported"):
        started("llamacpp", tmp_path, speculate=5)


def test_auto_that_turns_out_to_be_sglang_refuses_what_it_cannot_be_trained_with(tmp_path):
    torch = pytest.importorskip("torch")
    from turnwright.config import EngineConfig, RolloutConfig, RunConfig, TrainConfig
    from turnwright.training import make_engine

    def make(server, steps=1, **rollout):
        engine = EngineConfig(kind="auto", urls=(server.url,))
        config = RunConfig(
            engine=engine, rollout=RolloutConfig(**rollout), train=TrainConfig(steps=steps)
        )
        return make_engine(config, tmp_path, torch.nn.Linear(1, 1), None, tmp_path)

    with kit.servers("sglang", "vllm") as (sglang, vllm):
        for key, value in (("top_p", 0.9), ("top_k", 5)):
            with pytest.raises(
                ConfigError,
                match=rf"rollout\.{key} = {value}: SGLang returns logprobs .* answers at engine\.urls",  # noqa: E501
            ):
                make(sglang, **{key: value})
            make(vllm, **{key: value})
            make(sglang, steps=0, **{key: value})  # nothing is trained on
        make(sglang)
