"""Chat templates that treat tools as well-known families do. They are ours, short, and say nothing those would not."""

_OPEN = "{{ '<|im_start|>' + message.role + '\\n' }}"
_CLOSE = "{{ '<|im_end|>\\n' }}"
_PROMPT = "{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"

HERMES = (
    "{% if tools %}<|im_start|>system\n{% if messages[0].role == 'system' %}{{ messages[0].content }}\n{% endif %}"
    "{% for tool in tools %}{{ tool | tojson }}\n{% endfor %}Call with <tool_call></tool_call>.<|im_end|>\n"
    "{% elif messages[0].role == 'system' %}<|im_start|>system\n{{ messages[0].content }}<|im_end|>\n{% endif %}"
    "{% for message in messages %}{% if message.role == 'assistant' %}<|im_start|>assistant\n"
    "{% if message.content %}{{ message.content }}{% endif %}"
    "{% for call in message.tool_calls %}\n<tool_call>\n{{ call.function | tojson }}\n</tool_call>{% endfor %}"
    "<|im_end|>\n{% elif message.role == 'tool' %}<|im_start|>user\n<tool_response>\n{{ message.content }}\n"
    "</tool_response><|im_end|>\n{% elif message.role == 'user' %}<|im_start|>user\n{{ message.content }}<|im_end|>\n"
    "{% endif %}{% endfor %}" + _PROMPT
)
"""Arguments as objects, content may be null."""

REASONING = HERMES.removesuffix(_PROMPT) + (
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% if enable_thinking is defined and not enable_thinking %}"
    "<think>\n\n</think>\n\n{% endif %}{% endif %}"
)
"""Reasons unless told not to; the model opens the block."""

OPENED_REASONING = (
    HERMES.removesuffix(_PROMPT) + "{% if add_generation_prompt %}<|im_start|>assistant\n<think>\n{% endif %}"
)
"""Never knows `</think>`: the vocabulary does, and the prompt opens the block."""

STRICT_CONTENT = HERMES.replace(
    "{% if message.content %}{{ message.content }}{% endif %}", "{{ '' + message.content }}"
)
"""Fails on null beside calls."""

TEXT_ARGUMENTS = HERMES.replace(
    "{{ call.function | tojson }}",
    "{{ '{\"name\": \"' + call.function.name + '\", \"arguments\": ' + call.function.arguments + '}' }}",
)
"""Adds the arguments to a string."""

MISTRAL = (
    "{% for message in messages %}{% if message.role == 'user' %}"
    "{% if tools and loop.last %}[AVAILABLE_TOOLS]{{ tools | tojson }}[/AVAILABLE_TOOLS]{% endif %}"
    "[INST]{{ message.content }}[/INST]"
    "{% elif message.tool_calls is defined %}[TOOL_CALLS][{% for call in message.tool_calls %}"
    "{% if call.id | length != 9 %}{{ raise_exception('ids have 9 characters') }}{% endif %}"
    "{{ (call.function | tojson)[:-1] + ', \"id\": \"' + call.id + '\"}' }}{% endfor %}]"
    "{% elif message.role == 'tool' %}[TOOL_RESULTS]{{ message.content }} {{ message.tool_call_id }}[/TOOL_RESULTS]"
    "{% elif message.role == 'assistant' %}{{ message.content }}"
    "{% else %}{{ raise_exception('only user, assistant and tool') }}{% endif %}{% endfor %}"
)
"""Short ids, no system turn, tools beside the last question."""

LLAMA3 = (
    "{% for message in messages %}{{ '<|im_start|>' + message.role + '\\n' }}"
    '{% if loop.first and tools %}Answer with {"name": name, "parameters": object}.\n'
    "{% for tool in tools %}{{ tool | tojson(indent=4) }}\n{% endfor %}{% endif %}"
    "{% if message.tool_calls is defined %}"
    "{% set call = message.tool_calls[0].function %}"
    "{{ '{\"name\": \"' + call.name + '\", \"parameters\": ' }}{{ call.arguments | tojson }}{{ '}' }}"
    "{% else %}{{ message.content }}{% endif %}<|im_end|>\n{% endfor %}" + _PROMPT
)

QWEN3_CODER = HERMES.replace(
    "{{ call.function | tojson }}",
    "<function={{ call.function.name }}>\n{% for key, value in call.function.arguments | items %}"
    "<parameter={{ key }}>\n{{ value }}\n</parameter>\n{% endfor %}</function>",
)

UNKNOWN_FORMAT = HERMES.replace("tool_call>", "a_call>")
"""Knows tools, but teaches marks that nobody here reads."""

NO_TOOLS = "{% for message in messages %}" + _OPEN + "{{ message.content }}" + _CLOSE + "{% endfor %}" + _PROMPT

NO_SYSTEM = "{% if messages[0].role == 'system' %}{{ raise_exception('no system turn') }}{% endif %}" + NO_TOOLS
