"""Scripts with their tokens written out, for cells and clusters that take token ids (:mod:`bench.traffic`)."""

from collections.abc import Iterable, Iterator

from bench.client.prompts import Ids
from bench.client.scripts import Script
from bench.traffic import Conversation, Turn


def conversations(scripts: Iterable[Script], ids: Ids, *, deadline_s: float = 600.0) -> Iterator[Conversation]:
    """One by one, so that a long trace need not be in memory at once."""
    for script in scripts:
        turns = tuple(
            Turn(tokens=tuple(ids.ids(line.parts)), max_tokens=line.max_tokens, think_s=line.think_s)
            for line in script.lines
        )
        yield Conversation(
            at_s=script.at_s,
            turns=turns,
            prefix=tuple(ids.ids(script.system)),
            label=script.label,
            deadline_s=deadline_s,
        )
