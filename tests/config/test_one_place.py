"""A key is declared in its section and nowhere else: `--keys`, tables, checks and paths follow from
its field and its need."""

from __future__ import annotations

import importlib.util
import json
import subprocess
import sys
from pathlib import Path

import pytest

SCHEMA = Path(importlib.util.find_spec("turnwright.config.schema").origin)
ANCHOR = """    epochs: PositiveInt = 1
"""
NEED_ANCHOR = """        yield Need(("kl_estimator", "kl_in"), """
NEED = """        yield Need(("new_share",), self.kl > 0, "train.kl > 0")
"""
FIELDS = '''    new_share: Fraction = 0.25
    """Share that is new; 0 is none."""
    new_file: Annotated[str | None, PathKind.DATA] = None
    """File that is new."""
    new_mode: Literal["fast", "slow"] = "slow"
    """How new it is."""
'''
PROGRAM = '''
import importlib.util, json, sys, warnings
from pathlib import Path

class Finder:
    """Finds the changed schema in place of the package's."""
    @staticmethod
    def find_spec(name, path=None, target=None):
        return importlib.util.spec_from_file_location(name, "schema.py") if name == "turnwright.config.schema" else None

sys.meta_path.insert(0, Finder)
sys.path.insert(0, sys.argv[1])
from recipe_keys import tables
from turnwright.config import TrainConfig, load
from turnwright.config.recipe import from_python
from turnwright.config.dump import help_keys
from turnwright.errors import ConfigError

def attempt(make):
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        try:
            train = make().config.train
            result = [train.new_share, train.new_mode, train.new_file]
        except ConfigError as error:
            result = str(error)
    return [result, *(str(one.message) for one in caught)]

def recipe(lines, *words):
    Path("r.toml").write_text("[train]\\n" + lines + "\\n[[env]]\\nuse = 'hop'\\n")
    return attempt(lambda: load(Path("r.toml"), words))

def python(**train):
    return attempt(lambda: from_python({"train": train}, "tw.train()"))

print(json.dumps(eval(sys.stdin.read(), {**globals()})))
'''  # noqa: E501


@pytest.fixture(scope="module")
def evaluate(tmp_path_factory):
    """Evaluates an expression in a process whose schema has three more fields, and
    nothing else that differs."""
    folder = tmp_path_factory.mktemp("schema")
    text = SCHEMA.read_text(encoding="utf-8")
    for anchor, added in ((ANCHOR, FIELDS), (NEED_ANCHOR, NEED)):
        assert text.count(anchor) == 1
        text = text.replace(anchor, added + anchor)
    (folder / "schema.py").write_text(text, encoding="utf-8")
    (folder / "rows.jsonl").write_text("{}\n")

    def run(expression: str):
        words = [sys.executable, "-c", PROGRAM, str(Path(__file__).parents[1] / "docs")]
        done = subprocess.run(words, input=expression, capture_output=True, text=True, cwd=folder)
        assert done.returncode == 0, done.stderr
        return json.loads(done.stdout)

    run.folder = folder
    return run


def test_help_and_tables_have_the_new_key(evaluate):
    lines, page = evaluate("[[line for line in help_keys() if 'new-' in line], tables()]")
    assert lines == [
        "--train.new-share (a number; default 0.25): Share that is new; 0 is none. Needs "
        "`train.kl > 0`.",
        '--train.new-file (a string in quotes or "none"; default "none"): File that is new.',
        '--train.new-mode (one of "fast", "slow"; default "slow"): How new it is.',
    ]
    assert (
        "| `new_share` | a number | `0.25` | Share that is new; 0 is none. Needs `train.kl > 0`. |"
        in page
    )


def test_values_are_held_to_type_bounds_needs_and_files(evaluate):
    errors = evaluate(
        "[one[0] for one in (recipe('kl = 0.1\\nnew_share = 1.5'), recipe('new_share = 0.5'), "
        "recipe('new_mode = \"fats\"'), recipe('new_file = \"row.jsonl\"'), recipe('new_shar = "
        "1'), recipe('', '--train.new-share', 'x'), python(kl=0.1, new_share=-1.0))]"
    )
    assert errors == [
        "r.toml: train.new_share = 1.5: must be from 0 to 1",
        "r.toml: train.new_share = 0.5: has no effect: it needs train.kl > 0; set that, or leave "
        "this out",
        'r.toml: train.new_mode = "fats": must be one of "fast", "slow"; did you mean \'fast\'?',
        f'r.toml: train.new_file = "{evaluate.folder}/row.jsonl": no such file; did you mean '
        "'rows.jsonl'?",
        "r.toml: unknown key 'train.new_shar'; did you mean 'train.new_share'?",
        "command line: --train.new-share x: must be a number; `--train.new-share VALUE`",
        "tw.train(): train.new_share = -1.0: must be from 0 to 1",
    ]
    path = str(evaluate.folder / "rows.jsonl")
    # Relative to the recipe.
    assert evaluate("recipe('new_file = \"rows.jsonl\"')") == [[0.25, "slow", path]]
