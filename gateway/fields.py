"""What becomes of every member that a client may send: the one table behind the schemas, the tests and the document.

*Honoured* members do what they say; each has a test that fails when the gateway drops it. *Refused* ones are known and
not built: a 400 that names them, unless their value asks for nothing. *Ignored* ones are hints or labels that no answer
depends on. Any other member is unknown: ignored and counted, or refused where the operator says so.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from enum import StrEnum

from core.errors import InvalidRequest


class Verdict(StrEnum):
    HONOURED = "honoured"
    REFUSED = "refused"
    IGNORED = "ignored"


@dataclass(frozen=True, slots=True)
class FieldRule:
    name: str
    verdict: Verdict
    note: str = ""
    neutral: tuple[object, ...] = ()
    """Of a refused member: the values that ask for nothing (null is always one)."""

    def test_of(self, route: str) -> str:
        """The test that fails when this honoured member of a route is dropped."""
        return f"tests/unit/gateway/test_fields.py::test_a_member_that_is_dropped_is_missed[{route}-{self.name}]"


def _honoured(**notes: str) -> tuple[FieldRule, ...]:
    return tuple(FieldRule(name, Verdict.HONOURED, note) for name, note in notes.items())


def _refused(**rules: tuple[str, tuple[object, ...]]) -> tuple[FieldRule, ...]:
    return tuple(FieldRule(name, Verdict.REFUSED, note, neutral) for name, (note, neutral) in rules.items())


def _ignored(**notes: str) -> tuple[FieldRule, ...]:
    return tuple(FieldRule(name, Verdict.IGNORED, note) for name, note in notes.items())


_GENERATION = (
    *_honoured(
        model="a served model",
        temperature="0 to 2; below 1e-5 it is greedy",
        top_p="above 0, to 1",
        top_k="-1 and 0 are off",
        min_p="0 to 1",
        frequency_penalty="-2 to 2",
        presence_penalty="-2 to 2",
        repetition_penalty="above 0; counts prompt and answer",
        logit_bias="token id in decimal digits to a value of -100 to 100; others are refused, not clamped",
        allowed_token_ids="token ids, at least one",
        bad_words="texts that never appear, up to 128",
        n="1 to 128; prompts times n is bounded by `limits.max_choices`. Greedy choices are equal",
        seed="-1 draws one; choices of one seed differ and repeat",
        stop="a text or up to `limits.max_stop_strings`; the text of a special token acts as its id",
        stop_token_ids="up to `limits.max_stop_token_ids`",
        min_tokens="neither end token nor stop ends the answer before",
        ignore_eos="end tokens are ordinary; the caller's stops still work. Not with a grammar",
        priority="lower is served first; refused where the pools serve in order of arrival",
        cache_salt="requests with other salts share no cached blocks with it",
        include_stop_str_in_output="the matched stop is part of the text",
        skip_special_tokens="false shows special tokens in the text",
        stream="server-sent events",
        stream_options="`include_usage`, `continuous_usage_stats`; only with `stream`",
        return_token_ids="adds `prompt_token_ids` and `token_ids`",
        return_tokens_as_token_ids="tokens of log probabilities are written `token_id:N`",
        prompt_logprobs="up to `limits.max_logprobs`; not with `stream`",
        truncate_prompt_tokens="keeps that many tokens of a prompt; -1: as many as leave room for the answer",
        truncation_side="`left` (drops the beginning) or `right`; with `truncate_prompt_tokens`",
        response_format="`text`, `json_object`, `json_schema`, `structural_tag`",
        structured_outputs="exactly one of `json`, `regex`, `choice`, `grammar`, `json_object`, `structural_tag`",
        guided_json="older name of `structured_outputs.json`",
        guided_regex="older name of `structured_outputs.regex`",
        guided_choice="older name of `structured_outputs.choice`",
        guided_grammar="older name of `structured_outputs.grammar`",
        add_special_tokens="whether the tokenizer adds its own; chat: false, completions: true",
    ),
    *_refused(
        guided_decoding_backend=("there is one", ()),
        guided_whitespace_pattern=("", ()),
        length_penalty=("beam search is not built", (1,)),
        logprob_token_ids=("", ([],)),
        repetition_detection=("", ()),
        return_prompt_text=("", (False,)),
        stream_interval=("every token is sent as it comes", (1,)),
        thinking_token_budget=("", ()),
        use_beam_search=("beam search is not built", (False,)),
        vllm_xargs=("", ({},)),
    ),
    *_ignored(
        kv_transfer_params="never taken from outside",
        request_id="a label; ours is in `x-request-id`",
        service_tier="",
        session_id="a label",
        spaces_between_special_tokens="these tokenizers put none between tokens",
        user="a label",
        safety_identifier="a label",
        prompt_cache_key="prefixes are found by their tokens",
        prompt_cache_options="prefixes are found by their tokens",
        prompt_cache_retention="prefixes are kept while there is room",
    ),
)

_CHAT = (
    *_GENERATION,
    *_honoured(
        messages="1 to 4096; roles `system` (or `developer`), `user`, `assistant`, `tool`; text parts are joined",
        max_tokens="absent: what is left of the context, or the model's own limit",
        max_completion_tokens="wins over `max_tokens`",
        logprobs="",
        top_logprobs="up to `limits.max_logprobs`, with `logprobs`",
        add_generation_prompt="",
        continue_final_message="leaves the last turn open; not with `add_generation_prompt: true`",
        chat_template_kwargs="variables for the model's template",
        tools="functions, up to `limits.max_tools`; `strict` binds the arguments (docs/tools.md)",
        tool_choice="`none`, `auto`, `required`, or one function",
        parallel_tool_calls="false: at most one call",
        reasoning_effort="for models that reason; `none` turns it off where the template can",
        include_reasoning="false leaves out `reasoning_content`",
    ),
    *_refused(
        audio=("text only", ()),
        chat_template=("a template is code, and the operator's", ()),
        documents=("", ([],)),
        echo=("", (False,)),
        function_call=("use `tool_choice`", ("none", "auto")),
        functions=("use `tools`", ([],)),
        modalities=("text only", (["text"],)),
        moderation=("", ()),
        prediction=("", ()),
        store=("nothing is kept", (False,)),
        web_search_options=("", ()),
    ),
    *_ignored(metadata="", verbosity=""),
)

_COMPLETIONS = (
    *_GENERATION,
    *_honoured(
        prompt="a text (special tokens in it are parsed), token ids, or a list of either",
        max_tokens="16 unless given; 0 only with `echo`",
        logprobs="0 gives the chosen tokens alone; up to `limits.max_logprobs`",
        echo="the prompt's text, and with `logprobs` its log probabilities, before the answer",
        best_of="only as many as `n`: no choice is made in secret",
    ),
    *_refused(suffix=("no fill-in-the-middle", ("",))),
)

_TOKENIZE = (
    *_honoured(
        model="absent: the first served one",
        prompt="or `messages`",
        messages="as in a chat",
        add_special_tokens="text: true, chat: false",
        add_generation_prompt="",
        continue_final_message="",
        chat_template_kwargs="",
        tools="as in a chat",
        tool_choice="as in a chat",
        parallel_tool_calls="as in a chat",
        reasoning_effort="as in a chat",
        return_token_strs="",
    ),
    *_refused(chat_template=("", ())),
)

_DETOKENIZE = _honoured(model="absent: the first served one", tokens="up to 1,000,000 token ids")

_NOT_OF_RESPONSES = (
    "n",
    "response_format",
    "prompt_logprobs",
    "return_token_ids",
    "return_tokens_as_token_ids",
    "truncate_prompt_tokens",
    "truncation_side",
    "add_special_tokens",
)
_RESPONSES = (
    *(rule for rule in _GENERATION if rule.name not in _NOT_OF_RESPONSES),
    *_honoured(
        input="a text, or items: messages (text parts), `function_call`, `function_call_output`, `reasoning`",
        instructions="a system message before the input",
        max_output_tokens="1 or more; absent: what is left of the context, or the model's own limit",
        max_tool_calls="of tools that a server runs: there are none; repeated in the response",
        text="`format`: `text`, `json_object` or `json_schema`; `verbosity` is ignored",
        reasoning="`effort`; `summary`: nothing but `auto`, reasoning is shown as it is",
        top_logprobs="up to `limits.max_logprobs`, with `include`",
        include="`message.output_text.logprobs`; `reasoning.encrypted_content` asks for nothing here",
        metadata="up to 16 pairs; repeated in the response",
        stream_options="only with `stream`; `include_obfuscation` is ignored",
        chat_template_kwargs="variables for the model's template",
        tools="functions; others are refused",
        tool_choice="`none`, `auto`, `required` or a function",
        parallel_tool_calls="",
        user="a label; repeated in the response",
        safety_identifier="a label; repeated in the response",
        prompt_cache_key="a label; repeated in the response",
    ),
    *_refused(
        access_programs=("", ()),
        background=("nothing is stored", (False,)),
        background_options=("nothing is stored", ()),
        context_management=("", ([],)),
        conversation=("nothing is stored", ()),
        image=("text only", ()),
        moderation=("", ()),
        n=("one answer for a request", (1,)),
        previous_response_id=("nothing is stored: send the items again", ()),
        prompt=("there are no stored prompts", ()),
        prompt_logprobs=("", ()),
        response_format=("use `text.format`", ()),
        return_token_ids=("", (False,)),
        truncation=("what does not fit is refused", ("disabled",)),
    ),
    *_ignored(store="nothing is stored, and the response says so", service_tier=""),
)

ROUTES: Mapping[str, Mapping[str, FieldRule]] = {
    route: {rule.name: rule for rule in rules}
    for route, rules in (
        ("chat", _CHAT),
        ("completions", _COMPLETIONS),
        ("responses", _RESPONSES),
        ("tokenize", _TOKENIZE),
        ("detokenize", _DETOKENIZE),
    )
}
"""By the short name of a route."""


class UnknownFields:
    """What is done about members that stand in no rule: counted, and refused where the operator says so."""

    def __init__(self, count: Callable[[str, int], None], *, refuse: bool) -> None:
        self._count = count
        self._refuse = refuse

    def __call__(self, route: str, names: list[str]) -> None:
        self._count(route, len(names))
        if self._refuse:
            name = names[0][:64]
            raise InvalidRequest(f"'{name}' is not known here; leave it out", param=name, code="unknown_parameter")


def neutral_values(route: str) -> dict[str, tuple[object, ...]]:
    """The refused members of a route, with the values that are let through."""
    return {rule.name: rule.neutral for rule in ROUTES[route].values() if rule.verdict is Verdict.REFUSED}
