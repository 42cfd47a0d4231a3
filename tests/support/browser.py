"""Headless Chromium, driven by Playwright, and the accessibility checks of axe."""

from __future__ import annotations

import shutil
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest

OUTPUT = Path(__file__).parent.parent / "output"
"""Pictures of the last run, for people to look at."""
QUIET = (
    "--no-sandbox",
    "--disable-gpu",
    "--disable-quic",
    "--no-first-run",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
)
"""It talks to loopback only."""


def program() -> str:
    """Debian's ``chromium``. Skips the test where there is none."""
    for name in ("chromium", "chromium-headless-shell"):
        found = shutil.which(name)
        if found is not None:
            return found
    pytest.skip("no Chromium is installed (Debian: apt-get install chromium)")


@asynccontextmanager
async def browser() -> AsyncIterator[Any]:
    pytest.importorskip("playwright", reason="Playwright is not installed (the dev extra has it)")
    from playwright.async_api import async_playwright

    path = program()
    async with async_playwright() as playwright:
        chromium = await playwright.chromium.launch(executable_path=path, args=list(QUIET))
        try:
            yield chromium
        finally:
            await chromium.close()


async def axe_violations(page: Any) -> list[str]:
    """What axe finds wrong, as ``rule: selector``; nothing is left out."""
    carrier = pytest.importorskip("axe_playwright_python", reason="axe is not installed (the dev extra has it)")
    script = Path(carrier.__file__).with_name("axe.min.js")
    # The page's own policy forbids scripts that are not its own: the debugger may run one all the same.
    await page.evaluate(script.read_text())
    found = await page.evaluate("axe.run(document, {resultTypes: ['violations']})")
    return [
        f"{one['id']}: {node['target']} {node['failureSummary']}"
        for one in found["violations"]
        for node in one["nodes"]
    ]
