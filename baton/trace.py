"""``baton trace REQUEST_ID``: the life of a finished request on one time axis, its stages and the chunks of its KV."""

import json
import shutil
from collections.abc import Sequence

from baton.explain import find_records, path_of, to_json
from baton.status import format_bytes
from core.credentials import Credentials
from core.types import RequestRecord, StageInterval, TransferChunk

MIN_WIDTH = 64
STAGE_BAR, EARLY_BAR, LATE_BAR = "█", "░", "▒"
"""An early chunk moved while the prompt was computed."""


async def show_trace(
    router_address: str, request_id: str, *, as_json: bool, credentials: Credentials | None = None
) -> int:
    """Ask the router and print. Raises ConfigError when it does not answer or has no record of the request."""
    records = await find_records(router_address, request_id, credentials)
    if as_json:
        print(json.dumps([to_json(record) for record in records], indent=2))
    else:
        width = shutil.get_terminal_size().columns
        print("\n\n".join(render(record, width) for record in records))
    return 0


def render(record: RequestRecord, width: int) -> str:
    """No line is longer than ``width``, which is at least ``MIN_WIDTH``."""
    width = max(width, MIN_WIDTH)
    rows = _rows(record)
    name_width = max((len(name) for name, *_ in rows), default=0)
    about_width = max((len(about) for *_, about in rows), default=0)
    bar_width = max(10, width - name_width - about_width - 4)
    lines = [*_head(record), ""]
    lines.append(" " * (name_width + 2) + _axis(record.duration_s, bar_width))
    for name, start_s, duration_s, mark, about in rows:
        bar = _bar(start_s, duration_s, record.duration_s, bar_width, mark)
        lines.append(f"{name:<{name_width}}  {bar}  {about}".rstrip())
    return "\n".join(line if len(line) <= width else f"{line[: width - 1]}…" for line in lines)


Row = tuple[str, float, float, str, str]
"""Name, start, duration, mark of the bar, what stands behind it."""


def _rows(record: RequestRecord) -> list[Row]:
    rows: list[Row] = [_stage_row(one, record.attempts) for one in record.timeline]
    chunks = record.times.transfer_chunks if record.times is not None else ()
    return rows + [_chunk_row(one) for one in chunks]


def _stage_row(one: StageInterval, num_attempts: int) -> Row:
    name = f"{one.stage} #{one.attempt}" if num_attempts > 1 and one.attempt else one.stage
    about = f"{format_ms(one.duration_s):>10}"
    return name, one.start_s, one.duration_s, STAGE_BAR, f"{about}  {one.worker}".rstrip()


def _chunk_row(one: TransferChunk) -> Row:
    last = one.first_block + one.num_blocks - 1
    blocks = f"{one.first_block}" if last == one.first_block else f"{one.first_block}-{last}"
    rate = f" {one.num_bytes / one.duration_s / 1e9:.2f} GB/s" if one.duration_s > 0 else ""
    about = f"{format_ms(one.duration_s):>10}  {format_bytes(one.num_bytes)}{rate}{' early' if one.is_early else ''}"
    return f"  kv {blocks}", one.start_s, one.duration_s, EARLY_BAR if one.is_early else LATE_BAR, about


def _head(record: RequestRecord) -> Sequence[str]:
    lines = [f"request {record.request_id}  {record.model}  ended: {record.outcome}"]
    placed = [one.placement for one in record.history if one.placement is not None]
    if placed:
        lines.append(f"on {path_of(placed[-1])} because {record.reason}; {record.attempts} attempt(s)")
    first = f", first token after {format_ms(record.ttft_s)}" if record.ttft_s else ", no token came"
    lines.append(
        f"{record.num_prompt_tokens} prompt tokens ({record.num_cached_tokens} cached), "
        f"{record.num_completion_tokens} answer tokens{first}"
    )
    if record.trace_id:
        lines.append(f"trace {record.trace_id}")
    return lines


def _axis(total_s: float, width: int) -> str:
    end = format_ms(total_s)
    return f"0{end:>{width - 1}}"


def _bar(start_s: float, duration_s: float, total_s: float, width: int, mark: str) -> str:
    """At least one mark, within the axis."""
    scale = width / total_s if total_s > 0 else 0.0
    begin = min(width - 1, max(0, int(start_s * scale)))
    length = min(width - begin, max(1, round(duration_s * scale)))
    return (" " * begin + mark * length).ljust(width)


def format_ms(seconds: float) -> str:
    return f"{seconds:.2f} s" if seconds >= 10 else f"{1e3 * seconds:.1f} ms"
