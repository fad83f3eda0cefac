"""What a prompt shows of earlier turns: the modes and policies, over templates that rewrite history in all known ways."""

from __future__ import annotations

import random
from dataclasses import replace

from history_kit import APPEND_ONLY, TEMPLATES, Chat, Look, Speaker, renderer
from hypothesis import given, settings
from hypothesis import strategies as st
from rollout_kit import check_record, linear, tasks

import turnwise as tw
from turnwise.render.compose import REASONS

FEW = settings(max_examples=60, deadline=None)
LIMITS = tw.Limits(turns=12, turn_tokens=60, on_turn_length="continue", context=900)
SPEAKS = ("chatml", "folds", "strips_on_user", "strips_always", "prefilled", "swaps", "headers")


def forgets(conversation, replies):
    """Drops, edits and makes up messages, by what was said alone."""
    rng = random.Random(len(conversation))
    shown = list(conversation[:1])
    for number, message in enumerate(conversation[1:-1], 1):
        kind = rng.randrange(5)
        if kind == 0 and number in replies:
            shown.append(replace(message, content="I said something.", tool_calls=(), reasoning=None))
        elif kind == 1:
            shown.append(tw.Message("user", "[left out]"))
        else:
            shown.append(message)
    return [*shown, conversation[-1]]


HISTORIES = ("append", "template", "drop_reasoning:1", "keep_images:0", forgets)


def episodes(name, history, seed, *, env=Look, kind="bpe", ends=0.95, aborts=0.0, count=2):
    engine = Speaker(250, text=renderer(name, kind), ends=ends, aborts=aborts)
    rows = tw.rollout(env, tasks(count), engine, renderer=engine.text, seed=seed, limits=LIMITS, history=history)
    for trajectory in rows:
        assert trajectory.error is None, (trajectory.error.message, trajectory.error.traceback)
        check_record(trajectory, engine.calls)
        for number, turn in enumerate(trajectory.turns):
            assert len(trajectory.received(number)) + sum(len(trajectory.spans[i].ids) for i in turn.spans) <= LIMITS.context
    return rows


@FEW
@given(
    name=st.sampled_from(SPEAKS),
    history=st.sampled_from(HISTORIES),
    kind=st.sampled_from(("bpe", "unigram")),
    seed=st.integers(0, 2**32),
    aborts=st.sampled_from((0.0, 0.3)),
)
def test_the_invariants_hold_in_every_history_mode(name, history, kind, seed, aborts):
    for trajectory in episodes(name, history, seed, kind=kind, ends=0.9, aborts=aborts):
        for reason, count in trajectory.branches.items():
            assert history != "append", "append never branches"
            assert reason in REASONS if history == "template" else reason.startswith("policy:")
            assert count >= 1
        assert linear(trajectory) or trajectory.branches, "history was rewritten and nothing says so"


@FEW
@given(name=st.sampled_from(sorted(TEMPLATES)), history=st.sampled_from(("append", "template")), seed=st.integers(0, 2**32))
def test_the_invariants_hold_where_only_users_speak(name, history, seed):
    episodes(name, history, seed, env=Chat)


@FEW
@given(name=st.sampled_from(APPEND_ONLY), kind=st.sampled_from(("bpe", "unigram")), seed=st.integers(0, 2**32))
def test_an_append_only_template_never_branches_however_a_reply_is_spelled(name, kind, seed):
    for trajectory in episodes(name, "template", seed, kind=kind, ends=1.0, env=Look if name in ("chatml", "folds") else Chat):
        assert not trajectory.branches
        assert linear(trajectory)
