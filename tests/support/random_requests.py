"""Random requests for property tests, and what each is answered when nobody else is there."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from hypothesis import strategies as st

from core.costs import StepCosts
from core.grammar import GrammarKind, GrammarSource
from engine.engine import Engine, EngineConfig, SequenceOutput
from engine.sequence import Sequence
from tests.support.engine_runs import Recorded, make_sequence, run
from tests.support.random_llama import RandomLlama

EOS = 2
_IDS = range(3, 101)
_COMMON = tuple(3 + (17 * index) % 97 for index in range(140))
"""What most prompts begin with, so that they share blocks; as long as more than one tile of keys."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Asked:
    """A request of one or more choices."""

    prompt: tuple[int, ...]
    options: tuple[tuple[str, Any], ...]
    """Of SamplingParams."""

    def sequence(self, engine: Engine, *, choice: int = 0, accepted: tuple[int, ...] = (), **fields: Any) -> Sequence:
        """One choice, behind the tokens that were accepted of it already. ``fields``: of Sequence."""
        tokens = (*self.prompt, *accepted)
        made = make_sequence(
            tokens,
            num_prompt_tokens=len(self.prompt),
            choice=choice,
            eos_token_ids=(EOS,),
            **dict(self.options),
            **fields,
        )
        if made.sampling.grammar:
            made.grammar = engine.grammars.compile(made.sampling.grammar).start()
        return made


@dataclass(frozen=True, slots=True, kw_only=True)
class Answer:
    """What came out of a choice, step by step; the last output has its finish reason, or its error."""

    outputs: tuple[SequenceOutput, ...]
    scores: tuple[bytes, ...]
    """The raw scores that each token was drawn from."""

    @property
    def tokens(self) -> tuple[int, ...]:
        return tuple(output.token_id for output in self.outputs if output.error is None)


def score_bytes(recorded: Recorded, sequence: Sequence) -> tuple[bytes, ...]:
    return tuple(row.numpy().tobytes() for row in recorded.scores.get(sequence.key, ()))


class Model:
    """The weights that engines of a test share, and the answers of an engine that has nothing else to do."""

    def __init__(self, dtype: str, *, costs: StepCosts | None = None, **changes: Any) -> None:
        """``costs``: of mock execution."""
        self._files: Any = RandomLlama(**changes)
        self._options: dict[str, Any] = {"dtype": dtype, "costs": costs}
        self._alone = Engine(self._files, EngineConfig(num_blocks=64, prefix_cache=False, **self._options))
        self._answers: dict[tuple[Asked, int], Answer] = {}

    def engine(self, **config: Any) -> Engine:
        weights = None if self._options["costs"] else self._alone.model
        return Engine(self._files, EngineConfig(**self._options, **config), model=weights)

    def alone(self, asked: Asked, choice: int = 0) -> Answer:
        found = self._answers.get((asked, choice))
        if found is None:
            sequence = asked.sequence(self._alone, choice=choice)
            recorded = run(self._alone, sequence)
            found = Answer(outputs=tuple(recorded.outputs[sequence.key]), scores=score_bytes(recorded, sequence))
            self._answers[asked, choice] = found
        return found


def _some_ids(least: int, most: int) -> st.SearchStrategy[tuple[int, ...]]:
    return st.lists(st.sampled_from(_IDS), min_size=least, max_size=most, unique=True).map(tuple)


_pieces = st.lists(st.sampled_from(_IDS), max_size=12).map(tuple)
_prompts = st.builds(lambda size, tail: _COMMON[:size] + tail, st.sampled_from((0, 3, 16, 31, 48, 140)), _pieces)
_GRAMMARS = tuple(
    GrammarSource(kind=kind, source=source).encode()
    for kind, source in (
        (GrammarKind.REGEX, "[A-Z]{2,9}"),
        (GrammarKind.REGEX, "[0-9]+(-[0-9]+)*"),
        (GrammarKind.CHOICE, '["A", "AB", "ABBA", "-"]'),
        (GrammarKind.JSON_SCHEMA, '{"type":"array","items":{"type":"integer"},"maxItems":3}'),
        (GrammarKind.EBNF, 'root ::= "(" root ")" | [0-9]'),
    )
)
_common_options: dict[str, st.SearchStrategy[Any]] = {
    "top_k": st.sampled_from((1, 4, 40)),
    "top_p": st.sampled_from((0.3, 0.9)),
    "min_p": st.sampled_from((0.02, 0.3)),
    "repetition_penalty": st.sampled_from((0.7, 1.4)),
    "frequency_penalty": st.sampled_from((-0.5, 0.8)),
    "presence_penalty": st.sampled_from((-0.5, 1.1)),
    "logit_bias": st.lists(st.tuples(st.sampled_from(_IDS), st.sampled_from((-3.0, 2.5))), min_size=1, max_size=4).map(
        tuple
    ),
    "bad_words": st.lists(_some_ids(1, 2), min_size=1, max_size=12).map(tuple),
    "min_tokens": st.integers(1, 6),
    "stop_token_ids": _some_ids(1, 8),
    "logprobs": st.sampled_from((0, 3)),
    "prompt_logprobs": st.sampled_from((0, 2)),
}
_free = st.fixed_dictionaries({}, optional={"ignore_eos": st.just(True), "allowed_token_ids": _some_ids(8, 40)})
_bound = st.fixed_dictionaries({"grammar": st.sampled_from(_GRAMMARS)})
_options = st.builds(
    lambda always, some, ends: tuple(sorted({**always, **some, **ends}.items())),
    st.fixed_dictionaries(
        {
            "temperature": st.sampled_from((0.0, 0.7, 1.5)),
            "seed": st.integers(0, 3),
            "max_tokens": st.sampled_from((1, 6, 14, 30)),
        }
    ),
    st.sets(st.sampled_from(sorted(_common_options)), min_size=1, max_size=5).flatmap(
        lambda names: st.fixed_dictionaries({name: _common_options[name] for name in sorted(names)})
    ),
    st.integers(0, 9).flatmap(lambda roll: _bound if roll in (3, 7) else _free),
)
requests = st.builds(lambda prompt, options: Asked(prompt=prompt, options=options), _prompts.filter(bool), _options)
OPTION_NAMES = frozenset({*_common_options, "ignore_eos", "allowed_token_ids", "grammar", "temperature"})
