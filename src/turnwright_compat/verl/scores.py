"""Rewards of verl by the source of a row; a rule of each is `compute_score` of a module there.

`default_compute_score` chooses the rule. Where two modules of verl have a function of one name,
`stand_ins.py` says which of these stands for it. The rules for mathematics compare answers by
`turnwright_compat.graders`.
"""

from __future__ import annotations

import re
import string
from collections.abc import Iterable
from typing import Any

from turnwright_compat.verl import gsm8k

_FORM = re.compile(r"<think>.*</think>.*\\boxed\{.*\}.*", re.DOTALL)


def format_reward(predict_str: str) -> float:
    """Return 1.0 for thoughts and then a box, else 0.0."""
    return float(_FORM.fullmatch(predict_str) is not None)


def acc_reward(predict_str: str, ground_truth: str, use_boxed: bool = True) -> float:
    """Return 1.0 for the right answer, else 0.0."""
    from turnwright_compat.graders.boxes import BOX, content_of, last_box
    from turnwright_compat.graders.symbolic import equal

    answer = predict_str
    if use_boxed:
        content = content_of(last_box(predict_str, (BOX,)))
        answer = "None" if content is None else content.strip()
    return float(equal(answer, ground_truth, percent=True))


def geo3k_score(
    predict_str: str, ground_truth: str, use_boxed: bool = True, format_score: float = 0.1
) -> float:
    """Return the score of the answer, of which `format_score` is for the form."""
    accuracy = acc_reward(predict_str, ground_truth, use_boxed)
    return (1.0 - format_score) * accuracy + format_score * format_reward(predict_str)


def normalize_final_answer(final_answer: str) -> str:
    """Return an answer as `compute_score` compares it."""
    from turnwright_compat.graders.minerva import normalize

    return normalize(final_answer)


def math_dapo_score(
    solution_str: str,
    ground_truth: str,
    strict_box_verify: bool = False,
    pause_tokens_index: Any = None,
) -> dict[str, Any]:
    """Return `score`, 1 or -1, with `acc` and `pred`: of the last line after
    `Answer:`; without one, or with `strict_box_verify`, of the last box, whose
    content must be the text of the answer."""
    from turnwright_compat.graders.minerva import LAST, MISSING, after_answer, strict_box

    reply = solution_str[-LAST:]
    correct: bool
    pred: str | None
    correct, pred = after_answer(reply, ground_truth, integer=False)
    if strict_box_verify:
        correct, pred = strict_box(reply, ground_truth)
    elif pred == MISSING:
        box_is_correct, content = strict_box(reply, ground_truth)
        if content is not None:
            correct, pred = box_is_correct, content
    return {"score": 1.0 if correct else -1.0, "acc": correct, "pred": pred}


def last_boxed_only_string(string: str) -> str | None:
    r"""Return the last ``\boxed{...}`` or ``\fbox{...}`` of a text, or what follows
    ``\boxed`` and a space."""
    from turnwright_compat.graders.boxes import last_box

    if "\\boxed " in string:
        return "\\boxed " + string.rpartition("\\boxed ")[2].partition("$")[0]
    return last_box(string)


def remove_boxed(s: str) -> str:
    r"""Return the content of a box; raise `ValueError` for another text."""
    from turnwright_compat.graders.boxes import content_of

    if "\\boxed " in s:
        if not s.startswith("\\boxed "):
            raise ValueError(f"{s!r:.80} does not begin with a box")
        return s.removeprefix("\\boxed ")
    content = content_of(s)
    if content is None:
        raise ValueError(f"{s!r:.80} is not a box")
    return content


def strip_string(string: str) -> str:
    """Return an answer as `is_equiv` compares it."""
    from turnwright_compat.graders.hendrycks import rewrite

    return rewrite(string)


def is_equiv(str1: str | None, str2: str | None, verbose: bool = False) -> bool:
    """Whether two answers are the same text after rewriting, or as they are
    where it does not apply."""
    if str1 is None or str2 is None:
        return str1 is str2
    try:
        return strip_string(str1) == strip_string(str2)
    except ValueError:
        return str1 == str2


def math_reward_score(solution_str: str, ground_truth: str) -> float:
    """Return 1.0 for the right answer in the last box, else 0.0."""
    box = last_boxed_only_string(solution_str)
    if box is None:
        return 0.0
    try:
        return float(is_equiv(remove_boxed(box), ground_truth))
    except ValueError:
        return 0.0


def math_verify_score(
    model_output: str, ground_truth: str, timeout_score: float = 0, timeout: float = 30.0
) -> float:
    """Return 1.0 for the right answer, else 0.0, and `timeout_score` where the
    comparison does not end."""
    from turnwright_compat.graders.verified import by_verl

    return by_verl(model_output, ground_truth, timeout_score)


_MANY_TAGS = 10
"""Tags of one kind beyond which an answer is worth a quarter."""


def normalize_answer(s: str) -> str:
    """Return a text in lower case, without punctuation, articles and repeated spaces."""
    letters = "".join(char for char in s.lower() if char not in string.punctuation)
    return " ".join(re.sub(r"\b(?:a|an|the)\b", " ", letters).split())


def _golden(answers: Any) -> Iterable[str]:
    return map(normalize_answer, [answers] if isinstance(answers, str) else answers)


def em_check(prediction: str, golden_answers: Any) -> int:
    """Return 1 if a text is one of the answers, else 0."""
    return int(normalize_answer(prediction) in _golden(golden_answers))


def subem_check(prediction: str, golden_answers: Any) -> int:
    """Return 1 if a text has one of the answers in it, else 0."""
    text = normalize_answer(prediction)
    return int(any(answer in text for answer in _golden(golden_answers)))


def extract_search_solution(solution_str: str) -> str | None:
    """Return what is between the last `<answer>` tags; None without them."""
    answers = re.findall(r"<answer>(.*?)</answer>", solution_str, re.DOTALL)
    return answers[-1].strip() if answers else None


def count_answer_tags(text: str) -> tuple[int, int]:
    """Return the numbers of opening and of closing tags."""
    return text.count("<answer>"), text.count("</answer>")


def search_score(
    solution_str: str,
    ground_truth: Any,
    method: str = "strict",
    format_score: float = 0.0,
    score: float = 1.0,
) -> float:
    """Return `score` for an answer of `ground_truth["target"]`, a quarter of it with many tags,
    `format_score` for another answer, 0 without one."""
    answer = extract_search_solution(solution_str)
    if answer is None:
        return 0
    if not em_check(answer, ground_truth["target"]):
        return format_score
    return score / 4 if max(count_answer_tags(solution_str)) > _MANY_TAGS else score


def compute_score_subem(
    solution_str: str,
    ground_truth: Any,
    method: str = "strict",
    format_score: float = 0.0,
    score: float = 1.0,
) -> float:
    """Return `score` for a text that has an answer of `ground_truth["target"]` in it,
    `format_score` for another one."""
    answer = extract_search_solution(solution_str)
    if answer is None:
        return 0
    return score if subem_check(answer, ground_truth["target"]) else format_score


MATH = ("lighteval/MATH", "DigitalLearningGmbH/MATH-lighteval", "HuggingFaceH4/MATH-500")
DAPO = ("math_dapo", "math", "math_dapo_reasoning")
_QUESTIONS = ("nq", "triviaqa", "popqa", "hotpotqa", "2wikimultihopqa", "musique", "bamboogle")
SEARCH = tuple(f"searchR1_{name}" for name in _QUESTIONS)


def default_compute_score(
    data_source: str, solution_str: str, ground_truth: Any, extra_info: Any = None, **kwargs: Any
) -> Any:
    """Return the score of a solution by the rule of its source: a number, or a dict with `score`.

    Raises:
        NotImplementedError: for another source, also where verl has a rule that is not here
            (`prime_math`, `prime_code`, `sandbox_fusion`).
    """
    score: Any
    if data_source == "openai/gsm8k":
        score = gsm8k.compute_score(solution_str, ground_truth)
    elif data_source in MATH:
        score = math_reward_score(solution_str, ground_truth)
    elif data_source in DAPO or data_source.startswith("aime"):
        score = math_dapo_score(solution_str, ground_truth)
    elif data_source == "hiyouga/geometry3k":
        score = geo3k_score(solution_str, ground_truth)
    elif data_source in SEARCH:
        score = search_score(solution_str, ground_truth)
    else:
        raise NotImplementedError(
            f"data_source {data_source!r} has no reward here; install verl for its others, or "
            "write compute_score"
        )
    return score if isinstance(score, dict) else float(score)


def get_default_compute_score(reward_name: str | None = None) -> Any:
    """Return `default_compute_score`."""
    return default_compute_score
