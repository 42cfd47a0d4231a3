"""The engine as its worker sees it, on a tiny model: who owns what, and who fails alone."""

from __future__ import annotations

import random
from typing import Any

import numpy as np
import pytest
import torch
from transformers import LlamaConfig
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

from core.errors import ConfigError, ContextTooLong, InternalError, InvalidRequest, OutOfBlocks
from core.types import FinishReason
from engine.engine import Engine, EngineConfig
from engine.model.rope import rope_tables
from engine.sequence import Sequence, SequenceState
from modelfiles.config import RopeScaling
from tests.support.engine_runs import assert_same_bits, make_sequence, run
from tests.support.random_llama import RandomLlama

SMALL: dict[str, Any] = {"block_size": 4, "num_blocks": 64, "max_step_tokens": 32, "max_sequences": 8}


@pytest.fixture(scope="module")
def first_engine(tiny_files: RandomLlama) -> Engine:
    return make(tiny_files)


def make(files: RandomLlama, like: Engine | None = None, **changes: Any) -> Engine:
    return Engine(files, EngineConfig(**{**SMALL, **changes}), model=None if like is None else like.model)  # type: ignore[arg-type]


@pytest.fixture
def engine(tiny_files: RandomLlama, first_engine: Engine) -> Engine:
    return make(tiny_files, first_engine)


def prompt(num_tokens: int, seed: int = 0) -> list[int]:
    return random.Random(seed).choices(range(3, 101), k=num_tokens)


OPTIONS = ("temperature", "max_tokens", "seed", "top_k", "ignore_eos")


def reset(sequence: Sequence) -> Sequence:
    """The same request again, from the beginning."""
    return make_sequence(
        sequence.tokens[: sequence.num_prompt_tokens],
        **{name: getattr(sequence.sampling, name) for name in OPTIONS},
    )


# -- life of a sequence -----------------------------------------------------------------------------------------------


def test_a_sequence_runs_to_its_limit_and_gives_everything_back(engine: Engine) -> None:
    sequence = make_sequence(prompt(10), max_tokens=5)
    outputs = run(engine, sequence).outputs[sequence.key]
    assert [output.index for output in outputs] == [0, 1, 2, 3, 4]
    assert [output.finish_reason for output in outputs] == [None] * 4 + [FinishReason.LENGTH]
    assert sequence.is_finished and engine.pool.counts().is_idle() and engine.find(sequence.key) is None
    assert sequence.num_prompt_computed == 10 and sequence.first_step_at is not None
    counters = engine.counters()
    assert (counters.prompt_tokens_computed, counters.tokens_generated, counters.num_steps) == (10, 5, 5)


def test_a_renewed_engine_is_as_new_on_the_same_weights_and_memory(tiny_files: RandomLlama) -> None:
    engine = make(tiny_files)
    expected = list(run(engine, make_sequence(prompt(10), max_tokens=5)).tokens.values())
    model, region, pool = engine.model, engine.kv_region, engine.pool
    assert pool.counts().cached > 0
    engine.renew(EngineConfig(**{**SMALL, "max_step_tokens": 16, "max_sequences": 4}))
    assert engine.model is model and engine.kv_region == region and engine.pool is not pool
    assert (engine.limits.max_step_tokens, engine.limits.max_sequences) == (16, 4)
    counts, counters = engine.pool.counts(), engine.counters()
    assert counts.free == counts.total == pool.counts().total and counters.num_steps == 0
    assert list(run(engine, make_sequence(prompt(10), max_tokens=5)).tokens.values()) == expected
    assert engine.counters().prompt_tokens_computed == 10  # nothing was found in a cache


def test_a_stop_token_is_reported_with_its_id(engine: Engine) -> None:
    first = run(engine, make_sequence(prompt(10), max_tokens=6))
    (tokens,) = first.tokens.values()
    stop = next(token for token in tokens[1:] if token != tokens[0])
    again = make_sequence(prompt(10), max_tokens=6, stop_token_ids=(stop,))
    last = run(engine, again).outputs[again.key][-1]
    assert (last.finish_reason, last.stop_token_id, last.token_id) == (FinishReason.STOP, stop, stop)


def test_a_sequence_pauses_with_its_blocks_and_can_be_detached_and_brought_back(engine: Engine) -> None:
    whole = make_sequence(prompt(10), max_tokens=6)
    expected = run(engine, whole).tokens[whole.key]
    pausing = make_sequence(prompt(10), max_tokens=6, pause_at=11)
    recorded = run(engine, pausing)
    assert recorded.outputs[pausing.key][-1].is_paused and not engine.has_work
    assert engine.pool.counts().in_use == 3
    detached = engine.detach(pausing.key)
    assert (detached.state, detached.num_computed, detached.num_pending) == (SequenceState.NEW, 10, 1)
    detached.pause_at = None
    detached.num_prompt_computed = 0
    rest = run(engine, detached)
    assert recorded.tokens[pausing.key] + rest.tokens[pausing.key] == expected
    assert detached.num_prompt_computed == 0, "the KV was there: no prompt token was computed again"


def test_a_sequence_that_ends_at_its_pause_is_finished_not_paused(engine: Engine) -> None:
    sequence = make_sequence(prompt(10), max_tokens=1, pause_at=11)
    run(engine, sequence)
    assert sequence.is_finished and engine.pool.counts().is_idle()


@pytest.mark.parametrize("num_steps", [0, 1, 3])
def test_a_removed_sequence_gives_its_blocks_back_at_once(engine: Engine, num_steps: int) -> None:
    sequence = make_sequence(prompt(50), max_tokens=50, reservation=engine.pool.reserve(20))
    engine.add(sequence)
    for _ in range(num_steps):
        engine.step()
    assert engine.remove(sequence.key)
    assert engine.pool.counts().is_idle() and not engine.has_work
    assert not engine.remove(sequence.key)


def test_a_removed_paused_sequence_gives_its_blocks_back(engine: Engine) -> None:
    sequence = make_sequence(prompt(10), pause_at=11)
    run(engine, sequence)
    assert engine.remove(sequence.key) and engine.pool.counts().is_idle()


def test_usage_penalties_and_indices_count_from_the_original_prompt_in_a_retry(engine: Engine) -> None:
    """Accepted tokens are prefilled again, and what follows is what would have followed."""
    options: dict[str, Any] = {"max_tokens": 12, "frequency_penalty": 0.6, "min_tokens": 9, "eos_token_ids": (2,)}
    whole = make_sequence(prompt(10), **options)
    expected = run(engine, whole).tokens[whole.key]
    retried = make_sequence([*prompt(10), *expected[:5]], num_prompt_tokens=10, **options)
    recorded = run(engine, retried)
    assert recorded.tokens[retried.key] == expected[5:]
    assert [output.index for output in recorded.outputs[retried.key]] == list(range(5, 12))


# -- failing alone ----------------------------------------------------------------------------------------------------


def test_a_sequence_with_broken_kv_fails_alone_and_its_blocks_harm_nobody_after_it(engine: Engine) -> None:
    healthy = make_sequence(prompt(9, seed=2), max_tokens=12)
    alone = reset(healthy)
    expected = run(engine, alone)
    broken = make_sequence(prompt(10), max_tokens=12)
    engine.add(broken)
    engine.step()
    engine.cache.tensor[broken.block_table[0]] = float("nan")
    recorded = run(engine, healthy)
    (output,) = recorded.outputs[broken.key]
    assert isinstance(output.error, InternalError) and broken.is_finished
    assert_same_bits(recorded.scores[healthy.key], expected.scores[alone.key])
    after = reset(healthy)
    assert_same_bits(run(engine, after).scores[after.key], expected.scores[alone.key])
    assert engine.pool.counts().is_idle()


def test_a_sequence_that_outgrows_the_worker_fails_typed(tiny_files: RandomLlama, first_engine: Engine) -> None:
    engine = make(tiny_files, first_engine, num_blocks=4)
    sequence = make_sequence(prompt(10), max_tokens=100, ignore_eos=True)
    outputs = run(engine, sequence).outputs[sequence.key]
    assert isinstance(outputs[-1].error, OutOfBlocks) and len(outputs) == 8
    assert engine.pool.counts().is_idle() and engine.counters().num_failed == 1


@pytest.mark.parametrize(
    ("options", "error"),
    [
        ({"tokens": [5, 101]}, InvalidRequest),
        ({"tokens": [-1]}, InvalidRequest),
        ({"stop_token_ids": (101,)}, InvalidRequest),
        ({"logit_bias": ((500, 1.0),)}, InvalidRequest),
        ({"allowed_token_ids": (-3,)}, InvalidRequest),
        ({"bad_words": ((1, 101),)}, InvalidRequest),
        ({"grammar": "root ::= x"}, InternalError),
        ({"max_tokens": 0}, InvalidRequest),
        ({"tokens": [5] * 512}, ContextTooLong),
        ({"tokens": []}, InvalidRequest),
        ({"temperature": float("nan")}, InvalidRequest),
        ({"top_p": 0.0}, InvalidRequest),
        ({"repetition_penalty": float("inf")}, InvalidRequest),
        ({"logit_bias": ((5, float("nan")),)}, InvalidRequest),
        ({"bad_words": ((),)}, InvalidRequest),
    ],
    ids=str,
)
def test_what_could_break_a_step_is_refused_and_what_it_brought_is_freed(
    engine: Engine, options: dict[str, Any], error: type[Exception]
) -> None:
    reservation = engine.pool.reserve(3)
    sequence = make_sequence(options.pop("tokens", [5]), reservation=reservation, **options)
    sequence.block_table = engine.pool.allocate(1, reservation)
    with pytest.raises(error):
        engine.add(sequence)
    assert engine.pool.counts().is_idle() and not engine.has_work


def test_a_second_sequence_of_one_name_is_refused(engine: Engine) -> None:
    first = make_sequence(prompt(3))
    engine.add(first)
    second = make_sequence(prompt(4))
    second.key = first.key
    with pytest.raises(InvalidRequest):
        engine.add(second)
    assert engine.find(first.key) is first


# -- building ---------------------------------------------------------------------------------------------------------


def test_what_peers_need_to_know_is_declared(engine: Engine) -> None:
    assert (engine.geometry.num_blocks, engine.geometry.block_size, engine.geometry.num_layers) == (64, 4, 2)
    assert engine.kv_region.num_bytes == 64 * engine.geometry.block_bytes
    assert (engine.format.num_kv_heads, engine.format.kv_dtype) == (2, "float32")
    assert (engine.limits.vocab_size, engine.limits.max_context) == (101, 512)


def test_a_missing_tensor_is_named_with_its_file(tiny_files: RandomLlama) -> None:
    broken = RandomLlama()
    del broken.weights["model.layers.1.mlp.up_proj.weight"]
    with pytest.raises(ConfigError, match=r"tiny-model.*'model\.layers\.1\.mlp\.up_proj\.weight' is missing"):
        make(broken)


def test_a_tensor_of_the_wrong_shape_is_named_with_its_file() -> None:
    broken = RandomLlama()
    broken.weights["model.norm.weight"] = np.ones(31, dtype="float32")
    with pytest.raises(ConfigError, match=r"tiny-model.*'model\.norm\.weight' has shape \(31,\).*\(32,\)"):
        make(broken)


def test_an_unknown_architecture_is_refused_with_those_that_are_known() -> None:
    with pytest.raises(ConfigError, match=r"'mamba' is not supported; use one of: llama"):
        make(RandomLlama(architecture="mamba"))


@pytest.mark.parametrize(
    ("changes", "remedy"),
    [
        ({"max_context": 513}, "max_context"),
        ({"max_sequences": 33}, "max_sequences"),
        ({"dtype": "float16"}, "float32, bfloat16, int8"),
        ({"kv_dtype": "int8"}, "float32, bfloat16"),
        ({"num_blocks": "auto", "memory_bytes": 1000}, "memory_bytes"),
    ],
    ids=str,
)
def test_a_config_that_cannot_work_is_refused_with_the_remedy(
    tiny_files: RandomLlama, first_engine: Engine, changes: dict[str, Any], remedy: str
) -> None:
    with pytest.raises(ConfigError, match=remedy):
        make(tiny_files, first_engine, **changes)


def test_workers_of_unequal_arithmetic_never_pair(tiny_files: RandomLlama) -> None:
    formats = {
        (dtype, kv_dtype): make(tiny_files, dtype=dtype, kv_dtype=kv_dtype).format
        for dtype in ("float32", "bfloat16", "int8")
        for kv_dtype in ("float32", "bfloat16")
    }
    assert len({each.hash() for each in formats.values()}) == 6
    assert formats["int8", "bfloat16"].quantisation != formats["bfloat16", "bfloat16"].quantisation


def test_untied_heads_and_attention_biases_are_used() -> None:
    files = RandomLlama(tie_word_embeddings=False, attention_bias=True)
    one = make_sequence(prompt(6))
    before = run(make(files), one).scores[one.key]
    for name in ("lm_head.weight", "model.layers.0.self_attn.k_proj.bias"):
        changed = RandomLlama(tie_word_embeddings=False, attention_bias=True)
        changed.weights[name] = changed.weights[name] * 2
        two = make_sequence(prompt(6))
        assert not np.allclose(run(make(changed), two).scores[two.key][0], before[0]), name


def test_frequencies_of_long_contexts_match_the_reference() -> None:
    scaling = RopeScaling(kind="llama3", factor=8.0, low_freq_factor=1.0, high_freq_factor=4.0, original_max_context=64)
    hf_config = LlamaConfig(
        hidden_size=256,
        num_attention_heads=4,
        head_dim=64,
        max_position_embeddings=512,
        rope_parameters={
            "rope_type": "llama3",
            "rope_theta": 500000.0,
            "factor": 8.0,
            "low_freq_factor": 1.0,
            "high_freq_factor": 4.0,
            "original_max_position_embeddings": 64,
        },
    )
    inverse, _ = ROPE_INIT_FUNCTIONS["llama3"](hf_config, device=None)
    tables = rope_tables(64, 500000.0, scaling, 300)
    cos, sin = tables.cos, tables.sin
    angles = torch.arange(300).float()[:, None] * inverse[None]
    assert torch.equal(cos[:, :32], angles.cos()) and torch.equal(sin[:, 32:], angles.sin())


# -- blocks that are leased while the prompt is computed ---------------------------------------------------------------


@pytest.mark.parametrize(("num_generated", "num_parts"), [(1, 2), (2, 3)])
def test_complete_blocks_are_leased_as_soon_as_they_are_computed(
    engine: Engine, num_generated: int, num_parts: int
) -> None:
    sequence = make_sequence(prompt(70), max_tokens=num_generated)
    sequence.is_leased_early, sequence.pause_at = True, 71
    engine.add(sequence)
    steps = [engine.step() for _ in range(3)]
    leased = [part for step in steps for part in step.leased]
    assert all(part.sequence is sequence for part in leased)
    assert [(part.first_block, len(part.blocks)) for part in leased] == [(0, 8), (8, 8), (16, 1)][:num_parts]
    assert sequence.is_finished == (num_parts == 2), "nobody reads what a prompt that ended at its first token left"
    engine.remove(sequence.key)
    assert engine.pool.counts().leased == sum(len(part.blocks) for part in leased), "they outlive the sequence"
    for part in leased:
        engine.pool.end_lease(part.blocks)
    assert engine.pool.counts().is_idle()


def test_leased_blocks_of_a_preempted_sequence_are_given_out_only_when_the_lease_ends(
    tiny_files: RandomLlama, first_engine: Engine
) -> None:
    engine = make(tiny_files, first_engine, num_blocks=13, max_mixed_tokens=4, projected_tokens=1, prefix_cache=False)
    first = make_sequence(prompt(8), max_tokens=56)
    second = make_sequence(prompt(40, seed=1), max_tokens=1)
    second.is_leased_early = True
    engine.add(first)
    engine.step()
    engine.add(second)
    leased: list[int] = []
    while not (step := engine.step()).preempted:
        assert not second.is_finished
        leased += [block for part in step.leased for block in part.blocks]
    assert step.preempted == (second,) and leased and second.num_leased == 0
    assert not set(first.block_table) & set(leased)
    engine.remove(first.key)
    engine.remove(second.key)
    assert engine.pool.counts().leased == len(set(leased))
    engine.pool.end_lease(leased)
    assert engine.pool.counts().is_idle()
