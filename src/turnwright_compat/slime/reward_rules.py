"""Rewards of slime by name.

`async_rm` finds the rule of a sample in `RULES`. Each is a function of the reply, the label of the
row and its metadata; those for mathematics compare answers by `turnwright_compat.graders`. Names
and signatures are those that user code imports of `slime.rollout.rm_hub` (`stand_ins.py`).
"""

from __future__ import annotations

import asyncio
import hashlib
import importlib
import random
import re
import string
from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from typing import Any

from turnwright_compat.slime.utilities import load_function, post


def last_boxed_only_string(string: str) -> str | None:
    r"""Return the last ``\boxed{...}`` or ``\fbox{...}`` of a text; None without one."""
    from turnwright_compat.graders.boxes import last_box

    return last_box(string)


def remove_boxed(s: str | None) -> str | None:
    r"""Return the content of ``\boxed{...}``; None for anything else."""
    from turnwright_compat.graders.boxes import content_of

    return content_of(s)


def extract_boxed_answer(solution: str) -> str | None:
    """Return the content of the last box of a text; None without one."""
    return remove_boxed(last_boxed_only_string(solution))


def extract_answer(passage: str) -> str | None:
    r"""Return the content of the last ``\boxed{...}`` of a text; None without one."""
    return extract_boxed_answer(passage) if "\\boxed" in passage else None


def mathd_normalize_answer(answer: str | None) -> str | None:
    """Return an answer as `grade_answer_mathd` compares it."""
    from turnwright_compat.graders.hendrycks import normalize

    return normalize(answer)


def grade_answer_mathd(given_answer: str | None, ground_truth: str | None) -> bool:
    """Whether two answers are the same text after rewriting."""
    return mathd_normalize_answer(given_answer) == mathd_normalize_answer(ground_truth)


def grade_answer_sympy(given_answer: str, ground_truth: str | None) -> bool:
    """Whether SymPy finds an answer equal to the right one."""
    from turnwright_compat.graders.symbolic import equal_by_sympy

    return equal_by_sympy(given_answer, ground_truth)


def grade_answer_verl(solution_str: str, ground_truth: Any) -> bool:
    r"""Whether the last ``\boxed{...}`` of a text is the right answer, which
    may stand in a box too."""
    if not ground_truth:
        return False

    truth = str(ground_truth)
    right = extract_answer(truth) if "\\boxed" in truth else truth
    answer = extract_answer(solution_str)
    if answer is None:
        return False
    return grade_answer_mathd(answer, right) or grade_answer_sympy(answer, right)


def get_deepscaler_rule_based_reward(response: str, label: Any) -> int:
    """Return 1 for the right answer in the last box after `</think>` or `###Response`, else 0."""
    if "</think>" in response:
        text = response.rpartition("</think>")[2]
    elif "###Response" in response:
        text = response.split("###Response")[1]
    else:
        return 0
    return _grade(text, label)


def get_gemma_math_reward(response: str, label: Any) -> int:
    """Return 1 for the right answer in the last box after Gemma's thoughts, if
    there are any, else 0."""
    return _grade(response.rpartition("<channel|>")[2], label)


def _grade(text: str, label: Any) -> int:
    answer = extract_answer(text)
    if answer is None or label == "":
        return 0
    if not isinstance(label, (str, float, int)):
        raise TypeError(
            f"the label of a row is {type(label).__name__}; this grader takes a text or a number"
        )

    truth = str(label)
    right = extract_answer(truth) if "\\boxed" in truth else truth
    if right is None:
        return 0
    return int(grade_answer_mathd(answer, right) or grade_answer_sympy(answer, right))


def normalize_final_answer(final_answer: Any) -> str:
    """Return an answer as `compute_score` compares it."""
    from turnwright_compat.graders.minerva import END_TOKENS, normalize

    return normalize(str(final_answer), END_TOKENS)


def compute_score(
    solution_str: str,
    ground_truth: Any,
    strict_box_verify: bool = False,
    pause_tokens_index: Any = None,
) -> dict[str, Any]:
    """Return `score`, 1 or -1, with `acc` and `pred`: of the last line after `Answer:`, or with
    `strict_box_verify` of the last box, whose content must be the text of the answer."""
    from turnwright_compat.graders.minerva import END_TOKENS, LAST, after_answer, strict_box

    reply = solution_str[-LAST:]
    correct: bool
    pred: str | None
    if strict_box_verify:
        correct, pred = strict_box(reply, ground_truth)
    else:
        correct, pred = after_answer(reply, ground_truth, END_TOKENS, integer=True)
    return {"score": 1.0 if correct else -1.0, "acc": correct, "pred": pred}


CLOSED = ("yes", "no", "noanswer")


def normalize_answer(s: str) -> str:
    """Return a text in lower case, without punctuation, articles and repeated spaces."""
    letters = "".join(char for char in str(s).lower() if char not in string.punctuation)
    return " ".join(re.sub(r"\b(?:a|an|the)\b", " ", letters).split())


def f1_score(prediction: str | None, ground_truth: str) -> tuple[float, float, float]:
    """Return F1, precision and recall of the words; 0 for `yes`, `no` and `noanswer`
    against anything else."""
    answer = normalize_answer(prediction or "")
    right = normalize_answer(ground_truth)
    answer_words = answer.split()
    right_words = right.split()

    shared = sum((Counter(answer_words) & Counter(right_words)).values())
    if not shared or (answer != right and (answer in CLOSED or right in CLOSED)):
        return 0, 0, 0
    precision = shared / len(answer_words)
    recall = shared / len(right_words)
    return 2 * precision * recall / (precision + recall), precision, recall


_PATTERNS = (
    r"(?:answer|option|choice)\s*(?:is|:)?\s*([A-Z])",
    r"([A-Z])\s*(?:is\s*(?:the)?\s*correct)",
    r"final\s*(?:answer|option)\s*(?:is|:)?\s*([A-Z])",
)
LETTERS = string.ascii_uppercase[:10]
"""Letters of an answer where neither the choices nor their letters are known."""


def compute_gpqa_reward(
    response: str | None, label: Any, metadata: Mapping[str, Any] | None = None
) -> float:
    """Return 1 if a reply names the letter of the answer, or where no letter is known,
    contains its text; else 0.

    `metadata` may have `choices`, `valid_letters`, `correct_letter`, and
    `correct_answer` or `answer_text`.
    """
    if response is None:
        return 0.0

    info = dict(metadata or {})
    choices = info.get("choices") or ()
    if isinstance(choices, Mapping):
        choices = choices.values()
    texts = [str(choice) for choice in choices]
    valid_letters = info.get("valid_letters") or string.ascii_uppercase[: len(texts)] or LETTERS
    letters = [str(letter).upper() for letter in valid_letters]

    right = _letter_of_label(label, info.get("correct_letter"), letters)
    if right is None and isinstance(label, str) and label.strip():
        right = _letter_of_choice(label, texts, letters)

    reply = response.rpartition("</think>")[2]
    named = _named_letter(reply, letters)
    if named and right:
        return float(named == right)

    answers = [texts[letters.index(right)]] if right in letters[: len(texts)] else []
    answers += [str(info[key]) for key in ("correct_answer", "answer_text") if info.get(key)]
    if isinstance(label, str):
        answers.append(label)
    plain_answers = map(_plain, answers)
    return float(any(answer and answer in _plain(reply) for answer in plain_answers))


def _letter_of_label(label: Any, correct_letter: Any, letters: Sequence[str]) -> str | None:
    """Return the right letter: as `correct_letter` gives it, or as the
    label is one, or its number."""
    given = correct_letter.strip().upper() if isinstance(correct_letter, str) else ""
    if isinstance(label, (int, float)):
        if 0 <= int(label) < len(letters):
            return letters[int(label)]
    elif isinstance(label, str) and not given:
        letter = label.strip().upper()
        return letter if len(label.strip()) == 1 and letter in letters else None
    return given or None


def _letter_of_choice(label: str, texts: Sequence[str], letters: Sequence[str]) -> str | None:
    for number, text in enumerate(texts):
        if _plain(text) == _plain(label):
            return letters[number]
    return None


def _named_letter(text: str, letters: Collection[str]) -> str | None:
    """Return the letter that a text names as its answer, else the last one that stands alone."""
    for pattern in _PATTERNS:
        match = re.search(pattern, text, flags=re.IGNORECASE)
        if match and match[1].upper() in letters:
            return match[1].upper()

    alone = [letter for letter in re.findall(r"\b([A-Z])\b", text) if letter in letters]
    return alone[-1] if alone else None


def _plain(text: str) -> str:
    return re.sub(r"[^a-z0-9]+", " ", text.lower()).strip()


def compute_ifbench_reward(
    response: str | None, label: Any, metadata: Mapping[str, Any] | None = None
) -> float:
    """Return 1 if a reply follows all instructions of `metadata`: `instruction_id_list`,
    `kwargs`, `prompt_text`; else 0.

    Raises:
        ImportError: without IFBench's `evaluation_lib`; slime clones it, we do not.
    """
    info = metadata or {}
    names: list[str] = []
    for name in info.get("instruction_id_list") or ():
        if name is not None and str(name).strip():
            names.append(str(name).strip())
    if response is None or not names:
        return 0.0

    try:
        library = importlib.import_module("evaluation_lib")
    except ImportError as error:
        raise ImportError(
            f"rm_type = ifbench needs IFBench's evaluation_lib ({error}); clone "
            "https://github.com/allenai/IFBench, install its requirements, and add its folder to "
            "PYTHONPATH"
        ) from error

    prompt = "" if info.get("prompt_text") is None else str(info["prompt_text"])
    example = library.InputExample(
        key=int(info.get("record_id") or 0),
        instruction_id_list=names,
        prompt=prompt,
        kwargs=_arguments(info.get("kwargs"), len(names)),
    )
    checked = library.test_instruction_following_strict(example, {prompt: str(response)})
    return float(bool(checked.follow_all_instructions))


def _arguments(given: Any, count: int) -> list[dict[str, Any]]:
    """Return arguments for each instruction, without nulls: one mapping is for all, and the last
    one for those without."""
    rows: Sequence[Any] = given if isinstance(given, list) else []
    if isinstance(given, Mapping):
        rows = [given] * count

    arguments = [dict(row) if isinstance(row, Mapping) else {} for row in rows][:count]
    last = arguments[-1] if arguments else {}
    arguments += [dict(last) for _ in range(count - len(arguments))]
    return [{key: value for key, value in row.items() if value is not None} for row in arguments]


RULES = {
    "deepscaler": lambda response, label, metadata: get_deepscaler_rule_based_reward(
        response, label
    ),
    "gemma_math": lambda response, label, metadata: get_gemma_math_reward(response, label),
    "dapo": lambda response, label, metadata: compute_score(response, label),
    "math": lambda response, label, metadata: int(grade_answer_verl(response, label)),
    "f1": lambda response, label, metadata: f1_score(response, label)[0],
    "gpqa": compute_gpqa_reward,
    "ifbench": compute_ifbench_reward,
    "random": lambda response, label, metadata: random.randint(0, 1),
}
REMOTE = "remote_rm"
BY_CONTENT = "deterministic_random"
BOXED = "boxed_"
"""Prefix of a rule that reads what is in the last box."""


async def async_rm(args: Any, sample: Any, **options: Any) -> Any:
    """Return the reward of a sample: of `custom_rm_path` of the sample, else of `args`, else of the
    rule in the sample's metadata or in `args.rm_type`.

    Raises:
        NotImplementedError: for no rule, or one that is not here.
    """
    custom = sample.custom_rm_path or args.custom_rm_path
    if custom:
        return await load_function(custom)(args, sample, **options)

    metadata = sample.metadata if isinstance(sample.metadata, dict) else {}
    named = str(metadata.get("rm_type") or args.rm_type or "").strip()
    kind = named.removeprefix(BOXED)
    response = sample.response
    if named.startswith(BOXED):
        response = extract_answer(response) or ""

    if kind == REMOTE:
        request = {"prompt": sample.prompt, "response": sample.response, "label": sample.label}
        return await post(args.rm_url, request)
    if kind == BY_CONTENT:
        return hashlib.sha256(f"{sample.tokens}{response}".encode()).digest()[0] % 2
    rule = RULES.get(kind)
    if rule is None:
        raise NotImplementedError(
            f"rm_type {named!r}; there are {', '.join(RULES)}, each also with {BOXED}, and {REMOTE}"
        )
    # A grader may take seconds for a hard expression, and other episodes go on meanwhile.
    return await asyncio.to_thread(rule, response, sample.label, metadata)


async def batched_async_rm(args: Any, samples: Sequence[Any], **options: Any) -> Any:
    """Return the rewards of several samples, which a custom reward gets at once."""
    if args.custom_rm_path:
        return await load_function(args.custom_rm_path)(args, samples, **options)
    return await asyncio.gather(*(async_rm(args, sample, **options) for sample in samples))
