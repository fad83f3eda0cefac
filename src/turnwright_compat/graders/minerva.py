"""Integers after `Answer:`, compared as texts, as Minerva's checker does and after it DAPO's in
slime and verl.

`after_answer` reads the last line after `Answer:`, and `strict_box` reads the last box instead.
"""

from __future__ import annotations

import re

from turnwright_compat.graders.boxes import BOX, content_of, last_box

LAST = 300
"""Characters of a reply that are read; a strict box has to be in the last 100."""
MISSING = "[INVALID]"

_ANSWER = re.compile(r"(?i)Answer\s*:\s*([^\n]+)")

_REPLACED = {
    "an ": "",
    "a ": "",
    ".$": "$",
    "\\$": "",
    "\\ ": "",
    " ": "",
    "mbox": "text",
    ",\\text{and}": ",",
    "\\text{and}": ",",
    "\\text{m}": "\\text{}",
}
_WORDS = (
    "square ways integers dollars mph inches hours km units \\ldots sue points feet minutes digits "
    "cents degrees cm gm pounds meters meals edges students childrentickets multiples"
)
_COMMANDS = (
    "\\text{s}",
    "\\text{.}",
    "\\text{\ns}",
    "\\text{}^2",
    "\\text{}^3",
    "\\text{\n}",
    "\\text{}",
    "\\mathrm{th}",
    "^\\circ",
    "^{\\circ}",
    "\\;",
    ",\\!",
    "{,}",
    '"',
    "\\dots",
)
_DROPPED = (*_WORDS.split(), *_COMMANDS)
"""Texts that are dropped, one after another: the order is part of the verdict."""
END_TOKENS = ("<|im_end|>", "<|endoftext|>")
"""Also dropped by slime."""


def normalize(answer: str, dropped: tuple[str, ...] = ()) -> str:
    """Return an answer after its last equals sign, without words of units, wrappers and separators
    of thousands."""
    answer = answer.split("=")[-1]
    for old, new in _REPLACED.items():
        answer = answer.replace(old, new)
    for word in (*_DROPPED, *dropped):
        answer = answer.replace(word, "")

    # A formula within a sentence stands for the sentence.
    answer = re.sub(r"(.*?)\$(.*?)\$(.*)", r"$\2$", answer)
    for wrapper in ("text", "textbf", "overline"):
        answer = re.sub(rf"\\{wrapper}\{{(.*?)\}}", r"\1", answer)
    answer = re.sub(r"\\boxed\{(.*)\}", r"\1", answer)
    answer = re.sub(r"frac([^{])(.)", r"frac{\1}{\2}", answer)
    answer = re.sub(r"sqrt([^{])", r"sqrt{\1}", answer)

    # In an answer of digits and commas alone, commas separate thousands.
    answer = answer.replace("$", "")
    digits = answer.replace(",", "")
    if digits.isdigit():
        answer = digits
    return answer.strip()


def after_answer(
    reply: str, truth: object, dropped: tuple[str, ...] = (), *, integer: bool
) -> tuple[bool, str]:
    """Return whether the last line after `Answer:` is the right answer, and that line; `integer`
    cuts the answer to one.

    Raises:
        ValueError: for an answer that is no number, with `integer`.
    """
    lines = _ANSWER.findall(reply)
    answer = normalize(lines[-1] if lines else MISSING, dropped)
    right_answer = normalize(str(truth), dropped)
    if integer:
        right_answer = str(int(float(right_answer)))
    return answer == right_answer, answer


def strict_box(reply: str, truth: object) -> tuple[bool, str | None]:
    """Return whether the content of the last box is the text of the answer, and that content."""
    content = content_of(last_box(reply[-100:], (BOX,)))
    return content == truth, content
