"""From a valid body to a job: defaults, operator limits, template, tokens. A job can only fail by running.

Order of a sampling value, the first that is set wins: the request, the model's generation_config, OpenAI's default.
"""

import secrets
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TypeGuard

from core.config import LimitsConfig
from core.errors import ContextTooLong, InvalidRequest
from core.types import SamplingParams
from gateway.models import ServedModel
from gateway.prompt_blocks import PromptBlocks
from gateway.schemas import INT64, ChatBody, CompletionBody, GenerationBody, TokenizeBody
from gateway.structured import grammar_member, grammar_of
from gateway.text import Detokenizer, TextRules
from gateway.tools.conversation import render
from gateway.tools.output import OutputRules
from gateway.tools.plan import plan_of

GREEDY_BELOW = 1e-5
"""Temperatures below this are greedy, as in vLLM: dividing by them only makes infinities."""
MAX_LOGIT_BIAS = 1024


@dataclass(frozen=True, slots=True, kw_only=True)
class Prompt:
    token_ids: tuple[int, ...]
    text: str = ""
    """As it was given, if it was."""
    echo: str = ""
    """Text that precedes each of its answers (completions with `echo`)."""
    offsets: tuple[int, ...] = ()
    """Characters of `echo` before each token, when their log probabilities are shown too."""
    blocks: PromptBlocks | None = None
    """None: its workers need not be those that hold its beginning."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Job:
    """One request, validated: all that the pipeline and the answer need."""

    model: ServedModel
    prompts: tuple[Prompt, ...]
    """One, or several of a completion; each has `sampling.n` choices."""
    sampling: SamplingParams
    rules: TextRules
    is_chat: bool
    stream: bool
    include_usage: bool
    continuous_usage: bool
    return_token_ids: bool
    num_logprobs: int | None
    priority: int = 0
    cache_salt: str = ""
    is_echo_only: bool = False
    """Nothing is to be generated."""
    shows_prompt_logprobs: bool = False
    scores_echo: bool = False
    """Log probabilities of the echoed prompt are part of the answer."""
    tokens_as_ids: bool = False
    """Tokens of log probabilities are written as ids."""
    grammar_member: str = ""
    """The caller's name for the grammar, should a worker not be able to compile it."""
    output: OutputRules | None = None
    """How the text of an answer is read; None: it is content."""


def chat_job(body: ChatBody, model: ServedModel, limits: LimitsConfig) -> Job:
    """Blocking (template, tokenizer). Raises RequestError."""
    plan = plan_of(body, model.dialect, model.template_variables, limits)
    rendered = render(body, model, plan)
    plan = plan.behind(rendered.text)
    prompt = rendered.token_ids
    if body.top_logprobs is not None and not body.logprobs:
        raise InvalidRequest("'top_logprobs' needs 'logprobs': true", param="top_logprobs", code="invalid_value")
    asked = body.max_tokens if body.max_completion_tokens is None else body.max_completion_tokens
    param = "max_tokens" if body.max_completion_tokens is None else "max_completion_tokens"
    job = _job(body, model, limits, (Prompt(token_ids=prompt),), "messages", asked, param)
    num_logprobs = _num_logprobs((body.top_logprobs or 0) if body.logprobs else None, "top_logprobs", limits)
    sampling, rules = job.sampling, job.rules
    grammar = plan.constrained(sampling.grammar, job.grammar_member, model.dialect, ignores_eos=body.ignore_eos)
    if num_logprobs is not None or grammar != sampling.grammar:
        sampling = replace(sampling, logprobs=num_logprobs, grammar=grammar)
    if plan.reads:
        rules = replace(rules, shown_special=model.dialect.special_marks)
    return replace(
        job,
        is_chat=True,
        num_logprobs=num_logprobs,
        sampling=sampling,
        grammar_member=job.grammar_member or "tools",
        rules=rules,
        output=plan.rules if plan.reads else None,
    )


def completion_job(body: CompletionBody, model: ServedModel, limits: LimitsConfig) -> Job:
    """Blocking (tokenizer). Raises RequestError."""
    prompts = _completion_prompts(body, model, limits)
    if body.best_of not in (None, body.n):
        raise InvalidRequest("'best_of' must equal 'n'; leave it out", param="best_of", code="unsupported_parameter")
    if body.max_tokens == 0 and not body.echo:
        raise InvalidRequest("'max_tokens' may be 0 only with 'echo'", param="max_tokens", code="invalid_value")
    num_logprobs = _num_logprobs(body.logprobs, "logprobs", limits)
    scores_echo = body.echo and num_logprobs is not None
    is_scoring = scores_echo and body.max_tokens == 0
    # The log probabilities of a prompt come with a token behind it, which is then nobody's.
    job = _job(body, model, limits, prompts, "prompt", 1 if is_scoring else body.max_tokens, "max_tokens")
    prompt_logprobs = job.sampling.prompt_logprobs
    if scores_echo:
        prompt_logprobs = max(num_logprobs or 0, prompt_logprobs or 0)
    return replace(
        job,
        prompts=tuple(_echoed(prompt, body, model) for prompt in job.prompts) if body.echo else job.prompts,
        num_logprobs=num_logprobs,
        sampling=replace(job.sampling, logprobs=num_logprobs, prompt_logprobs=prompt_logprobs),
        is_echo_only=body.max_tokens == 0,
        scores_echo=scores_echo,
    )


def with_blocks(job: Job, *, block_size: int, salt: str) -> Job:
    """With the names of its prompts' blocks, unless they are of no use: log probabilities of a prompt are computed
    whatever is cached. Blocking. A ``block_size`` of 0 is unknown."""
    if not block_size or job.sampling.prompt_logprobs is not None or job.is_echo_only:
        return job
    prompts = (
        replace(prompt, blocks=PromptBlocks.of(prompt.token_ids, block_size=block_size, salt=salt))
        for prompt in job.prompts
    )
    return replace(job, prompts=tuple(prompts))


def tokenize(body: TokenizeBody, model: ServedModel, limits: LimitsConfig) -> tuple[int, ...]:
    """The ids of a /tokenize call. Blocking. Raises RequestError."""
    if (body.prompt is None) == (body.messages is None):
        raise InvalidRequest("give exactly one of 'prompt' and 'messages'", param="prompt", code="invalid_value")
    if body.messages is not None:
        plan = plan_of(body, model.dialect, model.template_variables, limits)
        return render(body, model, plan).token_ids
    assert body.prompt is not None
    adds = True if body.add_special_tokens is None else body.add_special_tokens
    return tuple(model.tokenizer.encode(body.prompt, parse_special=True, add_special_tokens=adds))


def check_token_ids(token_ids: Sequence[object], model: ServedModel, param: str) -> tuple[int, ...]:
    """Refuses what is no id of the vocabulary (bools and floats included)."""
    if not _are_ids(token_ids, model.vocab_size):
        raise InvalidRequest(
            f"'{param}' must hold token ids from 0 to {model.vocab_size - 1}", param=param, code="invalid_value"
        )
    return tuple(token_ids)


def _are_ids(values: Sequence[object], vocab_size: int) -> TypeGuard[Sequence[int]]:
    return all(type(one) is int and 0 <= one < vocab_size for one in values)


def _completion_prompts(body: CompletionBody, model: ServedModel, limits: LimitsConfig) -> tuple[Prompt, ...]:
    """A text, token ids, or a list of either."""
    given: object = body.prompt
    if not isinstance(given, list) or not given or isinstance(given[0], int | float):
        return (_completion_prompt(given, body, model, "prompt"),)
    if len(given) * body.n > limits.max_choices:
        raise InvalidRequest(
            f"at most {limits.max_choices} choices can be asked for at once (prompts times 'n'), not "
            f"{len(given) * body.n}",
            param="prompt" if len(given) > 1 else "n",
            code="invalid_value",
        )
    return tuple(_completion_prompt(one, body, model, f"prompt.{index}") for index, one in enumerate(given))


def _completion_prompt(given: object, body: CompletionBody, model: ServedModel, param: str) -> Prompt:
    """Special tokens in a text are parsed: this is the raw interface."""
    if isinstance(given, str):
        token_ids = tuple(model.tokenizer.encode(given, parse_special=True, add_special_tokens=body.add_special_tokens))
    elif isinstance(given, list):
        token_ids = check_token_ids(given, model, param)
    else:
        raise InvalidRequest(f"'{param}' must be a text or a list of token ids", param=param, code="invalid_value")
    if not token_ids:
        raise InvalidRequest(f"'{param}' must not be empty", param=param, code="invalid_value")
    return Prompt(token_ids=token_ids, text=given if isinstance(given, str) else "")


def _echoed(prompt: Prompt, body: CompletionBody, model: ServedModel) -> Prompt:
    """With the text that is echoed: as it was given, or as its tokens read."""
    detokenizer = Detokenizer(model.tokenizer, skip_special_tokens=body.skip_special_tokens and not prompt.text)
    offsets, text = [], ""
    for token_id in prompt.token_ids:
        offsets.append(len(text))
        text += detokenizer.append(token_id)
    echo = prompt.text or text + detokenizer.finish()
    return replace(prompt, echo=echo, offsets=tuple(min(offset, len(echo)) for offset in offsets))


def _truncated(prompts: tuple[Prompt, ...], body: GenerationBody, room: int) -> tuple[Prompt, ...]:
    """Prompts of at most ``truncate_prompt_tokens`` tokens; -1 stands for ``room``."""
    if body.truncate_prompt_tokens is None:
        return prompts
    most = max(1, room) if body.truncate_prompt_tokens == -1 else body.truncate_prompt_tokens
    return tuple(
        prompt
        if len(prompt.token_ids) <= most
        else Prompt(token_ids=prompt.token_ids[-most:] if body.truncation_side == "left" else prompt.token_ids[:most])
        for prompt in prompts
    )


def _num_logprobs(asked: int | None, param: str, limits: LimitsConfig) -> int | None:
    if asked is not None and asked > limits.max_logprobs:
        raise InvalidRequest(f"'{param}' may be at most {limits.max_logprobs}", param=param, code="invalid_value")
    return asked


def _job(
    body: GenerationBody,
    model: ServedModel,
    limits: LimitsConfig,
    prompts: tuple[Prompt, ...],
    prompt_param: str,
    asked_tokens: int | None,
    tokens_param: str,
) -> Job:
    if body.n > limits.max_choices:
        raise InvalidRequest(f"'n' may be at most {limits.max_choices}", param="n", code="invalid_value")
    if body.stream_options is not None and not body.stream:
        raise InvalidRequest("'stream_options' needs 'stream': true", param="stream_options", code="invalid_value")
    if body.priority and not model.has_priorities:
        raise InvalidRequest(
            "'priority' has no effect here: the model's pools serve in order of arrival (policy fcfs)",
            param="priority",
            code="unsupported_parameter",
        )
    prompts = _truncated(prompts, body, model.max_context - (1 if asked_tokens is None else asked_tokens))
    longest = max(len(prompt.token_ids) for prompt in prompts)
    max_tokens = _max_tokens(model, longest, prompt_param, asked_tokens, tokens_param)
    if body.min_tokens > max_tokens:
        raise InvalidRequest("'min_tokens' is above the token limit", param="min_tokens", code="invalid_value")
    for param, given, most in (
        ("stop", len(body.stop), limits.max_stop_strings),
        ("stop_token_ids", len(body.stop_token_ids), limits.max_stop_token_ids),
    ):
        if given > most:
            raise InvalidRequest(f"'{param}' may hold at most {most} entries", param=param, code="invalid_value")
    stop_ids = dict.fromkeys(check_token_ids(body.stop_token_ids, model, "stop_token_ids"))
    # A stop that is the text of one special token never shows in the text: it acts as that token's id.
    stop_ids |= dict.fromkeys(one for one in map(model.tokenizer.added_id, body.stop) if one is not None)
    options = body.stream_options
    return Job(
        model=model,
        prompts=prompts,
        sampling=_sampling(body, model, limits, max_tokens, tuple(stop_ids)),
        rules=TextRules(
            stop=tuple(dict.fromkeys(body.stop)),
            min_tokens=body.min_tokens,
            include_stop=body.include_stop_str_in_output,
            skip_special_tokens=body.skip_special_tokens,
        ),
        is_chat=False,
        stream=body.stream,
        include_usage=bool(options and options.include_usage),
        continuous_usage=bool(options and options.include_usage and options.continuous_usage_stats),
        return_token_ids=body.return_token_ids,
        tokens_as_ids=body.return_tokens_as_token_ids,
        shows_prompt_logprobs=body.prompt_logprobs is not None and not body.stream,
        num_logprobs=None,
        priority=body.priority,
        cache_salt=body.cache_salt or "",
        grammar_member=grammar_member(body),
    )


def _max_tokens(
    model: ServedModel, num_prompt_tokens: int, prompt_param: str, asked: int | None, tokens_param: str
) -> int:
    room = model.max_context - num_prompt_tokens
    if room < (0 if asked == 0 else 1):
        raise ContextTooLong(
            f"the prompt has {num_prompt_tokens} tokens; with at least one token of answer it must fit a context of "
            f"{model.max_context} tokens",
            param=prompt_param,
        )
    if asked is not None and asked > room:
        raise ContextTooLong(
            f"the prompt has {num_prompt_tokens} tokens and '{tokens_param}' is {asked}; together they must fit a "
            f"context of {model.max_context} tokens",
            param=tokens_param,
        )
    if asked is not None:
        return asked
    return room if model.defaults.max_new_tokens is None else min(room, model.defaults.max_new_tokens)


def _prompt_logprobs(body: GenerationBody, limits: LimitsConfig) -> int | None:
    if body.stream and body.prompt_logprobs:
        raise InvalidRequest(
            "'prompt_logprobs' cannot be used with 'stream'", param="prompt_logprobs", code="invalid_value"
        )
    return None if body.stream else _num_logprobs(body.prompt_logprobs, "prompt_logprobs", limits)


def _sampling(
    body: GenerationBody, model: ServedModel, limits: LimitsConfig, max_tokens: int, stop_ids: tuple[int, ...]
) -> SamplingParams:
    defaults = model.defaults
    temperature = _first(body.temperature, defaults.temperature, 1.0)
    seed = body.seed if body.seed is not None and body.seed != -1 else secrets.randbits(63)
    return SamplingParams(
        temperature=0.0 if temperature < GREEDY_BELOW else temperature,
        top_p=_first(body.top_p, defaults.top_p, 1.0),
        top_k=min(max(int(_first(body.top_k, defaults.top_k, 0)), 0), model.vocab_size),
        min_p=_first(body.min_p, defaults.min_p, 0.0),
        repetition_penalty=_first(body.repetition_penalty, defaults.repetition_penalty, 1.0),
        frequency_penalty=body.frequency_penalty,
        presence_penalty=body.presence_penalty,
        logit_bias=_logit_bias(body, model),
        allowed_token_ids=check_token_ids(body.allowed_token_ids or (), model, "allowed_token_ids"),
        bad_words=_bad_words(body.bad_words, model),
        seed=seed & INT64,
        n=body.n,
        max_tokens=max_tokens,
        min_tokens=body.min_tokens,
        ignore_eos=body.ignore_eos,
        eos_token_ids=model.eos_token_ids,
        stop_token_ids=stop_ids,
        prompt_logprobs=_prompt_logprobs(body, limits),
        grammar=grammar_of(body),
    )


def _logit_bias(body: GenerationBody, model: ServedModel) -> tuple[tuple[int, float], ...]:
    """Keys are token ids in decimal digits; values outside -100 to 100 are refused, not clamped."""
    keys = list(body.logit_bias)
    if len(keys) > MAX_LOGIT_BIAS:
        raise InvalidRequest(
            f"'logit_bias' may hold at most {MAX_LOGIT_BIAS} entries", param="logit_bias", code="invalid_value"
        )
    numbers = [int(key) if key.isascii() and key.isdigit() and len(key) < 20 else -1 for key in keys]
    token_ids = check_token_ids(numbers, model, "logit_bias")
    return tuple(zip(token_ids, body.logit_bias.values(), strict=True))


def _bad_words(words: Sequence[str], model: ServedModel) -> tuple[tuple[int, ...], ...]:
    """Each word as it stands and as it follows a space: those are different tokens."""
    spellings = (spelling for word in words for spelling in (word, f" {word.lstrip()}"))
    encoded = (tuple(model.tokenizer.encode(one, parse_special=False)) for one in spellings)
    return tuple(dict.fromkeys(one for one in encoded if one))


def _first(*values: float | None) -> float:
    return next(value for value in values if value is not None)
