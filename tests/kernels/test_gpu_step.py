"""Steps of answers that begin before the host knows the last one's tokens: the same answers as on CPU."""

from __future__ import annotations

import random
from dataclasses import fields
from typing import Any

import pytest
import torch

from engine.engine import Engine, EngineConfig, StepResult
from engine.forward_gpu import GpuForwardPass
from engine.kernels.gpu.advance import Standing, advance, advance_twin
from engine.model.step_gpu import buckets_for
from engine.sampler import key_prefix, sampling_key
from engine.sequence import Sequence
from tests.kernels.gpu import DEVICE
from tests.support.engine_runs import make_sequence
from tests.support.random_llama import RandomLlama

ON = "cuda" if DEVICE.type == "cuda" else "interpreter"


def prompt(length: int) -> list[int]:
    return random.Random(length).choices(range(3, 101), k=length)


def make_engine(device: str, **options: Any) -> Engine:
    """Of a model that the interpreter gets through in a moment."""
    files: Any = RandomLlama(num_layers=1, num_heads=2, num_kv_heads=1, head_dim=16)
    fields = {"num_blocks": 40, "block_size": 4, "max_context": 48, "max_step_tokens": 8, "max_sequences": 3}
    return Engine(files, EngineConfig(device=device, dtype="float32", **{**fields, **options}))


def test_rows_advance() -> None:
    mine, expected = (Standing.make(6, 5, DEVICE) for _ in range(2))
    for standing in (mine, expected):
        standing.tokens[:] = torch.tensor([7, 0, -1, 3, 9, 5])
        standing.next[:] = torch.tensor([0, 15, 4, -1, 79, 16])
        standing.prefixes[:] = torch.tensor([key_prefix(seed, 1) for seed in range(6)], dtype=torch.uint64).view(
            torch.int64
        )
        standing.tables_RB[:] = torch.randint(0, 1 << 30, (6, 5), generator=torch.Generator().manual_seed(1))
    for _ in range(2):
        advance(mine, 5, 16)
        advance_twin(expected, 5, 16)
        for field in fields(Standing):
            assert torch.equal(getattr(mine, field.name), getattr(expected, field.name)), field.name
        mine.next[4] = expected.next[4] = -1  # its table is full
    assert mine.keys[1].item() % (1 << 64) == sampling_key(1, 1, 17), "of the token behind position 16"


@pytest.mark.parametrize("max_rows", [1, 3, 64, 200])
def test_there_is_a_graph_for_every_number_of_rows(max_rows: int) -> None:
    buckets = buckets_for(max_rows)
    assert buckets[-1] == max_rows
    assert list(buckets) == sorted({*buckets})


def mixed_requests(seed: int) -> list[Sequence]:
    """Of every kind that joins, ends and hinders in its own way."""
    return [
        make_sequence(prompt(5), max_tokens=14, ignore_eos=True),
        make_sequence(prompt(9), max_tokens=6, temperature=0.9, seed=seed, ignore_eos=True),
        make_sequence(prompt(6), max_tokens=9, temperature=1.0, seed=seed + 2, stop_token_ids=(*range(3, 50),)),
        make_sequence(prompt(3), max_tokens=4, repetition_penalty=1.3, ignore_eos=True),
        make_sequence(prompt(2), max_tokens=6, temperature=1.2, top_k=20, top_p=0.9, seed=seed + 1, ignore_eos=True),
    ]


def play(engine: Engine, sequences: list[Sequence]) -> dict[int, list[int]]:
    """They come one by one, some while others are answered. What each was given, by its place."""
    places = {sequence.key: place for place, sequence in enumerate(sequences)}
    tokens: dict[int, list[int]] = {place: [] for place in places.values()}
    coming = list(sequences)
    for step in range(200):
        if coming and step % 3 == 0:
            engine.add(coming.pop(0))
        if not coming and not engine.has_work:
            break
        result: StepResult = engine.step()
        assert engine.pool.counts().is_conserved()
        for output in result.outputs:
            assert output.error is None
            assert output.index == len(tokens[places[output.key]]), "each token once, in order"
            tokens[places[output.key]].append(output.token_id)
    assert not engine.has_work
    counts = engine.pool.counts()
    assert counts.in_use == counts.reserved == 0
    return tokens


@pytest.mark.parametrize("invariant", [False, True])
def test_answers_are_those_of_the_cpu_whoever_comes_and_goes(invariant: bool) -> None:
    answers = []
    for device in ("cpu", ON):
        engine = make_engine(device, invariant=invariant)
        answers.append(play(engine, mixed_requests(5)))
        engine.close()
    assert answers[1] == answers[0]


def test_short_prompts_are_steps_at_fixed_addresses_too() -> None:
    """On a GPU they are recorded: some fit, some do not, and some are of several chunks."""
    answers = []
    for device in ("cpu", ON):
        engine = make_engine(device, invariant=False)
        if device == ON:
            options = {"max_sequences": 3, "max_context": 48, "invariant": False}
            engine.execution = GpuForwardPass(engine.model, engine.cache, short_steps=(2, 6), **options)  # type: ignore[arg-type]
        answers.append(play(engine, mixed_requests(9)[:4]))
        engine.close()
    assert answers[1] == answers[0]


def flights(engine: Engine) -> GpuForwardPass:
    assert isinstance(engine.execution, GpuForwardPass)
    return engine.execution


def test_a_sequence_is_settled_before_its_blocks_are_given_away() -> None:
    engine = make_engine(ON)
    first, second = (make_sequence(prompt(length), max_tokens=9, ignore_eos=True) for length in (4, 3))
    engine.add(first)
    engine.add(second)
    for _ in range(4):
        engine.step()
    flight = flights(engine)._flight
    assert flight is not None and set(flight.rows) == {first, second}, "a step is under way"
    engine.remove(first.key)
    assert set(flight.rows) == {second}
    num_tokens = len(second.tokens)
    assert [output.key for output in engine.step().outputs] == [second.key]
    assert len(second.tokens) == num_tokens + 1, "the step under way was not lost"
    engine.remove(second.key)
    assert engine.pool.counts().in_use == 0
    engine.close()


def test_a_paused_sequence_has_no_step_under_way() -> None:
    """Its blocks are about to be read by others."""
    engine = make_engine(ON)
    paused = make_sequence(prompt(4), max_tokens=9, ignore_eos=True, pause_at=7)
    engine.add(paused)
    for _ in range(4):
        if engine.has_work:
            engine.step()
    assert len(paused.tokens) == 7 and not engine.has_work
    flight = flights(engine)._flight
    assert flight is None or paused not in flight.rows
    assert len(paused.block_table) == engine.geometry.blocks_for(paused.num_computed)
    assert engine.detach(paused.key) is paused
    engine.pool.free(paused.block_table)
    engine.close()
