"""What one worker of each role takes for its work, as ``baton profile`` measured it or somebody computed it: all that
``baton plan`` and the simulator know of the hardware."""

from pathlib import Path
from typing import Annotated

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from core.costs import HandoffCosts, Seconds, StepCosts, StepWork
from core.errors import ConfigError

Count = Annotated[int, Field(ge=1)]


class Fit(BaseModel):
    """How well a law describes what was measured."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    name: str
    r2: float
    points: tuple[tuple[float, float], ...] = ()
    """(measured, fitted) seconds."""


class Profile(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid")

    costs: StepCosts
    """Of a prefill or decode worker; a unified one has both."""
    first_s: Seconds = 0.004
    """What a first token takes beyond its steps: gateway, router, messages."""
    num_kv_tokens: Count = 65_536
    """Tokens of KV that a worker holds."""
    block_size: Count = 16
    max_sequences: Count = 64
    max_step_tokens: Count = 2048
    max_mixed_tokens: Count = 256
    model: str = ""
    hardware: str = ""
    fits: tuple[Fit, ...] = ()

    @property
    def handoff(self) -> HandoffCosts:
        return self.costs.handoff or HandoffCosts()

    def prompt_s(self, num_tokens: int, num_cached: int = 0) -> float:
        """Of a prompt that a worker reads alone, in steps as long as they may be."""
        total, at = 0.0, num_cached
        while at < num_tokens:
            end = min(num_tokens, at + self.max_step_tokens)
            pairs = (end - at) * (at + end + 1) // 2
            total += self.costs.step_s(StepWork(num_prompt_tokens=end - at, num_prompt_pairs=pairs))
            at = end
        return total

    def decode_s(self, num_rows: float, context: float) -> float:
        """Of a step of so many answers, each behind ``context`` tokens; between whole numbers as between rows."""
        low = int(num_rows)
        rows = [self._decode_s(max(1, number), context) for number in (low, low + 1)]
        return rows[0] + (rows[1] - rows[0]) * (num_rows - low)

    def _decode_s(self, num_rows: int, context: float) -> float:
        work = StepWork(num_decode_rows=num_rows, num_decode_positions=round(num_rows * context))
        return self.costs.step_s(work)


def read_profile(path: Path) -> Profile:
    """Of ``baton profile``, or a bare cost table (`python -m bench.cost_table`). Raises ConfigError with the remedy."""
    remedy = "name a file that `baton profile --out FILE` wrote"
    try:
        text = path.read_bytes()
    except OSError as error:
        raise ConfigError(f"cannot read the profile {path}: {error.strerror}; {remedy}") from None
    try:
        return Profile.model_validate_json(text)
    except ValidationError as error:
        try:
            table = StepCosts.model_validate_json(text)
        except ValidationError:
            first = error.errors(include_url=False, include_input=False)[0]
            where = ".".join(str(part) for part in first["loc"]) or "the file"
            raise ConfigError(f"{path} is no profile ({where}: {first['msg']}); {remedy}") from None
        return Profile(costs=table, hardware=table.measured)
