"""Between the q/k/v product and attention, in one pass: the norm of each head of q and k, their rotation by position,
and K and V on their way into the cache.

Legend: T rows, H query heads, K kv heads, D head_dim, P positions.
"""

import torch
import triton.language as tl
from torch import Tensor

from engine.kernels.gpu.launch import check, go_ahead, jit, options, power_of_two, wait


def append(
    qkv_TND: Tensor,
    gains_2D: Tensor | None,
    cos_PD: Tensor,
    sin_PD: Tensor,
    positions_T: Tensor,
    slots_T: Tensor,
    kv: Tensor,
    layer: int,
    eps: float = 0.0,
) -> None:
    """Norm and rotate q in ``qkv`` in place; write k (normed, rotated) and v of every row into layer ``layer`` of the
    cache. What ``qkv`` holds as k and v afterwards is not defined.

    - ``qkv_TND``: ``[T, N = H + 2 K, D]``.
    - ``gains_2D``: what normed q and k are multiplied with; None leaves the norm out.
    - ``cos_PD``, ``sin_PD``: float32, by halves, the sign of the rotation in the first half of ``sin``
      (:mod:`engine.model.rope`).
    - ``positions_T``: int32 or int64, the position of each row's token.
    - ``slots_T``: int32 or int64, ``block * block_size + slot`` of each row; negative for rows that are padding.
    - ``kv``: ``[block, K, layer, k/v, slot, D]``.

    Raises ValueError for shapes that do not fit.
    """
    num_rows, num_all, head_dim = qkv_TND.shape
    num_kv_heads = kv.shape[1]
    check(qkv_TND, "qkv", None, None, None)
    check(kv, "kv", None, None, None, 2, None, head_dim)
    check(cos_PD, "cos", None, head_dim, dtype=torch.float32)
    check(sin_PD, "sin", cos_PD.shape[0], head_dim, dtype=torch.float32)
    check(positions_T, "positions", num_rows)
    check(slots_T, "slots", num_rows)
    if gains_2D is not None:
        check(gains_2D, "gains", 2, head_dim)
    if num_all <= 2 * num_kv_heads or head_dim % 2:
        raise ValueError(
            f"qkv has shape {tuple(qkv_TND.shape)}, wanted more than {2 * num_kv_heads} heads of an even size"
        )
    if not 0 <= layer < kv.shape[2]:
        raise ValueError(f"the cache has no layer {layer}, it has {kv.shape[2]}")
    if not num_rows:
        return
    _append[(num_rows, num_all)](
        qkv_TND,
        cos_PD if gains_2D is None else gains_2D,
        cos_PD,
        sin_PD,
        positions_T,
        slots_T,
        kv,
        qkv_TND.stride(0),
        qkv_TND.stride(1),
        cos_PD.stride(0),
        kv.stride(0),
        kv.stride(1),
        layer * kv.stride(2),
        kv.stride(3),
        kv.stride(4),
        eps,
        BLOCK_SIZE=kv.shape[4],
        NUM_QUERY_HEADS=num_all - 2 * num_kv_heads,
        NUM_KV_HEADS=num_kv_heads,
        HEAD_DIM=head_dim,
        HALF=power_of_two(head_dim // 2),
        HAS_NORM=gains_2D is not None,
        **options(qkv_TND, num_warps=1),
    )


def append_twin(
    qkv_TND: Tensor,
    gains_2D: Tensor | None,
    cos_PD: Tensor,
    sin_PD: Tensor,
    positions_T: Tensor,
    slots_T: Tensor,
    kv: Tensor,
    layer: int,
    eps: float = 0.0,
) -> None:
    """The same in plain torch."""
    num_kv_heads, block_size = kv.shape[1], kv.shape[4]
    num_query_heads = qkv_TND.shape[1] - 2 * num_kv_heads
    q, k, v = qkv_TND.float().split([num_query_heads, num_kv_heads, num_kv_heads], 1)
    if gains_2D is not None:
        q, k = (
            x * torch.rsqrt(x.square().mean(-1, keepdim=True) + eps) * gain.float()
            for x, gain in zip((q, k), gains_2D, strict=True)
        )
    cos, sin = cos_PD[positions_T.long(), None], sin_PD[positions_T.long(), None]
    q, k = (x * cos + x.roll(x.shape[-1] // 2, -1) * sin for x in (q, k))
    qkv_TND[:, :num_query_heads] = q.to(qkv_TND.dtype)
    is_real = slots_T >= 0
    blocks, slots = slots_T[is_real].long() // block_size, slots_T[is_real].long() % block_size
    kv[blocks, :, layer, 0, slots] = k[is_real].to(kv.dtype)
    kv[blocks, :, layer, 1, slots] = v[is_real].to(kv.dtype)


@jit
def _append(
    qkv,
    gains,
    cos,
    sin,
    positions,
    slots,
    kv,
    row_stride,
    head_stride,
    position_stride,
    block_stride,
    kv_head_stride,
    layer_offset,
    which_stride,
    slot_stride,
    eps,
    BLOCK_SIZE: tl.constexpr,
    NUM_QUERY_HEADS: tl.constexpr,
    NUM_KV_HEADS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    HALF: tl.constexpr,
    HAS_NORM: tl.constexpr,
    CHAINED: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    head = tl.program_id(1)
    d = tl.arange(0, HALF)
    half: tl.constexpr = HEAD_DIM // 2
    is_there = d < half
    wait(CHAINED)
    slot = tl.load(slots + row).to(tl.int64)
    at = qkv + row * row_stride + head * head_stride + d
    low = tl.load(at, mask=is_there, other=0.0).to(tl.float32)
    high = tl.load(at + half, mask=is_there, other=0.0).to(tl.float32)
    is_value = head >= NUM_QUERY_HEADS + NUM_KV_HEADS
    if not is_value:
        if HAS_NORM:
            gain = gains + tl.where(head < NUM_QUERY_HEADS, 0, HEAD_DIM) + d
            scale = tl.rsqrt(tl.sum(low * low + high * high, 0) / HEAD_DIM + eps)
            low = low * scale * tl.load(gain, mask=is_there, other=0.0).to(tl.float32)
            high = high * scale * tl.load(gain + half, mask=is_there, other=0.0).to(tl.float32)
        turn = tl.load(positions + row).to(tl.int64) * position_stride + half + d
        c = tl.load(cos + turn, mask=is_there, other=0.0)
        s = tl.load(sin + turn, mask=is_there, other=0.0)
        turned = low * c - high * s
        high = high * c + low * s
        low = turned
    if head < NUM_QUERY_HEADS:
        tl.store(at, low.to(qkv.dtype.element_ty), mask=is_there)
        tl.store(at + half, high.to(qkv.dtype.element_ty), mask=is_there)
    elif slot >= 0:
        kv_head = (head - NUM_QUERY_HEADS) % NUM_KV_HEADS
        to = kv + slot // BLOCK_SIZE * block_stride + kv_head * kv_head_stride + layer_offset
        to += slot % BLOCK_SIZE * slot_stride + tl.where(is_value, which_stride, 0) + d
        tl.store(to, low.to(kv.dtype.element_ty), mask=is_there)
        tl.store(to + half, high.to(kv.dtype.element_ty), mask=is_there)
    go_ahead(CHAINED)
