"""Rows that a loop builds from the texts of its messages: what is trained is what the engine
sampled, where it sampled it."""

from dataclasses import dataclass

import pytest
from hypothesis import given
from hypothesis import strategies as st

from turnwright.errors import EnvError
from turnwright_compat.sampled_rows import EngineCall, read_output

END, BLANK, OPENING = 1, 2, (3, 4)
"""The end token, a line break, and what opens a reply."""


@dataclass
class Reply:
    """What the reader needs of a reply."""

    ids: tuple[int, ...]
    logprobs: tuple[float, ...]


texts = st.lists(st.integers(10, 13), min_size=1, max_size=3).map(tuple)
turns = st.lists(st.tuples(texts, texts), min_size=1, max_size=4)


def episode(spoken, *, keeps_opening, masks_blanks):
    """Return the calls of an episode, and a row of its messages: replies with their end and a line
    break, then observations."""
    context, calls, response, mask = [9, *OPENING], [], [], []
    for number, (reply, observation) in enumerate(spoken):
        ids = (*reply, END)
        calls.append(EngineCall(list(context), Reply(ids, (-0.5,) * len(ids))))
        opening = OPENING if number and keeps_opening else ()
        response += [*opening, *ids, BLANK, *observation, BLANK]
        mask += (
            [0] * len(opening) + [1] * len(ids) + [int(masks_blanks)] + [0] * (len(observation) + 1)
        )
        context += [*ids, BLANK, *observation, BLANK, *OPENING]
    return calls, {
        "prompt_token_ids": [[9, *OPENING]],
        "response_ids": [response],
        "loss_masks": [mask],
        "rewards": [1.0],
    }


@given(turns, st.booleans(), st.booleans())
def test_replies_are_trained_and_nothing_else(spoken, keeps_opening, masks_blanks):
    calls, row = episode(spoken, keeps_opening=keeps_opening, masks_blanks=masks_blanks)
    weights = {}
    weigh = lambda reply, found: weights.__setitem__(id(reply), found)  # noqa: E731
    scores = read_output(row, calls, weigh, is_blank=lambda ids: set(ids) == {BLANK})
    assert [weights[id(call.reply)] for call in calls] == [
        [1.0] * len(call.reply.ids) for call in calls
    ]
    assert scores.own == 1.0
    assert scores.metrics.get("blank_ids_not_trained", 0) == masks_blanks * len(spoken)
    moved = 0 if keeps_opening else len(spoken) - 1
    assert scores.metrics.get("replies_in_other_contexts", 0) == moved


@given(turns, st.booleans(), st.data())
def test_an_id_that_was_not_sampled_is_an_error(spoken, keeps_opening, data):
    """One id of one reply is another in the row."""
    calls, row = episode(spoken, keeps_opening=keeps_opening, masks_blanks=True)
    (response,), (mask,) = row["response_ids"], row["loss_masks"]
    trained = [
        at
        for at, (one, kept) in enumerate(zip(response, mask, strict=True))
        if kept and one != BLANK
    ]
    response[data.draw(st.sampled_from(trained))] = 99
    with pytest.raises(EnvError, match="the engine did not sample that id"):
        read_output(row, calls, lambda reply, found: None, is_blank=lambda ids: set(ids) == {BLANK})


def test_loops_of_other_systems_write_what_was_sampled():
    calls, row = episode([((10,), (11,)), ((12,), (13,))], keeps_opening=False, masks_blanks=True)
    with pytest.raises(EnvError, match="the engine did not sample that id"):
        read_output(row, calls, lambda reply, found: None)
