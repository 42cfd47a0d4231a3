"""What a model's steps cost: measured once, so that a worker can take as long without the model (mock execution)."""

from bisect import bisect_left
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Self

from pydantic import BaseModel, ConfigDict, Field, ValidationError, field_validator

from core.errors import ConfigError

Seconds = Annotated[float, Field(ge=0, allow_inf_nan=False)]
Row = tuple[Annotated[int, Field(ge=1)], Seconds]


@dataclass(frozen=True, slots=True, kw_only=True)
class StepWork:
    """What one step computes, as far as its duration depends on it."""

    num_prompt_tokens: int = 0
    """Of chunks with more than one token, and of prompts that are computed to their end."""
    num_prompt_pairs: int = 0
    """(token, token before it or itself) of those: what attention has to look at."""
    num_decode_rows: int = 0
    """Answers that advance by one token."""
    num_decode_positions: int = 0
    """Tokens of their contexts together."""


class HandoffCosts(BaseModel):
    """What moving the KV of a prompt costs the worker that fetches it. Transfers of one worker take turns."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    fixed_s: Seconds = 0.0
    """Of each read."""
    token_s: Seconds = 0.0
    """Of each token whose KV is moved."""


class StepCosts(BaseModel):
    """Seconds of one step of a worker: what its prompt tokens take plus what its decode rows take, less what a step
    with both pays only once. Tables are linear between their rows, and go on like their last two beyond them."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    prompt: tuple[Row, ...] = Field(min_length=1)
    """(prompt tokens, seconds) of a step without context, numbers ascending."""
    decode: tuple[Row, ...] = Field(min_length=1)
    """(decode rows, seconds) of a step without context, numbers ascending."""
    shared_s: Seconds = 0.0
    """What a step with both pays once: reading the weights."""
    prompt_pair_s: Seconds = 0.0
    """Of each pair of a prompt token and one that it attends to."""
    decode_position_s: Seconds = 0.0
    """Of each token of the context of a decode row."""
    handoff: HandoffCosts | None = None
    """Null: moving the small KV of a mock worker costs what it costs."""
    measured: str = ""
    """Where and of what: for people."""

    @field_validator("prompt", "decode")
    @classmethod
    def _ascending(cls, rows: tuple[Row, ...]) -> tuple[Row, ...]:
        numbers = [number for number, _ in rows]
        if sorted(set(numbers)) != numbers:
            raise ValueError(f"the numbers of a table must ascend, these are {numbers}")
        if len(rows) > 1 and rows[-1][1] < rows[-2][1]:
            raise ValueError("the last row of a table must not take less than the one before: it goes on like them")
        return rows

    @classmethod
    def linear(
        cls,
        *,
        fixed_s: float,
        prompt_token_s: float,
        decode_row_s: float,
        prompt_pair_s: float = 0.0,
        decode_position_s: float = 0.0,
        handoff: HandoffCosts | None = None,
    ) -> Self:
        """A machine of one's own making: ``fixed_s`` for each step, and so much for each token of it."""
        return cls(
            prompt=((1, fixed_s + prompt_token_s), (2, fixed_s + 2 * prompt_token_s)),
            decode=((1, fixed_s + decode_row_s), (2, fixed_s + 2 * decode_row_s)),
            shared_s=fixed_s,
            prompt_pair_s=prompt_pair_s,
            decode_position_s=decode_position_s,
            handoff=handoff,
            measured="made up",
        )

    def scaled(self, *, prompt: float = 1.0, decode: float = 1.0, handoff: float = 1.0) -> Self:
        """So many times as slow: prompts, decode rows, hand-offs. What both share follows the faster of them."""
        moved = self.handoff
        if moved is not None:
            moved = HandoffCosts(fixed_s=moved.fixed_s * handoff, token_s=moved.token_s * handoff)
        return self.model_copy(
            update={
                "prompt": tuple((number, seconds * prompt) for number, seconds in self.prompt),
                "decode": tuple((number, seconds * decode) for number, seconds in self.decode),
                "shared_s": self.shared_s * min(prompt, decode),
                "prompt_pair_s": self.prompt_pair_s * prompt,
                "decode_position_s": self.decode_position_s * decode,
                "handoff": moved,
            }
        )

    def step_s(self, work: StepWork) -> float:
        """How long a step with this work takes; 0 without any."""
        prompt_s = _at(self.prompt, work.num_prompt_tokens) + self.prompt_pair_s * work.num_prompt_pairs
        decode_s = _at(self.decode, work.num_decode_rows) + self.decode_position_s * work.num_decode_positions
        if not (work.num_prompt_tokens and work.num_decode_rows):
            return prompt_s + decode_s
        return max(prompt_s, decode_s, prompt_s + decode_s - self.shared_s)


def read_costs(path: str) -> StepCosts:
    """Of a file that ``python -m bench.cost_table`` wrote. Raises ConfigError with the remedy."""
    remedy = "name a file made by `python -m bench.cost_table --json FILE` in models[].execution.costs"
    try:
        return StepCosts.model_validate_json(Path(path).read_bytes())
    except OSError as error:
        raise ConfigError(f"cannot read the cost table {path}: {error.strerror}; {remedy}") from None
    except ValidationError as error:
        first = error.errors(include_url=False, include_input=False)[0]
        where = ".".join(str(part) for part in first["loc"]) or "the file"
        what = first["msg"].removeprefix("Value error, ")
        raise ConfigError(f"{path} is no cost table ({where}: {what}); {remedy}") from None


def _at(rows: tuple[Row, ...], number: int) -> float:
    """Between two rows of a table, or beyond its end; below its first row as much as there."""
    if number == 0:
        return 0.0
    at = bisect_left(rows, number, key=lambda row: row[0])
    if at == 0:
        return rows[0][1]
    if at == len(rows) == 1:
        return rows[0][1] * number / rows[0][0]
    low, high = rows[at - 1 : at + 1] if at < len(rows) else rows[-2:]
    return low[1] + (high[1] - low[1]) * (number - low[0]) / (high[0] - low[0])
