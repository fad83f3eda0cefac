"""A browser, its pages, and real runs of shipped recipes, small ones, made once by the command
line."""

from __future__ import annotations

import os
import shutil

import pytest
from kit.browser import WITHOUT_WARMUP, finished, training


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
        browser = playwright.chromium.launch(
            executable_path=chromium(), args=["--no-sandbox", "--disable-gpu"]
        )
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


FLAKY = """from turnwright.envs.builtin.hop import Hop


class Flaky(Hop):
    async def step(self, action):
        if not action.text.startswith(("lookup ", "answer ")) and len(action.text) % 2:
            raise ConnectionError(f"the table is gone: {action.text}")
        return await super().step(action)
"""
"""A world that fails on about half of the replies that its demonstrator would not give."""


@pytest.fixture(scope="session")
def runs(tmp_path_factory):
    """Folder of a run for each kind of agent: text, images, tools, two policies, asynchronous, and
    one whose world fails."""
    folder = tmp_path_factory.mktemp("runs")
    flaky = folder / "flaky.py"
    flaky.write_text(FLAKY)
    processes = [
        training("quickstart.toml", folder / "quickstart"),
        training("quickstart_vlm.toml", folder / "quickstart-vlm"),
        training("json_tools.toml", folder / "tools"),
        training("two_policies.toml", folder / "policies", small=WITHOUT_WARMUP),
        training(
            "quickstart.toml",
            folder / "async",
            schedule={"mode": "async"},
            train={"correction": "tis"},
        ),
        training(
            "quickstart.toml",
            folder / "failing",
            small=WITHOUT_WARMUP,
            env={"use": f"{flaky}:Flaky"},
            warmup={"demos": 0},
            rollout={"max-failed": 1},
        ),
    ]
    for process in processes:
        finished(process)
    flaky.unlink()
    return folder


@pytest.fixture(scope="session")
def quickstarts(runs):
    """Runs of quickstart.toml and quickstart_vlm.toml."""
    return runs / "quickstart", runs / "quickstart-vlm"
