"""The console in a real browser, over a real cluster: what an operator would do, and what he must see."""

from __future__ import annotations

import re
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest

from core.types import WorkerState
from tests.support.browser import OUTPUT, axe_violations, browser
from tests.support.cluster import ProcessCluster
from tests.support.tiny_cluster import TINY, questions, tiny_settings

pytestmark = pytest.mark.processes

ADMIN = "an-admin-key-of-this-test"
WIDTHS = {"wide": (1600, 1000), "narrow": (360, 740)}
PATIENCE_MS = 30_000
DEATH_S = 3.0


@asynccontextmanager
async def signed_in(cluster: ProcessCluster, chromium: Any, problems: list[str]) -> AsyncIterator[Any]:
    """The page, behind its login. What goes wrong in it is told to ``problems``."""
    context = await chromium.new_context(viewport={"width": 1600, "height": 1000})
    page = await context.new_page()
    page.set_default_timeout(PATIENCE_MS)
    page.on("pageerror", lambda error: problems.append(str(error)))
    page.on(
        "request", lambda request: problems.append(request.url) if not request.url.startswith(cluster.url) else None
    )
    await page.goto(f"{cluster.url}/console")
    await page.get_by_label("Admin key").fill("not-the-admin-key-at-all")
    await page.keyboard.press("Enter")
    await page.get_by_role("alert").filter(has_text="not valid").wait_for()
    # From here on nothing may be wrong.
    page.on("console", lambda said: problems.append(said.text) if said.type in ("error", "warning") else None)
    await page.get_by_label("Admin key").fill(ADMIN)
    await page.keyboard.press("Enter")
    await page.get_by_role("status").filter(has_text="live").wait_for()
    yield page
    await context.close()


async def ask_all(cluster: ProcessCluster) -> str:
    """Some requests, all answered; returns the id of the last one."""
    made = await cluster.http.post("/admin/keys", json={"tenant": "acme"}, headers={"authorization": f"Bearer {ADMIN}"})
    key = made.json()["key"]
    ids = []
    for question in questions(seed=3, count=12, longest=600, num_tokens=24):
        body = {
            "model": TINY,
            "prompt": question.prompt,
            "temperature": 0,
            "max_tokens": question.num_tokens,
            "ignore_eos": True,
        }
        answer = await cluster.http.post("/v1/completions", json=body, headers={"authorization": f"Bearer {key}"})
        assert answer.status_code == 200, answer.text
        ids.append(answer.headers["x-request-id"])
    return ids[-1]


async def fits(page: Any) -> bool:
    """Nothing sticks out of the page: what is wider scrolls within itself."""
    result: bool = await page.evaluate("document.documentElement.scrollWidth <= document.documentElement.clientWidth")
    return result


async def photograph(page: Any, name: str) -> None:
    OUTPUT.mkdir(exist_ok=True)
    await page.screenshot(path=str(OUTPUT / f"console-{name}.png"), full_page=True)


async def test_an_operator_sees_the_cluster_a_request_and_a_death(tmp_path: Path) -> None:
    (tmp_path / "admin").write_text(ADMIN)
    settings = (
        *tiny_settings(tmp_path),
        f"gateway.access.database={tmp_path / 'keys.db'}",
        f"gateway.access.admin_key_file={tmp_path / 'admin'}",
        "gateway.access.open_metrics=true",
        "models.0.pools.decode.replicas=2",
    )
    problems: list[str] = []
    async with (
        browser() as chromium,
        ProcessCluster(tmp_path, *settings) as cluster,
        signed_in(cluster, chromium, problems) as page,
    ):
        request_id = await ask_all(cluster)

        # The live cluster: every worker with its incarnation, the pairs, the events of their coming.
        for worker in (await cluster.status()).workers:
            row = page.locator(f"tr[data-worker='{worker.registration.worker_id}']")
            await row.filter(has_text="ready").wait_for()
            assert f"{worker.registration.incarnation:016x}" in await row.inner_text()
        await (
            page.locator("#pairs td[data-pair='prefill-0 decode-0']")
            .filter(has_text=re.compile(r"/s.*[1-9]\d* hand-offs", re.DOTALL))
            .wait_for()
        )
        await page.locator("#events").get_by_text("decode-1").first.wait_for()

        # One request: the bars are what the record (and so the trace's root span) says.
        link = page.get_by_role("button", name=request_id)
        await link.focus()
        await page.keyboard.press("Enter")
        await page.locator("dialog tr[data-kind=stage]").first.wait_for()
        (record,) = (await cluster.router.find_records(request_id)).records
        shown = await page.locator("dialog tr[data-kind=stage]").evaluate_all(
            "rows => rows.map(row => [row.dataset.stage, +row.dataset.start, +row.dataset.duration])"
        )
        assert shown == [[one.stage, one.start_s, one.duration_s] for one in record.timeline]
        assert sum(duration for _, _, duration in shown) == pytest.approx(record.duration_s, abs=1e-3)
        chunks = await page.locator("dialog tr[data-kind=chunk]").count()
        assert record.times is not None and chunks == len(record.times.transfer_chunks) > 0
        assert await page.locator("dialog").get_by_text("because").count()

        for theme in ("light", "dark"):
            await page.emulate_media(color_scheme=theme)
            for name, (width, height) in WIDTHS.items():
                await page.set_viewport_size({"width": width, "height": height})
                assert await fits(page), f"{name}: the page is wider than the window"
                assert await axe_violations(page) == []
                await photograph(page, f"request-{name}-{theme}")
        await page.keyboard.press("Escape")
        await page.locator("dialog").wait_for(state="hidden")
        for theme in ("light", "dark"):
            await page.emulate_media(color_scheme=theme)
            for name, (width, height) in WIDTHS.items():
                await page.set_viewport_size({"width": width, "height": height})
                assert await fits(page), f"{name}: the page is wider than the window"
                assert await axe_violations(page) == []
                await photograph(page, f"{name}-{theme}")

        # A death shows at once, well before the router gives the worker up.
        cluster.kill("decode-1")
        row = page.locator("tr[data-worker='decode-1']:not([data-state=ready])")
        await row.wait_for(state="attached", timeout=1000 * DEATH_S)
        assert (await row.get_attribute("data-state")) in (WorkerState.SUSPECT, WorkerState.LOST)
        await page.locator("#events").get_by_text("suspect").first.wait_for()
        await photograph(page, "death")

        # Signed out, nothing is shown and nothing is told.
        await page.get_by_role("button", name="Sign out").click()
        await page.get_by_label("Admin key").wait_for()
        assert await page.locator("#cluster").is_hidden()
        assert await axe_violations(page) == []
        await photograph(page, "login")
    assert problems == []
