"""What a public forge and its visitors read says the same as the repository's own commands."""

from __future__ import annotations

import re
import tomllib
from pathlib import Path

import pytest
import yaml

import turnwright

ROOT = Path(__file__).parents[2]


def yaml_of(name):
    return yaml.safe_load((ROOT / name).read_text(encoding="utf-8"))


def test_the_workflow_decides_by_ci_run_alone():
    (job,) = yaml_of(".github/workflows/check.yml")["jobs"].values()
    assert [step["run"] for step in job["steps"] if "run" in step][-1] == ".ci/run"
    assert not any("continue-on-error" in step for step in (job, *job["steps"]))
    assert all(re.search(r"@v\d+$", step["uses"]) for step in job["steps"] if "uses" in step)
    (setup,) = [step for step in job["steps"] if "setup-python" in step.get("uses", "")]
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    assert project["requires-python"] == f">={setup['with']['python-version']}"
    # The commands of .ci/run are those of the Makefile.
    script = (ROOT / ".ci" / "run").read_text(encoding="utf-8")
    targets = re.findall(r"^(?:\{ )?make --no-print-directory ([\w-]+)", script, re.MULTILINE)
    makefile = (ROOT / "Makefile").read_text(encoding="utf-8")
    assert targets == ["setup", "check", "docs", "test-browser", "test"]
    assert all(re.search(rf"^{target}:", makefile, re.MULTILINE) for target in targets)


def test_pre_commit_runs_make_check():
    (repo,) = yaml_of(".pre-commit-config.yaml")["repos"]
    assert repo["repo"] == "local"
    makefile = (ROOT / "Makefile").read_text(encoding="utf-8")
    block = re.search(r"^check: .*\n((?:\t.*\n)+)", makefile, re.MULTILINE)
    checks = [line.strip().replace("$(BIN)", ".venv/bin") for line in block[1].splitlines()]
    checks = [re.sub(r" \.$", "", check) for check in checks]
    entries = [hook["entry"].replace(" --force-exclude", "") for hook in repo["hooks"]]
    assert sorted(entries) == sorted(checks)


def test_the_citation_is_of_this_version():
    citation = yaml_of("CITATION.cff")
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    assert str(citation["version"]) == turnwright.__version__
    assert citation["license"] == project["license"]
    assert {"cff-version", "message", "title", "authors"} <= citation.keys()


@pytest.mark.parametrize("name", ["bug", "wish"])
def test_forms_ask_for_what_can_be_answered(name):
    form = yaml_of(f".github/ISSUE_TEMPLATE/{name}.yml")
    assert {"name", "description", "body"} <= form.keys()
    fields = [field["id"] for field in form["body"] if field["type"] != "markdown"]
    assert len(fields) == len(set(fields)) > 1
    required = [field for field in form["body"] if field.get("validations", {}).get("required")]
    assert required


def test_assistants_are_told_commands_that_there_are():
    text = (ROOT / "AGENTS.md").read_text(encoding="utf-8")
    makefile = (ROOT / "Makefile").read_text(encoding="utf-8")
    for target in re.findall(r"make ([a-z-]+)", text):
        assert re.search(rf"^{target}\b.*:", makefile, re.MULTILINE), target
    for path in re.findall(r"`(?:\.venv/bin/python )?((?:src|tests|docs|benchmarks)[\w/.]*)", text):
        assert (ROOT / path).exists(), path
