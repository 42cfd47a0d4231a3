"""Plays one cell: a request is held in its state, the act is done, undone, and everything must be as before."""

from __future__ import annotations

import asyncio
import json
import random
import signal
import time
from collections import Counter, defaultdict
from dataclasses import dataclass, field
from pathlib import Path

from core.errors import ServingError
from tests.faults.matrix.callers import Callers
from tests.faults.matrix.cells import Act, Cell, Whom
from tests.support.network import Cut
from tests.support.proxied_cluster import Held, ProxiedCluster

WHOLE_S = 120.0
_STILL_S = 2.0
_MAX_TRIES = 3
_MISTAKES = ('"level": "error"', '"level": "critical"', "Traceback")


@dataclass(frozen=True, slots=True, kw_only=True)
class Played:
    """One cell."""

    counts: Counter[str]
    silence_s: float
    took_s: float
    damage: list[str]


@dataclass(slots=True)
class Summary:
    """What became of the cells."""

    num_cells: int = 0
    num_undisturbed: int = 0
    """Cells in which every client had its whole answer."""
    errors: Counter[str] = field(default_factory=Counter)
    """What clients got in place of an answer."""
    num_answers: int = 0
    silences_s: dict[Act, list[float]] = field(default_factory=lambda: defaultdict(list))
    damage: list[str] = field(default_factory=list)

    def add(self, cell: Cell, played: Played) -> None:
        self.num_cells += 1
        errors = {code: number for code, number in played.counts.items() if code != "answered"}
        self.errors.update(errors)
        self.num_answers += played.counts["answered"]
        self.num_undisturbed += not errors
        self.silences_s[cell.act].append(played.silence_s)
        self.damage += [f"{cell}: {one}" for one in played.damage]
        print(f"{self.num_cells}. {cell}: {played.took_s:.1f} s, silent for {played.silence_s:.1f} s, {errors}")
        print("".join(f"    DAMAGE {one[:1500]}\n" for one in played.damage), end="", flush=True)

    def table(self) -> str:
        every = [one for values in self.silences_s.values() for one in values]
        lines = [
            f"{self.num_cells} cells, {self.num_undisturbed} of them with nothing but whole answers; "
            f"{self.num_answers} answers, typed errors and broken connections: {dict(self.errors)}",
            f"longest silence for a client, all cells: {_figures(every)}",
        ]
        lines += [f"  {act}: {_figures(values)}" for act, values in self.silences_s.items()]
        return "\n".join([*lines, f"damage: {len(self.damage)}", *self.damage])


def _figures(values: list[float]) -> str:
    if not values:
        return "none"
    ordered = sorted(values)
    p50, p99 = ordered[len(ordered) // 2], ordered[min(len(ordered) - 1, len(ordered) * 99 // 100)]
    return f"p50 {p50:.2f} s, p99 {p99:.2f} s, worst {ordered[-1]:.2f} s ({len(ordered)} cells)"


class _Stillness:
    """How long the event loop of this process did not run."""

    def __enter__(self) -> _Stillness:
        self.longest_s = 0.0
        self._watching = asyncio.create_task(self._watch())
        return self

    def __exit__(self, *exc_info: object) -> None:
        self._watching.cancel()

    async def _watch(self) -> None:
        last = time.monotonic()
        while True:
            await asyncio.sleep(0.05)
            now = time.monotonic()
            self.longest_s, last = max(self.longest_s, now - last), now


class Player:
    """Plays cells on one cluster, one after the other."""

    def __init__(self, site: ProxiedCluster, callers: Callers, logs: Path, seed: int) -> None:
        self._site = site
        self._callers = callers
        self._logs = logs
        self._choose = random.Random(seed)
        self._read: dict[Path, int] = {}

    async def play(self, cell: Cell, summary: Summary) -> None:
        """Raises AssertionError when the cluster does not become whole again. A cell in which this process itself stood
        still (it carries every connection) says nothing of the cluster, and is played again."""
        for _ in range(_MAX_TRIES):
            with _Stillness() as stillness:
                played = await self._play(cell)
            if stillness.longest_s < _STILL_S:
                break
            print(f"{cell}: the test stood still for {stillness.longest_s:.1f} s, once more", flush=True)
        summary.add(cell, played)

    async def _play(self, cell: Cell) -> Played:
        callers, cluster = self._callers, self._site.cluster
        callers.counts, callers.damage = Counter(), []
        callers.cut_is_expected = cell.whom is Whom.GATEWAY and cell.act in (Act.KILL, Act.RESTART)
        callers.start()
        try:
            await callers.all_asked()
            held = await self._site.holds.hold(f"{cell.role}-{cell.index}", cell.point)
            began = time.monotonic()
            await self._act(cell, held)
            await cluster.wait_ready(WHOLE_S)
            await callers.ask_each()
        finally:
            self._site.holds.let_go()
            self._site.network.heal()
            await callers.stop()
        await self._check_idle()
        return Played(
            counts=callers.counts,
            silence_s=callers.longest_silence_s(began),
            took_s=time.monotonic() - began,
            damage=[*callers.damage, *self._logged()],
        )

    async def _act(self, cell: Cell, held: Held) -> None:
        ends = self._ends(cell, held)
        site, cluster = self._site, self._site.cluster
        if cell.act.loss is not None:
            site.network.cut(Cut(cell.act.loss, *ends))
            site.holds.let_go()
            await asyncio.sleep(cell.act.lasts_s)
            site.network.heal()
            return
        (name,) = ends
        before = cluster.pid(name)
        if cell.act is Act.KILL:
            cluster.kill(name)
        elif cell.act is Act.RESTART:
            await cluster.launcher.restart(name)
        else:
            cluster.kill(name, signal.SIGSTOP)
        site.holds.let_go()
        if cell.act in (Act.KILL, Act.RESTART):
            async with asyncio.timeout(WHOLE_S):
                while cluster.ready_pid(name) in (None, before):
                    await asyncio.sleep(0.01)  # the router may not have noticed yet that the old one is gone
        else:
            await asyncio.sleep(cell.act.lasts_s)
            cluster.kill(name, signal.SIGCONT)

    def _ends(self, cell: Cell, held: Held) -> tuple[str, ...]:
        """The components that it happens to: of the held request, where it is known which have it."""
        prefill, decode = self._placed(held.request_id)
        if cell.role == "prefill":
            prefill = f"prefill-{cell.index}"
        else:
            decode = f"decode-{cell.index}"
        prefill = prefill or f"prefill-{self._choose.randrange(2)}"
        decode = decode or f"decode-{self._choose.randrange(2)}"
        names = {"gateway": "gateway", "router": "router", "prefill": prefill, "decode": decode}
        return tuple(names[word] for word in cell.whom.value.split(" and "))

    def _placed(self, request_id: str) -> tuple[str, str]:
        """The workers of a request's last placement, by the router's log."""
        if request_id:
            for line in reversed((self._logs / "router.log").read_text(errors="replace").splitlines()):
                if request_id in line and '"placed"' in line:
                    fields = json.loads(line)
                    return fields["prefill"], fields["decode"]
        return "", ""

    async def _check_idle(self) -> None:
        """Laws 1 and 2 on every worker, in the router, and at the gateway."""
        cluster = self._site.cluster
        await cluster.wait_idle(60)
        async with asyncio.timeout(20):
            while True:
                try:
                    if all(gateway.num_requests == 0 for gateway in (await cluster.status()).gateways):
                        return
                except ServingError:
                    pass
                await asyncio.sleep(0.05)

    def _logged(self) -> list[str]:
        """What components have logged as errors since the last cell: a mistake of ours, or a resource that is lost."""
        found: list[str] = []
        for path in sorted(self._logs.glob("*.log")):
            data = path.read_bytes()
            new = data[self._read.get(path, 0) :]
            self._read[path] = len(data)
            lines = new.decode(errors="replace").splitlines()
            found += [f"{path.stem} logged {line[:2000]}" for line in lines if any(sign in line for sign in _MISTAKES)]
        return found
