"""A browser, its pages, and runs of both quickstarts' recipes, small ones, made
once by the command line."""

from __future__ import annotations

import os
import shutil

import pytest
from kit.browser import finished, training


def chromium():
    """The browser; without one these tests fail, since whoever runs them asked for it."""
    found = (
        os.environ.get("CHROMIUM") or shutil.which("chromium") or shutil.which("chromium-browser")
    )
    assert found, "no Chromium: install one (Debian: chromium), or name it with CHROMIUM=/path"
    return found


@pytest.fixture(scope="session")
def browser():
    from playwright.sync_api import sync_playwright

    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=chromium(), args=["--no-sandbox"])
        yield browser
        browser.close()


@pytest.fixture
def page(browser):
    page = browser.new_page()
    page.problems = []
    page.on("pageerror", lambda error: page.problems.append(str(error)))
    page.on(
        "console",
        lambda message: page.problems.append(message.text) if message.type == "error" else None,
    )
    page.set_default_timeout(60_000)
    yield page
    page.close()


@pytest.fixture(scope="session")
def quickstarts(tmp_path_factory):
    """Runs of quickstart.toml and quickstart_vlm.toml."""
    folder = tmp_path_factory.mktemp("runs")
    runs = folder / "quickstart", folder / "quickstart-vlm"
    processes = [training(f"{run.name.replace('-', '_')}.toml", run) for run in runs]
    for process in processes:
        finished(process)
    return runs
