"""The answer to a chat: messages, and log probabilities token by token."""

from gateway.answers import Answer, Fields, Part, finite


class ChatAnswer(Answer):
    object_name = "chat.completion"
    chunk_name = "chat.completion.chunk"
    id_prefix = "chatcmpl-"

    def _opening(self, part: Part) -> bytes:
        """The role chunk, once for a choice."""
        choice: Fields = {
            "index": part.index,
            "delta": {"role": "assistant", "content": ""},
            "logprobs": None,
            "finish_reason": None,
        }
        rest: Fields = {"choices": [choice]}
        if self._job.return_token_ids:
            rest["prompt_token_ids"] = self._job.prompts[part.prompt_index].token_ids
        return self._event(rest)

    def _splits_end(self) -> bool:
        return True

    def _text_head(self, index: int) -> bytes:
        return b'"choices":[{"index":%d,"delta":{"content":' % index

    def _text_tail(self) -> bytes:
        return b'},"logprobs":null,"finish_reason":null}]'

    def _chunk_content(self, text: str) -> Fields:
        return {"delta": {"content": text} if text else {}}

    def _whole_content(self, part: Part) -> Fields:
        return {"message": {"role": "assistant", "content": "".join(part.texts), "refusal": None}}

    def _logprobs(self, part: Part) -> Fields | None:
        if self._job.num_logprobs is None or not part.token_ids:
            return None
        content = [
            {
                **self._token_value(token_id, one.logprob),
                "top_logprobs": [
                    self._token_value(top_id, logprob) for top_id, logprob in one.top[: self._job.num_logprobs]
                ],
            }
            for token_id, one in zip(part.token_ids, part.logprobs, strict=True)
        ]
        return {"content": content, "refusal": None}

    def _token_value(self, token_id: int, logprob: float) -> Fields:
        """`bytes` is the truth; `token` is readable, with U+FFFD for a part of a character."""
        return {
            "token": self._token_name(token_id),
            "logprob": finite(logprob),
            "bytes": list(self._tokenizer.token_bytes(token_id)),
        }
