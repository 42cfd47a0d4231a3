"""Why a path was chosen, in words: the router's reasons (router/policy.py) for people. A test holds them together."""

REASONS: dict[str, str] = {
    "only_path": "there was no other",
    "least_loaded": "it had the least to do",
    "least_used": "equal to others, and chosen least often",
    "cached_prefix": "it holds the beginning of the prompt",
    "round_robin": "in turn, by the setting router.policy",
    "local_cheaper": "to read the prompt itself was predicted to cost less than to have it handed over",
    "split_cheaper": "to have the prompt handed over was predicted to cost less than to read it itself",
    "explored": "to know what the other way costs, by the setting router.break_even.explore",
    "prefill_missing": "no prefill worker was there, so it read the prompt itself",
    "pair_excluded": "every hand-off to it had failed for this request, so it read the prompt itself",
    "pair_broken": "its pairs were broken, so it read the prompt itself",
    "only_pair_left": "no other pair was left, and router.fallback allows nothing else",
    "held": "the prompt was computed and held: only a decode worker was needed",
    "forgiven": "it had failed this request before, but nothing else came",
}
