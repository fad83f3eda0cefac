"""Faults at every await of many episodes at once, by the benchmark that prints them; and long
texts off the event loop."""

from __future__ import annotations

import faults
import pytest
from kit.rollouts import AsyncTalk, Sampler, facts, tasks

import turnwright as tw
from turnwright.rollouts import episode


@pytest.mark.parametrize(
    ("mode", "count"),
    [
        ("async", 256),
        ("thread", 256),
        ("process", 64),
        pytest.param("process", 256, marks=pytest.mark.slow),
    ],
)
def test_every_fault_at_every_await_is_named_and_touches_nothing_else(mode, count, monkeypatch):
    if count < 256:
        monkeypatch.setitem(faults.DEADLINE_S, mode, 5.0)
    found = faults.run(mode, count)
    assert faults.wrong(found) == []
    assert len(found["table"]) >= 20


class Long(AsyncTalk):
    """Opens with a long text, and answers with another."""

    async def reset(self, task, *, seed=None):
        return "Begin. " * 4000

    async def step(self, action):
        return tw.Step("a long line \u00e9 " * 3000, terminated=False)


def test_long_texts_are_encoded_aside_to_the_same_ids(monkeypatch):
    threads = []
    aside = episode.EnvSession.in_thread

    async def counted(self, function, *args):
        threads.append(function.__name__)
        return await aside(self, function, *args)

    monkeypatch.setattr(episode.EnvSession, "in_thread", counted)
    limits = tw.Limits(turns=3)
    got = tw.rollout(Long, tasks(2), Sampler(), limits=limits)
    assert sorted(threads) == ["open"] * 2 + ["render_observation"] * 6
    monkeypatch.setattr(episode, "THREAD_ENCODE_CHARS", 10**9)
    assert [facts(t) for t in got] == [
        facts(t) for t in tw.rollout(Long, tasks(2), Sampler(), limits=limits)
    ]
