"""A router and a decode worker in one process that compute nothing: given tokens, at a given pace, over the real gRPC.

Sampled requests get one token at once and then one with each tick, all of them in one step as an engine would; greedy
ones get their whole answer at once. ``python -m bench.scripted_worker``; its last argument is told on standard output.
"""

import argparse
import asyncio
import signal
from collections.abc import AsyncGenerator
from dataclasses import dataclass
from itertools import count

import uvloop

from core import types as t
from core.handoff import PairCheck
from core.ids import GatewayId, HandoffId, Incarnation, PlacementId, WorkerId, new_incarnation
from decode_worker.outbox import Outbox
from rpc.server import RpcServer


@dataclass(slots=True)
class _Answer:
    request: t.GenerateRequest
    stream_key: int
    num_sent: int = 0


class ScriptedWorker:
    """The handlers of both services."""

    def __init__(self, token_ids: tuple[int, ...]) -> None:
        self._token_ids = token_ids
        self._incarnation = new_incarnation()
        self._running: dict[tuple[str, int], _Answer] = {}
        self._outboxes: dict[Incarnation, Outbox] = {}
        self._numbers = count(1)
        self.address = ""

    # -- router -------------------------------------------------------------------------------------------------------

    async def place(self, request: t.PlaceRequest) -> t.Placement:
        number = next(self._numbers)
        address = t.WorkerAddress(worker_id=WorkerId("unified-0"), incarnation=self._incarnation, address=self.address)
        return t.Placement(
            placement_id=PlacementId(f"p{number}"),
            handoff_id=HandoffId(f"h{number}"),
            mode=t.Mode.LOCAL,
            decode=address,
        )

    async def end_placement(self, end: t.PlacementEnd) -> None:
        pass

    async def report_gateway(self, report: t.GatewayReport) -> t.ClusterView:
        return t.ClusterView(models=(), usable=(("scripted", True, ""),))

    async def status(self) -> t.ClusterStatus:
        raise NotImplementedError

    async def drain(self, worker_id: str, reason: str) -> None:
        raise NotImplementedError

    async def flip(self, worker_id: str, reason: str) -> tuple[t.PoolSize, ...]:
        raise NotImplementedError

    async def report_pools(self, report: t.LauncherReport) -> tuple[t.PoolSize, ...]:
        raise NotImplementedError

    async def start_rollout(self, rollout: t.Rollout) -> None:
        raise NotImplementedError

    async def scale(self, pools: tuple[t.PoolSize, ...]) -> tuple[t.PoolSize, ...]:
        raise NotImplementedError

    def join(self, registration: object, messages: object) -> AsyncGenerator[t.WorkerCommand, None]:
        raise NotImplementedError

    def watch_pools(self) -> AsyncGenerator[tuple[t.PoolSize, ...], None]:
        raise NotImplementedError

    async def find_records(self, request_id: str, limit: int) -> t.RequestRecords:
        raise NotImplementedError

    def watch(self, interval_s: float) -> AsyncGenerator[t.ClusterNews, None]:
        raise NotImplementedError

    # -- decode worker ------------------------------------------------------------------------------------------------

    async def admit(self, request: t.AdmitRequest) -> t.AdmitReply:
        asked = request.request
        answer = _Answer(asked, request.stream_key)
        if asked.sampling.is_greedy:
            self._send(answer, asked.sampling.max_tokens)
        else:
            self._send(answer, 1)
            if answer.num_sent < asked.sampling.max_tokens:
                self._running[asked.request_id, asked.attempt] = answer
        return t.AdmitReply(verdict=t.AdmitVerdict.ACCEPTED)

    async def abort_decode(self, request: t.AbortRequest) -> t.AbortReply:
        return t.AbortReply(found=self._running.pop((request.request_id, request.attempt), None) is not None)

    async def outputs(
        self, gateway_id: GatewayId, gateway_incarnation: Incarnation, worker_incarnation: Incarnation
    ) -> AsyncGenerator[t.StepOutputs, None]:
        outbox = self._outboxes[gateway_incarnation] = Outbox(gateway_id, gateway_incarnation)
        async for message in outbox.messages():
            yield message

    async def check_pair(self, prefill: t.WorkerAddress, worker_incarnation: Incarnation) -> PairCheck:
        raise NotImplementedError

    async def run(self, tokens_per_s: float) -> None:
        """The steps."""
        loop = asyncio.get_running_loop()
        next_at = loop.time()
        while True:
            next_at += 1 / tokens_per_s
            await asyncio.sleep(next_at - loop.time())
            for key, answer in list(self._running.items()):
                self._send(answer, 1)
                if answer.num_sent == answer.request.sampling.max_tokens:
                    del self._running[key]

    def _send(self, answer: _Answer, num_tokens: int) -> None:
        request, first = answer.request, answer.num_sent
        answer.num_sent += num_tokens
        is_last = answer.num_sent == request.sampling.max_tokens
        outbox, now = self._outboxes[request.gateway_incarnation], asyncio.get_running_loop().time()
        if answer.stream_key and num_tokens == 1 and not is_last:
            name = (request.request_id, request.attempt, 0)
            outbox.put_token(
                answer.stream_key, name, first, self._token_ids[first % len(self._token_ids)], stepped_at=now
            )
            return
        chunk = t.TokenChunk(
            request_id=request.request_id,
            choice=0,
            attempt=request.attempt,
            first_index=first,
            token_ids=tuple(self._token_ids[index % len(self._token_ids)] for index in range(first, answer.num_sent)),
            finish_reason=t.FinishReason.LENGTH if is_last else None,
            stages=t.StageTimes() if is_last else None,
        )
        outbox.put_chunk(chunk, stepped_at=now)


async def _serve(token_ids: tuple[int, ...], tokens_per_s: float) -> None:
    worker, server = ScriptedWorker(token_ids), RpcServer()
    server.add_router(worker)
    server.add_decode(worker)
    worker.address = await server.start("127.0.0.1:0")
    print(worker.address, flush=True)
    stepping = asyncio.create_task(worker.run(tokens_per_s))
    stop = asyncio.Event()
    asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, stop.set)
    await stop.wait()
    stepping.cancel()
    await server.stop(0.5)


def main() -> None:
    parser = argparse.ArgumentParser(prog="bench.scripted_worker", description=__doc__)
    parser.add_argument("--tokens-per-s", type=float, default=20)
    parser.add_argument("--token-ids", required=True, help="with commas between them")
    options = parser.parse_args()
    token_ids = tuple(map(int, options.token_ids.split(",")))
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        runner.run(_serve(token_ids, options.tokens_per_s))


if __name__ == "__main__":
    main()
