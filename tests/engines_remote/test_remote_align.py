"""Which logprob belongs to which id where a server leaves some out."""

from __future__ import annotations

from itertools import combinations

from hypothesis import given
from hypothesis import strategies as st

from turnwright.engines.remote.response import align_logprobs

IDS = st.lists(st.integers(0, 3), max_size=9)


@given(IDS, st.data())
def test_an_id_gets_its_own_logprob_or_none(ids, data):
    kept = (
        sorted(data.draw(st.sets(st.integers(0, len(ids) - 1), max_size=len(ids)))) if ids else []
    )
    found = align_logprobs(ids, [(ids[place], -float(place) - 1) for place in kept])
    assert len(found) == len(ids)
    for place, logprob in enumerate(found):
        assert logprob is None or logprob == -float(place) - 1


@given(IDS, st.data())
def test_it_is_as_certain_as_can_be(ids, data):
    """An entry is placed exactly where every way of placing all entries in order
    puts it at the same id."""
    kept = (
        sorted(data.draw(st.sets(st.integers(0, len(ids) - 1), max_size=len(ids)))) if ids else []
    )
    entries = [(ids[place], -float(number) - 1) for number, place in enumerate(kept)]
    ways = [
        way
        for way in combinations(range(len(ids)), len(kept))
        if all(ids[p] == e[0] for p, e in zip(way, entries, strict=True))
    ]
    certain = {
        places.pop(): number
        for number in range(len(kept))
        if len(places := {way[number] for way in ways}) == 1
    }
    assert align_logprobs(ids, entries) == [
        -float(certain[p]) - 1 if p in certain else None for p in range(len(ids))
    ]


@given(IDS)
def test_all_entries_are_all_logprobs(ids):
    assert align_logprobs(ids, [(token, -1.0) for token in ids]) == [-1.0] * len(ids)


@given(IDS, IDS)
def test_entries_of_other_ids_are_refused(ids, others):
    rest = iter(ids)
    inside = all(token in rest for token in others)
    assert (align_logprobs(ids, [(token, -1.0) for token in others]) is not None) == inside
