"""A cell in virtual time: the router's own books and policy, workers with the engine's own scheduler, block pool and
prefix cache, and steps and hand-offs that take what a cost table says. No threads, no messages, no waiting: what comes
out is a function of the seed, on any machine and however busy it is. What a worker's or a gateway's own Python takes is
not in it; :mod:`bench.cell` has that.

    cell = VirtualCell(costs, prefill=2, decode=2, mode="auto")
    samples = cell.play(conversations)              # of bench/workloads.py
    cell.workers["decode-1"].costs = slower         # or cell.at(20.0, change)
"""

import itertools
import random
from collections import deque
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from functools import partial

from bench.traffic import OK, Conversation, Sample
from bench.virtual_worker import BLOCK_BYTES, RETRY_S, Timeline, VirtualWorker
from core.config import ClusterConfig, load_config
from core.costs import HandoffCosts, StepCosts
from core.errors import OutOfBlocks
from core.ids import GatewayId, Incarnation, RequestId, WorkerId
from core.kv import hash_blocks
from core.types import Mode, Placement, PlaceRequest, Role, SamplingParams
from engine.sequence import Sequence, SequenceKey
from router.absences import Absences
from router.cost_book import CostBook
from router.handler import policy_settings, room_limits
from router.load import LoadBook
from router.placer import Placer
from router.policy import Lack, Shortfall
from router.pools import PoolBook
from router.prefix_index import PrefixIndex
from router.registry import LivenessTimes, Membership, Registry

HOP_S = 0.002
"""From the gateway to a worker."""


@dataclass(slots=True, kw_only=True, eq=False)
class Asked:
    """One request on its way."""

    conversation: Conversation
    prompt: tuple[int, ...]
    max_tokens: int
    sent_at: float
    on_end: Callable[[tuple[int, ...]], None]
    placement: Placement | None = None
    times: list[float] = field(default_factory=list)
    answer: list[int] = field(default_factory=list)
    num_cached: int = 0


class VirtualCell:
    """One router, its workers and the driver of requests."""

    model = "virtual"

    def __init__(
        self,
        costs: StepCosts,
        *overrides: str,
        prefill: int = 0,
        decode: int = 0,
        unified: int = 0,
        noise: float = 0.05,
        seed: int = 0,
        hop_s: float = HOP_S,
    ) -> None:
        """``noise``: of each step and hand-off, log-normal. ``hop_s``: from the gateway to a worker, and back."""
        counts = {Role.PREFILL: prefill, Role.DECODE: decode, Role.UNIFIED: unified}
        counts = {role: number for role, number in counts.items() if number}
        pools = ", ".join(f"{role}: {{replicas: {number}}}" for role, number in counts.items())
        self.config: ClusterConfig = load_config(
            overrides=[
                f"models.0.name={self.model}",
                "models.0.kv.num_blocks=4096",
                f"models.0.pools={{{pools}}}",
                *overrides,
            ],
            environ={},
        )
        self.random = random.Random(seed)
        self.timeline = Timeline()
        self._noise, self._hop_s = noise, hop_s
        router = self.config.router
        self.registry = Registry(self.timeline, LivenessTimes.of(router))
        self.costs = CostBook()
        self._load = LoadBook(self.timeline, projected_tokens=self.config.worker.projected_tokens)
        self._prefixes = PrefixIndex(self.timeline)
        self._placer = Placer(
            registry=self.registry,
            load=self._load,
            prefixes=self._prefixes,
            costs=self.costs,
            pools=PoolBook(self.timeline, self.config.models),
            absences=Absences(self.timeline, after_s=router.fallback_after_s),
            settings=policy_settings(self.config),
            room_limits=room_limits(self.config),
        )
        self._line: deque[Asked] = deque()
        """Those for whom there is no room: they wait at the router, one behind the other."""
        self._samples: list[Sample] = []
        self._num_open = 0
        self.workers: dict[str, VirtualWorker] = {}
        """By id: ``prefill-0``, ``decode-0``, ..."""
        self._memberships: dict[tuple[WorkerId, Incarnation], Membership] = {}
        for role, number in counts.items():
            for each in range(number):
                worker = VirtualWorker(
                    self.config, role, each, costs, timeline=self.timeline, choose=self.random, noise=self.noise
                )
                self.workers[worker.registration.worker_id] = worker
                self._memberships[worker.key] = self.registry.join(worker.registration)
                self._prefixes.begin(worker.key, max_blocks=worker.registration.num_blocks)
                self._beat(worker)

    def noise(self) -> float:
        return self.random.lognormvariate(0.0, self._noise) if self._noise else 1.0

    def at(self, seconds: float, change: Callable[[], None]) -> None:
        """Let ``change`` happen at that time of the play."""
        self.timeline.after(seconds - self.timeline.now(), change)

    def play(self, conversations: Iterable[Conversation]) -> list[Sample]:
        """All to their ends; the samples in the order in which they were sent."""
        for conversation in conversations:
            self._num_open += 1
            self.at(conversation.at_s, partial(self._converse, conversation, 0, conversation.prefix))
        while self._num_open:
            self.timeline.step()
        return sorted(self._samples, key=lambda sample: sample.sent_s)

    def _converse(self, conversation: Conversation, number: int, said: tuple[int, ...]) -> None:
        turn = conversation.turns[number]
        prompt = said + turn.tokens

        def go_on(answer: tuple[int, ...]) -> None:
            if number + 1 == len(conversation.turns):
                self._num_open -= 1
                return
            think_s = conversation.turns[number + 1].think_s
            self.timeline.after(think_s, lambda: self._converse(conversation, number + 1, prompt + answer))

        asked = Asked(
            conversation=conversation,
            prompt=prompt,
            max_tokens=turn.max_tokens,
            sent_at=self.timeline.now(),
            on_end=go_on,
        )
        self._line.append(asked)
        self._serve_line()

    def _beat(self, worker: VirtualWorker) -> None:
        """A heartbeat, as the router's handler takes it in."""
        self.registry.heartbeat(self._memberships[worker.key], worker.load())
        changes = worker.pool.take_changes()
        self._prefixes.apply(worker.key, stored=changes.stored, evicted=changes.evicted)
        self.costs.learn(worker.registration, worker.samples.take())
        self._serve_line()
        self.timeline.after(self.config.router.heartbeat_s, lambda: self._beat(worker))

    # -- one request --------------------------------------------------------------------------------------------------

    def _serve_line(self) -> None:
        while self._line and self._place(self._line[0]):
            self._line.popleft()

    def _place(self, asked: Asked) -> bool:
        block_size = self.config.models[0].kv.block_size
        outcome = self._placer.place_now(
            PlaceRequest(
                request_id=RequestId(f"{self.random.getrandbits(64):016x}"),
                model=self.model,
                attempt=1,
                num_prompt_tokens=len(asked.prompt),
                max_new_tokens=asked.max_tokens,
                block_hashes=tuple(hash_blocks(asked.prompt, block_size)),
                gateway_id=GatewayId("gateway-0"),
                gateway_incarnation=Incarnation(1),
                deadline_s=asked.conversation.deadline_s,
            )
        )
        if isinstance(outcome, Shortfall):
            assert outcome.lack is Lack.NO_ROOM, outcome
            return False
        asked.placement = outcome
        decode = self.workers[outcome.decode.worker_id]
        if outcome.mode is Mode.LOCAL:
            self.timeline.after(
                self._hop_s, lambda: decode.run(self._sequence(asked), partial(self._take, asked, decode))
            )
            return True
        assert outcome.prefill is not None
        prefill = self.workers[outcome.prefill.worker_id]
        sequence = self._sequence(asked)
        sequence.pause_at = len(asked.prompt) + 1
        self.timeline.after(self._hop_s, lambda: prefill.run(sequence, partial(self._hand_off, asked, prefill, decode)))
        return True

    def _sequence(self, asked: Asked) -> Sequence:
        assert asked.placement is not None
        return Sequence(
            key=SequenceKey(request_id=RequestId(asked.placement.placement_id), attempt=1, choice=0),
            sampling=SamplingParams(max_tokens=asked.max_tokens, ignore_eos=True),
            tokens=list(asked.prompt),
            num_prompt_tokens=len(asked.prompt),
        )

    def _hand_off(self, asked: Asked, prefill: VirtualWorker, decode: VirtualWorker, sequence: Sequence) -> None:
        """P has the first token. Complete chunks have moved before; the last one is still to move."""
        prefill.scheduler.park(sequence)
        self._note(asked, sequence)
        if len(asked.answer) == asked.max_tokens:
            prefill.end(sequence)
            self._end(asked)
            return
        held = decode.pool.hold(list(hash_blocks(asked.prompt, decode.registration.model.block_size)))
        costs = decode.costs.handoff or HandoffCosts()
        num_tokens = len(asked.prompt) - len(held) * decode.registration.model.block_size
        num_tokens = min(num_tokens, prefill.registration.max_step_tokens)
        seconds = (costs.fixed_s + costs.token_s * num_tokens) * self.noise()
        now = self.timeline.now()
        decode.is_fetching_until = max(now, decode.is_fetching_until) + seconds
        num_bytes = BLOCK_BYTES * -(-num_tokens // decode.registration.model.block_size)
        assert asked.placement is not None and asked.placement.prefill is not None
        source = asked.placement.prefill

        def arrive() -> None:
            needed = -(-len(asked.prompt) // decode.registration.model.block_size) - len(held)
            try:
                blocks = decode.pool.allocate(needed)
            except OutOfBlocks:
                self.timeline.after(RETRY_S, arrive)
                return
            decode.samples.add_handoff(source, num_bytes, seconds)
            prefill.end(sequence)
            arrived = self._sequence(asked)
            arrived.num_computed = len(asked.prompt)
            arrived.tokens.append(asked.answer[0])
            arrived.block_table = held + blocks
            decode.run(arrived, partial(self._take, asked, decode))

        self.timeline.after(decode.is_fetching_until - now, arrive)

    def _take(self, asked: Asked, decode: VirtualWorker, sequence: Sequence) -> None:
        self._note(asked, sequence)
        if len(asked.answer) == asked.max_tokens:
            decode.end(sequence)
            self._end(asked)

    def _note(self, asked: Asked, sequence: Sequence) -> None:
        asked.times.append(self.timeline.now() + self._hop_s)
        asked.answer.append(sequence.tokens[-1])
        asked.num_cached = max(asked.num_cached, sequence.num_cached)

    def _end(self, asked: Asked) -> None:
        placement, times = asked.placement, asked.times
        assert placement is not None
        self._load.release(placement.placement_id)
        self._serve_line()
        self._samples.append(
            Sample(
                label=asked.conversation.label,
                tenant=asked.conversation.tenant,
                priority=asked.conversation.priority,
                num_prompt_tokens=len(asked.prompt),
                outcome=OK,
                ttft_s=times[0] - asked.sent_at,
                e2e_s=times[-1] - asked.sent_at,
                itl_s=tuple(later - earlier for earlier, later in itertools.pairwise(times)),
                answer=tuple(asked.answer),
                sent_s=asked.sent_at,
                num_cached_tokens=asked.num_cached,
                attempts=1,
                mode=str(placement.mode),
                prefill_worker="" if placement.prefill is None else placement.prefill.worker_id,
                decode_worker=placement.decode.worker_id,
                reason=placement.reason,
            )
        )
        asked.on_end(tuple(asked.answer))
