"""Every public bug report that is a case of ours has a test of its number, at least one of them on a real socket."""

import re
from pathlib import Path

import pytest

TESTS = Path(__file__).parents[1]
REPORTS = (
    *(1, 2, 4, 5, 7, 8, 10, 11, 13, 14, 16, 17, 19, 20, 22, 23, 25, 26, 28, 29, 31, 32, 34, 35, 37, 38, 40, 41, 43, 44),
    *(46, 47, 49, 50, 52, 53, 55, 56, 58, 59, 61, 62, 64, 65, 67, 68, 70, 71),
)
NAMED = re.compile(r"def test_bug_(\d{3})_\w+")


def numbers(folder: Path) -> set[int]:
    texts = (path.read_text() for path in folder.rglob("test_*.py"))
    return {int(number) for text in texts for number in NAMED.findall(text)}


@pytest.mark.parametrize("number", REPORTS)
def test_a_report_has_its_test(number: int) -> None:
    assert number in numbers(TESTS / "integration")


def test_no_test_bears_a_number_that_is_none() -> None:
    assert numbers(TESTS) <= set(REPORTS)
