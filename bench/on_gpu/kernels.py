"""Every kernel against its twin in plain torch, on fresh random inputs of the model's own shapes. The twin computes in
float64 where it can, else in float32, from the same rounded inputs.

A figure is ``|out - twin| / |twin|`` over all elements. What was not written would show: outputs begin as NaN or 7.
"""

import secrets
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from itertools import accumulate

import torch
from torch import Tensor
from triton.errors import TritonError

from bench.on_gpu.setup import Setup
from engine.kernels.gpu import (
    activation,
    advance,
    attention,
    decode_attention,
    digest,
    linear,
    norm,
    rotary,
    sampling,
    shaping,
)

_FAILURES = (TritonError, RuntimeError, ValueError, TypeError, AttributeError, AssertionError)
BOUNDS = {torch.float32: 1e-5, torch.float16: 2e-3, torch.bfloat16: 1.5e-2}


class Checks:
    """One run of all of them with a seed of its own."""

    def __init__(self, setup: Setup) -> None:
        self.seed = secrets.randbits(31)
        self._setup, self._device = setup, setup.torch_device
        self._generator = torch.Generator(self._device).manual_seed(self.seed)
        config = setup.config
        self._heads, self._kv_heads, self._dim = config.num_heads, config.num_kv_heads, config.head_dim
        self._dtypes = (torch.bfloat16, torch.float16, torch.float32) if setup.is_gpu else (torch.float32,)
        # Each variant is compiled, which is what takes the time: bfloat16 is what is served.
        self._served = self._dtypes[0]
        self._rows = 67 if setup.is_gpu else 3

    def run(self) -> dict[str, float | str]:
        """Relative errors by name, or what went wrong."""
        found: dict[str, float | str] = {}
        for dtype in self._dtypes:
            for name, check in self._by_dtype(dtype is self._served).items():
                self._note(found, f"{name} {dtype}".replace("torch.", ""), partial(check, dtype))
        whole: dict[str, Callable[[], float]] = {
            "wsum64": self._digest,
            "choose": self._choose,
            "forbid": self._forbid,
            "penalise": self._penalise,
            "advance": self._advance,
        }
        for name, judge in whole.items():
            self._note(found, name, judge)
        return found

    def _note(self, found: dict[str, float | str], name: str, check: Callable[[], float]) -> None:
        try:
            found[name] = check()
            self._setup.synchronize()
        except _FAILURES as error:  # one kernel that cannot be compiled must not hide the others
            found[name] = f"{type(error).__name__}: {error}"[:300]

    def _by_dtype(self, is_served: bool) -> dict[str, Callable[[torch.dtype], float]]:
        some: dict[str, Callable[[torch.dtype], float]] = {
            "rms_norm": self._norm,
            "gated": self._gated,
            "append": self._append,
            "attend": partial(self._attend, None),
        }
        more: dict[str, Callable[[torch.dtype], float]] = {
            "linear": self._linear,
            "attend, window": partial(self._attend, 37),
            "attend_decode": partial(self._attend_decode, None),
            "attend_decode, window": partial(self._attend_decode, 37),
        }
        return some | more if is_served else some

    def _draw(self, *shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
        return torch.randn(*shape, generator=self._generator, device=self._device).to(dtype)

    # -- by dtype -----------------------------------------------------------------------------------------------------

    def _norm(self, dtype: torch.dtype) -> float:
        columns = self._setup.config.hidden_size
        x, residual = self._draw(self._rows, columns, dtype=dtype), self._draw(self._rows, columns, dtype=dtype)
        gain = self._draw(columns, dtype=dtype)
        summed = (x.float() + residual.float()).to(dtype)
        out = norm.rms_norm(x, gain, 1e-6, residual)
        assert torch.equal(residual, summed), "the residual stream"
        wide = summed.double()
        return error_of(out, wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + 1e-6) * gain.double())

    def _gated(self, dtype: torch.dtype) -> float:
        gate_up = self._draw(self._rows, 2 * self._setup.config.intermediate_size, dtype=dtype)
        gate, up = gate_up.double().chunk(2, -1)
        return error_of(activation.gated(gate_up), gate * torch.sigmoid(gate) * up)

    def _linear(self, dtype: torch.dtype) -> float:
        hidden = self._setup.config.hidden_size
        x, residual = self._draw(19, hidden, dtype=dtype), self._draw(19, 3 * hidden + 5, dtype=dtype)
        weight = self._draw(3 * hidden + 5, hidden, dtype=dtype)
        expected = residual.double() + x.double() @ weight.double().T
        return error_of(linear.linear(x, weight, None, residual), expected)

    def _append(self, dtype: torch.dtype) -> float:
        num_rows, dim = min(33, 2 * self._rows), self._dim
        qkv = self._draw(num_rows, self._heads + 2 * self._kv_heads, dim, dtype=dtype)
        angles = self._draw(50, dim // 2)
        cos, sin = torch.cat([angles.cos()] * 2, -1), torch.cat([-angles.sin(), angles.sin()], -1)
        gains = self._draw(2, dim, dtype=dtype)
        positions = torch.randint(0, 50, (num_rows,), device=self._device, dtype=torch.int32)
        slots = torch.randperm(7 * 16, device=self._device)[:num_rows] - 2
        kv = torch.full((7, self._kv_heads, 2, 2, 16, dim), 7.0, dtype=dtype, device=self._device)
        expected_qkv, expected_kv = qkv.clone(), kv.clone()
        rotary.append(qkv, gains, cos, sin, positions, slots, kv, 1, 1e-6)
        rotary.append_twin(expected_qkv, gains, cos, sin, positions, slots, expected_kv, 1, 1e-6)
        queries = error_of(qkv[:, : self._heads], expected_qkv[:, : self._heads])
        return max(queries, error_of(kv, expected_kv))

    def _attend(self, window: int | None, dtype: torch.dtype) -> float:
        new, contexts = [1, 43, 0, 200, 1, 64], [300, 43, 9, 417, 1, 64]
        if not self._setup.is_gpu:
            new, contexts = [1, 5, 0], [33, 5, 9]
        q, kv, paged, out = self._paged(new, contexts, dtype)
        expected = out.double()
        # Without matrix units tiles of the usual size take minutes to compile.
        tiles = attention.Tiles(rows=16, keys=16) if dtype == torch.float32 else None
        attention.attend(q, kv, 1, paged, out, scale=self._dim**-0.5, window=window, tiles=tiles)
        attention.attend_twin(q.double(), kv.double(), 1, paged, expected, scale=self._dim**-0.5, window=window)
        return error_of(out, expected)

    def _attend_decode(self, window: int | None, dtype: torch.dtype) -> float:
        contexts = [1, 0, 64, 65, 1000, 2049, 128] if self._setup.is_gpu else [1, 0, 40]
        q, kv, paged, out = self._paged([1] * len(contexts), contexts, dtype)
        worst = 0.0
        for num_splits in (1, 8) if window else (1, 32):
            got, expected = out.clone(), out.double()
            workspace = decode_attention.Workspace(len(contexts), self._heads, self._dim, num_splits, self._device)
            decode_attention.attend_decode(
                q, kv, 1, paged.tables_SB, paged.contexts_S, got, workspace, scale=self._dim**-0.5, window=window
            )
            attention.attend_twin(q.double(), kv.double(), 1, paged, expected, scale=self._dim**-0.5, window=window)
            worst = max(worst, error_of(got, expected))
        return worst

    def _paged(
        self, new: list[int], contexts: list[int], dtype: torch.dtype
    ) -> tuple[Tensor, Tensor, attention.Paged, Tensor]:
        """Queries, a cache of two layers, where each sequence's blocks are in any order, and what is to be filled."""
        sizes = [-(-context // 16) for context in contexts]
        kv = self._draw(sum(sizes) + 1, self._kv_heads, 2, 2, 16, self._dim, dtype=dtype)
        order = torch.randperm(sum(sizes), device=self._device).int()
        tables = torch.zeros(len(contexts), max(sizes), dtype=torch.int32, device=self._device)
        for row, (end, size) in enumerate(zip(accumulate(sizes), sizes, strict=True)):
            tables[row, :size] = order[end - size : end]
        paged = attention.Paged(
            tables_SB=tables,
            contexts_S=torch.tensor(contexts, dtype=torch.int32, device=self._device),
            query_starts=torch.tensor([0, *accumulate(new)], dtype=torch.int32, device=self._device),
        )
        q = self._draw(sum(new), self._heads, self._dim, dtype=dtype)
        return q, kv, paged, torch.full_like(q, 7.0)

    # -- whole numbers and scores -------------------------------------------------------------------------------------

    def _digest(self) -> float:
        kv = self._draw(9, self._kv_heads, 3, 2, 16, self._dim)
        blocks = torch.tensor([8, 0, 8, 3], dtype=torch.int32, device=self._device)
        return 1.0 - float(torch.equal(digest.wsum64(kv, blocks), digest.wsum64_twin(kv, blocks)))

    def _choose(self) -> float:
        """The share of rows that drew another token than the twin. Noise is a logarithm of a logarithm: a last bit
        may decide between two that are equal but for it."""
        num_rows = 64 if self._setup.is_gpu else 6
        scores = self._draw(num_rows, self._setup.config.vocab_size) * 3

        def column(values: list[float], dtype: torch.dtype = torch.float32) -> Tensor:
            return torch.tensor((values * num_rows)[:num_rows], dtype=dtype, device=self._device)

        choosing = sampling.Choosing(
            temperature=column([0.0, 1.0, 0.7, 1.3, 0.9, 2.0]),
            top_k=column([0, 0, 50, 0, 40, 200], torch.int32),
            top_p=column([1.0, 1.0, 1.0, 0.9, 0.5, 0.95]),
            min_p=column([0.0, 0.0, 0.0, 0.0, 0.02, 0.01]),
            keys=torch.randint(-(2**62), 2**62, (num_rows,), device=self._device),
        )
        out, expected = (torch.full((num_rows,), -7, dtype=torch.int64, device=self._device) for _ in range(2))
        sampling.choose(scores, choosing, out)
        sampling.choose_twin(scores, choosing, expected)
        return float((out != expected).double().mean())

    def _forbid(self) -> float:
        scores = self._draw(5, self._setup.config.vocab_size)
        words = torch.randint(-(2**31), 2**31 - 1, (5, -(-scores.shape[1] // 32)), device=self._device)
        is_masked = torch.tensor([1, 0, 1, 1, 0], dtype=torch.int32, device=self._device)
        expected = scores.clone()
        shaping.forbid(scores, words.int(), is_masked)
        shaping.forbid_twin(expected, words.int(), is_masked)
        return 1.0 - float(torch.equal(scores, expected))

    def _penalise(self) -> float:
        vocab_size = self._setup.config.vocab_size
        scores = self._draw(4, vocab_size)
        counts = torch.randint(0, 3, (6, vocab_size), dtype=torch.int32, device=self._device)
        counts += (torch.rand(6, vocab_size, device=self._device) < 0.2).int() * shaping.SEEN
        options = [
            torch.tensor(values, device=self._device)
            for values in ([1.0, 1.5, 1.0, 1.2], [0.0, 0.0, 0.5, 0.5], [0.0, 0.0, 0.25, -0.5])
        ]
        places = torch.tensor([0, 5, 5, 2], device=self._device)
        expected = scores.clone()
        shaping.penalise(scores, counts, places, *options)
        shaping.penalise_twin(expected, counts, places, *options)
        return error_of(scores, expected)

    def _advance(self) -> float:
        mine = advance.Standing.make(7, 5, self._device)
        mine.tokens[:] = torch.tensor([7, 0, -1, 3, 9, 5, 5])
        mine.next[:] = torch.tensor([0, 15, 4, -1, 79, 16, 17])
        mine.prefixes[:] = torch.randint(-(2**62), 2**62, (7,), device=self._device)
        mine.tables_RB[:] = torch.randint(0, 1 << 30, (7, 5), device=self._device)
        expected = replace(mine, **{name: getattr(mine, name).clone() for name in advance.Standing.__slots__})
        advance.advance(mine, 6, 16)
        advance.advance_twin(expected, 6, 16)
        same = all(torch.equal(getattr(mine, name), getattr(expected, name)) for name in advance.Standing.__slots__)
        return 1.0 - float(same)


def error_of(out: Tensor, expected: Tensor) -> float:
    """NaN is never small."""
    difference = (out.double() - expected.double()).norm() / expected.double().norm()
    return float(difference) if bool(torch.isfinite(difference)) else float("inf")


def bound_of(name: str) -> float:
    """The largest error that passes."""
    if name == "choose":
        return 0.05
    return next((bound for dtype, bound in BOUNDS.items() if str(dtype).removeprefix("torch.") in name), 1e-5)
