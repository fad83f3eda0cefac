"""The command line: commands reach their functions, and every mistake is one
line with exit status 2."""

from __future__ import annotations

import json
import re
import subprocess
import sys
import types
from pathlib import Path

import pytest

from turnwright.cli.main import main
from turnwright.cli.train import next_run
from turnwright.errors import TaskError, TraceError, did_you_mean
from turnwright.evaluation import EvaluationResult, estimate_pass_at_k
from turnwright.training.evaluation import EvalResult

HOP = '[[env]]\nuse = "hop"\n'


@pytest.fixture
def recipe(tmp_path: Path) -> str:
    path = tmp_path / "hop.toml"
    path.write_text(HOP)
    return str(path)


@pytest.fixture
def commands(monkeypatch, tmp_path):
    """Stand-ins for what the commands do, which keep what they were called with."""
    stand_ins = types.SimpleNamespace(calls=[], outcome=None)

    def keep(module, name, result=None):
        def call(*args, **kwargs):
            stand_ins.calls.append((name, args, kwargs))
            if isinstance(stand_ins.outcome, BaseException):
                raise stand_ins.outcome
            return result if stand_ins.outcome is None else stand_ins.outcome

        monkeypatch.setattr(f"turnwright.{module}.{name}", call)

    monkeypatch.chdir(tmp_path)
    (tmp_path / "out").mkdir()
    keep("runs", "run_training", tmp_path / "out")
    keep("evaluation", "evaluate_config")
    keep("cli.rollout", "preview_rollouts")
    keep("cli.check", "check_env")
    keep("cli.check", "check_template")
    return stand_ins


def refusal(capsys, *words: str) -> str:
    """The one line that a mistake prints."""
    status = main(words)
    out, err = capsys.readouterr()
    assert status == 2, err
    assert out == ""
    assert err.startswith("turnwright: error: ")
    assert err.count("\n") == 1
    return err


def shell(*words: str, cwd: Path) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "turnwright.cli.main", *words],
        cwd=cwd,
        capture_output=True,
        text=True,
    )


@pytest.fixture(autouse=True)
def _importable_from_anywhere(monkeypatch):
    monkeypatch.setenv("PYTHONPATH", str(Path(__file__).parents[2] / "src"))


def test_help_imports_nothing_heavy(tmp_path):
    heavy = (
        "torch",
        "transformers",
        "pydantic",
        "asyncio",
        "rich",
        "jinja2",
        "tokenizers",
        "orjson",
        "tomllib",
    )
    code = (
        "import sys; from turnwright.cli.main import main; main(['--help']); print([m for m "
        f"in {heavy} if m in sys.modules])"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=tmp_path, capture_output=True, text=True, check=True
    )
    assert done.stdout.splitlines()[-1] == "[]"
    assert all(
        verb in done.stdout for verb in ("train", "eval", "rollout", "check", "init", "view")
    )


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        (("train", "gone.toml"), ["gone.toml", "no such recipe"]),
        (("train", "bad.toml"), ["bad.toml", "not TOML", "line 1"]),
        (("train", "hop.toml", "--train.lr", "fast"), ["--train.lr fast", "a number"]),
        (("eval", "hpo.toml"), ["env.0.use", "did you mean 'hop'"]),
        (("trian",), ["did you mean `turnwright train`"]),
    ],
)
def test_mistakes_in_a_real_process(tmp_path, words, expected):
    (tmp_path / "hop.toml").write_text(HOP)
    (tmp_path / "bad.toml").write_text("lr 3\n")
    (tmp_path / "hpo.toml").write_text('[[env]]\nuse = "hpo"\n')
    done = shell(*words, cwd=tmp_path)
    assert done.returncode == 2
    assert done.stdout == ""
    assert done.stderr.count("\n") == 1
    for piece in expected:
        assert piece in done.stderr


@pytest.mark.parametrize(
    "recipe",
    [
        '[model]\npath = "loop"\n' + HOP,
        '[model]\npath = "~nobody-of-this-name/x"\n' + HOP,
        '[model]\npath = "zero\\u0000byte"\n' + HOP,
        '[warmup]\ndataset = "loop"\n' + HOP,
        '[warmup]\ndataset = "zero\\u0000byte.jsonl"\n' + HOP,
        '[[env]]\nuse = "loop.py:World"\n',
        '[[env]]\nuse = "~nobody-of-this-name/x.py:World"\n',
        '[[env]]\nuse = "zero\\u0000byte.py:World"\n',
    ],
)
def test_a_path_that_leads_nowhere_is_one_line(capsys, tmp_path, recipe):
    """A link to itself, an unknown user's home, and a zero byte, which no system call takes."""
    for name in ("loop", "loop.py"):
        (tmp_path / name).symlink_to(name)
    (tmp_path / "recipe.toml").write_text(recipe)
    said = refusal(capsys, "train", str(tmp_path / "recipe.toml"), "--dry-run")
    assert re.search("no such (file|directory)", said)


def test_no_suggestion_is_the_word_itself(capsys, recipe):
    assert did_you_mean("loop", ["loop"]) == ""
    assert did_you_mean("loop", ["loop", "loops"]) == "did you mean 'loops'?"
    assert "did you mean '--out'" not in refusal(capsys, "rollout", recipe, "--out", "x")


@pytest.mark.beside("view")
def test_mistakes_of_the_command_line(capsys, recipe, tmp_path):
    assert "did you mean '--resume'" in refusal(capsys, "train", recipe, "--resum", "x")
    assert "did you mean '--rollout.group-size'" in refusal(
        capsys, "train", recipe, "--group-size", "3"
    )
    assert "did you mean '--rollout.group-size'" in refusal(
        capsys, "train", recipe, "--rollout.group-sise", "3"
    )
    assert "needs a recipe" in refusal(capsys, "train")
    assert "invalid choice" in refusal(capsys, "train", recipe, "--display", "loud")
    assert "at least 1" in refusal(capsys, "eval", recipe, "--samples", "0")
    assert "unexpected argument 'again.toml'" in refusal(capsys, "train", recipe, "again.toml")
    assert "no such run directory" in refusal(capsys, "train", "--resume", str(tmp_path / "gone"))
    assert "not a run directory" in refusal(capsys, "train", "--resume", str(tmp_path))
    assert "uses the run's own settings" in refusal(
        capsys, "train", "--resume", str(tmp_path), "--train.lr", "1"
    )
    assert "nothing to check" in refusal(capsys, "check")
    assert "did you mean 'hop_json'" in refusal(capsys, "check", "hop_jsn")
    assert "no such file" in refusal(capsys, "check", "gone.py:Env")
    assert ":Name" in refusal(capsys, "check", "gone.py")
    assert "no such run directory" in refusal(capsys, "view", str(tmp_path / "gone"))
    assert "not a run directory" in refusal(capsys, "view", str(tmp_path))
    assert "reads no recipe, so --train.lr has no effect" in refusal(
        capsys, "view", str(tmp_path), "--train.lr", "3"
    )
    assert "commands are train, eval" in refusal(capsys, "zzzzz")


def test_no_words_prints_help_and_version_prints_one_line(capsys):
    assert main([]) == 2
    assert "turnwright init my_env" in capsys.readouterr().err
    assert main(["--version"]) == 0
    assert capsys.readouterr().out.startswith("turnwright ")


def test_dry_run_shows_origins_and_loads_nothing(capsys, recipe, commands):
    assert (
        main(
            ["train", recipe, "--dry-run", "--train.lr", "1e-6", "--seed", "3", "--out", "runs/x.y"]
        )
        == 0
    )
    out = capsys.readouterr().out
    for start, origin in (
        ("lr = 1e-06", "command line"),
        ('use = "hop"', "hop.toml"),
        ("seed = 3", "command line"),
        ("kl = 0.0", "default"),
    ):
        assert any(
            line.startswith(start) and line.endswith(f"# {origin}") for line in out.splitlines()
        ), start
    assert 'out = "runs/x.y"' in out
    assert not commands.calls


def test_keys_lists_every_key_with_its_meaning(capsys):
    assert main(["train", "--keys"]) == 0
    assert (
        "--rollout.group-size (an integer; default 8): Episodes per task."
        in capsys.readouterr().out
    )


def test_train_and_resume_reach_their_function(capsys, recipe, commands, tmp_path):
    from turnwright.config import load
    from turnwright.config.dump import to_json_dict

    assert main(["train", recipe, "--display", "none", "--train.steps=3"]) == 0
    name, (resolved,), kwargs = commands.calls[-1]
    assert (name, resolved.config.train.steps, kwargs["resume"]) == ("run_training", 3, None)
    run = tmp_path / "run"
    run.mkdir()
    (run / "config.json").write_text(
        json.dumps(to_json_dict(load(Path(recipe), ["--train.steps", "4"])))
    )
    assert main(["train", "--resume", str(run), "--display", "none"]) == 0
    _, (resolved,), kwargs = commands.calls[-1]
    assert (resolved.config.train.steps, kwargs["resume"]) == (4, run)


@pytest.mark.beside("view")
def test_train_ends_with_what_it_came_to_and_three_commands(capsys, recipe, commands, tmp_path):
    figures = {
        "success_before": 0.24,
        "success_after": 0.973,
        "success_before_ci": [0.19, 0.3],
        "success_after_ci": [0.945, 0.987],
    }
    figures |= {
        "greedy_before": 0.19,
        "greedy_after": 0.99,
        "single_turn_best": 0.1,
        "turns_before": 2.1,
        "turns_after": 3.0,
    }
    (tmp_path / "out" / "summary.json").write_text(
        json.dumps(figures | {"n_eval": 256, "wall_s": 93.2, "cpu_s": 51})
    )
    assert main(["train", recipe, "--display", "none"]) == 0
    out = capsys.readouterr().out.splitlines()
    assert (
        out[0]
        == "success    24.0% [19.0, 30.0] before, 97.3% [94.5, 98.7] after reinforcement, on 256 "
        "held-out tasks"
    )
    assert out[1:5] == [
        "greedy     19.0% before, 99.0% after",
        "one reply  10.0% at best",
        "turns      2.10 before, 3.00 after",
        "time       1 min 33 s wall, 51 s CPU",
    ]
    assert out[5] == f"report     {tmp_path}/out/report.html"
    assert [line.split()[1] for line in out[-3:]] == ["view", "eval", "train"]
    assert out[-1] == f"  turnwright train {recipe} --seed 1"
    assert (tmp_path / "out" / "report.html").is_file()
    assert main(["train", recipe, "--display", "none", "--train.lr", "1e-3", "--seed", "4"]) == 0
    assert (
        capsys.readouterr().out.splitlines()[-1]
        == f"  turnwright train {recipe} --train.lr 1e-3 --seed 5"
    )
    again = next_run(Path("a.toml"), ["--model.path", "my model"], 0)
    assert again == "turnwright train a.toml --model.path 'my model' --seed 1"


@pytest.mark.parametrize(
    ("error", "expected"),
    [
        (
            TaskError("rows.jsonl:3: not JSON\nat all; mend it \x1b[31m"),
            "rows.jsonl:3: not JSON at all; mend it",
        ),
        (TraceError("runs/x: cannot be written (No space left on device)"), "No space left"),
        (
            OSError(28, "No space left on device", "checkpoints/4"),
            "checkpoints/4: the disk is full; free space, then resume",
        ),
        (OSError(27, "File too large", "model/a"), "model/a: a file may not grow so large"),
        (OSError(30, "Read-only file system", "model/a"), "model/a: the file system is read-only"),
        (
            Exception("I/O error: No space left on device (os error 28)"),
            "writing: the disk is full",
        ),
    ],
)
def test_mistakes_found_later_are_one_line_too(capsys, recipe, commands, error, expected):
    commands.outcome = error
    message = refusal(capsys, "train", recipe, "--display", "none")
    assert expected in message
    assert "\x1b" not in message


def test_a_warning_of_ours_is_one_line_without_a_line_of_our_code(tmp_path):
    (tmp_path / "task.py").write_text(
        "import warnings\n"
        "from turnwright.envs.builtin import hop\n"
        "warnings.warn('not ours')\n"
        "warnings.warn_explicit('a text', UserWarning, hop.__file__, 1)\n"
        "Hop = hop.Hop\n"
    )
    (tmp_path / "hop.toml").write_text('[[env]]\nuse = "task.py:Hop"\n')
    said = shell("rollout", "hop.toml", "-n", "1", "--quiet", cwd=tmp_path).stderr.splitlines()
    assert [line for line in said if "a text" in line] == ["warning: a text"]
    assert [line for line in said if "UserWarning" in line] == [
        f"{tmp_path / 'task.py'}:3: UserWarning: not ours"
    ]


def test_interrupts_leave_with_130_and_other_errors_show_their_traceback(capsys, recipe, commands):
    commands.outcome = KeyboardInterrupt()
    assert main(["train", recipe, "--display", "none"]) == 130
    assert (
        capsys.readouterr().err
        == "turnwright: error: interrupted; journaled episodes are kept; resume with --resume RUN\n"
    )
    commands.outcome = ZeroDivisionError()
    with pytest.raises(ZeroDivisionError):
        main(["train", recipe, "--display", "none"])


def evaluation(counts: tuple[tuple[int, int], ...]) -> EvaluationResult:
    """An evaluation of tasks with so many episodes and successes."""
    n = sum(episodes for episodes, _ in counts)
    successes = sum(won for _, won in counts)
    scores = EvalResult(n, successes, turns=3.0, reward=0.5, failed=0, counts=counts)
    return EvaluationResult({"sampled": scores}, {"sampled": []}, estimate_pass_at_k(counts))


def test_eval_prints_a_table_with_intervals_and_pass_at_k(capsys, recipe, commands):
    commands.outcome = evaluation(((4, 2), (4, 4), (4, 0)))
    assert main(["eval", recipe, "--samples", "4", "--tasks", "2", "--display", "none"]) == 0
    out = capsys.readouterr().out
    assert "50.0%" in out
    assert "[25.4, 74.6]" in out
    assert "pass@4" in out
    _, (resolved,), kwargs = commands.calls[-1]
    assert (resolved.config.eval.samples, resolved.config.eval.tasks, kwargs["engine"]) == (
        4,
        2,
        "local",
    )
    assert main(["eval", recipe, "--json"]) == 0
    figures = json.loads(capsys.readouterr().out)
    assert figures["pass_at_k"]["1"]["value"] == pytest.approx(0.5)
    assert figures["pass_at_k"]["2"]["value"] == pytest.approx((5 / 6 + 1 + 0) / 3)


def test_eval_of_a_run_takes_its_settings_and_overrides(capsys, recipe, commands, tmp_path):
    from turnwright.config import load
    from turnwright.config.dump import to_json_dict

    (tmp_path / "config.json").write_text(
        json.dumps(to_json_dict(load(Path(recipe), ["--train.steps", "4"])))
    )
    commands.outcome = evaluation(((8, 4),))
    assert main(["eval", "--run", str(tmp_path), "--eval.tasks", "3", "--display", "none"]) == 0
    _, (resolved,), kwargs = commands.calls[-1]
    assert (resolved.config.train.steps, resolved.config.eval.tasks) == (4, 3)
    assert resolved.origins["eval.tasks"] == "command line"
    assert kwargs["checkpoint"] == str(tmp_path)


def test_check_prints_findings_and_fails_when_one_does(capsys, commands, recipe):
    commands.outcome = [
        (True, "reset answers"),
        (None, "no demonstrator"),
        (False, "gold answer scores 0.0\n\x1b[2J"),
    ]
    assert main(["check", "hop"]) == 1
    out = capsys.readouterr().out
    assert "ok    reset answers" in out
    assert "FAIL  gold answer scores 0.0" in out
    assert "\x1b" not in out
    assert main(["check", "--recipe", recipe]) == 0
    assert "1 keys set" in capsys.readouterr().out


def test_check_says_what_a_template_does(capsys, tmp_path):
    stripping = (
        "{% for m in messages %}<|im_start|>{{ m.role + '\n' }}{% if loop.last "
        "%}{{ m.reasoning_content }}{% endif %}"
    )
    file = tmp_path / "odd.jinja"
    file.write_text(
        stripping + "{{ m.content }}<|im_end|>{% endfor %}{% if add_generation_prompt "
        "%}<|im_start|>a{% endif %}"
    )
    assert main(["check", "--template", str(file), "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert (found["kind"], found["stops"], found["exact"]) == (
        "strips always",
        ["<|im_end|>"],
        True,
    )
    assert main(["check", "--template", str(file), "--history", "template"]) == 0
    assert "branches where earlier replies are rendered differently" in capsys.readouterr().out
    once = "{% if messages|length > 2 %}{{ raise_exception('no more') }}{% endif %}"
    file.write_text(once + file.read_text())
    assert main(["check", "--template", str(file)]) == 1
    assert (
        'FAIL  history = "append" cannot be exact: nothing can follow a reply; use "inline"'
        in capsys.readouterr().out
    )
    assert main(["check", "--template", str(file), "--history", "inline"]) == 0
    capsys.readouterr()
    assert "did you mean 'append'?" in refusal(
        capsys, "check", "--template", str(file), "--history", "apend"
    )
    assert "none.jinja" in refusal(capsys, "check", "--template", str(tmp_path / "none.jinja"))
    file.write_text("{% for %}")
    assert "odd.jinja: not a Jinja template" in refusal(capsys, "check", "--template", str(file))


def test_rollout_prints_conversations(capsys, recipe, commands, tmp_path):
    from turnwright.types import (
        EpisodeKey,
        Message,
        Origin,
        Span,
        StopReason,
        Task,
        Trajectory,
        Turn,
    )

    reply = Message("assistant", "lookup \x1b]0;pwn\x07amber")
    turn = Turn("main", 0, 1, (1,), (Message("user", "code of amber"),), reply)
    spans = [Span(Origin.PROMPT, [1]), Span(Origin.MODEL, [2, 3], 0, 1, [0.0, 0.0], 0)]
    commands.outcome = [
        Trajectory(
            Task("q"), EpisodeKey("eval", 0, "t", 0), spans, [turn], 1.0, stop=StopReason.DONE
        )
    ]
    assert (
        main(
            ["rollout", recipe, "-n", "1", "--save", str(tmp_path / "t.jsonl"), "--display", "none"]
        )
        == 0
    )
    out = capsys.readouterr().out
    assert "assistant | lookup amber" in out
    assert "reward 1" in out
    assert "\x1b" not in out
    assert commands.calls[-1][2]["n"] == 1


def test_a_closed_pipe_is_no_error(recipe, tmp_path):
    command = f"{sys.executable} -m turnwright.cli.main train {recipe} --dry-run | head -1"
    done = subprocess.run(["bash", "-c", command], cwd=tmp_path, capture_output=True, text=True)
    assert done.stderr == ""


FAILING = """\
import turnwright as tw


class Failing(tw.Env):
    def reset(self, task, *, seed=None):
        self.broken = task.answer
        return "say something"

    def step(self, action):
        if self.broken:
            raise OSError("the database is down")
        return tw.Step(None, reward=1.0, terminated=True)

    @staticmethod
    def tasks(split, n, seed):
        return [tw.Task(f"{split} {i}", answer=BROKEN) for i in range(n)]

    @staticmethod
    def solver(messages, rng):
        return "something"
"""


def failing(tmp_path, broken):
    (tmp_path / "failing.py").write_text(FAILING.replace("BROKEN", broken))
    path = tmp_path / "failing.toml"
    path.write_text(
        f'[[env]]\nuse = "{tmp_path / "failing.py"}:Failing"\nretries.episode = 0\n[eval]\ntasks = '
        "10\n"
    )
    return str(path)


def test_eval_of_a_world_that_fails_is_an_error_that_says_of_what(capsys, tmp_path):
    assert main(["eval", failing(tmp_path, "True"), "--engine", "scripted"]) == 1
    expected = capsys.readouterr().err
    assert "10 of 10 episodes of the sampled pass failed" in expected
    assert "OSError: the database is down" in expected
    assert "Traceback" not in expected


def test_eval_tells_of_episodes_that_failed_and_leaves_their_tasks_out_of_pass_at_k(
    capsys, tmp_path
):
    assert (
        main(
            [
                "eval",
                failing(tmp_path, "i == 3"),
                "--engine",
                "scripted",
                "--samples",
                "2",
                "--json",
            ]
        )
        == 0
    )
    figures = json.loads(capsys.readouterr().out)
    assert figures["counts"].count([0, 0]) == 1
    assert figures["sampled"] | {"failed": 2, "n": 18, "success": 1.0} == figures["sampled"]
    assert figures["pass_at_k"]["2"]["value"] == 1.0
    assert main(["eval", failing(tmp_path, "i == 3"), "--engine", "scripted"]) == 0
    assert "1 sampled episodes failed and are not counted" in capsys.readouterr().out


UNTIL_STOPPED = """
import asyncio, signal
from turnwright.cli.options import stopped_by_signals

async def work():
    try:
        print("up", flush=True)
        await asyncio.sleep(60)
    finally:
        print("cleaned up", flush=True)

{interrupts}
with stopped_by_signals():
    asyncio.run(work())
print("ended", flush=True)
"""


@pytest.mark.parametrize(
    "interrupts",
    [
        "signal.signal(signal.SIGINT, signal.SIG_IGN)",
        "signal.signal(signal.SIGINT, signal.default_int_handler)",
        "signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGINT])",
    ],
    ids=["ignored", "default", "blocked"],
)
def test_sigterm_ends_what_ignores_ctrl_c_since_a_script_or_a_thread_of_ray_started_it(interrupts):
    words = [sys.executable, "-c", UNTIL_STOPPED.format(interrupts=interrupts)]
    with subprocess.Popen(words, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout.readline() == "up\n"
        process.terminate()
        assert process.communicate(timeout=30) == ("cleaned up\nended\n", None)
        assert process.returncode == 0
