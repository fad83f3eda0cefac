"""Plain words: names, docstrings, comments, messages and documents use the field's terms, none of the private words below.

`python tests/test_plain_words.py [PATH ...]` lists what it finds.
"""

from __future__ import annotations

import io
import re
import sys
import tokenize
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
WORDS = frozenset(
    """
    told said says shown heard whole behind stands lies aside afresh anew
    whoever somebody nobody nursery nurseries obituary inmate inmates warden prison jail courier
    couriers parcel parcels shelf shelves eyes
    """.split()  # noqa: SIM905
)
ALLOWED: dict[str, dict[str, str]] = {
    "docs/environments.md": {"shown": "argument of the built-in environment zoom"},
    "docs/runs.md": {"said": "a key of the journal"},
    "turnwright/engines/remote/base.py": {"told": "a counter's key, waited_as_told"},
    "turnwright/envs/builtin/geometry.py": {"whole": "a rule that the model reads"},
    "turnwright/envs/builtin/hop.py": {"stands": "a rule that the model reads"},
    "turnwright/envs/builtin/zoom.py": {
        "stands": "a question that the model reads",
        "whole": "tool schema and alt text that the model reads",
        "shown": "argument of the environment",
    },
    "turnwright/envs/isolation/process_env.py": {"nursery": "the environment variable TURNWRIGHT_NURSERY"},
    "turnwright/envs/rewards/judge.py": {"says": "the question to the judge"},
    "turnwright/envs/simulated_user.py": {"says": "the question to the simulated user"},
    "turnwright/envs/tools/results.py": {"shown": "the truncation marker that the model reads"},
    "turnwright/envs/tools/schema_check.py": {"whole": "an argument error that the model reads"},
    "turnwright/errors.py": {"afresh": "an exception's name in older records"},
    "turnwright/records/journal.py": {"said": "a key of the journal"},
    "turnwright/renderers/contract.py": {"shown": "a value of TemplateContract.system, printed as JSON"},
    "turnwright/renderers/history.py": {"shown": "text that the model reads in place of an image"},
    "turnwright/renderers/parsers/readers.py": {"stands": "tool-call errors that the model reads"},
    "turnwright/renderers/render_check.py": {"said": "a key of the rows in sanity.jsonl"},
    "turnwright/rollouts/recorder.py": {"said": "a key of the journal"},
    "turnwright/rollouts/conversation.py": {"shown": "the metric media_shown"},
    "turnwright/rollouts/observations.py": {"shown": "the truncation marker that the model reads"},
    "turnwright/viewer/diagnosis.py": {"said": "a key of the rows in sanity.jsonl"},
}
"""File -> word -> why it may be there: data that is read by a model or by older files, a quotation, or a name of others."""
_PIECES = re.compile(r"[A-Z]?[a-z]+|[A-Z]+(?![a-z])")


def words_of(text: str) -> set[str]:
    """Return the listed words of a text, names split at underscores and capitals."""
    return {piece.lower() for piece in _PIECES.findall(text)} & WORDS


def found_in_python(source: str) -> Iterator[tuple[int, str]]:
    """Yield (line, word) for names, comments, docstrings and other strings of a Python file."""
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        if token.type in (tokenize.NAME, tokenize.COMMENT, tokenize.STRING):
            for number, line in enumerate(token.string.split("\n"), token.start[0]):
                for word in sorted(words_of(line)):
                    yield number, word


def found_in_prose(source: str) -> Iterator[tuple[int, str]]:
    """Yield (line, word) for a document's text, code blocks included."""
    for number, line in enumerate(source.splitlines(), 1):
        for word in sorted(words_of(line)):
            yield number, word


def found_in(path: Path) -> list[tuple[int, str]]:
    """Return (line, word) for each word that is neither plain nor allowed."""
    source = path.read_text(encoding="utf-8")
    allowed = ALLOWED.get(str(path.relative_to(ROOT)), {})
    if not words_of(source) - allowed.keys():  # far quicker than its tokens
        return []
    found = found_in_python(source) if path.suffix == ".py" else found_in_prose(source)
    return [(line, word) for line, word in found if word not in allowed]


def files() -> list[Path]:
    """Return the product's modules, templates and documents."""
    product = [path for path in (ROOT / "turnwright").rglob("*.py") if "templates" not in path.relative_to(ROOT).parts]
    return sorted([*product, *(ROOT / "docs").rglob("*.md"), ROOT / "README.md", ROOT / "CONTRIBUTING.md"])


@pytest.mark.parametrize("path", files(), ids=lambda path: str(path.relative_to(ROOT)))
def test_words_are_plain(path):
    found = found_in(path)
    assert not found, "\n".join(f"{path.relative_to(ROOT)}:{line}: {word}" for line, word in found)


def test_words_are_found_in_names_strings_and_comments():
    source = 'def heard(x):\n    """What the world said."""\n    return NotTold  # stands alone\n'
    assert list(found_in_python(source)) == [(1, "heard"), (2, "said"), (3, "told"), (3, "stands")]
    assert words_of("SaidBefore wholeText theirs") == {"said", "whole"}


def test_allowances_are_needed():
    for name, words in ALLOWED.items():
        path = ROOT / name
        source = path.read_text(encoding="utf-8")
        found = {word for _, word in (found_in_python(source) if path.suffix == ".py" else found_in_prose(source))}
        assert set(words) <= found, f"{name}: {sorted(set(words) - found)} need no allowance any more"


if __name__ == "__main__":
    for path in [Path(word).resolve() for word in sys.argv[1:]] or files():
        for one in sorted(path.rglob("*.py")) if path.is_dir() else [path]:
            for line, word in found_in(one):
                print(f"{one.relative_to(ROOT)}:{line}: {word}")
