"""A step computed on a GPU, one ahead of what the host knows.

Steps of answers only run on :class:`~engine.model.step_gpu.DecodeStep`, which wants nothing of the host between two of
them. So while the tokens of one step are on their way to the host, and the host tells them, finds stops and plans, the
device computes the next step (the *flight*). What follows from that:

- A sequence that joins while a flight is under way is not computed before the flight behind it: ``Computed.chunks``.
- A sequence that ends by a stop token has one step too many under way. Its KV goes into a block that is still its own:
  nobody gives a block back before :meth:`GpuForwardPass.settle`.
- No flight starts ahead for rows whose next token the host must shape or score (grammars, penalties, logprobs ...),
  nor for one that surely ends, nor while a block for the next token is missing.

Steps with prompts, and the first token of each, go the way of :mod:`engine.forward`; tokens are drawn on the device
there too where nothing but temperature, top-k, top-p and min-p says which.
"""

from collections.abc import Iterable, Mapping
from collections.abc import Sequence as Seq
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from core.errors import InternalError
from engine.execution import Computed
from engine.forward import ForwardPass, draw
from engine.kernels.gpu.launch import one_at_a_time
from engine.kernels.gpu.sampling import NOT_FINITE, Choosing, choose
from engine.kv_cache import KVCache
from engine.model.attention_gpu import on_device
from engine.model.decoder import Decoder
from engine.model.prompt_gpu import PromptStep
from engine.model.recorded_gpu import Progress
from engine.model.step_gpu import DecodeStep, NewRow
from engine.sampler import Sampled, key_prefix, sampling_key
from engine.scheduler import Chunk
from engine.sequence import Sequence
from engine.stopping import stop_token_ids


@dataclass(slots=True, kw_only=True)
class _Flight:
    """A step that the device computes."""

    rows: dict[Sequence, int]
    """Whose tokens somebody still waits for."""
    launched: Mapping[Sequence, int]
    positions: Mapping[Sequence, int]
    """Of the token that each row computes."""
    tokens: Tensor
    """Drawn, by row, in the host's memory once it has landed."""
    landed: torch.cuda.Event | None

    def wait(self) -> None:
        if self.landed is not None:
            self.landed.synchronize()


class GpuForwardPass:
    """Weights and KV memory; an :class:`~engine.execution.Execution`."""

    looks_ahead = True

    def __init__(
        self,
        model: Decoder,
        cache: KVCache,
        *,
        max_sequences: int,
        max_context: int,
        invariant: bool,
        short_steps: Seq[int] = (),
        progress: Progress = lambda done, of: None,
    ) -> None:
        """``invariant``: a row's bits do not depend on its neighbours, as far as the products' do not. ``short_steps``:
        sizes, in tokens, of steps with prompts that are recorded too."""
        self.model = model
        self._device = cache.tensor.device
        self._block_size = cache.geometry.block_size
        self._max_context = max_context
        self._mixed = ForwardPass(model, cache, invariant=invariant, draw=self._draw)
        self._step = DecodeStep(model, cache, max_rows=max_sequences, max_context=max_context, invariant=invariant)
        self._prompts = PromptStep(model, cache, max_context=max_context, sizes=short_steps) if short_steps else None
        if model.config.experts is None:  # the host finds out which of them are wanted
            self._step.record(progress)
            if self._prompts is not None:
                self._prompts.record(progress)
        self._flight: _Flight | None = None
        self._num_blocks: dict[Sequence, int] = {}
        """Of each row, that the device knows."""

    # -- an Execution -------------------------------------------------------------------------------------------------

    def run(self, chunks: Seq[Chunk]) -> Computed:
        with torch.inference_mode(), one_at_a_time():
            return self._run(chunks)

    def _run(self, chunks: Seq[Chunk]) -> Computed:
        flight = self._flight
        taken = () if flight is None else tuple(chunk for chunk in chunks if chunk.sequence in flight.rows)
        if flight is None or not taken:
            self._drop_flight()
            if not all(chunk.is_sampled and chunk.num_tokens == 1 for chunk in chunks):
                return self._run_prompts(chunks)
            flight, taken = self._start(chunks), tuple(chunks)
        joining = [chunk for chunk in chunks if chunk.sequence not in flight.rows]
        self._flight = self._go_ahead(flight, taken, joining)
        return Computed(chunks=taken, sampled=self._land(flight, taken))

    def settle(self, sequence: Sequence) -> None:
        """Nothing that the device is doing writes to the blocks of ``sequence`` any more when this returns."""
        flight = self._flight
        if flight is not None and flight.rows.pop(sequence, None) is not None:
            flight.wait()

    # -- flights ------------------------------------------------------------------------------------------------------

    def _start(self, chunks: Seq[Chunk]) -> _Flight:
        """From what the host knows."""
        rows = {chunk.sequence: row for row, chunk in enumerate(chunks)}
        self._step.stop_all()
        self._put(chunks, rows)
        return self._launch(rows, {chunk.sequence: chunk.start for chunk in chunks})

    def _go_ahead(self, flight: _Flight, taken: Seq[Chunk], joining: Seq[Chunk]) -> _Flight | None:
        """The step behind ``flight``, if it can be said by now what it computes."""
        going = [chunk for chunk in taken if not self._surely_ends(chunk)]
        ready = all(chunk.is_sampled and chunk.num_tokens == 1 for chunk in joining)
        if not going or not ready or not all(_is_plain(chunk.sequence) for chunk in (*taken, *joining)):
            return None
        if any(len(chunk.sequence.block_table) * self._block_size <= chunk.end for chunk in going):
            return None
        rows = {chunk.sequence: flight.launched[chunk.sequence] for chunk in going}
        used = {*rows.values()}
        free = (row for row in range(self._step.max_rows) if row not in used)
        joined = dict(zip((chunk.sequence for chunk in joining), free, strict=False))
        if len(joined) < len(joining) or self._is_wasteful([*rows.values(), *joined.values()]):
            return None
        positions = {chunk.sequence: chunk.end for chunk in going} | {each.sequence: each.start for each in joining}
        taken_over = {*rows.values(), *joined.values()}
        self._step.stop([row for row in flight.launched.values() if row not in taken_over])
        self._grow(rows)
        self._put(joining, joined)
        return self._launch(rows | joined, positions)

    def _is_wasteful(self, rows: Seq[int]) -> bool:
        """So many rows are empty that a fresh start is cheaper."""
        return self._step.bucket_of(max(rows) + 1) >= 2 * self._step.bucket_of(len(rows))

    def _surely_ends(self, chunk: Chunk) -> bool:
        """With the token that this chunk's step draws, whatever it is."""
        sequence, sampling = chunk.sequence, chunk.sequence.sampling
        num_tokens = len(sequence.tokens) + 1
        return (
            num_tokens - sequence.num_prompt_tokens >= sampling.max_tokens
            or num_tokens >= self._max_context
            or (sequence.pause_at is not None and num_tokens >= sequence.pause_at)
        )

    def _put(self, chunks: Seq[Chunk], rows: Mapping[Sequence, int]) -> None:
        self._step.put([_new_row(chunk, rows[chunk.sequence]) for chunk in chunks])
        for chunk in chunks:
            self._num_blocks[chunk.sequence] = len(chunk.sequence.block_table)

    def _grow(self, rows: Mapping[Sequence, int]) -> None:
        grown: list[tuple[int, int, int]] = []
        for sequence, row in rows.items():
            table, known = sequence.block_table, self._num_blocks[sequence]
            grown += [(row, place, table[place]) for place in range(known, len(table))]
            self._num_blocks[sequence] = len(table)
        self._step.grow(grown)

    def _launch(self, rows: dict[Sequence, int], positions: Mapping[Sequence, int]) -> _Flight:
        self._num_blocks = {sequence: self._num_blocks[sequence] for sequence in rows}
        drawn = self._step.run(max(rows.values()) + 1)
        if self._device.type != "cuda":
            return _Flight(rows=rows, launched={**rows}, positions=positions, tokens=drawn.clone(), landed=None)
        tokens = torch.empty(len(drawn), dtype=drawn.dtype, pin_memory=True)
        tokens.copy_(drawn, non_blocking=True)
        landed = torch.cuda.Event()  # type: ignore[no-untyped-call]
        landed.record()
        return _Flight(rows=rows, launched={**rows}, positions=positions, tokens=tokens, landed=landed)

    def _land(self, flight: _Flight, taken: Seq[Chunk]) -> tuple[Sampled, ...]:
        flight.wait()
        assert all(flight.positions[chunk.sequence] == chunk.start for chunk in taken), "a flight is of its sequences"
        tokens = flight.tokens.tolist()
        rows = [flight.launched[chunk.sequence] for chunk in taken]
        sampled = [_sampled(tokens[row]) for row in rows]
        shaped = [place for place, chunk in enumerate(taken) if not _is_plain(chunk.sequence)]
        if shaped:  # no step was started behind this one: its scores are still there
            scores_RV = self._step.scores_RV[on_device(torch.tensor([rows[place] for place in shaped]), self._device)]
            for place, each in zip(shaped, draw(scores_RV, [taken[place].sequence for place in shaped]), strict=True):
                sampled[place] = each
        return tuple(sampled)

    def _drop_flight(self) -> None:
        """Nobody wants its tokens."""
        if self._flight is not None:
            self._flight.wait()
            self._flight = None

    # -- mixed steps --------------------------------------------------------------------------------------------------

    def _run_prompts(self, chunks: Seq[Chunk]) -> Computed:
        if self._prompts is not None and self._prompts.fits(chunks):
            scores_RV = self._prompts.run(chunks)
            sampled = self._draw(scores_RV, [chunk.sequence for chunk in chunks if chunk.is_sampled])
            computed = Computed(chunks=tuple(chunks), sampled=tuple(sampled))
        else:
            computed = self._mixed.run(chunks)
        self._synchronize()
        return computed

    def _draw(self, scores_RV: Tensor, sequences: Seq[Sequence]) -> list[Sampled]:
        plain = [row for row, sequence in enumerate(sequences) if _is_plain(sequence)]
        shaped = [row for row in range(len(sequences)) if row not in {*plain}]
        sampled: dict[int, Sampled] = {}
        for rows, way in ((plain, self._choose), (shaped, draw)):
            if rows:
                index = on_device(torch.tensor(rows), self._device)
                sampled |= dict(zip(rows, way(scores_RV[index], [sequences[row] for row in rows]), strict=True))
        return [sampled[row] for row in range(len(sequences))]

    def _choose(self, scores_RV: Tensor, sequences: Seq[Sequence]) -> Iterable[Sampled]:
        drawn = torch.empty(len(sequences), dtype=torch.int64, device=self._device)
        choose(scores_RV, _choosing(sequences, self._device), drawn)
        return map(_sampled, drawn.tolist())

    def _synchronize(self) -> None:
        """KV is there for everybody, peers included."""
        if self._device.type == "cuda":
            torch.cuda.current_stream(self._device).synchronize()


def _is_plain(sequence: Sequence) -> bool:
    """Nothing but temperature, top-k, top-p and min-p says which token comes, and nobody asks how likely it was."""
    sampling = sequence.sampling
    return not (
        sequence.grammar is not None
        or sampling.logprobs is not None
        or sampling.logit_bias
        or sampling.allowed_token_ids
        or sampling.bad_words
        or sampling.repetition_penalty != 1.0
        or sampling.frequency_penalty
        or sampling.presence_penalty
        or (sequence.num_generated < sampling.min_tokens and stop_token_ids(sampling))
    )


def _new_row(chunk: Chunk, row: int) -> NewRow:
    sequence, sampling = chunk.sequence, chunk.sequence.sampling
    return NewRow(
        row=row,
        token=sequence.tokens[chunk.start],
        position=chunk.start,
        blocks=sequence.block_table,
        temperature=0.0 if sampling.is_greedy else sampling.temperature,
        top_k=sampling.top_k,
        top_p=sampling.top_p,
        min_p=sampling.min_p,
        key_prefix=key_prefix(sampling.seed, sequence.key.choice),
    )


def _choosing(sequences: Seq[Sequence], device: torch.device) -> Choosing:
    samplings = [sequence.sampling for sequence in sequences]
    keys = [sampling_key(sequence.sampling.seed, sequence.key.choice, len(sequence.tokens)) for sequence in sequences]

    def place(values: Seq[float], dtype: torch.dtype = torch.float32) -> Tensor:
        return on_device(torch.tensor(values, dtype=dtype), device)

    return Choosing(
        temperature=place([0.0 if each.is_greedy else each.temperature for each in samplings]),
        top_k=place([each.top_k for each in samplings], torch.int32),
        top_p=place([each.top_p for each in samplings]),
        min_p=place([each.min_p for each in samplings]),
        keys=on_device(torch.from_numpy(np.array(keys, np.uint64).view(np.int64)), device),
    )


def _sampled(token: int) -> Sampled:
    if token == NOT_FINITE:
        return Sampled(error=InternalError("the model's scores are not finite for this request"))
    return Sampled(token_id=token)
