"""Stand-ins of the flash-attn package's operators, which need CUDA: its schemas, and the documented result in plain torch.

``flash_attn::_flash_attn_forward`` and ``_flash_attn_varlen_forward`` have the argument lists of flash-attn 2.8,
``flash_attn_3::_flash_attn_forward`` that of version 3; the wrappers of ``flash_attn_func`` and ``flash_attn_with_kvcache`` those of
the public functions. ``install`` registers them as the modules that transformers imports.
"""

from __future__ import annotations

import sys
from types import ModuleType
from typing import Any

import torch

_LIBRARY = torch.library.Library("flash_attn", "DEF")
_LIBRARY_3 = torch.library.Library("flash_attn_3", "DEF")
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


def _forward_3(
    q, k, v, k_new=None, v_new=None, qv=None, out_=None, cu_q=None, cu_k=None, cu_new=None, used_q=None, used_k=None, max_q=None,
    max_k=None, page_table=None, kv_batch_idx=None, leftpad_k=None, rotary_cos=None, rotary_sin=None, seqlens_rotary=None,
    q_descale=None, k_descale=None, v_descale=None, softmax_scale=None, causal=False, window_size_left=-1, window_size_right=-1,
    attention_chunk=0, softcap=0.0, *_, **__,
):  # fmt: skip
    scale = q.shape[-1] ** -0.5 if softmax_scale is None else softmax_scale
    how = (scale, causal, window_size_left, window_size_right, softcap)
    if cu_q is not None:
        out, lse, *_ = _varlen(q, k, v, cu_q, cu_k, max_q, max_k, 0.0, *how)
    else:
        out, lse = stand_in(q, k, v, *how, used_k)
    return out, lse, q.new_empty(0), torch.empty(2, dtype=torch.int64)


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
_LIBRARY_3.define(
    "_flash_attn_forward(Tensor q, Tensor k, Tensor v, Tensor? k_new=None, Tensor? v_new=None, Tensor? qv=None, Tensor? out_=None,"
    " Tensor? cu_seqlens_q=None, Tensor? cu_seqlens_k=None, Tensor? cu_seqlens_k_new=None, Tensor? seqused_q=None,"
    " Tensor? seqused_k=None, SymInt? max_seqlen_q=None, SymInt? max_seqlen_k=None, Tensor? page_table=None,"
    " Tensor? kv_batch_idx=None, Tensor? leftpad_k=None, Tensor? rotary_cos=None, Tensor? rotary_sin=None,"
    " Tensor? seqlens_rotary=None, Tensor? q_descale=None, Tensor? k_descale=None, Tensor? v_descale=None,"
    " float? softmax_scale=None, bool causal=False, SymInt window_size_left=-1, SymInt window_size_right=-1,"
    " SymInt attention_chunk=0, float softcap=0.0, bool rotary_interleaved=True, Tensor? scheduler_metadata=None,"
    " SymInt num_splits=1, bool? pack_gqa=None, SymInt sm_margin=0) -> (Tensor, Tensor, Tensor, Tensor)"
)
_LIBRARY.impl("_flash_attn_forward", _forward, "CompositeExplicitAutograd")
_LIBRARY_3.impl("_flash_attn_forward", _forward_3, "CompositeExplicitAutograd")
torch.library.register_fake("flash_attn_3::_flash_attn_forward", _fakes)
_LIBRARY.impl("_flash_attn_varlen_forward", _varlen, "CompositeExplicitAutograd")
_WRAPPED.impl("flash_attn_with_kvcache", _with_kvcache, "CompositeExplicitAutograd")
torch.library.register_fake("flash_attn::_flash_attn_forward", _fakes)
torch.library.register_fake("flash_attn::_flash_attn_varlen_forward", _fakes)
torch.library.register_fake("flash_attn_wrapped::flash_attn_with_kvcache", lambda q, *_, **__: torch.empty_like(q))


def flash_attn_func(q, k, v, causal=False, window_size=(-1, -1), softcap=0.0, softmax_scale=None, alibi_slopes=None):
    scale = q.shape[-1] ** -0.5 if softmax_scale is None else softmax_scale
    op = torch.ops.flash_attn._flash_attn_forward
    return op(q, k, v, 0.0, scale, causal, *window_size, softcap, alibi_slopes, False)[0]


class _Func(torch.autograd.Function):
    """As the package has it: heads of a size that is no multiple of 8 are padded, what backward needs is kept."""

    @staticmethod
    def forward(ctx, q, k, v, dropout_p, softmax_scale, causal, window_size, softcap, alibi_slopes):
        size = q.shape[-1]
        q, k, v = (torch.nn.functional.pad(x, [0, -size % 8]) for x in (q, k, v))
        op = torch.ops.flash_attn._flash_attn_forward
        out, lse, _, state = op(q, k, v, dropout_p, softmax_scale, causal, *window_size, softcap, alibi_slopes, False)
        ctx.save_for_backward(q, k, v, out, lse, state)
        return out[..., :size]


def package(version: int) -> ModuleType:
    """``flash_attn`` (2) or ``flash_attn_interface`` (3), as far as transformers uses them."""

    def func_2(
        q, k, v, dropout_p=0.0, softmax_scale=None, causal=False, window_size=(-1, -1), softcap=0.0, alibi_slopes=None,
        deterministic=False,
    ):  # fmt: skip
        scale = q.shape[-1] ** -0.5 if softmax_scale is None else softmax_scale
        return _Func.apply(q, k, v, dropout_p, scale, causal, window_size, softcap, alibi_slopes)

    def varlen_2(
        q, k, v, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k, dropout_p=0.0, softmax_scale=None, causal=False,
        window_size=(-1, -1), softcap=0.0, alibi_slopes=None, deterministic=False,
    ):  # fmt: skip
        scale = q.shape[-1] ** -0.5 if softmax_scale is None else softmax_scale
        op = torch.ops.flash_attn._flash_attn_varlen_forward
        given = (cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k, dropout_p, scale, causal, *window_size)
        return op(q, k, v, *given, softcap, alibi_slopes)[0]

    def func_3(q, k, v, softmax_scale=None, causal=False, window_size=(-1, -1), attention_chunk=0, softcap=0.0):
        left, right = window_size
        how = dict(causal=causal, window_size_left=left, window_size_right=right, attention_chunk=attention_chunk)
        op = torch.ops.flash_attn_3._flash_attn_forward
        return op(q, k, v, softmax_scale=softmax_scale, softcap=softcap, **how)[0]

    def varlen_3(
        q, k, v, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k, softmax_scale=None, causal=False, window_size=(-1, -1),
        softcap=0.0,
    ):  # fmt: skip
        how: dict[str, Any] = dict(cu_seqlens_q=cu_seqlens_q, cu_seqlens_k=cu_seqlens_k)
        how |= dict(max_seqlen_q=max_seqlen_q, max_seqlen_k=max_seqlen_k, causal=causal, softcap=softcap)
        how |= dict(window_size_left=window_size[0], window_size_right=window_size[1])
        return torch.ops.flash_attn_3._flash_attn_forward(q, k, v, softmax_scale=softmax_scale, **how)[0]

    def with_kvcache(q, k_cache, v_cache, k=None, v=None, **how):
        return torch.ops.flash_attn_wrapped.flash_attn_with_kvcache(q, k_cache, v_cache, k, v, **how)

    made: Any = ModuleType("flash_attn" if version == 2 else "flash_attn_interface")
    made.flash_attn_func, made.flash_attn_varlen_func = (func_2, varlen_2) if version == 2 else (func_3, varlen_3)
    made.flash_attn_with_kvcache = with_kvcache
    return made


def install(monkeypatch: Any, version: int) -> str:
    """Have transformers use the stand-in of ``version`` for the rest of a test, in float32 too; its name for the implementation."""
    from transformers import modeling_flash_attention_utils as utils

    module, padding = package(version), ModuleType("flash_attn.bert_padding")
    vars(padding).update(pad_input=utils._pad_input, unpad_input=utils._unpad_input)
    monkeypatch.setitem(sys.modules, module.__name__, module)
    monkeypatch.setitem(sys.modules, padding.__name__, padding)
    monkeypatch.setattr(utils, "is_flash_attn_2_available", lambda: version == 2)
    monkeypatch.setattr(utils, "is_flash_attn_3_available", lambda: version == 3)
    monkeypatch.setattr(utils, "_loaded_implementation", None)
    # In float32 transformers logs that the package takes halves only, and a log message breaks the graph.
    monkeypatch.setattr(utils, "fa_peft_integration_check", lambda q, k, v, target_dtype=None: (q, k, v))
    utils.lazy_import_flash_attention(f"flash_attention_{version}")
    return f"flash_attention_{version}"
