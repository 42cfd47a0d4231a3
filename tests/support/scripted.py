"""A scripted cluster: plays given token ids through the gateway's ports, and goes wrong exactly where it is told to.

It answers like a deterministic engine: the same request with accepted tokens continues behind them. Nothing here
sleeps; a test that needs a pause holds a gate.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Sequence
from dataclasses import dataclass, field, replace
from itertools import zip_longest

from core import types as t
from core.errors import NoWorker, ServingError, WorkerLost
from core.ids import GatewayId, HandoffId, Incarnation, PlacementId, WorkerId

Steps = Sequence[Sequence[int]]


@dataclass(kw_only=True)
class Fault:
    """What goes wrong in one attempt. Counts are of the answer's tokens, from 0."""

    on_place: ServingError | None = None
    on_prefill: ServingError | None = None
    on_admit: ServingError | None = None
    fail_at: int | None = None
    """D reports AttemptFailed(`error`) instead of the step that begins at or after this token."""
    error: ServingError = field(default_factory=lambda: WorkerLost("scripted", worker_id="decode-0"))
    break_stream_at: int | None = None
    """D's whole token stream breaks there."""
    repeat_from: int | None = None
    """D starts with tokens from this index, known or not."""
    skip_at: int | None = None
    """D leaves this token out: a gap."""
    hangs: bool = False
    """Neither worker ever answers."""
    is_queued: bool = False
    """D queues the admission; the gate `accept` lets it in."""


@dataclass(kw_only=True)
class Script:
    """What the cluster answers. `steps` are the tokens as the engine groups them."""

    steps: Steps
    others: Sequence[Steps] = ()
    """What the choices from the second on say, in turn; `steps` again where there is none."""
    finish_reason: t.FinishReason = t.FinishReason.LENGTH
    stop_token_id: int | None = None
    finish_alone: bool = False
    """The finish reason comes in a last chunk without tokens."""
    mode: t.Mode = t.Mode.SPLIT
    logprobs: Callable[[int], t.TokenLogprobs] | None = None
    faults: dict[int, Fault] = field(default_factory=dict)
    """By attempt."""
    num_decodes: int = 1
    holds: bool = True
    """What a failed attempt left at its prefill worker can be claimed: the router finds the holder alive."""

    def steps_of(self, choice: int) -> Steps:
        return self.others[choice - 1] if 0 < choice <= len(self.others) else self.steps

    def answer(self, choice: int = 0) -> list[int]:
        return [token for step in self.steps_of(choice) for token in step]


class ScriptedCluster:
    """Router, prefill and decode workers in one; also the client factory of the gateway."""

    def __init__(self, script: Script) -> None:
        self.script = script
        self.gates: dict[str, asyncio.Event] = {}
        self.reached: dict[str, asyncio.Event] = {}
        self.places: list[t.PlaceRequest] = []
        self.requests: list[t.GenerateRequest] = []
        self.ends: list[t.PlacementEnd] = []
        self.aborts: list[tuple[str, int, str]] = []
        self.unread: list[int] = []
        """Choices that D was told to give up alone."""
        self.reports: list[t.GatewayReport] = []
        self.usable: tuple[tuple[str, bool, str], ...] = (("m", True, ""),)
        self.models: tuple[t.ModelRecord, ...] = ()
        """What the router tells of them."""
        self.incarnations = {f"decode-{index}": index + 1 for index in range(script.num_decodes)}
        self.prefill_incarnation = 9
        self.closed_prefills: list[int] = []
        self.streams: dict[tuple[str, int], asyncio.Queue[t.StepOutputs | ServingError]] = {}
        self.tasks: set[asyncio.Task[None]] = set()
        self.prefilled: dict[HandoffId, asyncio.Event] = {}
        self.prefills: list[HandoffId] = []
        """Of each call."""
        self.is_closed = False

    # -- control ------------------------------------------------------------------------------------------------------

    def hold(self, name: str) -> None:
        """Whoever comes to `name` waits until `release(name)`."""
        self.gates[name] = asyncio.Event()

    def release(self, name: str) -> None:
        self.gates[name].set()

    async def pass_gate(self, name: str) -> None:
        self.reached.setdefault(name, asyncio.Event()).set()
        if name in self.gates:
            await self.gates[name].wait()

    async def until(self, name: str) -> None:
        """Returns when somebody has come to the gate `name`."""
        await self.reached.setdefault(name, asyncio.Event()).wait()

    def fault(self, attempt: int) -> Fault:
        return self.script.faults.get(attempt, Fault())

    # -- the router ---------------------------------------------------------------------------------------------------

    async def place(self, request: t.PlaceRequest) -> t.Placement:
        self.places.append(request)
        self.ends += request.ended
        await self.pass_gate("place")
        fault = self.fault(request.attempt)
        if fault.on_place is not None:
            raise fault.on_place
        for name, incarnation in self.incarnations.items():
            if (name, incarnation) not in request.excluded_workers:
                break
        else:
            raise NoWorker("no worker is left")
        is_split = self.script.mode is t.Mode.SPLIT
        held = request.held if self.script.holds else None
        name_of_attempt = f"{request.request_id}-{request.attempt}"
        return t.Placement(
            placement_id=PlacementId(name_of_attempt),
            handoff_id=HandoffId(name_of_attempt) if held is None else held.handoff_id,
            is_held=held is not None,
            mode=self.script.mode,
            decode=t.WorkerAddress(worker_id=WorkerId(name), incarnation=Incarnation(incarnation), address="d:1"),
            prefill=t.WorkerAddress(
                worker_id=WorkerId("prefill-0"), incarnation=Incarnation(self.prefill_incarnation), address="p:1"
            )
            if is_split
            else None,
        )

    async def end_placement(self, end: t.PlacementEnd) -> None:
        self.ends.append(end)

    async def report_gateway(self, report: t.GatewayReport) -> t.ClusterView:
        self.reports.append(report)
        return t.ClusterView(models=self.models, usable=self.usable)

    async def close(self) -> None:
        self.is_closed = True
        for task in self.tasks:
            task.cancel()
        await asyncio.gather(*self.tasks, return_exceptions=True)

    # -- the client factory -------------------------------------------------------------------------------------------

    def prefill(self, worker: t.WorkerAddress) -> ScriptedPrefill:
        return ScriptedPrefill(self, worker.incarnation)

    def decode(self, worker: t.WorkerAddress) -> ScriptedDecode:
        return ScriptedDecode(self, worker)

    # -- shared by the workers ----------------------------------------------------------------------------------------

    def first_token(self, request: t.GenerateRequest, progress: t.ChoiceProgress) -> t.FirstToken:
        index = len(progress.accepted)
        answer = self.script.answer(progress.choice)
        token_id = answer[index]
        is_last = index + 1 == len(answer) and not self.script.finish_alone
        return t.FirstToken(
            choice=progress.choice,
            index=index,
            token_id=token_id,
            logprobs=self.script.logprobs(token_id) if self.script.logprobs else None,
            finish_reason=self.script.finish_reason if is_last else None,
            stop_token_id=self.script.stop_token_id if is_last else None,
        )

    def prompt_scores(self, request: t.GenerateRequest) -> tuple[t.TokenLogprobs, ...]:
        if request.sampling.prompt_logprobs is None:
            return ()
        score = self.script.logprobs or (lambda token_id: t.TokenLogprobs(logprob=-1.0, rank=1))
        return tuple(score(token_id) for token_id in request.prompt_token_ids[1:])

    def chunks(self, request: t.GenerateRequest) -> list[t.TokenChunk]:
        """What D sends for an attempt, the choices step by step beside each other."""
        each = [self.chunks_of(request, progress) for progress in request.choices]
        chunks = [chunk for step in zip_longest(*each) for chunk in step if chunk is not None]
        if self.script.mode is t.Mode.LOCAL:
            chunks[0] = replace(chunks[0], prompt_logprobs=self.prompt_scores(request))
        return chunks

    def chunks_of(self, request: t.GenerateRequest, progress: t.ChoiceProgress) -> list[t.TokenChunk]:
        """The script's steps from the accepted tokens on (index 0 of a split repeated)."""
        script, fault = self.script, self.fault(request.attempt)
        steps, num_tokens = script.steps_of(progress.choice), len(script.answer(progress.choice))
        start = len(progress.accepted) if fault.repeat_from is None else fault.repeat_from
        chunks: list[t.TokenChunk] = []
        index = 0
        for step in steps:
            tokens = tuple(step)[max(0, start - index) :]
            first = max(index, start)
            index += len(step)
            if not tokens or (fault.skip_at is not None and first <= fault.skip_at < index):
                continue
            is_last = index == num_tokens and not script.finish_alone
            chunks.append(
                t.TokenChunk(
                    request_id=request.request_id,
                    choice=progress.choice,
                    attempt=request.attempt,
                    first_index=first,
                    token_ids=tokens,
                    logprobs=tuple(script.logprobs(one) for one in tokens) if script.logprobs else (),
                    finish_reason=script.finish_reason if is_last else None,
                    stop_token_id=script.stop_token_id if is_last else None,
                    stages=t.StageTimes() if is_last else None,
                )
            )
        if script.finish_alone:
            chunks.append(
                t.TokenChunk(
                    request_id=request.request_id,
                    choice=progress.choice,
                    attempt=request.attempt,
                    first_index=num_tokens,
                    token_ids=(),
                    finish_reason=script.finish_reason,
                    stages=t.StageTimes(),
                )
            )
        return chunks


class ScriptedPrefill:
    def __init__(self, cluster: ScriptedCluster, incarnation: int) -> None:
        self._cluster = cluster
        self._incarnation = incarnation

    async def prefill(self, request: t.PrefillRequest) -> t.PrefillReply:
        cluster, attempt = self._cluster, request.request.attempt
        fault = cluster.fault(attempt)
        cluster.prefills.append(request.handoff_id)
        await cluster.pass_gate("prefill")
        if fault.hangs:
            await asyncio.get_running_loop().create_future()
        if fault.on_prefill is not None:
            raise fault.on_prefill
        cluster.prefilled.setdefault(request.handoff_id, asyncio.Event()).set()
        return t.PrefillReply(
            first_tokens=tuple(cluster.first_token(request.request, one) for one in request.request.choices),
            num_cached_tokens=0,
            stages=t.StageTimes(),
            prompt_logprobs=cluster.prompt_scores(request.request),
        )

    async def abort(self, request: t.AbortRequest) -> t.AbortReply:
        await self._cluster.pass_gate("abort-prefill")
        self._cluster.aborts.append(("prefill", request.attempt, request.reason))
        return t.AbortReply(found=True)

    async def close(self) -> None:
        self._cluster.closed_prefills.append(self._incarnation)


class ScriptedDecode:
    def __init__(self, cluster: ScriptedCluster, worker: t.WorkerAddress) -> None:
        self._cluster = cluster
        self._key = (worker.worker_id, worker.incarnation)
        self._queue: asyncio.Queue[t.StepOutputs | ServingError] = asyncio.Queue()
        cluster.streams[self._key] = self._queue

    async def admit(self, request: t.AdmitRequest) -> t.AdmitReply:
        cluster = self._cluster
        fault = cluster.fault(request.request.attempt)
        cluster.requests.append(request.request)
        await cluster.pass_gate("admit")
        if fault.hangs:
            await asyncio.get_running_loop().create_future()
        if fault.on_admit is not None:
            raise fault.on_admit
        task = asyncio.create_task(self._play(request))
        cluster.tasks.add(task)
        task.add_done_callback(cluster.tasks.discard)
        return t.AdmitReply(verdict=t.AdmitVerdict.QUEUED if fault.is_queued else t.AdmitVerdict.ACCEPTED)

    async def _play(self, admitted: t.AdmitRequest) -> None:
        cluster, request = self._cluster, admitted.request
        fault = cluster.fault(request.attempt)
        if fault.is_queued:
            await cluster.pass_gate("accept")
            accepted = t.AttemptAccepted(request_id=request.request_id, attempt=request.attempt)
            self._queue.put_nowait(t.StepOutputs(accepted=(accepted,)))
        if admitted.mode is t.Mode.SPLIT:
            await cluster.prefilled.setdefault(admitted.handoff_id, asyncio.Event()).wait()
        for chunk in cluster.chunks(request):
            if fault.fail_at is not None and chunk.first_index >= fault.fail_at:
                failed = t.AttemptFailed(
                    request_id=request.request_id,
                    attempt=request.attempt,
                    slug=fault.error.slug,
                    message=fault.error.message,
                    worker_id=WorkerId(fault.error.worker_id) if fault.error.worker_id else None,
                )
                self._queue.put_nowait(t.StepOutputs(failed=(failed,)))
                return
            if fault.break_stream_at is not None and chunk.first_index >= fault.break_stream_at:
                self._queue.put_nowait(WorkerLost("scripted break", worker_id=self._key[0]))
                return
            await cluster.pass_gate(f"token-{chunk.first_index}")
            self._queue.put_nowait(_outputs(chunk, admitted.stream_key))

    async def abort(self, request: t.AbortRequest) -> t.AbortReply:
        await self._cluster.pass_gate("abort-decode")
        if request.choices:
            self._cluster.unread += request.choices
        else:
            self._cluster.aborts.append(("decode", request.attempt, request.reason))
        return t.AbortReply(found=True)

    async def outputs(self, gateway_id: GatewayId, gateway_incarnation: Incarnation) -> AsyncIterator[t.StepOutputs]:
        await self._cluster.pass_gate("outputs")
        await self._cluster.pass_gate(f"outputs-{self._key[0]}")
        yield t.StepOutputs()
        while True:
            message = await self._queue.get()
            if isinstance(message, ServingError):
                raise message
            yield message

    async def follow_outputs(
        self, gateway_id: GatewayId, gateway_incarnation: Incarnation, take: Callable[[t.StepOutputs], None]
    ) -> None:
        async for message in self.outputs(gateway_id, gateway_incarnation):
            take(message)

    async def close(self) -> None:
        pass


def _outputs(chunk: t.TokenChunk, stream_key: int) -> t.StepOutputs:
    """As a worker would send it: a token that is nothing but a token goes by its key."""
    is_plain = stream_key and len(chunk.token_ids) == 1 and chunk.finish_reason is None
    if not is_plain or chunk.logprobs or chunk.prompt_logprobs:
        return t.StepOutputs(chunks=(chunk,))
    key = stream_key + chunk.choice
    return t.StepOutputs(plain=t.PlainTokens(keys=(key,), indexes=(chunk.first_index,), token_ids=chunk.token_ids))
