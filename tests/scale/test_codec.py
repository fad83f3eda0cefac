"""What travels arrives as it was, and nothing else is accepted."""

from __future__ import annotations

import json

import orjson
import pytest
from hypothesis import given
from hypothesis import strategies as st

import turnwright as tw
from turnwright.engines import Generation, Request, Sampling, StopText
from turnwright.errors import UsageError
from turnwright.media import MediaStore
from turnwright.types import ROUTES, EpisodeKey, ExpertRoutes, ImageRef
from turnwright_cluster.base import GroupSpec, PlayedGroup
from turnwright_cluster.codec import (
    Contexts,
    dumps,
    generation_row,
    group_row,
    pack,
    read_generation,
    read_group,
    read_request,
    read_spec,
    request_row,
    spec_row,
    unpack,
)

LEAVES = (
    st.none()
    | st.booleans()
    | st.integers(-(2**63), 2**63 - 1)
    | st.floats(allow_nan=False, allow_infinity=False)
    | st.text()
)
LEAVES = LEAVES.filter(lambda leaf: not isinstance(leaf, str) or leaf.isprintable())


@given(
    st.recursive(
        LEAVES,
        lambda inner: (
            st.lists(inner)
            | st.lists(inner).map(tuple)
            | st.dictionaries(st.text(max_size=3), inner)
        ),
    )
)
def test_data_of_tasks_arrives_as_it_was(value):
    found = unpack(orjson.loads(orjson.dumps(pack(value, "task"))))
    assert found == value
    assert repr(found) == repr(value)  # tuples and floats too


@pytest.mark.parametrize(
    "value", [{1, 2}, b"bytes", float("nan"), 2**70, {1: "one"}, object(), {"tuple": [1]}]
)
def test_data_that_json_would_change_is_refused(value):
    with pytest.raises(UsageError, match="task 'x' has a"):
        pack([value], "task 'x'")


def test_a_group_arrives_as_it_was(tmp_path):
    picture = tw.Image(b"", name="p")
    task = tw.Task(
        [{"role": "user", "content": "hi"}], answer=(1, 2.5), id="t", info={"a": [1, (2,)]}, env="e"
    )
    key = EpisodeKey("train", 3, "t", 1)
    plays = {key: (({"e": "turn", "k": ["train", 3, "t", 1, 0], "n": 0},),)}
    spec = GroupSpec(
        "e",
        task,
        (key,),
        Sampling(0.7, min_p=0.1),
        frozenset({"routes"}),
        4,
        False,
        True,
        plays,
        {"x": [1]},
    )
    row = orjson.loads(dumps(spec_row(spec, MediaStore(tmp_path))))
    assert read_spec(row, lambda ref: picture) == spec


def test_images_of_a_task_arrive_by_hash(tmp_path):
    import numpy as np

    pixels = np.arange(48, dtype=np.uint8).reshape(4, 4, 3)
    store = MediaStore(tmp_path)
    task = tw.Task(
        [{"role": "user", "content": ["see", tw.Image(pixels, alt="dots")]}],
        images=[tw.Image(pixels, max_pixels=4)],
    )
    row = spec_row(GroupSpec("e", task, (EpisodeKey("train", 0, task.id, 0),), Sampling()), store)
    found = read_spec(
        json.loads(dumps(row)),
        lambda ref: tw.Image(store.pixels(ImageRef(ref.sha256)), max_pixels=ref.max_pixels),
    )
    part = found.task.messages[0].content[1]
    assert isinstance(part, ImageRef)
    assert part.alt == "dots"
    assert (found.task.images[0].value == pixels).all()
    assert found.task.images[0].max_pixels == 4


def test_an_engine_call_and_its_answer_arrive_as_they_were():
    renderer = tw.byte_renderer()
    banned = renderer.banned_ids | {7}
    stop = StopText(["end"], renderer.decode).continued_after([101, 110])
    request = Request(
        [1, 2, 101, 110],
        5,
        frozenset({3}),
        2**64 - 1,
        "train/0/t/1/0",
        "train/0/t",
        2,
        Sampling(top_k=3),
        "main",
    )
    for field, value in {
        "stop_text": stop,
        "reply_position": 2,
        "min_version": 3,
        "banned_ids": banned,
        "routes_from": 1,
        "alternatives": 4,
    }.items():
        setattr(request, field, value)
    ends = Contexts(), Contexts()
    row = json.loads(dumps(request_row(request, renderer.banned_ids, ends[0], messages=True)))
    found = read_request(row, renderer.decode, renderer.banned_ids, ends[1])
    assert found.stop_text is not None
    assert found.stop_text.completes([100])  # "en" was sampled before
    for field in Request.__dataclass_fields__:
        if field not in ("stop_text", "messages", "media"):
            assert getattr(found, field) == getattr(request, field), field
    request.ids = [*request.ids, 5, 6]
    row = json.loads(dumps(request_row(request, renderer.banned_ids, ends[0], messages=False)))
    assert row["ids"] == [5, 6]  # the others were sent
    assert read_request(row, renderer.decode, renderer.banned_ids, ends[1]).ids == request.ids
    with pytest.raises(ValueError, match="ids of a context of"):
        read_request(row, renderer.decode, renderer.banned_ids, ends[1])
    routes = ExpertRoutes(bytes(range(12)), 2, 3)
    answer = Generation(
        [1, 2], [-0.1, None], "stop", 4, 9, {ROUTES: (2, routes)}, "mask", 3, 1, [(1, 5)], 3, True
    )
    for alternatives in ([], [[(1, -0.1), (9, -2.5)], [(7, -0.25)]]):
        answer.alternatives = alternatives
        again = read_generation(json.loads(dumps(generation_row(answer))))
        assert again == answer


def test_the_end_of_a_group_arrives_as_it_was():
    group = PlayedGroup(("train", 1, "t"), 7)
    assert read_group(json.loads(dumps(group_row(group)))) == group
