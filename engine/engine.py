"""The engine of one worker: weights, KV memory, block pool, scheduler; one forward pass per :meth:`Engine.step`.

It knows no roles. What makes a prefill worker is that its sequences pause behind their first token and are detached;
what makes a decode worker is that its sequences arrive with their KV.

Threads: :attr:`Engine.pool` may be used from anywhere; everything else belongs to one thread, the step thread.

Ownership of blocks: ``add`` takes over the blocks and the reservation of a sequence, even when it raises. The engine
frees them when the sequence is refused, finishes, fails or is removed. A paused sequence keeps its blocks until it is
detached (then they are the caller's, who may lease them before freeing) or removed.
"""

import os
import time
from dataclasses import dataclass, replace
from typing import Literal

import torch

from core.errors import ConfigError, ContextTooLong, InvalidRequest, ServingError
from core.kv import KVFormat, KVGeometry, MemoryRegion
from core.types import FinishReason, SamplingParams, TokenLogprobs
from engine.batch import build_batch
from engine.block_pool import BlockPool
from engine.kv_cache import KVCache, KVShape, num_blocks_for
from engine.model.decoder import Decoder
from engine.model.linear import ROW_MULTIPLE
from engine.sampler import Sampled, sample
from engine.scheduler import Chunk, Scheduler
from engine.sequence import Sequence, SequenceKey, SequenceState
from engine.stopping import finish_of
from modelfiles.model import ModelFiles

AUTO_MEMORY_BYTES = 2 << 30
AUTO_MEMORY_DIVISOR = 8


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineConfig:
    """What may be chosen. ``auto`` is resolved at start and then found in :class:`EngineLimits`."""

    block_size: int = 16
    num_blocks: int | Literal["auto"] = "auto"
    memory_bytes: int | Literal["auto"] = "auto"
    """Of the KV cache, when ``num_blocks`` is ``auto``. ``auto``: 2 GiB, at most an eighth of the machine's memory."""
    max_step_tokens: int = 2048
    max_sequences: int = 64
    max_context: int | Literal["auto"] = "auto"
    """``auto``: what the model was trained for."""
    dtype: str = "auto"
    """Of weights and arithmetic. ``auto`` is float32, the only one on CPU so far."""
    kv_dtype: str = "auto"
    invariant: bool = True
    """Law 3 bitwise: rows of a step are padded so that none depends on the others."""


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineLimits:
    """Facts learnt at start."""

    num_blocks: int
    block_size: int
    block_bytes: int
    max_context: int
    vocab_size: int
    max_sequences: int
    max_step_tokens: int


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
class StepResult:
    """One forward pass (or none, when nothing could run)."""

    outputs: tuple[SequenceOutput, ...] = ()
    num_tokens: int = 0
    num_preempted: int = 0


class Engine:
    """Built in seconds from model files; raises :class:`ConfigError` with the remedy.

    Engines of one process may share the weights: pass the ``model`` of another engine on the same files.
    """

    def __init__(self, files: ModelFiles, config: EngineConfig, *, model: Decoder | None = None) -> None:
        shapes = files.config
        dtype = _dtype("dtype", config.dtype)
        kv_dtype = _dtype("kv.dtype", config.kv_dtype)
        max_context = shapes.max_context if config.max_context == "auto" else config.max_context
        if max_context > shapes.max_context:
            raise ConfigError(
                f"models[].max_context is {max_context}, {files.path} was made for {shapes.max_context}: lower it"
            )
        if config.max_sequences > config.max_step_tokens:
            raise ConfigError(
                f"max_sequences ({config.max_sequences}) exceeds max_step_tokens ({config.max_step_tokens}): "
                "a step has one token for every running sequence; raise max_step_tokens or lower max_sequences"
            )
        shape = KVShape(
            block_size=config.block_size,
            num_layers=shapes.num_layers,
            num_kv_heads=shapes.num_kv_heads,
            head_dim=shapes.head_dim,
            dtype=kv_dtype,
        )
        num_blocks = config.num_blocks
        if num_blocks == "auto":
            memory_bytes = _auto_memory_bytes() if config.memory_bytes == "auto" else config.memory_bytes
            num_blocks = num_blocks_for(shape, memory_bytes=memory_bytes, min_tokens=max_context)
        template = files.chat_template()
        self.format = KVFormat(
            model_digest=files.digest,
            tokenizer_digest=files.tokenizer().digest,
            template_digest="" if template is None else template.digest,
            compute_dtype=dtype,
            kv_dtype=kv_dtype,
            quantisation="none",
            num_layers=shapes.num_layers,
            num_kv_heads=shapes.num_kv_heads,
            head_dim=shapes.head_dim,
        )
        self.limits = EngineLimits(
            num_blocks=num_blocks,
            block_size=config.block_size,
            block_bytes=shape.block_bytes,
            max_context=max_context,
            vocab_size=shapes.vocab_size,
            max_sequences=config.max_sequences,
            max_step_tokens=config.max_step_tokens,
        )
        self.model = Decoder(files, max_context=max_context) if model is None else model
        self.cache = KVCache(shape, num_blocks)
        self.pool = BlockPool(num_blocks)
        self._totals = EngineCounters()
        self._scheduler = Scheduler(
            self.pool,
            block_size=config.block_size,
            max_step_tokens=config.max_step_tokens,
            max_sequences=config.max_sequences,
        )
        self._row_multiple = ROW_MULTIPLE if config.invariant else 1
        self._sequences: dict[SequenceKey, Sequence] = {}

    # -- facts --------------------------------------------------------------------------------------------------------

    @property
    def geometry(self) -> KVGeometry:
        return self.cache.geometry

    @property
    def kv_region(self) -> MemoryRegion:
        return self.cache.region

    @property
    def has_work(self) -> bool:
        return self._scheduler.has_work

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
            self._check(sequence)
        except ServingError:
            self._scheduler.finish(sequence)
            raise
        self._sequences[sequence.key] = sequence
        self._scheduler.add(sequence)

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
        if schedule.chunks:
            outputs += self._run(schedule.chunks)
        totals = self._totals
        self._totals = replace(
            totals,
            tokens_generated=totals.tokens_generated + sum(output.error is None for output in outputs),
            num_preemptions=totals.num_preemptions + schedule.num_preempted,
            num_failed=totals.num_failed + sum(output.error is not None for output in outputs),
        )
        return StepResult(
            outputs=tuple(outputs),
            num_tokens=sum(chunk.num_tokens for chunk in schedule.chunks),
            num_preempted=schedule.num_preempted,
        )

    @torch.inference_mode()
    def _run(self, chunks: tuple[Chunk, ...]) -> list[SequenceOutput]:
        started_at = time.monotonic()
        batch = build_batch(chunks, self.cache, num_heads=self.model.config.num_heads, row_multiple=self._row_multiple)
        hidden_TH = self.model.forward(batch.tokens_T, batch.positions_T, batch.plan)
        sampled: list[Sampled] = []
        if batch.sampled:
            logits_RV = self.model.logits(hidden_TH[batch.sampled_rows_R])[: len(batch.sampled)]
            sampled = sample(logits_RV, [chunk.sequence for chunk in batch.sampled])
        num_prompt = 0
        for chunk in chunks:
            sequence = chunk.sequence
            if sequence.first_step_at is None:
                sequence.first_step_at = started_at
            num_prompt += sequence.mark_computed(chunk.num_tokens)
        totals = self._totals
        self._totals = replace(
            totals,
            num_steps=totals.num_steps + 1,
            prompt_tokens_computed=totals.prompt_tokens_computed + num_prompt,
            tokens_computed=totals.tokens_computed + batch.num_tokens,
            num_padded_rows=totals.num_padded_rows + len(batch.tokens_T) - batch.num_tokens,
        )
        return [self._apply(chunk.sequence, each) for chunk, each in zip(batch.sampled, sampled, strict=True)]

    def _apply(self, sequence: Sequence, sampled: Sampled) -> SequenceOutput:
        if sampled.error is not None:
            self._end(sequence)
            return SequenceOutput(sequence=sequence, error=sampled.error)
        sequence.tokens.append(sampled.token_id)
        finish = finish_of(
            sequence.sampling,
            token_id=sampled.token_id,
            num_generated=sequence.num_generated,
            num_tokens=len(sequence.tokens),
            max_context=self.limits.max_context,
        )
        if finish is not None:
            self._end(sequence)
        elif sequence.pause_at is not None and len(sequence.tokens) >= sequence.pause_at:
            self._scheduler.park(sequence)
        return SequenceOutput(
            sequence=sequence,
            token_id=sampled.token_id,
            index=sequence.num_generated - 1,
            logprobs=sampled.logprobs,
            finish_reason=None if finish is None else finish.reason,
            stop_token_id=None if finish is None else finish.stop_token_id,
        )

    def _end(self, sequence: Sequence) -> None:
        self._scheduler.finish(sequence)
        del self._sequences[sequence.key]

    def _check(self, sequence: Sequence) -> None:
        """The last line of defence: a bad id must fail its own request, not an index operation of everybody's step."""
        sampling, vocab_size = sequence.sampling, self.limits.vocab_size
        if len(sequence.tokens) >= self.limits.max_context:
            raise ContextTooLong(
                f"{len(sequence.tokens)} tokens leave no room for an answer in a context of {self.limits.max_context}"
            )
        if sequence.num_generated >= sampling.max_tokens:
            raise InvalidRequest(f"{sequence.num_generated} tokens are generated, max_tokens is {sampling.max_tokens}")
        if sampling.grammar:
            raise InvalidRequest("structured output is not supported by this worker")
        if sampling.prompt_logprobs is not None:
            raise InvalidRequest("prompt_logprobs is not supported by this worker", param="prompt_logprobs")
        for param, ids in _ids_of(sequence.tokens, sampling):
            if ids and not (min(ids) >= 0 and max(ids) < vocab_size):
                raise InvalidRequest(f"{param} has a token id outside 0..{vocab_size - 1}", param=param)


def _ids_of(tokens: list[int], sampling: SamplingParams) -> tuple[tuple[str, list[int]], ...]:
    return (
        ("prompt", tokens),
        ("stop_token_ids", [*sampling.eos_token_ids, *sampling.stop_token_ids]),
        ("logit_bias", [token_id for token_id, _ in sampling.logit_bias]),
        ("allowed_token_ids", list(sampling.allowed_token_ids)),
        ("bad_words", [token_id for word in sampling.bad_words for token_id in word]),
    )


def _dtype(name: str, dtype: str) -> str:
    if dtype not in ("auto", "float32"):
        raise ConfigError(f"models[].{name} is {dtype}: this build computes in float32 on CPU; say auto or float32")
    return "float32"


def _auto_memory_bytes() -> int:
    return min(AUTO_MEMORY_BYTES, os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") // AUTO_MEMORY_DIVISOR)
