"""The class of a request's work: a label of few values, so that histograms of unlike work are not one heap."""

from bisect import bisect_left

from core.priority import PriorityClass

_PROMPT_BANDS = ((256, "short"), (2048, "medium"), (8192, "long"))
_ANSWER_BANDS = ((64, "short"), (512, "medium"), (2048, "long"))
_LONGEST = "huge"
BANDS = (*(name for _, name in _PROMPT_BANDS), _LONGEST)


def workload_class(num_prompt_tokens: int, num_answer_tokens: int, priority: int) -> str:
    """``<prompt>-<answer>-<tenant>``, such as ``medium-short-normal``: bands of both lengths (up to 256, 2,048, 8,192
    and more; up to 64, 512, 2,048 and more tokens) and the priority class of the caller."""
    prompt, answer = _band(num_prompt_tokens, _PROMPT_BANDS), _band(num_answer_tokens, _ANSWER_BANDS)
    return f"{prompt}-{answer}-{PriorityClass.of(priority)}"


def _band(number: int, bands: tuple[tuple[int, str], ...]) -> str:
    place = bisect_left([limit for limit, _ in bands], number)
    return bands[place][1] if place < len(bands) else _LONGEST
