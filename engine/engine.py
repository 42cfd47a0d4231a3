"""The engine of one worker: execution, KV memory, block pool, scheduler; one forward pass per :meth:`Engine.step`.

It knows no roles. What makes a prefill worker is that its sequences pause behind their first token and are detached;
what makes a decode worker is that its sequences arrive with their KV.

Threads: :attr:`Engine.pool` and :attr:`Engine.grammars` may be used from anywhere; everything else belongs to one
thread, the step thread.

Ownership of blocks: ``add`` takes over the blocks and the reservation of a sequence, even when it raises. The engine
frees them when the sequence is refused, finishes, fails or is removed. A paused sequence keeps its blocks until it is
detached (then they are the caller's, who may lease them before freeing) or removed.
"""

import logging
import time
from collections.abc import Sequence as Seq
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

from core.costs import StepWork
from core.errors import InternalError, InvalidRequest, ServingError
from core.ids import BlockHash
from core.kv import KVGeometry, MemoryRegion, hash_blocks
from core.types import FinishReason, TokenLogprobs
from engine.block_pool import BlockPool
from engine.block_table import BlockTables
from engine.checks import check_sequence
from engine.config import MEASURED, resolve
from engine.config import EngineConfig as EngineConfig
from engine.device import Device
from engine.execution import Execution
from engine.forward import ForwardPass
from engine.gpu_memory import blocks_within, measure
from engine.grammar import Grammars
from engine.kv_cache import KVCache, KVShape
from engine.mock import MockExecution
from engine.model.decoder import Decoder
from engine.sampler import Sampled
from engine.scheduler import Chunk, Limits, Scheduler, work_of
from engine.sequence import Sequence, SequenceKey, SequenceState
from engine.stopping import finish_of
from modelfiles.model import ModelFiles

if TYPE_CHECKING:
    from engine.device_memory import DeviceMemory


log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineCounters:
    """A snapshot: what runs now, and totals since start."""

    num_running: int = 0
    num_waiting: int = 0
    queued_prompt_tokens: int = 0
    """Tokens of original prompts still to be computed."""
    num_steps: int = 0
    prompt_tokens_computed: int = 0
    """Tokens of original prompts, recomputation included."""
    prompt_tokens_cached: int = 0
    """Tokens of original prompts that were found in the prefix cache."""
    tokens_computed: int = 0
    tokens_generated: int = 0
    num_preemptions: int = 0
    num_padded_rows: int = 0
    num_failed: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class SequenceOutput:
    """What one step did for one sequence: a new token, or the error that ended it."""

    sequence: Sequence
    token_id: int = -1
    """Means nothing beside an error."""
    index: int = -1
    """Of the token among the generated ones, from the end of the original prompt."""
    logprobs: TokenLogprobs | None = None
    prompt_logprobs: tuple[TokenLogprobs, ...] = ()
    """Given once, with the first token after the prompt was computed here: of its tokens from the second on."""
    finish_reason: FinishReason | None = None
    stop_token_id: int | None = None
    error: ServingError | None = None

    @property
    def key(self) -> SequenceKey:
        return self.sequence.key

    @property
    def is_paused(self) -> bool:
        """The sequence has reached ``pause_at``: detach or remove it."""
        return self.sequence.state is SequenceState.PAUSED


@dataclass(frozen=True, slots=True, kw_only=True)
class LeasedBlocks:
    """Complete blocks of a sequence that is leased early, from ``first_block`` of it on. Computed, immutable, and
    leased in the pool once more: the leases are for the reader of the result to end, whatever becomes of the
    sequence."""

    sequence: Sequence
    first_block: int
    blocks: tuple[int, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class StepResult:
    """One forward pass (or none, when nothing could run)."""

    outputs: tuple[SequenceOutput, ...] = ()
    num_tokens: int = 0
    work: StepWork = field(default_factory=StepWork)
    """What its time depended on."""
    preempted: tuple[Sequence, ...] = ()
    """They start over in other blocks, before this pass."""
    leased: tuple[LeasedBlocks, ...] = ()
    """Of sequences that go on, or have paused behind their first token."""

    @property
    def num_preempted(self) -> int:
        return len(self.preempted)


class Engine:
    """Built in seconds from model files; raises :class:`ConfigError` with the remedy.

    Engines of one process may share the weights: pass the ``model`` of another engine on the same files.
    """

    def __init__(self, files: ModelFiles, config: EngineConfig, *, model: Decoder | None = None) -> None:
        self.format, shape, self.limits = resolve(files, config)
        weights = self._weights(files, config, model) if config.costs is None else None
        if self.limits.num_blocks == MEASURED:
            assert weights is not None, "mock execution runs on a CPU"
            self.limits = replace(self.limits, num_blocks=self._room_on_gpu(weights, config, shape))
        self.cache = KVCache(shape, self.limits.num_blocks, self.limits.device)
        self.execution: Execution = (
            MockExecution(config.costs, self.cache, files)
            if config.costs is not None
            else self._forward_pass(weights, config)
        )
        self.grammars = Grammars(
            files.tokenizer(), vocab_size=self.limits.vocab_size, eos_token_ids=files.config.eos_token_ids
        )
        if config.prefault and config.costs is None and self.cache.prefault is not None:
            self.cache.prefault.start()  # mock execution leaves most of its memory alone
        self.device_memory = _device_memory(self.cache)
        """For digests of the blocks, where the kernels of a GPU make them."""
        self._begin(config)

    def _begin(self, config: EngineConfig) -> None:
        """What a run of the engine changes."""
        self.pool = BlockPool(self.limits.num_blocks)
        self._totals = EngineCounters()
        self._is_caching = config.prefix_cache
        self._tables = BlockTables(
            self.pool,
            block_size=config.block_size,
            copy_block=self.cache.copy_block,
            is_caching=config.prefix_cache,
            settle=self.execution.settle,
        )
        self._scheduler = Scheduler(
            self.pool,
            self._tables,
            Limits(
                max_step_tokens=config.max_step_tokens,
                max_sequences=config.max_sequences,
                max_mixed_tokens=config.max_mixed_tokens,
                projected_tokens=config.projected_tokens,
                policy=config.policy,
            ),
        )
        self._sequences: dict[SequenceKey, Sequence] = {}

    def _weights(self, files: ModelFiles, config: EngineConfig, model: Decoder | None) -> Decoder:
        dtype = self.format.compute_dtype
        weights = model or Decoder(
            files,
            max_context=self.limits.max_context,
            dtype=dtype,
            device=self.limits.device,
            invariant=config.invariant,
        )
        assert (weights.dtype, weights.device) == (dtype, self.limits.device), "shared weights are of one kind"
        return weights

    def _room_on_gpu(self, weights: Decoder, config: EngineConfig, shape: KVShape) -> int:
        limits = self.limits
        memory = measure(weights, max_step_tokens=limits.max_step_tokens, max_sequences=limits.max_sequences)
        num_blocks = blocks_within(memory, config.memory_fraction, shape, min_tokens=limits.max_context)
        log.info("KV on the GPU", extra={"num_blocks": num_blocks, "sum": memory.explain(config.memory_fraction)})
        return num_blocks

    def _forward_pass(self, weights: Decoder | None, config: EngineConfig) -> Execution:
        assert weights is not None
        if not self.limits.device.has_triton:
            return ForwardPass(weights, self.cache, invariant=config.invariant)
        from engine.forward_gpu import GpuForwardPass  # imports Triton
        from engine.model.prompt_gpu import SIZES

        return GpuForwardPass(
            weights,
            self.cache,
            max_sequences=self.limits.max_sequences,
            max_context=self.limits.max_context,
            invariant=config.invariant,
            short_steps=SIZES if self.limits.device is Device.CUDA else (),
            progress=lambda done, of: log.info("recording the steps of answers", extra={"done": done, "of": of}),
        )

    def renew(self, config: EngineConfig) -> None:
        """As if newly built on the same files, memory and weights: no sequence, no block in use, nothing cached, totals
        from zero. Only what a scheduler chooses within may differ in ``config``. No other thread may use the engine
        meanwhile, and nothing may still write to its memory."""
        assert self.pool.counts().is_idle() and not self._sequences, "a run ends before the next one begins"
        assert config.max_sequences <= config.max_step_tokens, "as resolved for another pool of the same model"
        self.limits = replace(self.limits, max_sequences=config.max_sequences, max_step_tokens=config.max_step_tokens)
        self._begin(config)

    def close(self) -> None:
        """End what the engine runs beside its steps. No step may follow."""
        self.grammars.close()
        if self.cache.prefault is not None:
            self.cache.prefault.stop()

    # -- facts --------------------------------------------------------------------------------------------------------

    @property
    def model(self) -> Decoder:
        """The weights, which other engines may share. An engine with mock execution has none."""
        model = getattr(self.execution, "model", None)
        assert isinstance(model, Decoder), "mock execution has no weights"
        return model

    @property
    def geometry(self) -> KVGeometry:
        return self.cache.geometry

    @property
    def kv_region(self) -> MemoryRegion:
        return self.cache.region

    @property
    def has_work(self) -> bool:
        return self._scheduler.has_work

    @property
    def num_growth_blocks(self) -> int:
        """Blocks that running sequences are projected to want beyond what they were promised. From any thread."""
        return self._scheduler.num_growth_blocks

    def hash_prefix(self, tokens: Seq[int], salt: str) -> list[BlockHash]:
        """Hashes under which the complete blocks of ``tokens`` may be found in the pool. From any thread; nothing
        without a prefix cache."""
        return list(hash_blocks(tokens, self.limits.block_size, salt=salt)) if self._is_caching else []

    def counters(self) -> EngineCounters:
        """Cheap, and safe from any thread: a step may be between two of the numbers."""
        scheduler = self._scheduler
        sequences = (*scheduler.running, *scheduler.waiting)
        return replace(
            self._totals,
            num_running=len(scheduler.running),
            num_waiting=len(scheduler.waiting),
            queued_prompt_tokens=sum(max(0, each.num_prompt_tokens - each.num_computed) for each in sequences),
        )

    def find(self, key: SequenceKey) -> Sequence | None:
        return self._sequences.get(key)

    # -- sequences come and go ----------------------------------------------------------------------------------------

    def add(self, sequence: Sequence) -> None:
        """Take a sequence over. When it raises (the sequence could never run here), the blocks it brought are freed."""
        try:
            if sequence.key in self._sequences:
                raise InvalidRequest(f"request {sequence.key.request_id} is running here already")
            check_sequence(sequence, self.limits)
        except ServingError:
            self._scheduler.finish(sequence)
            raise
        if sequence.sampling.prompt_logprobs is not None and sequence.num_tokens_computed == 0:
            sequence.prompt_scores = [] if sequence.num_computed == 0 else None
        self._sequences[sequence.key] = sequence
        self._scheduler.add(sequence)

    def fork(self, parent: Sequence, children: Seq[Sequence]) -> None:
        """Add choices that share the blocks of ``parent`` copy-on-write.

        A child has no blocks yet; its first ``num_computed`` tokens are also the parent's, and computed there. One
        that has no token of its own yet leaves its last one to be computed (``num_computed = len(tokens) - 1``): it
        then draws its next token itself. ``parent`` is in any state in which it has its blocks.
        """
        for child in children:
            self._tables.fork(parent, child)
            self.add(child)

    def remove(self, key: SequenceKey) -> bool:
        """Abort: blocks and reservation are back when this returns. False when the sequence is not (or no longer)
        here.
        """
        sequence = self._sequences.pop(key, None)
        if sequence is None:
            return False
        self._scheduler.finish(sequence)
        return True

    def detach(self, key: SequenceKey) -> Sequence:
        """Hand a paused sequence and its blocks to the caller. Raises KeyError when it is not here."""
        sequence = self._sequences[key]
        assert sequence.state is SequenceState.PAUSED, (
            f"only a paused sequence is detached, this one is {sequence.state}"
        )
        del self._sequences[key]
        self.execution.settle(sequence)
        sequence.state = SequenceState.NEW
        return sequence

    # -- one step -----------------------------------------------------------------------------------------------------

    def step(self) -> StepResult:
        """One forward pass over what the scheduler picks."""
        schedule = self._scheduler.schedule()
        outputs: list[SequenceOutput] = []
        for sequence, error in schedule.failed:
            del self._sequences[sequence.key]
            outputs.append(SequenceOutput(sequence=sequence, error=error))
        leased: list[LeasedBlocks] = []
        chunks: tuple[Chunk, ...] = ()
        if schedule.chunks:
            chunks, computed = self._run(schedule.chunks)
            outputs += computed
            early = [chunk.sequence for chunk in chunks if chunk.sequence.is_leased_early]
            leased += [self._lease_complete(each) for each in early if not each.is_finished]
        totals = self._totals
        self._totals = replace(
            totals,
            tokens_generated=totals.tokens_generated + sum(output.error is None for output in outputs),
            num_preemptions=totals.num_preemptions + len(schedule.preempted),
            num_failed=totals.num_failed + sum(output.error is not None for output in outputs),
        )
        return StepResult(
            outputs=tuple(outputs),
            num_tokens=sum(chunk.num_tokens for chunk in chunks),
            work=work_of(chunks),
            preempted=schedule.preempted,
            leased=tuple(leased),
        )

    def _run(self, scheduled: tuple[Chunk, ...]) -> tuple[tuple[Chunk, ...], list[SequenceOutput]]:
        """The chunks that were computed, and what came of them."""
        started_at = time.monotonic()
        if self.execution.looks_ahead:
            for chunk in scheduled:
                self._tables.make_room(chunk.sequence)
        computed = self.execution.run(scheduled)
        chunks = computed.chunks
        sampled = [
            (chunk.sequence, each)
            for chunk, each in zip((chunk for chunk in chunks if chunk.is_sampled), computed.sampled, strict=True)
        ]
        broken = {sequence.key for sequence, each in sampled if isinstance(each.error, InternalError)}
        num_prompt = num_cached = 0
        for chunk in chunks:
            sequence = chunk.sequence
            if sequence.num_tokens_computed == 0:
                num_cached += sequence.num_cached
            if sequence.first_step_at is None:
                sequence.first_step_at = started_at
            num_prompt += self._scheduler.complete(chunk, is_broken=sequence.key in broken)
        totals = self._totals
        self._totals = replace(
            totals,
            num_steps=totals.num_steps + 1,
            prompt_tokens_computed=totals.prompt_tokens_computed + num_prompt,
            prompt_tokens_cached=totals.prompt_tokens_cached + num_cached,
            tokens_computed=totals.tokens_computed + sum(chunk.num_tokens for chunk in chunks),
            num_padded_rows=totals.num_padded_rows + computed.num_padded_rows,
        )
        return chunks, [self._apply(sequence, each) for sequence, each in sampled]

    def _lease_complete(self, sequence: Sequence) -> LeasedBlocks:
        first = sequence.num_leased
        blocks = tuple(self._tables.lease_complete(sequence))
        return LeasedBlocks(sequence=sequence, first_block=first, blocks=blocks)

    def _apply(self, sequence: Sequence, sampled: Sampled) -> SequenceOutput:
        if sampled.error is not None:
            self._end(sequence, is_broken=isinstance(sampled.error, InternalError))
            return SequenceOutput(sequence=sequence, error=sampled.error)
        sequence.tokens.append(sampled.token_id)
        finish = finish_of(
            sequence.sampling,
            token_id=sampled.token_id,
            num_generated=sequence.num_generated,
            num_tokens=len(sequence.tokens),
            max_context=self.limits.max_context,
            is_end=sampled.is_end,
        )
        if finish is not None and not sequence.is_kept:
            self._end(sequence)
        elif finish is not None or (sequence.pause_at is not None and len(sequence.tokens) >= sequence.pause_at):
            self.execution.settle(sequence)
            self._scheduler.park(sequence)
        prompt_logprobs, sequence.prompt_scores = tuple(sequence.prompt_scores or ()), None
        return SequenceOutput(
            sequence=sequence,
            token_id=sampled.token_id,
            index=sequence.num_generated - 1,
            logprobs=sampled.logprobs,
            prompt_logprobs=prompt_logprobs,
            finish_reason=None if finish is None else finish.reason,
            stop_token_id=None if finish is None else finish.stop_token_id,
        )

    def _end(self, sequence: Sequence, *, is_broken: bool = False) -> None:
        self._scheduler.finish(sequence, is_broken=is_broken)
        del self._sequences[sequence.key]


def _device_memory(cache: KVCache) -> "DeviceMemory | None":
    if not cache.device.has_triton:
        return None
    from engine.device_memory import DeviceMemory  # imports Triton

    return DeviceMemory(cache)
