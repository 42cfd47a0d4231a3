"""Shared blocks: what was computed once is not computed again, and nobody can tell by the bits."""

from __future__ import annotations

import functools
import random
from typing import Any

import pytest
import torch

from core.errors import InternalError
from engine.engine import Engine, EngineConfig
from engine.sequence import Sequence
from tests.support.engine_runs import assert_same_bits, make_sequence, run
from tests.support.random_llama import RandomLlama

FILES: Any = RandomLlama()
SMALL: dict[str, Any] = {"block_size": 4, "num_blocks": 64, "max_step_tokens": 32, "max_sequences": 8}


@functools.cache
def first_engine() -> Engine:
    return Engine(FILES, EngineConfig(**SMALL))


def make(**changes: Any) -> Engine:
    return Engine(FILES, EngineConfig(**{**SMALL, **changes}), model=first_engine().model)


@pytest.fixture
def engine() -> Engine:
    return make()


def prompt(num_tokens: int, seed: int = 0) -> list[int]:
    return random.Random(seed).choices(range(3, 101), k=num_tokens)


def solo(tokens: list[int], **options: Any) -> tuple[list[int], list[torch.Tensor]]:
    """What an engine that shares nothing makes of it."""
    return _solo(tuple(tokens), tuple(sorted(options.items())))


@functools.lru_cache(maxsize=1000)
def _solo(tokens: tuple[int, ...], options: tuple[tuple[str, Any], ...]) -> tuple[list[int], list[torch.Tensor]]:
    sequence = make_sequence(tokens, **dict(options))
    recorded = run(make(prefix_cache=False), sequence)
    return recorded.tokens[sequence.key], recorded.scores[sequence.key]


def check(engine: Engine, tokens: list[int], **options: Any) -> Sequence:
    sequence = make_sequence(tokens, **options)
    recorded = run(engine, sequence)
    expected, scores = solo(tokens, **options)
    assert recorded.tokens[sequence.key] == expected
    assert_same_bits(recorded.scores[sequence.key], scores)
    return sequence


# -- what is shared ---------------------------------------------------------------------------------------------------


def test_a_prompt_that_shares_nine_blocks_of_ten_computes_only_the_rest(engine: Engine) -> None:
    common = prompt(36)
    check(engine, [*common, *prompt(4, seed=1)])
    second = check(engine, [*common, *prompt(4, seed=2)])
    assert (second.num_prompt_computed, second.num_cached) == (4, 36)
    counters = engine.counters()
    assert (counters.prompt_tokens_computed, counters.prompt_tokens_cached) == (44, 36)


@pytest.mark.parametrize(("length", "num_cached"), [(1, 0), (4, 0), (5, 4), (8, 4), (9, 8), (11, 8)])
def test_of_the_same_prompt_again_the_last_token_is_always_computed(
    engine: Engine, length: int, num_cached: int
) -> None:
    check(engine, prompt(length))
    assert check(engine, prompt(length)).num_cached == num_cached


def test_an_answer_is_shared_with_the_next_turn(engine: Engine) -> None:
    first = check(engine, prompt(10), max_tokens=20, ignore_eos=True)
    turn = [*first.tokens, *prompt(5, seed=1)]
    assert check(engine, turn).num_cached == 28, "all complete blocks of what was computed: 29 tokens"


def test_prompts_that_run_at_once_share_what_is_complete(engine: Engine) -> None:
    first = make_sequence(prompt(36), max_tokens=20, ignore_eos=True)
    engine.add(first)
    engine.step()
    engine.step()
    second = make_sequence(prompt(36), max_tokens=20, ignore_eos=True)
    recorded = run(engine, second)
    assert second.num_cached == 32 and engine.pool.counts().is_idle()
    assert recorded.tokens[second.key] == solo(prompt(36), max_tokens=20, ignore_eos=True)[0]


def test_tenants_share_nothing(engine: Engine) -> None:
    for salt in ("", "a", "b"):
        sequence = make_sequence(prompt(20), salt=salt)
        run(engine, sequence)
        assert sequence.num_cached == 0
    again = make_sequence(prompt(20), salt="a")
    run(engine, again)
    assert again.num_cached == 16


def test_it_can_be_switched_off() -> None:
    engine = make(prefix_cache=False)
    for _ in range(2):
        assert check(engine, prompt(20)).num_cached == 0
    assert engine.pool.counts().cached == 0 and engine.hash_prefix(prompt(20), "") == []


def test_a_tenth_of_a_prompt_is_not_hit_behind_a_difference(engine: Engine) -> None:
    check(engine, prompt(36))
    changed = prompt(36)
    changed[9] = 3 if changed[9] != 3 else 4
    assert check(engine, changed).num_cached == 8


def test_kept_blocks_are_given_up_when_room_is_needed(engine: Engine) -> None:
    for seed in range(12):
        check(engine, prompt(40, seed=seed))
    assert engine.pool.counts().is_idle() and engine.pool.counts().free <= 1
    changes = engine.pool.take_changes()
    assert len(changes.stored) == engine.pool.counts().cached and not changes.evicted
    check(engine, prompt(40, seed=99))
    changes = engine.pool.take_changes()
    assert len(changes.stored) == 11 and len(changes.evicted) >= 11


def test_a_preempted_sequence_finds_what_it_had_computed() -> None:
    engine = make(num_blocks=20, projected_tokens=1)
    sequences = [make_sequence(prompt(20, seed=seed), max_tokens=30, ignore_eos=True) for seed in range(3)]
    recorded = run(engine, *sequences)
    assert engine.counters().num_preemptions > 0
    for seed, sequence in enumerate(sequences):
        assert recorded.tokens[sequence.key] == solo(prompt(20, seed=seed), max_tokens=30, ignore_eos=True)[0]
        assert sequence.num_cached == 0, "its own blocks are no hits of the request"


# -- what must not be shared ------------------------------------------------------------------------------------------


def test_blocks_of_a_broken_sequence_are_not_shared(engine: Engine) -> None:
    broken = make_sequence(prompt(20), max_tokens=12)
    engine.add(broken)
    engine.step()
    assert engine.pool.take_changes().stored
    engine.cache.tensor[broken.block_table[0]] = float("nan")
    output = run(engine).outputs[broken.key][-1]
    assert isinstance(output.error, InternalError)
    assert len(engine.pool.take_changes().evicted) == 5
    assert check(engine, prompt(20)).num_cached == 0


def test_kv_that_nobody_vouches_for_is_used_but_not_shared(engine: Engine) -> None:
    tokens = prompt(20)
    first = make_sequence(tokens, pause_at=21)
    run(engine, first)
    detached = engine.detach(first.key)
    engine.pool.forget(detached.block_table)
    detached.has_unverified_kv, detached.pause_at, detached.num_published = True, None, 0
    run(engine, detached)
    assert engine.pool.counts().cached == 0
    assert check(engine, tokens).num_cached == 0


def test_kv_that_arrived_and_was_verified_is_shared(engine: Engine) -> None:
    tokens = prompt(20)
    first = make_sequence(tokens, pause_at=21)
    run(engine, first)
    detached = engine.detach(first.key)
    engine.pool.forget(detached.block_table)
    detached.pause_at, detached.num_published = None, 0
    engine.add(detached)
    again = make_sequence(tokens)
    run(engine, again)
    assert again.num_cached == 16


# -- forks ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("length", [10, 11, 12, 13])
@pytest.mark.parametrize("late", [0, 3])
@pytest.mark.parametrize("is_caching", [True, False])
def test_choices_share_the_prompt_and_each_draws_as_if_it_were_alone(length: int, late: int, is_caching: bool) -> None:
    """The prompt is computed once; every choice computes its last token again and draws its own first token."""
    engine = make(prefix_cache=is_caching)
    options: dict[str, Any] = {"max_tokens": 12, "temperature": 1.0, "seed": 3, "ignore_eos": True}
    leader = make_sequence(prompt(length), choice=0, **options)
    engine.add(leader)
    for _ in range(1 + late):
        engine.step()
    others = [make_sequence(prompt(length), num_computed=length - 1, choice=n, **options) for n in (1, 2, 3)]
    engine.fork(leader, others)
    shared = engine.pool.counts().in_use
    recorded = run(engine)
    assert shared == -(-(length + late + 1) // 4) or shared == -(-(length + late) // 4), "no block was copied yet"
    assert len({tuple(recorded.tokens[each.key]) for each in others}) > 1
    for choice in others:
        tokens, scores = solo(prompt(length), choice=choice.key.choice, **options)
        assert recorded.tokens[choice.key] == tokens
        assert_same_bits(recorded.scores[choice.key], scores)
        assert choice.num_prompt_computed == 1
    assert leader.tokens[length:] == solo(prompt(length), choice=0, **options)[0]
    assert engine.pool.counts().is_idle()


@pytest.mark.parametrize("length", [8, 10])
def test_choices_that_have_their_first_tokens_share_blocks_that_arrived(engine: Engine, length: int) -> None:
    """The decode side of n > 1: one transfer, n sequences, each with a first token of its own."""
    options: dict[str, Any] = {"max_tokens": 9, "temperature": 1.0, "seed": 8, "ignore_eos": True}
    expected = [solo(prompt(length), choice=n, **options)[0] for n in range(3)]
    carrier = make_sequence(prompt(length), pause_at=length + 1)
    run(engine, carrier)
    blocks = engine.detach(carrier.key)
    choices = [
        make_sequence([*prompt(length), expected[n][0]], num_prompt_tokens=length, num_computed=length, choice=n)
        for n in range(3)
    ]
    for each in choices:
        each.sampling = make_sequence([5], **options).sampling
    engine.fork(blocks, choices)
    engine.pool.free(blocks.block_table)
    recorded = run(engine)
    for n, each in enumerate(choices):
        assert recorded.tokens[each.key] == expected[n][1:]
        assert each.num_prompt_computed == 0
    assert engine.pool.counts().is_idle()


def test_first_tokens_of_several_choices_are_drawn_from_one_prompt(engine: Engine) -> None:
    """The prefill side of n > 1: every choice pauses behind its first token, the blocks of one are handed off."""
    options: dict[str, Any] = {"max_tokens": 9, "temperature": 1.0, "seed": 8, "ignore_eos": True}
    leader = make_sequence(prompt(10), pause_at=11, choice=0, **options)
    run(engine, leader)
    others = [make_sequence(prompt(10), pause_at=11, num_computed=9, choice=n, **options) for n in (1, 2)]
    engine.fork(leader, others)
    recorded = run(engine)
    assert all(recorded.outputs[each.key][-1].is_paused for each in others)
    firsts = [leader.tokens[-1], *(recorded.tokens[each.key][0] for each in others)]
    assert firsts == [solo(prompt(10), choice=n, **options)[0][0] for n in range(3)]
    blocks = engine.detach(leader.key).block_table
    engine.pool.lease(blocks)
    engine.pool.free(blocks)
    for each in others:
        engine.remove(each.key)
    assert engine.pool.counts().leased == 3 and engine.pool.counts().in_use == 0


def test_a_broken_fork_does_not_spoil_its_sisters(engine: Engine) -> None:
    """Of a shared block a fork takes over no more than the tokens that both have."""
    leader = make_sequence(prompt(10), max_tokens=12, ignore_eos=True)
    engine.add(leader)
    engine.step()
    engine.step()
    engine.cache.tensor[leader.block_table[-1], ..., 2:, :] = float("nan")  # behind the prompt
    tokens = [*prompt(10), 5]
    sister = make_sequence(tokens, num_computed=9, max_tokens=12, ignore_eos=True)
    engine.fork(leader, [sister])
    recorded = run(engine)
    assert recorded.tokens[sister.key] == solo(tokens, max_tokens=12, ignore_eos=True)[0]


def test_a_leased_block_is_not_written_to(engine: Engine) -> None:
    """Its reader may be in the middle of it: a writer copies its tail first."""
    sequence = make_sequence(prompt(10), max_tokens=6, ignore_eos=True, pause_at=11)
    run(engine, sequence)
    detached = engine.detach(sequence.key)
    leased = list(detached.block_table)
    engine.pool.lease(leased)
    before = engine.cache.tensor[leased].clone()
    detached.pause_at = None
    rest = run(engine, detached)
    assert torch.equal(engine.cache.tensor[leased], before)
    assert rest.tokens[detached.key] == solo(prompt(10), max_tokens=6, ignore_eos=True)[0][1:]
    engine.pool.end_lease(leased)
    assert engine.pool.counts().is_idle()


def test_a_fork_that_needs_the_whole_pool_gives_up_the_tail_that_it_shares() -> None:
    """A copy beside the shared block would be one block more than there is: it would wait for ever, and all behind."""
    engine = make(num_blocks=4, max_context=16)
    leader = make_sequence(prompt(8), max_tokens=8, ignore_eos=True)
    engine.add(leader)
    engine.step()
    child = make_sequence([*prompt(8), *range(3, 8)], num_computed=3, max_tokens=2, ignore_eos=True)
    engine.fork(leader, [child])
    engine.remove(leader.key)
    recorded = run(engine, behind := make_sequence(prompt(5, seed=1), max_tokens=3), max_steps=100)
    assert recorded.tokens[child.key] == solo(child.tokens[:13], max_tokens=2, ignore_eos=True)[0]
    assert len(recorded.tokens[behind.key]) == 3
