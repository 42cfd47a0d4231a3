"""Eight clients that ask all the time, each in its own way, and judge every answer that they get."""

from __future__ import annotations

import asyncio
import json
import random
import time
from collections import Counter
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any

import httpx

from core.errors import ERRORS_BY_SLUG
from tests.support.cluster import ProcessCluster
from tests.support.tiny_cluster import TINY

DEADLINE_S = 30.0
GRACE_S = 3.0
_PAUSE_S = 0.05
_WORDS = range(2, 250)
_NO_WORD = ("cut", "nobody there")
"""A connection that ended, or could not be made: what the clients of a gateway see that is ended."""
_LEAVING = "draining"
"""What a gateway that is to end says to those who come then: 503, try again."""

WAYS: tuple[dict[str, Any], ...] = (
    {"temperature": 0, "stream": True},
    {"temperature": 0, "stream": False},
    {"temperature": 0.9, "seed": 11, "stream": True},
    {"temperature": 0.9, "seed": 12, "n": 2, "stream": True},
    {"temperature": 0.8, "seed": 13, "presence_penalty": 0.7, "frequency_penalty": 0.3, "logprobs": 1, "stream": True},
    {
        "temperature": 1,
        "seed": 14,
        "structured_outputs": {"regex": "[a-z ]{100,200}"},
        "ignore_eos": False,
        "stream": True,
    },
    {"temperature": 1, "stream": True},
    {"temperature": 1, "stream": False},
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Question:
    way: int
    body: dict[str, Any]

    @property
    def is_fixed(self) -> bool:
        """It has one answer only."""
        return self.body["temperature"] == 0 or "seed" in self.body


@dataclass(slots=True)
class Answer:
    """What came, by choice."""

    token_ids: dict[int, list[int]] = field(default_factory=dict)
    texts: dict[int, str] = field(default_factory=dict)
    finish_reasons: dict[int, str] = field(default_factory=dict)
    error: str = ""
    """Its code, or one of `_NO_WORD`."""

    def take(self, choice: dict[str, Any]) -> bool:
        """One choice of an event, or of a plain answer. Whether there was a token."""
        index, new = choice["index"], choice.get("token_ids") or []
        self.token_ids.setdefault(index, []).extend(new)
        self.texts[index] = self.texts.get(index, "") + choice["text"]
        if choice["finish_reason"]:
            assert index not in self.finish_reasons, "a choice ends once"
            self.finish_reasons[index] = choice["finish_reason"]
        return bool(new)


def questions(seed: int, for_each_way: int) -> list[Question]:
    choose = random.Random(seed)
    return [
        Question(
            way=way,
            body={
                "model": TINY,
                "prompt": [choose.choice(_WORDS) for _ in range(choose.randint(20, 500))],
                "max_tokens": choose.randint(30, 90),
                "ignore_eos": True,
                "return_token_ids": True,
                **fields,
            },
        )
        for way, fields in enumerate(WAYS)
        for _ in range(for_each_way)
    ]


class Callers:
    """Start and stop them as often as wanted; what is wrong is collected in ``damage``."""

    def __init__(self, cluster: ProcessCluster, asked: list[Question], seed: int) -> None:
        self._cluster = cluster
        self._asked = asked
        self._choose = random.Random(seed)
        self._right: dict[int, Answer] = {}
        self._tasks: list[asyncio.Task[None]] = []
        self._is_over = False
        self.counts: Counter[str] = Counter()
        self.damage: list[str] = []
        self.cut_is_expected = False
        """The gateway is to be ended: a broken connection is what its clients see."""
        self.progress: list[list[float]] = [[] for _ in WAYS]
        """Of each caller, when something good came."""

    async def learn(self) -> None:
        """The right answers, while nothing disturbs."""
        fixed = [number for number, question in enumerate(self._asked) if question.is_fixed]
        answers = await asyncio.gather(*[self._ask(self._asked[number], []) for number in fixed])
        self._right = dict(zip(fixed, answers, strict=True))
        for answer in answers:
            assert not answer.error, answer.error

    def start(self) -> None:
        self._is_over = False
        self.progress = [[time.monotonic()] for _ in WAYS]
        self._tasks = [asyncio.create_task(self._call(way)) for way in range(len(WAYS))]

    async def stop(self) -> None:
        """No new questions; the last answers are waited for."""
        self._is_over = True
        await asyncio.gather(*self._tasks)

    async def all_asked(self) -> None:
        """Everybody has had something good since the start."""
        async with asyncio.timeout(DEADLINE_S):
            while any(len(times) < 2 for times in self.progress):
                await asyncio.sleep(0.01)

    async def ask_each(self) -> None:
        """One new question of every way must be answered."""
        asked = [self._choose.choice(self._of(way)) for way in range(len(WAYS))]
        answers = await asyncio.gather(*[self._ask(self._asked[number], []) for number in asked])
        for number, answer in zip(asked, answers, strict=True):
            if answer.error:
                self.damage.append(f"a new request failed: {answer.error}")
            self._judge(number, answer)

    def longest_silence_s(self, since: float) -> float:
        """The longest time without anything good for a caller, of those that lasted at ``since`` or began later."""
        gaps = [0.0]
        for times in self.progress:
            gaps += [after - before for before, after in pairwise(times) if after > since]
        return max(gaps)

    # -- inside -------------------------------------------------------------------------------------------------------

    def _of(self, way: int) -> list[int]:
        return [number for number, question in enumerate(self._asked) if question.way == way]

    async def _call(self, way: int) -> None:
        while not self._is_over:
            number = self._choose.choice(self._of(way))
            began = time.monotonic()
            try:
                async with asyncio.timeout(DEADLINE_S + GRACE_S):
                    answer = await self._ask(self._asked[number], self.progress[way])
            except TimeoutError:
                self.damage.append(f"hang: no end after {time.monotonic() - began:.1f} s, {self._asked[number].body}")
                continue
            if answer.error != "nobody there":
                self.counts[answer.error or "answered"] += 1
            self._judge(number, answer)
            if answer.error:
                await asyncio.sleep(_PAUSE_S)

    async def _ask(self, question: Question, progress: list[float]) -> Answer:
        answer = Answer()
        try:
            if question.body["stream"]:
                await self._read_stream(question, answer, progress)
            else:
                reply = await self._cluster.http.post("/v1/completions", json=question.body)
                content = reply.json()
                if reply.status_code == 200:
                    for choice in content["choices"]:
                        answer.take(choice)
                    progress.append(time.monotonic())
                else:
                    answer.error = content["error"]["code"]
        except httpx.ConnectError:
            answer.error = "nobody there"
        except httpx.TransportError:
            answer.error = "cut"
        return answer

    async def _read_stream(self, question: Question, answer: Answer, progress: list[float]) -> None:
        async with self._cluster.http.stream("POST", "/v1/completions", json=question.body) as reply:
            if reply.status_code != 200:
                answer.error = json.loads(await reply.aread())["error"]["code"]
                return
            is_ended = False
            async for line in reply.aiter_lines():
                if not line.startswith("data: "):
                    continue
                if line == "data: [DONE]":
                    is_ended = True
                    continue
                event = json.loads(line.removeprefix("data: "))
                if "error" in event:
                    answer.error = event["error"]["code"]
                    continue
                if [choice for choice in event["choices"] if answer.take(choice)]:
                    progress.append(time.monotonic())
            if not is_ended and not answer.error:
                answer.error = "cut"

    def _judge(self, number: int, answer: Answer) -> None:
        question = self._asked[number]
        is_known = answer.error in ERRORS_BY_SLUG and answer.error != "internal_error"
        is_known |= answer.error == _LEAVING and self.cut_is_expected
        if answer.error in _NO_WORD and not self.cut_is_expected:
            self.damage.append(f"{answer.error}, after {answer.token_ids}")
        elif answer.error not in ("", *_NO_WORD) and not is_known:
            self.damage.append(f"an error that is none: {answer.error}")
        for index in range(question.body.get("n", 1)):
            self._judge_choice(number, index, answer)

    def _judge_choice(self, number: int, index: int, answer: Answer) -> None:
        question, right = self._asked[number], self._right.get(number)
        tokens, text = answer.token_ids.get(index, []), answer.texts.get(index, "")
        is_whole = not answer.error
        if is_whole and not answer.finish_reasons.get(index):
            self.damage.append(f"choice {index} has no end: {question.body}")
        if right is not None:
            wanted, all_text = right.token_ids[index], right.texts[index]
            if tokens != (wanted if is_whole else wanted[: len(tokens)]):
                self.damage.append(f"wrong tokens {tokens} for {wanted} ({question.body})")
            elif text != (all_text if is_whole else all_text[: len(text)]):
                self.damage.append(f"wrong text {text!r} for {all_text!r}")
        elif is_whole and len(tokens) != question.body["max_tokens"]:
            self.damage.append(f"{len(tokens)} tokens, {question.body['max_tokens']} were asked")
