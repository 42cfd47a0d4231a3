"""The texts of a tokenizer's added tokens, prepared for searching: some vocabularies have thousands of them."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator


class AddedTexts:
    """A set of texts. All searches take time by the text searched, not by the size of the set."""

    def __init__(self, texts: Iterable[str]) -> None:
        self.all = tuple(text for text in texts if text)
        self._exact = re.compile(_pattern(self.all)) if self.all else None
        folded = [text.casefold() for text in self.all]
        self._start = re.compile(f"(?={_pattern(folded)})", re.IGNORECASE) if self.all else None
        self._joined = "\0".join(folded)
        self._heads = {text[:size] for text in folded for size in range(1, len(text))}
        self._tails = {text[-size:] for text in folded for size in range(1, len(text))}
        self._longest = max(map(len, folded), default=0)

    def occurrences(self, text: str) -> Iterator[re.Match[str]]:
        """Leftmost-longest, without overlaps."""
        return self._exact.finditer(text) if self._exact else iter(())

    def starts(self, text: str) -> list[int]:
        """Where an added text begins in any case of letters; occurrences may overlap."""
        return [match.start() for match in self._start.finditer(text)] if self._start else []

    def is_inside_one(self, text: str) -> bool:
        """In any case of letters."""
        return bool(self.all) and text.casefold() in self._joined

    def begins_with_a_tail(self, text: str) -> bool:
        """Something before the text could make an added text of its beginning."""
        folded = text.casefold()
        return any(folded[:size] in self._tails for size in range(1, self._longest))

    def ends_with_a_head(self, text: str) -> bool:
        """Something behind the text could make an added text of its end."""
        folded = text.casefold()
        return any(folded[-size:] in self._heads for size in range(1, self._longest))


def _pattern(texts: Iterable[str]) -> str:
    """An expression for any of the texts that prefers the longest and reads each character once."""
    root: dict[str, object] = {}
    for text in texts:
        node = root
        for character in text:
            child = node.setdefault(character, {})
            assert isinstance(child, dict)
            node = child
        node[""] = {}
    return _expression(root)


def _expression(node: dict[str, object]) -> str:
    branches = []
    for character, child in node.items():
        if character:
            assert isinstance(child, dict)
            branches.append(re.escape(character) + _expression(child))
    if not branches:
        return ""
    if len(branches) == 1 and "" not in node:
        return branches[0]
    return f"(?:{'|'.join(branches)}){'?' if '' in node else ''}"
