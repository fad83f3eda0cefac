"""New weights as a LoRA adapter alone: each policy answers by a name of its own, and
nobody answers for it."""

from __future__ import annotations

import asyncio
import json
import os
import signal

import pytest
from kit import remote_engines as kit
from kit.fleets import (
    CONFIG,
    GENERATE,
    LOAD,
    both,
    fingerprint,
    fleet,
    question,
    right,
    scores,
    until,
    weights,
)
from kit.own_servers import fleet as own_fleet

from turnwright.engines.remote import managed
from turnwright.engines.remote.server_adapters import NAME
from turnwright.engines.remote.weight_files import AdapterDirectories
from turnwright.errors import SyncError, UsageError


@pytest.fixture
def directories(tmp_path):
    pytest.importorskip("safetensors.torch")
    return AdapterDirectories(tmp_path / "directories", lambda: CONFIG, fingerprint=fingerprint)


RESUME = {"vllm": "/resume", "sglang": "/continue_generation"}


@both
def test_every_policy_answers_by_its_own_name_and_the_one_before_goes(directories, kind):
    with kit.servers(kind, kind) as servers:

        async def work():
            version = 0
            engine = fleet(
                servers, directories=directories, expected_logprobs=lambda ids: scores(version)(ids)
            )
            for version in (3, 4, 5):
                assert await engine.update(weights(version), version) == fingerprint(
                    weights(version)
                )
                made = await asyncio.gather(
                    *(
                        engine.generate(question(f"{version}{n}", min_version=version))
                        for n in range(8)
                    )
                )
                assert all(right(one, version) and one.version == version for one in made)
            await engine.close()
            return [member.engine.owner for member in engine.members]

        owners = kit.run(work())
        assert len(set(owners)) == 2
        for server, owner in zip(servers, owners, strict=True):
            names = [
                NAME.format(owner, version, number) for number, version in enumerate((3, 4, 5), 1)
            ]
            asked = [
                row["body"]
                for row in server.seen(GENERATE[kind])
                if row["body"].get("logprob_start_len") != 0
            ]
            assert {body["model" if kind == "vllm" else "lora_path"] for body in asked} == set(
                names
            )
            assert kind == "sglang" or len({body["cache_salt"] for body in asked}) == 3
            assert [row["body"]["lora_name"] for row in server.seen(LOAD[kind])] == names
            gone = [
                row["body"]["lora_name"]
                for row in server.seen(LOAD[kind].replace("/load", "/unload"))
            ]
            assert gone == names
            assert not server.seen("/collective_rpc")
            assert not server.seen("/update_weights_from_disk")
    assert sorted(path.name for path in directories.root.iterdir()) == ["policy-4", "policy-5"]
    assert sorted(path.name for path in (directories.root / "policy-5").iterdir()) == [
        "adapter_config.json",
        "adapter_model.safetensors",
    ]
    assert json.loads((directories.root / "policy-5" / "adapter_config.json").read_text()) == CONFIG


@both
def test_calls_in_flight_end_first_and_sampling_goes_on_after(directories, kind):
    with kit.servers(kind) as server:

        async def work():
            engine = fleet([server], directories=directories)
            await engine.update(weights(3), 3)
            server.fault("slow", seconds=0.4)
            flying = asyncio.create_task(engine.generate(question("a")))
            await until(lambda: engine.members[0].calls)
            await asyncio.sleep(0.1)
            await engine.update(weights(4), 4)
            found = await engine.generate(question("b", min_version=4))
            late = await flying
            await engine.close()
            return late, found

        late, found = kit.run(work())
        assert right(late, 3)
        assert right(found, 4)
        paths = [row["path"].partition("?")[0] for row in server.seen()]
        assert RESUME[kind] not in paths  # it was not paused, for others may use it


def test_a_server_without_routes_for_developers_takes_adapters_and_its_calls_are_asked_again(
    directories, monkeypatch
):
    monkeypatch.setattr("turnwright.engines.remote.server_adapters.DRAIN_S", 0.2)
    with kit.servers("vllm", KIT_PLAIN="1") as server:

        async def work():
            engine = fleet([server], directories=directories)
            await engine.update(weights(3), 3)
            server.fault("slow", seconds=1.0)
            flying = asyncio.create_task(engine.generate(question("a")))
            await until(lambda: engine.members[0].calls)
            await asyncio.sleep(0.1)
            await engine.update(weights(4), 4)
            late = await flying
            await engine.close()
            return late

        late = kit.run(work())
        assert right(late, 4)
        assert late.version == 4
        assert not any(row["path"].startswith("/pause") for row in server.seen())


@both
def test_a_server_that_was_started_anew_is_given_the_adapter_before_it_is_asked(directories, kind):
    with kit.servers(kind, kind) as servers:

        async def work():
            engine = fleet(servers, directories=directories)
            await engine.update(weights(3), 3)
            made = await asyncio.gather(
                *(engine.generate(question(f"s{n}", min_version=3)) for n in range(4))
            )
            servers[0].kill()
            servers[0].start()
            made += await asyncio.gather(
                *(engine.generate(question(f"s{n}", min_version=3)) for n in range(16))
            )
            await until(lambda: all(member.state == "up" for member in engine.members))
            made += await asyncio.gather(
                *(engine.generate(question(f"t{n}", min_version=3)) for n in range(16))
            )
            await engine.close()
            return made

        assert all(right(one, 3) for one in kit.run(work()))
        assert len(servers[0].seen(LOAD[kind])) == 1
        assert servers[0].seen(GENERATE[kind])


@both
def test_servers_of_a_run_start_with_the_model_and_come_back_with_the_adapter(
    home,
    directories,
    kind,
):
    async def work():
        base = home / "base"
        base.mkdir()
        from safetensors.torch import save_file

        save_file(dict(weights(1)), base / "model.safetensors")
        engine = own_fleet(home, kind, directories=directories, base=base)
        await engine.update(weights(3), 3)
        before = await engine.generate(question(min_version=3))
        (server,) = engine.started
        os.kill(server.pid, signal.SIGKILL)
        await until(lambda: server.starts == 2)
        after = await engine.generate(question(min_version=3))
        await engine.update(weights(4), 4)
        last = await engine.generate(question(min_version=4))
        log = server.log.read_text()
        await engine.close()
        return before, after, last, log

    before, after, last, log = kit.run(work())
    assert right(before, 3)
    assert right(after, 3)
    assert right(last, 4)
    assert log.count(f"{'--model' if kind == 'vllm' else '--model-path'} {home / 'base'}") == 2


@both
def test_an_adapter_that_is_listed_and_does_nothing_is_found_out(directories, kind):
    with kit.servers(kind, KIT_DEAF="1") as server:

        async def work():
            engine = fleet([server], directories=directories, expected_logprobs=scores(3))
            with pytest.raises(
                SyncError,
                match=r"samples from others: its logprobs of known ids differ from the trainer's by up to",  # noqa: E501
            ):
                await engine.update(weights(3), 3)
            await engine.close()

        kit.run(work())


def test_what_takes_no_adapters_says_what_to_do(directories, tmp_path):
    with kit.servers("llamacpp") as server:

        async def work():
            engine = fleet([server], directories=directories)
            with pytest.raises(
                SyncError,
                match=r"this kind of server does not take LoRA adapters \(engine.update\)",
            ):
                await engine.update(weights(3), 3)
            await engine.close()

        kit.run(work())
    started = dict(host="127.0.0.1", port=1)
    for kind in ("vllm", "sglang", "llamacpp"):
        (tmp_path / kind).mkdir()
    (command,) = managed.start_command("vllm", tmp_path, tmp_path, lora=17, **started).commands
    assert command[command.index("--max-lora-rank") + 1] == "32"
    with pytest.raises(UsageError, match="up to rank 512, not 513"):
        managed.start_command("vllm", tmp_path, tmp_path, lora=513, **started)
    with pytest.raises(
        UsageError, match="predates the fix for SGLang's LoRA on a CPU; recreate it with"
    ):
        managed.start_command("sglang", tmp_path, tmp_path, lora=17, **started)
    (command,) = managed.start_command(
        "sglang", tmp_path, tmp_path, lora=17, gpu=True, **started
    ).commands
    assert command[command.index("--max-lora-rank") + 1] == "17"
    assert "torch_native" not in command
    with pytest.raises(
        UsageError, match="LoRA adapters work with vLLM and SGLang, not with llamacpp"
    ):
        managed.start_command("llamacpp", tmp_path, tmp_path, lora=17, **started)


@pytest.mark.parametrize(
    ("kind", "words", "said"),
    [
        (
            "llamacpp",
            ["--engine.update", "lora", "--lora.rank", "2"],
            "adapters go to vLLM and SGLang only, but llama.cpp",
        ),
        (
            "vllm",
            ["--engine.update", "tensors"],
            "weights in requests go to SGLang only, but vLLM answers at engine.urls",
        ),
        ("sglang", ["--rollout.top-p", "0.9"], "SGLang answers at engine.urls"),
    ],
)
def test_what_a_server_behind_a_url_cannot_do_is_said_before_anything_is_played(
    tmp_path, capsys, kind, words, said
):
    pytest.importorskip("peft")
    from turnwright.cli.main import main

    with kit.servers(kind) as server:
        told = [
            "--engine.kind",
            "auto",
            "--engine.urls",
            json.dumps([server.url]),
            "--display",
            "none",
            *words,
        ]
        assert main(["train", "--env.use", "hop", "--out", str(tmp_path / "run"), *told]) == 2
    assert said in capsys.readouterr().err
