"""``baton bench`` against an independent client, aiperf, on one live cluster of mock workers: the same prompts in turns
(A B B A), and what both say of TTFT, TPOT and throughput over each other. ``python -m bench.aiperf --aiperf PATH``.

aiperf is no dependency (it brings 1.2 GB): install it into an environment of its own. Without it nothing is compared,
and that is said.
"""

import argparse
import asyncio
import json
import shutil
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import Whitespace

from bench.bars import Ratio, as_json, show
from bench.client.endpoint import Asking, Endpoint, first_model
from bench.client.figures import Objective, figures
from bench.client.http import HttpClient
from bench.client.player import Player
from bench.client.prompts import Words
from bench.client.scripts import Line, Part, Script

BAR = 1.05
PROMPT, ANSWER, CONCURRENCY = 200, 32, 4


@dataclass(frozen=True, slots=True, kw_only=True)
class Seen:
    """What one client says of one run."""

    client: str
    ttft_s: float
    """Medians."""
    tpot_s: float
    tokens_per_s: float


@contextmanager
def serving() -> Iterator[str]:
    """The URL of a cluster in a process of its own."""
    process = subprocess.Popen(
        [sys.executable, "-m", "bench.mock_server"], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    assert process.stdin is not None and process.stdout is not None
    try:
        yield process.stdout.readline().strip()
    finally:
        process.stdin.close()
        process.wait(30)


def scripts(seed: int, number: int) -> list[Script]:
    """Prompts that nobody has seen."""
    return [
        Script(lines=(Line(parts=(Part(key=f"{seed}/{each}", num_tokens=PROMPT),), max_tokens=ANSWER),))
        for each in range(number)
    ]


async def ours(url: str, seed: int, number: int) -> Seen:
    client = HttpClient(url)
    endpoint = Endpoint(client, Asking(model=await first_model(client)))
    run = await Player(endpoint).play(scripts(seed, number), concurrency=CONCURRENCY)
    client.close()
    found = figures(run, Objective())
    if found.num_ok != number:
        raise RuntimeError(f"{found.errors} of {number} requests failed")
    return Seen(
        client="baton bench", ttft_s=found.ttft.median, tpot_s=found.tpot.median, tokens_per_s=found.output_rate
    )


def theirs(program: str, url: str, model: str, seed: int, number: int) -> Seen:
    words = Words()
    with tempfile.TemporaryDirectory(prefix="baton-aiperf-") as folder:
        prompts = Path(folder) / "prompts.jsonl"
        rows = (json.dumps({"text": words.text(script.lines[0].parts)}) for script in scripts(seed, number))
        prompts.write_text("\n".join(rows) + "\n")
        command = [program, "profile", "--model", model, "--url", url, "--endpoint-type", "completions", "--streaming"]
        command += ["--input-file", str(prompts), "--custom-dataset-type", "single_turn"]
        command += ["--dataset-sampling-strategy", "sequential", "--request-count", str(number)]
        command += [
            "--concurrency",
            str(CONCURRENCY),
            "--tokenizer",
            str(_tokenizer(Path(folder))),
            "--use-server-token-count",
        ]
        command += ["--use-legacy-max-tokens", "--artifact-dir", folder, "--ui", "none"]
        for name, value in (("max_tokens", ANSWER), ("min_tokens", ANSWER), ("ignore_eos", "true"), ("temperature", 0)):
            command += ["--extra-inputs", f"{name}:{value}"]
        done = subprocess.run(command, capture_output=True, text=True, timeout=300, check=False)
        files = [each for each in Path(folder).rglob("*.json") if "inputs" not in each.name]
        found = [json.loads(each.read_text()) for each in files]
    seen = next((each for each in found if isinstance(each, dict) and "time_to_first_token" in each), None)
    if done.returncode or seen is None:
        raise RuntimeError(f"aiperf ended with {done.returncode}: {(done.stderr or done.stdout)[-800:]}")
    return Seen(
        client="aiperf",
        ttft_s=seen["time_to_first_token"]["p50"] / 1e3,
        tpot_s=seen["inter_token_latency"]["p50"] / 1e3,
        tokens_per_s=seen["output_token_throughput"]["avg"],
    )


def compare(runs: Sequence[Seen]) -> list[Ratio]:
    """How far apart they are, whichever is larger."""

    def ratio(name: str, field: str) -> Ratio:
        means = {
            client: statistics.fmean(getattr(run, field) for run in runs if run.client == client)
            for client in ("baton bench", "aiperf")
        }
        apart = means["baton bench"] / means["aiperf"]
        apart = max(apart, 1 / apart)
        return Ratio(name=f"{name}: apart by", best=apart, median=apart, bar=BAR, is_at_most=True)

    return [
        ratio("TTFT, median", "ttft_s"), ratio("TPOT, median", "tpot_s"), ratio("tokens a second", "tokens_per_s")
    ]  # fmt: skip


def _tokenizer(folder: Path) -> Path:
    """Of words: aiperf wants one though the server counts, and would fetch its own from the network."""
    made = folder / "tokenizer"
    made.mkdir()
    words = sorted({*Words().vocabulary, "[UNK]"})
    tokenizer = Tokenizer(WordLevel({word: number for number, word in enumerate(words)}, unk_token="[UNK]"))
    tokenizer.pre_tokenizer = Whitespace()
    tokenizer.save(str(made / "tokenizer.json"))
    facts = {"tokenizer_class": "PreTrainedTokenizerFast", "unk_token": "[UNK]", "model_max_length": 1 << 17}
    (made / "tokenizer_config.json").write_text(json.dumps(facts))
    return made


async def _model(url: str) -> str:
    client = HttpClient(url)
    try:
        return await first_model(client)
    finally:
        client.close()


def main() -> int:
    parser = argparse.ArgumentParser(prog="bench.aiperf", description=__doc__)
    parser.add_argument(
        "--aiperf", default=shutil.which("aiperf"), metavar="PATH", help="the program; default: on PATH"
    )
    parser.add_argument("--requests", type=int, default=120, metavar="N", help="of each run")
    parser.add_argument("--quick", action="store_true", help="40 requests")
    parser.add_argument("--json", type=Path, metavar="FILE")
    options = parser.parse_args()
    if options.aiperf is None:
        print("aiperf is not installed: nothing is compared (pip install aiperf in an environment of its own)")
        if options.json is not None:
            options.json.write_text(json.dumps({"absent": "aiperf", "ratios": []}) + "\n")
        return 0
    number = 40 if options.quick else options.requests
    runs = []
    with serving() as url:
        model = asyncio.run(_model(url))
        asyncio.run(ours(url, -1, 4))  # first uses
        for seed, client in enumerate("ABBA"):
            ran = (
                asyncio.run(ours(url, seed, number))
                if client == "A"
                else theirs(options.aiperf, url, model, seed, number)
            )
            runs.append(ran)
            print(
                f"{ran.client:12} TTFT {1e3 * ran.ttft_s:7.2f} ms  TPOT {1e3 * ran.tpot_s:6.2f} ms  "
                f"{ran.tokens_per_s:7.1f} tokens/s",
                flush=True,
            )
    found = compare(runs)
    if options.json is not None:
        options.json.write_text(json.dumps({"ratios": as_json(found)}, indent=2) + "\n")
    return show(found)


if __name__ == "__main__":
    sys.exit(main())
