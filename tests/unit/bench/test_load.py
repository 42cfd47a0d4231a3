"""What the load generator makes of its samples."""

from __future__ import annotations

from bench.load import Sample, quantile, report


def sample(ttft_s: float, duration_s: float, tokens: int) -> Sample:
    return Sample(ttft_s=ttft_s, duration_s=duration_s, num_prompt_tokens=10, num_completion_tokens=tokens)


def test_time_per_token_leaves_out_the_first() -> None:
    assert sample(1, 2, 11).tpot_s == 0.1
    assert sample(1, 1, 1).tpot_s == 0


def test_a_quantile_is_a_value_that_occurred() -> None:
    values = [4.0, 1.0, 3.0, 2.0]
    assert [quantile(values, q) for q in (0.5, 0.75, 0.95, 1.0)] == [2.0, 3.0, 4.0, 4.0]


def test_rates_are_over_the_whole_run() -> None:
    text = report([sample(0.1, 1, 10), sample(0.2, 2, 30)], 4)
    assert "0.50 requests/s, 10.0 tokens/s out, 5.0 tokens/s in" in text
    assert "TTFT" in text
