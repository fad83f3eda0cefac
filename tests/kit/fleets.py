"""Fleets of stand-in servers, weights to send them, and what is asked."""

from __future__ import annotations

import asyncio
from dataclasses import fields, replace

import pytest

from kit import remote_engines as kit
from turnwright.engines import Request
from turnwright.engines.remote import Fleet, LlamaCppEngine, SglangEngine, VllmEngine
from turnwright.engines.remote.fleet_settings import FleetSettings, WeightDelivery

QUICK = FleetSettings(check_s=0.3, health_s=2.0, misses=2, patience_s=60.0)


def described(settings=QUICK, **options):
    """Options by name, as the settings and the delivery of a fleet; others stay as they are."""
    delivery = {
        field.name: options.pop(field.name)
        for field in fields(WeightDelivery)
        if field.name in options
    }
    chosen = {
        field.name: options.pop(field.name)
        for field in fields(FleetSettings)
        if field.name in options
    }
    return {
        "settings": replace(settings, **chosen),
        "delivery": WeightDelivery(**delivery),
        **options,
    }


def fleet(servers, **options):
    kinds = {"vllm": VllmEngine, "sglang": SglangEngine, "llamacpp": LlamaCppEngine}
    return Fleet([kinds[server.kind](server.url) for server in servers], **described(**options))


def question(session="a", tokens=12, ids=kit.PROMPT, **more) -> Request:
    return Request(list(ids), tokens, frozenset({kit.END}), 7, session, **more)


def right(generation, weights, last=kit.PROMPT[-1]):
    """Whether every logprob is the one that these weights give its id."""
    rows = kit.table(weights)
    for token, logprob in zip(generation.ids, generation.logprobs, strict=True):
        if logprob != pytest.approx(rows[last][token]):
            return False
        last = token
    return bool(generation.ids)


async def many(engine, sessions, turns=3, pause=0.0):
    """Sessions of several turns, side by side; every turn extends the one before."""

    async def one(name):
        ids, found = list(kit.PROMPT), []
        for _ in range(turns):
            last = ids[-1]
            found.append((await engine.generate(question(name, ids=ids)), last))
            ids += found[-1][0].ids
            await asyncio.sleep(pause)
        engine.release(name)
        return found

    return await asyncio.gather(*(one(f"s{number}") for number in range(sessions)))


async def until(condition, seconds=30.0):
    async with asyncio.timeout(seconds):
        while not condition():
            await asyncio.sleep(0.02)


def weights(seed):
    import torch

    return [("seed", torch.tensor([float(seed)]))]


def fingerprint(rows):
    """The trainer's own takes transformers to import."""
    return " ".join(f"{name}={tensor.tolist()}" for name, tensor in rows)


CONFIG = {"peft_type": "LORA", "r": 4}


def scores(seed):
    """What a trainer with these weights says of ids."""
    return lambda ids: kit.State("vllm", seed).scores(ids)


GENERATE = {"vllm": "/inference/v1/generate", "sglang": "/generate"}
LOAD = {"vllm": "/v1/load_lora_adapter", "sglang": "/load_lora_adapter"}
both = pytest.mark.parametrize("kind", ["vllm", "sglang"])
