"""Graders of other frameworks give those frameworks' verdicts, in any thread, and bounded.

`grader_verdicts.json` has what the originals said; `make test-compat` need not be installed for it.
"""

import asyncio
import json
import threading
from pathlib import Path
from types import SimpleNamespace

import pytest

from turnwright.envs.user_imports import import_foreign

VERDICTS = json.loads((Path(__file__).parent / "grader_verdicts.json").read_text("utf-8"))[
    "verdicts"
]


def by_slime(kind):
    hub = import_foreign("slime.rollout.rm_hub")

    def verdict(response, label, metadata=None):
        sample = SimpleNamespace(
            response=response, label=label, metadata=metadata or {}, custom_rm_path=None
        )
        return asyncio.run(hub.async_rm(SimpleNamespace(rm_type=kind, custom_rm_path=None), sample))

    return verdict


def by_verl(name):
    return import_foreign(f"verl.utils.reward_score.{name}").compute_score


def by_swift(reply, solution):
    return import_foreign("swift.rewards.orm").orms["accuracy"]()([reply], [solution])[0]


def by_trl(reply, solution):
    return import_foreign("trl.rewards").accuracy_reward(
        [[{"role": "assistant", "content": reply}]], [solution]
    )[0]


GRADERS = {
    **{f"slime.{kind}": by_slime(kind) for kind in ("math", "deepscaler", "dapo", "f1", "gpqa")},
    **{
        f"verl.{name}": by_verl(name)
        for name in ("math_reward", "geo3k", "math_dapo", "gsm8k", "math_verify")
    },
    "verl.search": by_verl("search_r1_like_qa_em"),
    "swift.accuracy": by_swift,
    "trl.accuracy": by_trl,
}


def same(one, other):
    if isinstance(one, float) and isinstance(other, (int, float)):
        return one == pytest.approx(other, abs=1e-12)
    return one == other


@pytest.mark.parametrize("grader", sorted(VERDICTS))
def test_the_verdicts_are_the_originals(grader):
    wrong = []
    for *args, verdict in VERDICTS[grader]:
        got = GRADERS[grader](*args)
        if not same(got, verdict):
            wrong.append((args, verdict, got))
    assert wrong == []


def test_the_verdicts_are_of_both_kinds_for_every_grader():
    assert sorted(VERDICTS) == sorted(GRADERS)
    for rows in VERDICTS.values():
        verdicts = [row[-1]["score"] if isinstance(row[-1], dict) else row[-1] or 0 for row in rows]
        assert sum(verdict > 0 for verdict in verdicts) >= 10
        assert sum(verdict <= 0 for verdict in verdicts) >= 10


@pytest.mark.parametrize(
    "grader", ["slime.math", "swift.accuracy", "trl.accuracy", "verl.math_verify"]
)
def test_a_thread_and_the_main_thread_agree(grader):
    rows = VERDICTS[grader][::6]
    here = [GRADERS[grader](*args) for *args, _ in rows]
    there = []
    thread = threading.Thread(
        target=lambda: there.extend(GRADERS[grader](*args) for *args, _ in rows)
    )
    thread.start()
    thread.join()
    assert there == here


@pytest.mark.parametrize(
    "grader", ["slime.math", "swift.accuracy", "trl.accuracy", "verl.math_verify", "verl.geo3k"]
)
@pytest.mark.parametrize(
    "answer",
    [
        "9**9**9**9",
        "9^9^9^9",
        "{" * 10_000,
        "\\frac{" * 2_000,
        "9" * 20_000,
        "(" * 5_000,
        "().__class__",
        "x" * 50_000,
    ],
)
def test_a_hostile_answer_is_wrong(grader, answer):
    assert not GRADERS[grader](f"so \\boxed{{{answer}}}", "7")


@pytest.mark.parametrize(
    "answer",
    ["s('1')", "li('ii')", "(1).a", "[a for a in a]", "a if a else a", "ii(aa=1)", "{1:a}"],
)
def test_what_is_no_expression_is_not_evaluated(answer):
    from turnwright_compat.graders.symbolic import _parsed

    with pytest.raises((SyntaxError, TypeError, ValueError, AttributeError, KeyError)):
        _parsed(answer)


@pytest.mark.parametrize(
    ("named", "response", "reward"),
    [("boxed_f1", "x \\boxed{a cat}", 1.0), ("boxed_gpqa", "\\boxed{B}", 1.0)],
)
def test_a_prefix_reads_the_last_box(named, response, reward):
    label = "cat" if named == "boxed_f1" else "B"
    assert by_slime(named)(response, label) == reward
    assert by_slime(None)(response, label, {"rm_type": named}) == reward


def test_names_of_slime_and_miles_are_there_and_others_are_named():
    assert by_slime("random")("x", "y") in (0, 1)
    assert by_slime("gemma_math")("thought<channel|>\\boxed{7}", "7") == 1
    with pytest.raises(NotImplementedError, match="there are deepscaler"):
        by_slime("rouge")("x", "y")
    with pytest.raises(ImportError, match="evaluation_lib"):
        by_slime("ifbench")("x", "y", {"instruction_id_list": ["a"]})


def test_verl_chooses_by_the_source_of_a_row():
    score = import_foreign("verl.utils.reward_score").default_compute_score
    assert score("openai/gsm8k", "#### 7", "7") == 1.0
    assert score("lighteval/MATH", "\\boxed{7}", "7") == 1.0
    assert score("aime24", "Answer: 7", "7")["score"] == 1.0
    assert score("hiyouga/geometry3k", "<think>a</think>\\boxed{7}", "7") == pytest.approx(1.0)
    assert score("searchR1_nq", "<answer>The cat</answer>", {"target": ["cat"]}) == 1.0
    with pytest.raises(NotImplementedError, match="numina_cn_k12"):
        score("numina_cn_k12", "7", "7")


def test_trl_skips_a_solution_that_cannot_be_read():
    rewards = import_foreign("trl.rewards")
    reply = [[{"role": "assistant", "content": "<think>a</think>\\boxed{7}"}]]
    assert rewards.accuracy_reward(reply, ["$7$"]) == [1.0]
    assert rewards.accuracy_reward(reply, ["no idea"]) == [None]
    assert rewards.reasoning_accuracy_reward(reply, ["$7$"]) == [1.0]
    assert rewards.reasoning_accuracy_reward(
        [[{"role": "assistant", "content": "\\boxed{7}"}]], ["$7$"]
    ) == [0.0]
    assert rewards.get_cosine_scaled_reward(10)(reply, ["$7$"], [[1] * 10]) == [0.5]
    assert rewards.get_repetition_penalty_reward(2)([[1, 2, 3, 4], [5, 5, 5, 5, 5]]) == [0.0, -0.75]
