"""Stand-ins of the flash-attn package's operators, which need CUDA: its schemas, and the documented result in plain torch.

``flash_attn::_flash_attn_forward`` and ``_flash_attn_varlen_forward`` have the argument lists of flash-attn 2.8; the wrappers of
``flash_attn_func`` and ``flash_attn_with_kvcache`` those of its public functions.
"""

from __future__ import annotations

import torch

_LIBRARY = torch.library.Library("flash_attn", "DEF")
_WRAPPED = torch.library.Library("flash_attn_wrapped", "DEF")


def stand_in(q, k, v, scale, causal, left, right, softcap, lengths=None):
    """q [B, T, Hq, D], k and v [B, L, Hkv, D]: (result, log-sum-exp), masks aligned to the last key, as the package documents."""
    T, L, group = q.shape[1], k.shape[1], q.shape[2] // k.shape[2]
    k, v = k.repeat_interleave(group, 2), v.repeat_interleave(group, 2)
    s = torch.einsum("bthd,blhd->bhtl", q.float(), k.float()) * scale
    if softcap:
        s = softcap * torch.tanh(s / softcap)
    end = torch.full((q.shape[0],), L) if lengths is None else lengths
    last = torch.arange(T)[:, None] + (end - T)[:, None, None, None]
    column = torch.arange(L)
    hidden = (column >= end[:, None, None, None]).expand(-1, -1, T, L).clone()
    if left >= 0:
        hidden |= column < last - left
    if causal:
        right = 0
    if right >= 0:
        hidden |= column > last + right
    s = s.masked_fill(hidden, float("-inf"))
    result = torch.einsum("bhtl,blhd->bthd", s.softmax(-1).to(v.dtype), v)
    return torch.empty_like(q).copy_(result), s.logsumexp(-1)


def _forward(q, k, v, dropout_p, softmax_scale, causal, window_size_left, window_size_right, softcap, alibi, lse):
    out, lse = stand_in(q, k, v, softmax_scale, causal, window_size_left, window_size_right, softcap)
    return out, lse, q.new_empty(0), torch.empty(2, dtype=torch.int64)


def _varlen(
    q, k, v, cu_q, cu_k, max_q, max_k, dropout_p, scale, causal, left=-1, right=-1, softcap=0.0, alibi=None,
    return_softmax=False, block_table=None,
):  # fmt: skip
    out, lse = torch.zeros_like(q), q.new_zeros(q.shape[1], q.shape[0])
    rows, columns = cu_q.tolist(), cu_k.tolist()
    for a, b, c, d in zip(rows, rows[1:], columns, columns[1:], strict=False):
        if b > a:
            one, one_lse = stand_in(q[None, a:b], k[None, c:d], v[None, c:d], scale, causal, left, right, softcap)
            out[a:b], lse[:, a:b] = one[0], one_lse[0]
    return out, lse, q.new_empty(0), torch.empty(2, dtype=torch.int64)


def _with_kvcache(
    q, k_cache, v_cache, k=None, v=None, rotary_cos=None, rotary_sin=None, cache_seqlens=None, softmax_scale=None,
    causal=False, window_size=(-1, -1), softcap=0.0, alibi_slopes=None,
):  # fmt: skip
    scale = q.shape[-1] ** -0.5 if softmax_scale is None else softmax_scale
    return stand_in(q, k_cache, v_cache, scale, causal, *window_size, softcap, cache_seqlens)[0]


def _fakes(q, k, v, *_, **__):
    heads, tokens = q.shape[-2], q.shape[:-2]
    lse = q.new_empty((*tokens[:-1], heads, tokens[-1]), dtype=torch.float32)
    return torch.empty_like(q), lse, q.new_empty(0), q.new_empty(2, dtype=torch.int64)


_LIBRARY.define(
    "_flash_attn_forward(Tensor q, Tensor k, Tensor v, float dropout_p, float softmax_scale, bool causal, SymInt window_size_left,"
    " SymInt window_size_right, float softcap, Tensor? alibi_slopes, bool return_softmax) -> (Tensor, Tensor, Tensor, Tensor)"
)
_LIBRARY.define(
    "_flash_attn_varlen_forward(Tensor q, Tensor k, Tensor v, Tensor cu_seqlens_q, Tensor cu_seqlens_k, SymInt max_seqlen_q,"
    " SymInt max_seqlen_k, float dropout_p, float softmax_scale, bool causal, SymInt window_size_left=-1,"
    " SymInt window_size_right=-1, float softcap=0.0, Tensor? alibi_slopes=None, bool return_softmax=False,"
    " Tensor? block_table=None) -> (Tensor, Tensor, Tensor, Tensor)"
)
_WRAPPED.define(
    "flash_attn_with_kvcache(Tensor q, Tensor k_cache, Tensor v_cache, Tensor? k=None, Tensor? v=None, Tensor? rotary_cos=None,"
    " Tensor? rotary_sin=None, Tensor? cache_seqlens=None, float? softmax_scale=None, bool causal=False,"
    " int[] window_size=[-1, -1], float softcap=0.0, Tensor? alibi_slopes=None) -> Tensor"
)
_LIBRARY.impl("_flash_attn_forward", _forward, "CompositeExplicitAutograd")
_LIBRARY.impl("_flash_attn_varlen_forward", _varlen, "CompositeExplicitAutograd")
_WRAPPED.impl("flash_attn_with_kvcache", _with_kvcache, "CompositeExplicitAutograd")
torch.library.register_fake("flash_attn::_flash_attn_forward", _fakes)
torch.library.register_fake("flash_attn::_flash_attn_varlen_forward", _fakes)
torch.library.register_fake("flash_attn_wrapped::flash_attn_with_kvcache", lambda q, *_, **__: torch.empty_like(q))


def flash_attn_func(q, k, v, causal=False, window_size=(-1, -1), softcap=0.0, softmax_scale=None, alibi_slopes=None):
    scale = q.shape[-1] ** -0.5 if softmax_scale is None else softmax_scale
    op = torch.ops.flash_attn._flash_attn_forward
    return op(q, k, v, 0.0, scale, causal, *window_size, softcap, alibi_slopes, False)[0]
