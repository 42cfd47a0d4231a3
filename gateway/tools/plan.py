"""What a chat request says of tools and reasoning, checked against its model: a plan for prompt and answer."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from core.config import LimitsConfig
from core.errors import InvalidRequest
from core.grammar import MAX_SOURCE_BYTES, GrammarSource
from gateway.schemas import ChatBody, TokenizeBody
from gateway.tools.bodies import MAX_DEPTH, ToolBody, is_shallow
from gateway.tools.dialect import Dialect
from gateway.tools.forced import MAX_FORCED_CALLS, ChosenCalls, behind_reasoning, call_list
from gateway.tools.output import OutputRules
from gateway.tools.reasoning import CLOSE, OPEN
from modelfiles import ChatTool


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    tools: tuple[ChatTool, ...] = ()
    """What the model is told of."""
    parallel: bool = True
    variables: Mapping[str, object]
    """For the template."""
    forced: GrammarSource | None = None
    """Calls that must be made."""
    chosen: ChosenCalls | None = None
    """Calls that the model may make."""
    rules: OutputRules
    """Silent about the prompt's end, which is not known yet."""

    @property
    def reads(self) -> bool:
        """There may be something in the text besides content."""
        return bool(self.rules.tools) or self.rules.has_reasoning

    def behind(self, prompt: str) -> "Plan":
        """The plan for an answer that follows this prompt text."""
        if not self.rules.has_reasoning:
            return self
        end = prompt.rstrip()
        is_open, is_over = end.endswith(OPEN), end.endswith(CLOSE)
        rules = replace(self.rules, has_reasoning=not is_over, is_reasoning_open=is_open)
        return replace(self, rules=rules)

    def constrained(self, asked: str, member: str, dialect: Dialect, *, ignores_eos: bool) -> str:
        """The grammar of the whole answer: `asked` by a member (empty: none) and that of the calls, behind the
        reasoning if there may be any. Raises InvalidRequest."""
        source, param = self._source(asked, member)
        if source is None:
            return ""
        if ignores_eos:
            raise _refuse("ignore_eos", "cannot be used where calls follow a grammar: it says where the answer ends")
        if self.rules.has_reasoning:
            if not dialect.special_reasoning_marks:
                source = behind_reasoning(source, is_open=self.rules.is_reasoning_open)
            elif self.rules.is_reasoning_open:
                raise _refuse(
                    param, "this model's reasoning cannot be followed by a grammar; turn it off (reasoning_effort none)"
                )
        encoded = source.encode()
        if len(encoded.encode()) > MAX_SOURCE_BYTES:
            raise _refuse(param, f"the schemas are too large together: at most {MAX_SOURCE_BYTES} bytes")
        return encoded

    def _source(self, asked: str, member: str) -> tuple[GrammarSource | None, str]:
        """The grammar of what follows the reasoning, and the member that asked for it."""
        answer = GrammarSource.decode(asked) if asked else None
        if self.forced is not None:
            if answer is not None:
                raise _refuse("tool_choice", "an answer cannot both call a tool and follow a format: leave one out")
            return self.forced, "tools"
        if self.chosen is None:
            return answer, member
        return self.chosen.in_text() if answer is None else self.chosen.or_answer(answer), "tools"


def plan_of(
    body: ChatBody | TokenizeBody, dialect: Dialect, template_variables: frozenset[str], limits: LimitsConfig
) -> Plan:
    """Raises InvalidRequest that names the member, and the tool."""
    tools = _tools(body.tools or (), limits)
    choice = body.tool_choice
    mode = ("auto" if tools else "none") if choice is None else choice.type
    if not tools and mode in ("required", "function"):
        raise _refuse("tool_choice", "needs 'tools'")
    shows_reasoning = not isinstance(body, ChatBody) or body.include_reasoning
    rules = OutputRules(has_reasoning=dialect.has_reasoning, shows_reasoning=shows_reasoning)
    plan = Plan(variables=_variables(body, dialect, template_variables), rules=rules, parallel=body.parallel_tool_calls)
    if not tools or mode == "none":
        return plan
    places = [f"tools.{index}" for index in range(len(tools))]
    max_calls = MAX_FORCED_CALLS if body.parallel_tool_calls else 1
    rules = replace(
        rules,
        tools={tool.name: tool.parameters for tool in tools},
        format=dialect.format,
        max_calls=max_calls if mode != "auto" else limits.max_tools if body.parallel_tool_calls else 1,
        is_forced=mode != "auto",
        is_named=mode == "function",
    )
    plan = replace(plan, tools=tools, rules=rules)
    if mode == "required":
        return replace(plan, forced=call_list(tools, places, max_calls=max_calls))
    if mode == "function":
        index = _named(body, tools)
        return replace(plan, forced=call_list([tools[index]], [places[index]], max_calls=1))
    is_strict = [bool(tool.function.strict) for tool in body.tools or ()]
    chosen = ChosenCalls(tools=tools, places=places, is_strict=is_strict, dialect=dialect, parallel=plan.parallel)
    return replace(plan, chosen=chosen)


def _named(body: ChatBody | TokenizeBody, tools: Sequence[ChatTool]) -> int:
    named = body.tool_choice.function if body.tool_choice is not None else None
    if named is None:
        raise InvalidRequest(
            "'tool_choice.function' is required", param="tool_choice.function", code="missing_required_parameter"
        )
    for index, tool in enumerate(tools):
        if tool.name == named.name:
            return index
    raise _refuse("tool_choice", "names a function that is not in 'tools'")


def _tools(given: Sequence[ToolBody], limits: LimitsConfig) -> tuple[ChatTool, ...]:
    if len(given) > limits.max_tools:
        raise _refuse("tools", f"at most {limits.max_tools} tools can be offered")
    seen: set[str] = set()
    for index, tool in enumerate(given):
        function, place = tool.function, f"tools.{index}.function"
        if function.name in seen:
            raise _refuse(f"{place}.name", f"'{function.name}' is offered twice")
        seen.add(function.name)
        parameters = function.parameters
        if parameters is None:
            continue
        reason = ""
        if parameters.get("type", "object") != "object":
            reason = "the schema of arguments must be of the type 'object'"
        elif not is_shallow(parameters):
            reason = f"the schema may be nested {MAX_DEPTH} deep"
        if reason:
            raise InvalidRequest(
                f"tool '{function.name}': {reason}", param=f"{place}.parameters", code="invalid_json_schema"
            )
    functions = [tool.function for tool in given]
    return tuple(ChatTool(name=one.name, description=one.description, parameters=one.parameters) for one in functions)


def _variables(body: ChatBody | TokenizeBody, dialect: Dialect, known: frozenset[str]) -> Mapping[str, object]:
    """The caller's own, and what follows from the effort: it is also the switch for models that think or do not."""
    given = body.chat_template_kwargs
    for name in ("messages", "tools", "add_generation_prompt"):
        if name in given:
            raise _refuse("chat_template_kwargs", f"'{name}' is a member of the body")
    if not is_shallow(given):
        raise _refuse("chat_template_kwargs", "too deeply nested")
    effort = body.reasoning_effort
    if effort is None:
        return given
    if effort != "none" and not dialect.has_reasoning and "reasoning_effort" not in known:
        raise InvalidRequest(
            "'reasoning_effort': this model does not reason; leave it out",
            param="reasoning_effort",
            code="unsupported_parameter",
        )
    thinks = effort != "none"
    return {"reasoning_effort": effort, "enable_thinking": thinks, "thinking": thinks, **given}


def _refuse(param: str, reason: str) -> InvalidRequest:
    return InvalidRequest(f"'{param}': {reason}", param=param, code="invalid_value")
