"""The engine on one CPU thread beside llama.cpp: ``python -m bench.cpu_engine``.

The same model at 1, 8 and 32 streams and on a prompt, in one run: CPU time of our step thread against that of
llama.cpp's process on one thread, both with greedy choice of each token. Other processes disturb CPU time through
shared caches and memory, so ours is measured before and after the peer, and figures are best of rounds with the
median's beside; compare ratios, and only of one run.

Exit status 1 when a ratio misses its bar. Without npm llama.cpp is left out, and that is said.
"""

import argparse
import json
import statistics
import sys
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path

from bench import llama_cpp, prefix_cache
from bench.bars import Ratio, as_json, show
from bench.llama_cpp import PeerTimes, PeerUnavailable
from bench.own_engine import OwnEngine, OwnTimes, read_bandwidth
from bench.quality import measure_quality
from core.config import DEFAULT_MODEL, set_worker_environment
from modelfiles.locate import locate

STREAMS = (1, 8, 32)
CONTEXT = 128
PROMPT = 256
DEFAULT_CACHE = Path.home() / ".cache" / "baton-bench"
SHARED_PROMPT = 640


def measure_own(own: OwnEngine, *, steps: int, rounds: int) -> OwnTimes:
    return OwnTimes(
        decode={number: own.decode(number, context=CONTEXT, steps=steps, rounds=rounds) for number in STREAMS},
        prefill=own.prefill(PROMPT, rounds=rounds),
    )


def joined(first: OwnTimes, second: OwnTimes) -> OwnTimes:
    return OwnTimes(
        decode={number: first.decode[number] + second.decode[number] for number in first.decode},
        prefill=first.prefill + second.prefill,
    )


def compare(own: OwnTimes, peers: dict[str, PeerTimes]) -> list[Ratio]:
    ratios = []
    for streams in STREAMS:
        name, times = min(((name, peer.decode[streams]) for name, peer in peers.items()), key=lambda each: min(each[1]))
        best, median = min(times) / min(own.decode[streams]), _median(times) / _median(own.decode[streams])
        if streams == 1:
            title = f"time per token, 1 stream, over {name}'s"
            ratios.append(Ratio(name=title, best=1 / best, median=1 / median, bar=1.5, is_at_most=True))
        else:
            ratios.append(Ratio(name=f"tokens/s, {streams} streams, over {name}'s", best=best, median=median, bar=1.8))
    name, times = min(((name, peer.prefill) for name, peer in peers.items()), key=lambda each: min(each[1]))
    ratios.append(
        Ratio(
            name=f"prefill of {PROMPT} tokens, over {name}'s",
            best=min(times) / min(own.prefill),
            median=_median(times) / _median(own.prefill),
            bar=2.0,
        )
    )
    return ratios


def measure_peers(
    model: Path, cache: Path, quantisations: Sequence[str], steps: int, rounds: int
) -> dict[str, PeerTimes]:
    folder = llama_cpp.install(cache)
    peers = {}
    for quantisation in quantisations:
        file = llama_cpp.model_file(model, quantisation, cache)
        peers[quantisation] = llama_cpp.measure(
            folder, file, streams=STREAMS, context=CONTEXT, prompt=PROMPT, steps=steps, rounds=rounds
        )
        print_times(f"llama.cpp {quantisation}", peers[quantisation])
    return peers


def print_times(title: str, times: OwnTimes | PeerTimes) -> None:
    decode = "  ".join(
        f"{number:2} streams {1e3 * min(each):6.1f} ({1e3 * _median(each):6.1f})"
        for number, each in times.decode.items()
    )
    prefill = f"prefill {1e3 * min(times.prefill):6.0f} ({1e3 * _median(times.prefill):6.0f})"
    print(f"{title:20} ms best (median):  {decode}  {prefill}", flush=True)


def main() -> int:
    parser = argparse.ArgumentParser(prog="bench.cpu_engine", description=__doc__)
    parser.add_argument("--model", default=DEFAULT_MODEL)
    parser.add_argument("--dtype", default="int8", help="of our engine")
    parser.add_argument("--kv-dtype", default="auto")
    parser.add_argument("--quick", action="store_true", help="few rounds, and of the peer the fastest file only (Q8_0)")
    parser.add_argument("--no-peer", action="store_true", help="leave llama.cpp out")
    parser.add_argument("--cache", type=Path, default=DEFAULT_CACHE, help="where the peer and its files are kept")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write all figures there")
    options = parser.parse_args()
    set_worker_environment(1)  # before torch
    import torch

    torch.set_num_threads(1)
    steps, rounds = (3, 3) if options.quick else (4, 6)
    own = OwnEngine(options.model, options.dtype, options.kv_dtype, max(STREAMS))
    kv_dtype = own.engine.format.kv_dtype
    bandwidth = read_bandwidth()
    times = measure_own(own, steps=steps, rounds=rounds)
    peers: dict[str, PeerTimes] = {}
    try:
        if options.no_peer:
            raise PeerUnavailable("--no-peer")
        quantisations = llama_cpp.QUANTISATIONS[:1] if options.quick else llama_cpp.QUANTISATIONS
        peers = measure_peers(locate(options.model).path, options.cache, quantisations, steps, rounds)
    except PeerUnavailable as error:
        print(f"llama.cpp left out: {error}", file=sys.stderr)
    times = joined(times, measure_own(own, steps=steps, rounds=rounds))
    print_times(f"ours, {options.dtype}", times)
    bandwidth = max(bandwidth, read_bandwidth())
    floor = own.num_weights() / bandwidth
    shared = prefix_cache.measure(options.model, SHARED_PROMPT, 0.9, 2 if options.quick else 3)
    (quality,) = measure_quality(options.model, [(options.dtype, kv_dtype)], 10 if options.quick else 50)
    print(
        f"int8 floor of 1 stream: {own.num_weights() / 1e6:.0f} MB at {bandwidth / 1e9:.1f} GB/s = {1e3 * floor:.1f} ms"
    )
    print(f"ours over the floor: {min(times.decode[1]) / floor:.2f}")
    print(f"quality against float32: {quality}")
    ratios = [shared.ratio]
    if peers:
        ratios += compare(times, peers)
    if options.json is not None:
        figures = {
            "model": options.model,
            "dtype": options.dtype,
            "kv_dtype": kv_dtype,
            "threads": 1,
            "context": CONTEXT,
            "prompt": PROMPT,
            "ours_s": asdict(times),
            "llama_cpp_s": {name: asdict(peer) for name, peer in peers.items()},
            "int8_floor_s": floor,
            "read_bytes_per_s": bandwidth,
            "quality": asdict(quality),
            "ratios": as_json(ratios),
        }
        options.json.write_text(json.dumps(figures, indent=2) + "\n")
    return show(ratios)


def _median(times: Sequence[float]) -> float:
    return statistics.median(times)


if __name__ == "__main__":
    sys.exit(main())
