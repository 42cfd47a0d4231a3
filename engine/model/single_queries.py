"""Attention of sequences that compute one token in a step, many at once.

Their keys come from the mirror, where neighbouring seats are one batched product in place, or are gathered out of the
blocks when they have no seat there.

Legend: as in :mod:`engine.model.attention`; S sequences of a group.
"""

from collections.abc import Callable, Mapping, Sequence

import torch
from torch import Tensor

from engine.kv_cache import KVCache
from engine.model.keys import KEY_MULTIPLE, KEY_TILE, NEVER, Span, first_key, gather, is_unseen, tile_rows, weigh
from engine.model.linear import ROW_MULTIPLE, round_up
from engine.model.mirror import Seat

GROUP_BYTES = 4 << 20
"""KV that one group gathers: more falls out of the cache between the gather and its use."""
MAX_HOLE = 3
"""Empty seats between two that still belong to one product: it is cheaper to compute for them than to begin anew."""

ReadKeys = Callable[[int], tuple[Tensor, Tensor]]
"""Keys and values ``[S x K, N, D]`` of a layer."""


class SingleQueries:
    """One query each of up to ``width`` sequences. ``members``: place in the group, row of the step, span."""

    def __init__(
        self,
        read: ReadKeys,
        members: Sequence[tuple[int, int, Span]],
        *,
        width: int,
        first_keys: Sequence[int],
        num_keys: int,
        num_kv_heads: int,
        group: int,
        head_dim: int,
        window: int | None,
    ) -> None:
        self._read = read
        self._group = group
        self._num_keys = num_keys
        self._rows_S = torch.tensor([row for _, row, _ in members])
        self._places_S = None if len(members) == width else torch.tensor([place for place, _, _ in members])
        self._q = torch.zeros(width, num_kv_heads, round_up(group, ROW_MULTIPLE), head_dim)
        self._q_SKGD, self._q_BRD = self._q[:, :, :group], self._q.flatten(0, 1)
        self._is_in_order = [row for _, row, _ in members] == list(range(width))
        positions = [0] * width
        bases = [0] * width
        for (place, _, span), first in zip(members, first_keys, strict=True):
            positions[place], bases[place] = span.start, first
        shortest = min(span.end - first for (_, _, span), first in zip(members, first_keys, strict=True))
        self._first_masked = 0 if window is not None else shortest // KEY_MULTIPLE * KEY_MULTIPLE
        keys_SN = torch.tensor(bases)[:, None] + torch.arange(self._first_masked, num_keys)
        self._is_unseen_S1N = is_unseen(keys_SN, torch.tensor(positions)[:, None], window)[:, None]

    def attend(self, layer: int, q_TKGD: Tensor, out_TKGD: Tensor) -> None:
        width, num_kv_heads, num_rows, head_dim = self._q.shape
        keys, values = self._read(layer)
        scale = head_dim**-0.5
        is_whole_step = self._is_in_order and len(q_TKGD) == width  # the usual case of decoding: nothing to pick
        if is_whole_step:
            torch.mul(q_TKGD, scale, out=self._q_SKGD)
        elif self._places_S is None:
            torch.mul(q_TKGD.index_select(0, self._rows_S), scale, out=self._q_SKGD)
        else:
            self._q_SKGD.index_copy_(0, self._places_S, q_TKGD.index_select(0, self._rows_S).mul_(scale))
        scores = torch.bmm(self._q_BRD, keys.transpose(1, 2))
        scores.view(width, -1, self._num_keys)[:, :, self._first_masked :].masked_fill_(self._is_unseen_S1N, NEVER)
        out = weigh(scores, values).view(width, num_kv_heads, num_rows, head_dim)[:, :, : self._group]
        if is_whole_step:
            out_TKGD.copy_(out)
            return
        out_TKGD.index_copy_(0, self._rows_S, out if self._places_S is None else out.index_select(0, self._places_S))


def group_singles(
    cache: KVCache, members: Sequence[tuple[int, Span]], seats: Mapping[int, Seat], group: int, window: int | None
) -> list[SingleQueries]:
    """``members``: row of the step, span; ``seats`` by row."""
    unseated = [(row, span) for row, span in members if row not in seats]
    seated = [(seats[row], row, span) for row, span in members if row in seats]
    return [*_seated(cache, seated, group, window), *_gathered(cache, unseated, group, window)]


def _seated(
    cache: KVCache, members: Sequence[tuple[Seat, int, Span]], group: int, window: int | None
) -> list[SingleQueries]:
    runs: list[list[tuple[Seat, int, Span]]] = []
    for member in sorted(members, key=lambda each: (each[0].arena.capacity, each[0].index)):
        last = runs[-1][-1][0] if runs else None
        if last is not None and last.arena is member[0].arena and member[0].index - last.index <= MAX_HOLE + 1:
            runs[-1].append(member)
        else:
            runs.append([member])
    return [_seated_run(cache, run, group, window) for run in runs]


def _seated_run(cache: KVCache, run: Sequence[tuple[Seat, int, Span]], group: int, window: int | None) -> SingleQueries:
    arena, first, last = run[0][0].arena, run[0][0].index, run[-1][0].index
    start = 0 if window is None else min(max(0, span.end - window) for _, _, span in run) // KEY_TILE * KEY_TILE
    num_keys = round_up(max(span.end for _, _, span in run) - start, KEY_MULTIPLE)
    # [layer, k/v, S x K, N, D]
    seats = arena.kv[:, :, first : last + 1, :, start : start + num_keys].flatten(2, 3)

    def read(layer: int) -> tuple[Tensor, Tensor]:
        return seats[layer, 0], seats[layer, 1]

    return SingleQueries(
        read,
        [(seat.index - first, row, span) for seat, row, span in run],
        width=last - first + 1,
        first_keys=[start] * len(run),
        num_keys=num_keys,
        num_kv_heads=cache.geometry.num_kv_heads,
        group=group,
        head_dim=cache.geometry.head_dim,
        window=window,
    )


def _gathered(
    cache: KVCache, members: Sequence[tuple[int, Span]], group: int, window: int | None
) -> list[SingleQueries]:
    geometry = cache.geometry
    per_token_bytes = 2 * geometry.num_kv_heads * geometry.head_dim * 4
    buckets: dict[int, list[tuple[int, Span]]] = {}
    for row, span in members:
        seen = span.end - first_key(cache, span.start, window)
        buckets.setdefault(_bucket(seen), []).append((row, span))
    groups = []
    for bucket in buckets.values():
        longest = max(span.end - first_key(cache, span.start, window) for _, span in bucket)
        most = max(1, GROUP_BYTES // (round_up(longest, KEY_MULTIPLE) * per_token_bytes))
        groups += [
            _gathered_group(cache, bucket[first : first + most], group, window) for first in range(0, len(bucket), most)
        ]
    return groups


def _gathered_group(
    cache: KVCache, members: Sequence[tuple[int, Span]], group: int, window: int | None
) -> SingleQueries:
    geometry = cache.geometry
    spans = [span for _, span in members]
    first_keys = [first_key(cache, span.start, window) for span in spans]
    num_keys = round_up(max(span.end - first for span, first in zip(spans, first_keys, strict=True)), KEY_MULTIPLE)
    tiles_2SKM = tile_rows(cache, spans, first_keys, num_keys)

    def read(layer: int) -> tuple[Tensor, Tensor]:
        return gather(cache, tiles_2SKM, layer, len(spans) * geometry.num_kv_heads, num_keys)

    return SingleQueries(
        read,
        [(place, row, span) for place, (row, span) in enumerate(members)],
        width=len(members),
        first_keys=first_keys,
        num_keys=num_keys,
        num_kv_heads=geometry.num_kv_heads,
        group=group,
        head_dim=geometry.head_dim,
        window=window,
    )


def _bucket(num_tokens: int) -> int:
    """Sequences of one bucket are padded to the longest of them: at most twice the keys of any."""
    return (-(-num_tokens // KEY_TILE) - 1).bit_length()
