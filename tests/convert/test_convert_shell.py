"""The reader of shell scripts: words as a shell makes them, and nothing executed."""

import os
import shutil
import subprocess

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from turnwright.errors import ConfigError
from turnwright_compat.convert.shell import read_script, split_words


def words(text):
    return read_script(text).commands[-1]


@pytest.mark.parametrize(
    ("script", "expected"),
    [
        ("run --a 1 \\\n  --b '2 3'", ["run", "--a", "1", "--b", "2 3"]),
        ("A=1\nB=$A-${A}x\nrun $B", ["run", "1-1x"]),
        (
            'ARGS=(\n  --a 1  # why\n  # --b 2\n  --c "x y"\n)\nrun ${ARGS[@]}',
            ["run", "--a", "1", "--c", "x", "y"],
        ),
        ('ARGS=(--c "x y")\nrun "${ARGS[@]}"', ["run", "--c", "x y"]),
        ("A=(--x)\nA+=(--y 2)\nrun ${A[@]}", ["run", "--x", "--y", "2"]),
        ("N=${N:-8}\nrun n=${N} m=$((N * 2 + 1))", ["run", "n=8", "m=17"]),
        (': "${MODE:=fast}"\nrun $MODE', ["run", "fast"]),
        ('H=/h\nD="${D:-"$H/data set"}"\nrun "$D/x"', ["run", "/h/data set/x"]),
        ('export X=3\nrun "$X" $@ "$@"', ["run", "3"]),
        ("E=''\nrun a $E b ''", ["run", "a", "b", ""]),
        ('run "a#b" c#d # e', ["run", "a#b", "c#d"]),
        ("run '$HOME' \\$x", ["run", "$HOME", "$x"]),
        ("cat <<EOF\n don't --x 1\nEOF\nrun --y 2", ["run", "--y", "2"]),
        (
            'V=true\nif [ "$V" = "true" ]; then\n  A="--t 1"\nelse\n  A="--f 1"\nfi\nrun $A',
            ["run", "--t", "1"],
        ),
        (
            'V=no\nif [ "$V" = "true" ]; then\n  A=1\nelif [ "$V" = "no" ]; then\n  A=2\nelse\n  '
            "A=3\nfi\nrun $A",
            ["run", "2"],
        ),
    ],
)
def test_words_are_those_of_a_shell(script, expected):
    assert words(script) == expected


def test_what_only_a_shell_knows_stays_and_is_named():
    script = read_script('D=$(rm -rf never)\nrun $HOME/x "${KEY}" "$D" `date`')
    assert script.commands[-1] == ["run", "$HOME/x", "${KEY}", "$(rm...)", "$(date...)"]
    assert script.unresolved == ["$(rm...)", "$HOME", "${KEY}", "$(date...)"]


def test_nothing_is_executed(tmp_path):
    marker = tmp_path / "ran"
    read_script(
        f'touch {marker}\nA=$(touch {marker})\n`touch {marker}`\nrun "$(touch {marker})" '
        '$((__import__("os").getpid()))'
    )
    assert not marker.exists()


def test_a_condition_that_is_not_known_is_noted():
    script = read_script("if [ -f /etc/x ]; then\nrun --a 1\nelse\nrun --b 2\nfi")
    assert script.commands == [["run", "--a", "1"], ["run", "--b", "2"]]
    assert script.notes == ["both branches of `if [ -f /etc/x ]` are read"]


@pytest.mark.parametrize("text", ["run 'open", 'run "open', "x" * 1_000_001])
def test_a_script_that_cannot_be_read_is_one_line(text):
    with pytest.raises(ConfigError, match="the script has"):
        read_script(text)


def test_a_script_that_grows_without_bound_is_refused():
    bomb = "A=0123456789\n" + "".join("A=$A$A$A$A$A$A$A$A$A$A\n" for _ in range(12)) + "run $A"
    with pytest.raises(ConfigError, match="expands to over"):
        read_script(bomb)


SAFE = st.text(alphabet="abc-=./:,", min_size=1, max_size=8)


@settings(max_examples=40, deadline=None)
@given(
    st.lists(
        st.tuples(SAFE, st.sampled_from(["plain", "single", "double", "escaped"])),
        min_size=1,
        max_size=6,
    )
)
@pytest.mark.skipif(shutil.which("bash") is None, reason="needs bash")
def test_words_equal_those_of_bash(parts):
    quote = {"plain": "{}", "single": "'{} x'", "double": '"{} y"', "escaped": "{}\\ z"}
    line = "printf '%s\\n' " + " \\\n  ".join(quote[kind].format(text) for text, kind in parts)
    done = subprocess.run(
        ["bash", "-c", line],
        capture_output=True,
        text=True,
        check=True,
        env={"PATH": os.environ["PATH"]},
    )
    assert (
        read_script("run " + line.partition("\\n' ")[2]).commands[-1][1:]
        == done.stdout.splitlines()
    )


def test_an_argument_list_is_not_expanded():
    assert split_words("--a $B 'c d'") == ["--a", "$B", "c d"]
