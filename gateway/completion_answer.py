"""The answer to a completion: texts, an echoed prompt before them, and log probabilities in four lists."""

from collections.abc import Sequence

from core.types import TokenLogprobs
from gateway.answers import Answer, Fields, Part, finite
from gateway.parse import Prompt

TokenLists = dict[str, list[object]]


class CompletionAnswer(Answer):
    object_name = "text_completion"
    chunk_name = "text_completion"
    id_prefix = "cmpl-"
    is_per_choice = True

    def _opening(self, part: Part) -> bytes:
        """The echoed prompt, if it was asked for."""
        prompt = self._prompt(part)
        if not prompt.echo and not self._job.return_token_ids:
            return b""
        choice: Fields = {"index": part.index, "text": prompt.echo}
        choice |= {"logprobs": self._echo_logprobs(part), "finish_reason": None}
        if self._job.return_token_ids:
            choice |= {"token_ids": [], "prompt_token_ids": prompt.token_ids}
        return self._event({"choices": [choice]})

    def _frames(self, part: Part) -> bytes:
        if not part.is_open and self._job.scores_echo and not self._is_scored(part):
            self._changed[part.index] = part  # D's first token overtook what P has to say of the prompt
            return b""
        return super()._frames(part)

    def _is_scored(self, part: Part) -> bool:
        return len(self.runs[part.prompt_index].prompt_logprobs) == len(self._prompt(part).token_ids) - 1

    def _prompt(self, part: Part) -> Prompt:
        return self._job.prompts[part.prompt_index]

    def _text_head(self, index: int) -> bytes:
        return b'"choices":[{"index":%d,"text":' % index

    def _text_tail(self) -> bytes:
        return b',"logprobs":null,"finish_reason":null}]'

    def _chunk_content(self, text: str) -> Fields:
        return {"text": text}

    def _whole_content(self, part: Part) -> Fields:
        return {"text": self._prompt(part).echo + "".join(part.texts)}

    def _logprobs(self, part: Part) -> TokenLists | None:
        if self._job.num_logprobs is None or not part.token_ids:
            return None
        start = len(self._prompt(part).echo)
        return self._token_lists(part.token_ids, part.logprobs, [start + offset for offset in part.offsets])

    def _whole_logprobs(self, part: Part) -> TokenLists | None:
        """Those of an echoed prompt first."""
        lists, rest = self._echo_logprobs(part), self._logprobs(part)
        if lists is None or rest is None:
            return lists or rest
        return {name: [*values, *rest[name]] for name, values in lists.items()}

    def _echo_logprobs(self, part: Part) -> TokenLists | None:
        """The first token of a prompt has none."""
        if not self._job.scores_echo:
            return None
        prompt = self._prompt(part)
        first, *others = prompt.token_ids
        lists = self._token_lists(others, self.runs[part.prompt_index].prompt_logprobs, prompt.offsets[1:])
        heads = {"tokens": self._token_name(first), "token_logprobs": None, "top_logprobs": None, "text_offset": 0}
        return {name: [heads[name], *values] for name, values in lists.items()}

    def _token_lists(
        self, token_ids: Sequence[int], logprobs: Sequence[TokenLogprobs], offsets: Sequence[int]
    ) -> TokenLists:
        """Four lists of one length."""
        tops: list[object] = []
        for token_id, one in zip(token_ids, logprobs, strict=True):
            top: Fields = {
                self._token_name(one_id): finite(value) for one_id, value in reversed(one.top[: self._job.num_logprobs])
            }
            top.setdefault(self._token_name(token_id), finite(one.logprob))
            tops.append(top)
        return {
            "tokens": [self._token_name(token_id) for token_id in token_ids],
            "token_logprobs": [finite(one.logprob) for one in logprobs],
            "top_logprobs": tops,
            "text_offset": list(offsets),
        }
