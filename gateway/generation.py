"""The two generation routes: read, parse (off the event loop), run the pipeline, answer plain or as a stream."""

import asyncio
import re
import secrets
import time
from collections.abc import Callable, Sequence

from core import semconv
from core.clock import Clock
from core.config import LimitsConfig
from core.errors import Cancelled, InvalidRequest, NoWorker, QueueFull
from core.grammar import GRAMMAR_PARAM
from core.ids import GatewayId, Incarnation, RequestId
from core.spans import Span, Value
from core.tasks import all_or_none
from core.telemetry import Telemetry
from core.types import ChoiceProgress, FinishReason, GenerateRequest, RequestRecord, Stage, StageTimes
from gateway.access.gate import Gate
from gateway.access.reservations import Demand
from gateway.answers import Answer
from gateway.completion_answer import CompletionAnswer
from gateway.edge import Exchange
from gateway.event_stream import EventStream
from gateway.fields import UnknownFields
from gateway.http import Interruption, Receive, Scope, Send, header, read_json_body, send_bytes, until_disconnect
from gateway.models import ModelShelf
from gateway.parse import Job, chat_job, completion_job, with_blocks
from gateway.pipeline import Pipeline
from gateway.responses.answer import ResponsesAnswer
from gateway.responses.body import ResponsesBody
from gateway.responses.conversation import ResponseRequest
from gateway.run import Choice, Run
from gateway.schemas import ChatBody, CompletionBody, parse_body
from gateway.stages import StageClock
from gateway.text import ChoiceText, TextDelta
from gateway.tools.answer import chat_answer
from gateway.trace import RequestTrace
from gateway.usage import usage_of

SEND_GRACE_S = 10.0
"""After its deadline a request has only to be sent; a client that does not read for so long is gone."""


TRACEPARENT = re.compile("00-(?!0{32})[0-9a-f]{32}-(?!0{16})[0-9a-f]{16}-[0-9a-f]{2}")


class Generation:
    """The handlers that run requests, and the count of those that run."""

    def __init__(
        self,
        *,
        shelf: ModelShelf,
        pipeline: Pipeline,
        limits: LimitsConfig,
        unknown: UnknownFields,
        clock: Clock,
        gateway_id: GatewayId,
        incarnation: Incarnation,
        on_count: Callable[[int], None],
        on_end: Callable[[Run, RequestRecord], None],
        block_size: Callable[[str], int],
        gate: Gate,
        telemetry: Telemetry,
    ) -> None:
        self._shelf = shelf
        self._pipeline = pipeline
        self._limits = limits
        self._unknown = unknown
        self._clock = clock
        self._gateway_id = gateway_id
        self._incarnation = incarnation
        self._on_count = on_count
        self._on_end = on_end
        self._block_size = block_size
        self._gate = gate
        self._telemetry = telemetry
        self._num_running = 0
        self._idle = asyncio.Event()
        self._idle.set()
        self._stopping = asyncio.Event()
        self._stops: set[Interruption] = set()
        """Of the requests that run."""
        self._is_refusing = False
        self.is_draining = False

    async def drain(self, timeout_s: float, *, wait_s: float = 0) -> None:
        """Says that it drains, and after `wait_s` refuses new work; lets running requests finish for `timeout_s`, then
        ends them by an error."""
        self.is_draining = True
        if wait_s:
            await _at_most(wait_s, self._stopping)
        self._is_refusing = True
        await _at_most(timeout_s, self._idle, self._stopping)
        self._stop()
        await self._idle.wait()

    def _stop(self) -> None:
        self._stopping.set()
        for stop in tuple(self._stops):
            stop.end(_draining())

    def hurry(self) -> None:
        """Ends running requests by an error, now; a drain under way waits no longer."""
        self._stop()

    async def chat_completions(self, exchange: Exchange, scope: Scope, receive: Receive, send: Send) -> None:
        def make_job(raw: bytes) -> Job:
            body = parse_body(ChatBody, raw, self._unknown)
            return chat_job(body, self._shelf.seen_by(exchange.caller).get(body.model), self._limits)

        await self._generate(exchange, scope, receive, send, make_job, chat_answer)

    async def completions(self, exchange: Exchange, scope: Scope, receive: Receive, send: Send) -> None:
        def make_job(raw: bytes) -> Job:
            body = parse_body(CompletionBody, raw, self._unknown)
            return completion_job(body, self._shelf.seen_by(exchange.caller).get(body.model), self._limits)

        await self._generate(exchange, scope, receive, send, make_job, CompletionAnswer)

    async def responses(self, exchange: Exchange, scope: Scope, receive: Receive, send: Send) -> None:
        asked: list[ResponseRequest] = []

        def make_job(raw: bytes) -> Job:
            body = parse_body(ResponsesBody, raw, self._unknown)
            request = ResponseRequest(body, self._shelf.seen_by(exchange.caller).get(body.model))
            asked.append(request)
            return request.job(self._limits)

        await self._generate(
            exchange, scope, receive, send, make_job, lambda job, request_id: ResponsesAnswer(job, request_id, asked[0])
        )

    async def _generate(
        self,
        exchange: Exchange,
        scope: Scope,
        receive: Receive,
        send: Send,
        make_job: Callable[[bytes], Job],
        make_answer: Callable[[Job, str], Answer],
    ) -> None:
        stages = StageClock(self._clock, started=self._clock.now() - (time.monotonic() - exchange.started))
        raw = await read_json_body(scope, receive, self._limits)
        self._begin()
        try:
            work = self._answer(exchange, scope, send, stages, raw, make_job, make_answer)
            await until_disconnect(
                scope, receive, work, stops=self._stops, timeout_s=self._limits.request_timeout_s + SEND_GRACE_S
            )
        finally:
            self._end()

    def _begin(self) -> None:
        if self._is_refusing or self._stopping.is_set():
            raise _draining()
        if self._num_running >= self._limits.max_requests:
            raise QueueFull("this gateway is at its limit of requests; try again", code="server_overloaded")
        self._num_running += 1
        self._idle.clear()
        self._on_count(self._num_running)

    def _end(self) -> None:
        self._num_running -= 1
        if self._num_running == 0:
            self._idle.set()
        self._on_count(self._num_running)

    async def _answer(
        self,
        exchange: Exchange,
        scope: Scope,
        send: Send,
        stages: StageClock,
        raw: bytes,
        make_job: Callable[[bytes], Job],
        make_answer: Callable[[Job, str], Answer],
    ) -> None:
        stages.mark(Stage.ADMISSION)
        job = await self._shelf.run(lambda: self._with_blocks(make_job(raw), exchange), num_bytes=len(raw))
        stages.mark(Stage.TOKENIZE)
        answer = make_answer(job, exchange.request_id)
        ticket = await self._gate.reserve(exchange, _demand(job))
        runs: list[Run] = []
        is_answered = False
        try:
            runs = answer.runs = self._runs(exchange, scope, job, answer, stages)
            if header(scope, b"x-baton-timing") == "1":
                answer.timing = _timing
            work = (
                _echo(runs)
                if job.is_echo_only and not job.scores_echo
                else all_or_none([self._pipeline.generate(run) for run in runs])
            )
            if job.stream:
                limits = self._limits
                stream = EventStream(
                    exchange,
                    scope,
                    send,
                    answer,
                    patience_s=limits.slow_reader_s,
                    keep_alive_s=limits.stream_keep_alive_s,
                )
                await stream.run(work)
            else:
                await work
                if answer.timing is not None:
                    exchange.headers[b"x-baton-timing"] = _timing_header(runs)
                await send_bytes(send, 200, answer.whole())
            is_answered = True
        except InvalidRequest as error:
            if error.param == GRAMMAR_PARAM:
                error.param = job.grammar_member or error.param
            raise
        finally:
            ticket.settle(usage_of(runs if is_answered else self._charged(runs)))
            records = []
            for run in runs:
                if self._telemetry.record_prompts and run.trace.is_told:
                    run.trace.root.set(**_texts(run, job))
                records.append(run.close(is_sent=is_answered and len(runs) == 1))  # several wait for each other
                self._on_end(run, records[-1])
            if runs and exchange.is_logged:
                exchange.fields |= _log_fields(runs, records[0], job)

    def _with_blocks(self, job: Job, exchange: Exchange) -> Job:
        salt = exchange.caller.salt(job.cache_salt)
        return with_blocks(job, block_size=self._block_size(job.model.name), salt=salt)

    def _charged(self, runs: Sequence[Run]) -> list[Run]:
        """The runs that cost something although there was no whole answer: those that made tokens, and where it was the
        caller who left, those whose prompt is being read. What fails by our fault before its first token is free."""
        has_left = not self._stopping.is_set() and all(run.is_over or run.outcome == Cancelled.slug for run in runs)
        return [run for run in runs if run.num_completion_tokens or (has_left and run.last_placement is not None)]

    def _runs(self, exchange: Exchange, scope: Scope, job: Job, answer: Answer, stages: StageClock) -> list[Run]:
        """One for each prompt. Their first bears the id that the caller sees, the others are numbered behind it."""
        given = header(scope, b"traceparent")
        parent = given if TRACEPARENT.fullmatch(given) else ""
        runs: list[Run] = []
        for number, prompt in enumerate(job.prompts):
            above = parent if not runs else parent or runs[0].trace.root.traceparent
            span = self._begin_span(exchange, job, above)
            request = GenerateRequest(
                request_id=RequestId(exchange.request_id if number == 0 else f"{exchange.request_id}-{number}"),
                model=job.model.name,
                prompt_token_ids=prompt.token_ids,
                sampling=job.sampling,
                choices=tuple(ChoiceProgress(choice=choice) for choice in range(job.sampling.n)),
                priority=exchange.caller.rank(job.priority),
                tenant=exchange.caller.tenant,
                cache_salt=exchange.caller.salt(job.cache_salt),
                gateway_id=self._gateway_id,
                gateway_incarnation=self._incarnation,
                deadline_s=self._limits.request_timeout_s,
                traceparent=span.traceparent or _new_traceparent(exchange.request_id),
            )
            first = number * job.sampling.n
            choices = [
                Choice(
                    choice,
                    ChoiceText(job.model.tokenizer, job.rules),
                    answer.sink(first + choice),
                    answer.lane(first + choice),
                )
                for choice in range(job.sampling.n)
            ]
            clock = stages if number == 0 else stages.copy()
            runs.append(Run(request, choices, clock, blocks=prompt.blocks, is_scoring=job.is_echo_only))
            runs[-1].trace = RequestTrace(self._telemetry, span, started_at=exchange.started)
            runs[-1].stages.mark(Stage.ADMISSION)
        return runs

    def _begin_span(self, exchange: Exchange, job: Job, above: str) -> Span:
        operation = semconv.OPERATIONS[exchange.route]
        asked: dict[str, Value] = {
            semconv.OPERATION: operation,
            semconv.PROVIDER: semconv.PROVIDER_NAME,
            semconv.OUTPUT_TYPE: "text",
            semconv.REQUEST_STREAM: job.stream,
        }
        return self._telemetry.begin(
            f"{operation} {job.model.name}",
            parent=above,
            trace_id=exchange.request_id,
            kind="server",
            started_at=exchange.started,
            route=exchange.route,
            **asked,
        )


def _draining() -> NoWorker:
    return NoWorker("this gateway is shutting down; try again", code="draining")


async def _at_most(seconds: float, *events: asyncio.Event) -> None:
    """Until one of the events is set, or the time is over."""
    waits = [asyncio.ensure_future(event.wait()) for event in events]
    try:
        await asyncio.wait(waits, timeout=seconds, return_when=asyncio.FIRST_COMPLETED)
    finally:
        for wait in waits:
            wait.cancel()


def _new_traceparent(request_id: str) -> str:
    """Of a trace whose id is the request id."""
    return f"00-{request_id}-{secrets.token_hex(8)}-01"


async def _echo(runs: Sequence[Run]) -> None:
    """Nothing is to be generated."""
    for run in runs:
        for choice in run.choices:
            choice.finish_reason = FinishReason.LENGTH
        run.finish()
        for choice in run.choices:
            choice.sink(TextDelta(finish_reason=FinishReason.LENGTH))


def _demand(job: Job) -> Demand:
    max_tokens = 0 if job.is_echo_only else job.sampling.max_tokens
    lengths = [len(prompt.token_ids) for prompt in job.prompts]
    return Demand(
        model=job.model.name,
        num_prompt_tokens=sum(lengths),
        num_choices=job.sampling.n * len(lengths),
        max_tokens=max_tokens,
        is_open_ended=max(lengths) + max_tokens >= job.model.max_context,
    )


def _timing(run: Run) -> dict[str, object]:
    """Where the time went, for a caller that asked with `x-baton-timing: 1`."""
    record = run.record()
    times = run.times
    decode_s = record.duration_s - record.ttft_s
    num_gaps = record.num_completion_tokens - 1
    timing: dict[str, object] = {
        "total_ms": _ms(record.duration_s),
        "ttft_ms": _ms(record.ttft_s),
        "stages_ms": {stage: _ms(seconds) for stage, seconds in record.stages},
        "tokens_per_s": round(num_gaps / decode_s, 2) if num_gaps > 0 and decode_s > 0 else None,
        "attempts": record.attempts,
        "mode": record.mode,
        "prefill_worker": record.prefill_worker,
        "decode_worker": record.decode_worker,
        "transfer_bytes": times.transfer_bytes if times else 0,
        "transfer_early_bytes": times.transfer_early_bytes if times else 0,
        "transfer_backend": times.transfer_backend if times else "",
        "transfer_ms": _ms(times.transfer_s) if times else 0.0,
        "transfer_parts_ms": _parts_of_transfer(times) if times and times.transfer_backend else {},
        "workload_class": record.workload_class,
        "trace_id": record.trace_id,
    }
    return {"timing": timing}


def _texts(run: Run, job: Job) -> dict[str, Value]:
    """What was asked and answered, for a trace whose operator has asked for it."""

    def text_of(token_ids: Sequence[int]) -> str:
        return job.model.tokenizer.decode(token_ids, skip_special_tokens=False)

    return {
        semconv.INPUT_MESSAGES: text_of(run.request.prompt_token_ids),
        semconv.OUTPUT_MESSAGES: tuple(text_of(choice.accepted) for choice in run.choices),
    }


def _timing_header(runs: Sequence[Run]) -> bytes:
    """The stages of the run that took longest, as the header Server-Timing writes durations: milliseconds."""
    slowest = max(runs, key=lambda run: run.stages.total_s())
    return ", ".join(f"{stage};dur={_ms(seconds)}" for stage, seconds in slowest.stages.stages()).encode()


def _parts_of_transfer(times: StageTimes) -> dict[str, float]:
    """They sum to the transfer as D saw it, from the grant on."""
    return {
        "wait": _ms(times.transfer_wait_s),
        "post": _ms(times.transfer_post_s),
        "move": _ms(times.transfer_move_s),
        "verify": _ms(times.transfer_verify_s),
        "publish": _ms(times.transfer_publish_s),
    }


def _ms(seconds: float) -> float:
    return round(1e3 * seconds, 3)


def _log_fields(runs: Sequence[Run], record: RequestRecord, job: Job) -> dict[str, object]:
    """Of the first run, and the tokens of all."""
    usage = usage_of(runs)
    return {
        "model": record.model,
        "stream": job.stream,
        "num_prompts": len(runs),
        "n": job.sampling.n,
        "outcome": record.outcome,
        "num_prompt_tokens": usage.num_prompt_tokens,
        "num_completion_tokens": usage.num_completion_tokens,
        "attempts": sum(run.attempt for run in runs),
        "mode": record.mode,
        "prefill_worker": record.prefill_worker,
        "decode_worker": record.decode_worker,
        "ttft_ms": _ms(record.ttft_s),
        "trace_id": record.trace_id,
        "stages_ms": {stage: _ms(seconds) for stage, seconds in record.stages},
    }
