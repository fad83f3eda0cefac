"""What a prompt shows of earlier turns: the modes and policies, over templates that rewrite
history in all known ways."""

from __future__ import annotations

import random
from collections import Counter

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from kit import corpus
from kit.histories import APPEND_ONLY, TEMPLATES, Chat, Look, Speaker, in_use, renderer
from kit.play_functions import forgets
from kit.rollouts import check_record, linear, tasks

import turnwright as tw
from turnwright.config import load
from turnwright.config.names import HISTORY_POLICIES
from turnwright.renderers.history import POLICIES, drop_reasoning, keep_images
from turnwright.rollouts.runner import parse_history

FEW = settings(max_examples=40, deadline=None)
LIMITS = tw.Limits(turns=12, turn_tokens=60, on_turn_length="continue", context=900)
REASONS = frozenset(
    (
        "thinking_stripped",
        "reply_dropped",
        "reply_rewritten",
        "close_swapped",
        "prefix_changed",
        "preamble_changed",
    )
)
"""What `docs/concepts.md` says of templates that render earlier turns differently."""
SPEAKS = ("chatml", "folds", "strips_on_user", "strips_always", "prefilled", "swaps", "headers")


HISTORIES = ("append", "template", "drop_reasoning:1", "keep_images:0", forgets)


def episodes(name, history, seed, *, env=Look, kind="bpe", ends=0.95, aborts=0.0, count=2):
    return played(
        renderer(name, kind), history, seed, env=env, ends=ends, aborts=aborts, count=count
    )


def played(text, history, seed, *, env, ends=0.95, aborts=0.0, count=2, fails=()):
    engine = Speaker(250, text=text, ends=ends, aborts=aborts)
    rows = tw.rollout(
        env, tasks(count), engine, renderer=engine.text, seed=seed, limits=LIMITS, history=history
    )
    for trajectory in rows:
        error = trajectory.error
        assert error is None or error.type in fails, (error.message, error.traceback)
        check_record(trajectory, engine.calls)
        for number, turn in enumerate(trajectory.turns):
            assert (
                len(trajectory.prompt_ids(number))
                + sum(len(trajectory.spans[i].ids) for i in turn.spans)
                <= LIMITS.context
            )
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
        assert linear(trajectory) or trajectory.branches, (
            "history was rewritten and nothing says so"
        )


@FEW
@given(
    name=st.sampled_from(sorted(TEMPLATES)),
    history=st.sampled_from(("append", "template")),
    seed=st.integers(0, 2**32),
)
def test_the_invariants_hold_where_only_users_speak(name, history, seed):
    episodes(name, history, seed, env=Chat)


@FEW
@given(
    name=st.sampled_from(APPEND_ONLY),
    kind=st.sampled_from(("bpe", "unigram")),
    seed=st.integers(0, 2**32),
)
def test_an_append_only_template_never_branches_however_a_reply_is_spelled(name, kind, seed):
    for trajectory in episodes(
        name,
        "template",
        seed,
        kind=kind,
        ends=1.0,
        env=Look if name in ("chatml", "folds") else Chat,
    ):
        replies = [turn.reply for turn in trajectory.turns]
        allowed = set()
        if any(reply.reasoning is not None and not reply.reasoning.strip() for reply in replies):
            allowed.add("thinking_stripped")  # these templates show no thinking that holds nothing
        if any(
            reply.reasoning is not None and not reply.text and not reply.tool_calls
            for reply in replies
        ):
            allowed.add("reply_rewritten")  # thinking that was not closed is closed by the template
        if allowed:
            assert trajectory.branches.keys() <= allowed
        else:
            assert not trajectory.branches
            assert linear(trajectory)


@pytest.mark.skipif(
    not corpus.distinct(),
    reason="no templates are cached: PYTHONPATH=tests python -m kit.corpus fetches them",
)
@settings(max_examples=50, deadline=None)
@given(
    data=st.data(),
    history=st.sampled_from(HISTORIES),
    seed=st.integers(0, 2**32),
    env=st.sampled_from((Look, Chat)),
)
def test_over_the_templates_in_use_the_invariants_hold_in_every_mode(data, history, seed, env):
    text = in_use(*data.draw(st.sampled_from(corpus.distinct())))
    if text is None:
        return
    for trajectory in played(text, history, seed, env=env, fails=("TemplateError",)):
        known = (
            REASONS
            if history == "template"
            else {r for r in trajectory.branches if r.startswith("policy:")}
        )
        assert set(trajectory.branches) <= known
        assert linear(trajectory) or trajectory.branches


def test_thinking_stays_behind_tools_and_goes_when_a_user_speaks():
    call = (
        '<think>\nfirst\n</think>\n\n<tool_call>\n{"name": "look", "arguments": {"key": '
        '"a"}}\n</tool_call>'
    )
    engine = tw.ScriptedEngine(
        [call, call, "<think>\nlast\n</think>\n\nYes.", "<think>\nmore\n</think>\n\nNo."]
    )

    class Calm(Look):
        turns = 4
        texts = ("found",)

    (trajectory,) = tw.rollout(
        Calm, tasks(1), engine, renderer=renderer("strips_on_user"), history="template", seed=3
    )
    assert trajectory.error is None
    answers = [turn.messages[0].role for turn in trajectory.turns[1:]]
    assert answers == ["tool", "tool", "user"]
    assert trajectory.branches == {"thinking_stripped": 1}
    assert [len(row.ids) > 0 for row in trajectory.samples()] == [True, True]
    text = renderer("strips_on_user")
    assert text.decode(trajectory.prompt_ids(2)).count("first") == 2
    assert "think" not in text.decode(trajectory.prompt_ids(3))


class Mixed(Look):
    """Now and then goes on inside the model's message, or takes some of it back."""

    def step(self, action):
        step = super().step(action)
        if step.terminated or self.rng.random() < 0.6:
            return step
        keep = self.rng.randrange(action.tokens + 1) if self.rng.random() < 0.5 else None
        return step._replace(observation=tw.InlineObservation(" and then", keep_tokens=keep))


@FEW
@given(
    name=st.sampled_from(SPEAKS),
    history=st.sampled_from(("append", "template", "drop_reasoning:1")),
    seed=st.integers(0, 2**32),
)
def test_messages_that_grow_are_replies_like_any_other(name, history, seed):
    for trajectory in episodes(name, history, seed, env=Mixed):
        others = {
            reason
            for reason in trajectory.branches
            if reason not in REASONS and not reason.startswith("policy:")
        }
        assert others <= {"close_dropped", "rewound"}


async def best_of_two(task, model):
    """Two replies to each prompt at the same time; the conversation goes on with one of them."""
    rng = random.Random(task.id)
    messages = [{"role": "user", "content": "Begin."}]
    for _ in range(4):
        first, second = await model.generate(messages), await model.generate(messages)
        messages = [
            *messages,
            rng.choice((first, second)).message,
            {"role": "user", "content": rng.choice("ab")},
        ]
        if rng.random() < 0.3:
            messages[0] = {"role": "user", "content": f"Begin {rng.choice('xy')}."}
    return 1.0


@settings(max_examples=30, deadline=None)
@given(
    name=st.sampled_from(SPEAKS),
    history=st.sampled_from(("append", "template", "drop_reasoning:1", forgets)),
    seed=st.integers(0, 2**32),
)
def test_play_functions_keep_the_invariants_in_every_mode(name, history, seed):
    for trajectory in episodes(name, history, seed, env=best_of_two):
        assert {
            r for r in trajectory.branches if r not in REASONS and not r.startswith("policy:")
        } <= {"edited"}


def test_replies_in_an_edited_history_stand_as_they_were_sampled():
    text = renderer("folds")
    letters = [text.encode(letter)[0] for letter in "word"]
    assert text.encode("word") != letters
    reply = [*letters, min(text.stop_ids)]

    async def edits(task, model):
        first = await model.generate([tw.Message("user", "Begin.")])
        await model.generate(
            [tw.Message("user", "Begin again."), first.message, tw.Message("user", "On.")]
        )
        return 1.0

    (trajectory,) = tw.rollout(edits, tasks(1), tw.ScriptedEngine([reply, reply]), renderer=text)
    received = trajectory.prompt_ids(1)
    at = received.index(letters[0], received.index(letters[1]) - 1)
    assert received[at : at + 5] == reply
    assert sum(sum(row.weights) for row in trajectory.samples()) == 10


def test_a_policy_that_keeps_what_a_template_strips_is_not_undone_by_it():
    engine = tw.ScriptedEngine([f"<think>\nt{n}\n</think>\n\nYes {n}." for n in range(4)])

    class Users(Chat):
        turns = 4
        texts = ("On.",)

    text = renderer("strips_always")
    (trajectory,) = tw.rollout(Users, tasks(1), engine, renderer=text, history=drop_reasoning(2))
    assert trajectory.branches == {"policy:drop_reasoning:2": 1}
    shown = text.decode(trajectory.prompt_ids(3))
    assert ["t0" in shown, "t1" in shown, "t2" in shown] == [False, True, True]
    check = Counter(shown.split("\n"))
    assert check["Yes 0.<|im_end|>"] == 1


def test_keep_images_leaves_the_last_ones():
    one, two = tw.ImageRef("a" * 64), tw.ImageRef("b" * 64)
    messages = [
        tw.Message("user", ("look", one)),
        tw.Message("assistant", "ok"),
        tw.Message("user", (two, "and this")),
    ]
    shown = keep_images(1)(messages, (1,))
    assert shown[0].content == ("look", "[image no longer shown]")
    assert shown[1] is messages[1]
    assert shown[2] is messages[2]
    assert keep_images(2)(messages, (1,)) == messages
    assert [len(m.images) for m in keep_images(0)(messages, (1,))] == [0, 0, 0]


def test_a_policy_that_cannot_be_shown_fails_its_episode_and_says_why():
    def nothing(conversation, replies):
        return []

    def words(conversation, replies):
        return ["hello"]

    for policy, said in (
        (nothing, "no message before the first reply"),
        (words, "returned 'hello'"),
    ):
        engine = tw.ScriptedEngine(["Yes."] * 8)
        rows = tw.rollout(Chat, tasks(2), engine, renderer=renderer("folds"), history=policy)
        assert all(row.reward is None for row in rows)
        assert said in rows[0].error.message


@pytest.mark.parametrize(
    ("said", "why"),
    [
        ("templates", "did you mean 'template'"),
        ("drop_resoning:2", "did you mean 'drop_reasoning'"),
        ("drop_reasoning", "say how many, as in drop_reasoning:2"),
        ("nonsense", "there are append"),
        ("nowhere.py:policy", "no such file"),
        ("object:mine", "resume it with the same call"),
    ],
)
def test_a_history_that_there_is_not_is_a_mistake_that_names_what_was_meant(said, why):
    with pytest.raises(tw.UsageError, match=why):
        tw.rollout(Chat, tasks(1), tw.ScriptedEngine(["x"]), history=said)


def test_a_recipe_says_which_history(tmp_path):
    recipe = tmp_path / "recipe.toml"
    (tmp_path / "own.py").write_text("def last(conversation, replies):\n    return conversation\n")
    recipe.write_text('[[env]]\nuse = "hop"\n[rollout]\nhistory = "own.py:last"\n')
    assert load(recipe).config.rollout.history == f"{tmp_path / 'own.py'}:last"
    for said, why in (
        ("templat", "did you mean 'template'"),
        ("keep_images:x", "say how many"),
        ("no.py:f", "no such file"),
    ):
        with pytest.raises(tw.UsageError, match=why):
            load(recipe, [f"--rollout.history={said}"])
    assert (
        load(recipe, ["--rollout.history", "drop_reasoning:2"]).config.rollout.history
        == "drop_reasoning:2"
    )
    assert set(HISTORY_POLICIES) == set(POLICIES)


def test_policies_by_name_and_from_a_file(tmp_path):
    (tmp_path / "own.py").write_text(
        "def last(conversation, replies):\n    return conversation[:1] + conversation[-1:]\n"
    )
    engine = tw.ScriptedEngine(["Yes."] * 8)
    (row,) = tw.rollout(
        Chat, tasks(1), engine, renderer=renderer("folds"), history=f"{tmp_path / 'own.py'}:last"
    )
    assert set(row.branches) == {"policy:last"}
    assert parse_history("keep_images:3").name == "keep_images:3"
    with pytest.raises(tw.UsageError, match="not 3"):
        parse_history(3)


def test_a_long_observation_is_cut_in_a_branch_too():
    engine = tw.ScriptedEngine(["<think>\nhm\n</think>\n\nYes."] * 3)

    class Long(Chat):
        turns = 3
        texts = ("word " * 200,)

    limits = tw.Limits(observation_tokens=20)
    text = renderer("strips_always")
    (row,) = tw.rollout(Long, tasks(1), engine, renderer=text, history="template", limits=limits)
    assert row.error is None
    assert row.branches
    assert row.metrics["observation_tokens_cut"] > 100
    assert "[cut: " in row.turns[1].messages[0].text


@settings(max_examples=25, deadline=None)
@given(
    name=st.sampled_from(("chatml", "folds", "strips_on_user", "strips_always")),
    seed=st.integers(0, 2**32),
)
def test_in_template_mode_the_engine_sees_what_a_full_render_shows(name, seed):
    """Where replies are spelled as the template would; each prompt is held against a
    rendering of its own."""
    text = renderer(name)
    thought = "" if name == "chatml" else "<think>\nhm\n</think>\n\n"
    engine = tw.ScriptedEngine(
        lambda messages, rng: f"{thought}{rng.choice(('Yes.', 'No, two', 'So.'))}"
    )
    rows = tw.rollout(Chat, tasks(2), engine, renderer=text, history="template", seed=seed)
    for trajectory in rows:
        assert trajectory.error is None
        assert bool(trajectory.branches) is name.startswith("strips")
        for number, turn in enumerate(trajectory.turns):
            shown = [*trajectory.conversation(turn.parent), *turn.messages]
            assert trajectory.prompt_ids(number) == text.open(shown).ids
