"""Texts made of what calls and reasoning are made of, in any order."""

from __future__ import annotations

from hypothesis import strategies as st

FRAGMENTS = (
    *("<tool_call>", "</tool_call>", "<tool_", "<|python_tag|>", "[TOOL_CALLS]", "[ARGS]", "[CALL_ID]", "<think>"),
    *("</think>", "{", "}", "[", "]", ",", ";", ":", '"', "\\", '"name"', '"arguments"', '"parameters"', '"w"', "w"),
    *('"get_time"', '"nobody"', '{"name": "w", "arguments": ', '{"name": "w", "parameters": {}}', '"{}"', "null", "{}"),
    *(
        "<function=",
        "<function=w>",
        "</function>",
        "<parameter=",
        "<parameter=num>",
        "<parameter=city>",
        "</parameter>",
    ),
    *(
        '{"a": "x\\u00e9\\"}"}',
        "\\ud800",
        "1",
        "-0.5",
        "true",
        "fals",
        " ",
        "\n",
        "\u00e9\u6f22\U0001f999",
        "\x00",
        "text",
    ),
)
any_text = st.lists(st.sampled_from(FRAGMENTS) | st.text(max_size=3), max_size=25).map("".join)
