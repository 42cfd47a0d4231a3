"""Names of the GenAI semantic conventions of OpenTelemetry that we use, of one version.

The conventions are in development and have moved to a repository of their own: names are pinned to what v1.41 says, and
change here only. Everything else that we say of a span bears our own prefix.
"""

VERSION = "1.41"

OPERATION = "gen_ai.operation.name"
PROVIDER = "gen_ai.provider.name"
OUTPUT_TYPE = "gen_ai.output.type"
REQUEST_MODEL = "gen_ai.request.model"
REQUEST_CHOICES = "gen_ai.request.choice.count"
REQUEST_SEED = "gen_ai.request.seed"
REQUEST_STREAM = "gen_ai.request.stream"
REQUEST_MAX_TOKENS = "gen_ai.request.max_tokens"
REQUEST_TEMPERATURE = "gen_ai.request.temperature"
REQUEST_TOP_P = "gen_ai.request.top_p"
REQUEST_TOP_K = "gen_ai.request.top_k"
REQUEST_FREQUENCY_PENALTY = "gen_ai.request.frequency_penalty"
REQUEST_PRESENCE_PENALTY = "gen_ai.request.presence_penalty"
RESPONSE_ID = "gen_ai.response.id"
RESPONSE_MODEL = "gen_ai.response.model"
RESPONSE_FINISH_REASONS = "gen_ai.response.finish_reasons"
RESPONSE_TIME_TO_FIRST_CHUNK = "gen_ai.response.time_to_first_chunk"
USAGE_INPUT_TOKENS = "gen_ai.usage.input_tokens"
USAGE_OUTPUT_TOKENS = "gen_ai.usage.output_tokens"
USAGE_CACHE_READ_TOKENS = "gen_ai.usage.cache_read.input_tokens"
INPUT_MESSAGES = "gen_ai.input.messages"
"""Sensitive: only with `telemetry.record_prompts`."""
OUTPUT_MESSAGES = "gen_ai.output.messages"
"""The same."""
ERROR_TYPE = "error.type"

PROVIDER_NAME = "baton"
CHAT, TEXT_COMPLETION = "chat", "text_completion"
OPERATIONS = {
    "/v1/chat/completions": CHAT,
    "/v1/responses": CHAT,
    "/v1/completions": TEXT_COMPLETION,
}
"""What is asked for at each route."""

NAMESPACES = ("gen_ai.", "error.", "server.")
"""Attributes of these are said as they are."""
