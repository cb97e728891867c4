"""FASA decode by a plain hook: transformers' attention interface calls the reference, step by step, with no compiler.

The compiled path gets its sites, its rotary pairs, its scale and its packed FC cache by reading a graph. This one is told
all of that by transformers and by the profile, and packs the FC cache anew from K in every step. What both compute must
agree: an independent check of everything between the model and the kernel, and a way to try a profile without compiling.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from torch import Tensor

from fasa_compile import FCProfile
from fasa_compile.profiles import Budget, LayerProfile
from fasa_compile.triton_kernels import reference

NAME = "fasa_reference_hook"


@contextmanager
def hooked(
    model: Any,
    profile: FCProfile | None,
    budget: Budget | None = None,
    fc_format: str | None = None,
    reduction: str | None = None,
) -> Iterator[None]:
    """Inside, decode steps of ``model`` (transformers, SDPA attention) select tokens as ``profile`` says.

    ``profile=None`` scores with every dim of K: the true best tokens of a KV head, an upper bound for any profile.
    ``budget``, ``fc_format`` and ``reduction`` override the profile's. Prefill, dense layers and layers without a profile
    run SDPA as before.
    """
    from transformers import AttentionInterface
    from transformers.integrations.sdpa_attention import sdpa_attention_forward
    from transformers.masking_utils import AttentionMaskInterface, sdpa_mask

    by_path = {} if profile is None else {layer.layer: layer for layer in profile.layers}
    layers = {module: by_path.get(path) for path, module in model.named_modules()}
    budget = budget or (Budget() if profile is None else profile.budget)
    fc_format = fc_format or ("fp32" if profile is None else profile.fc_format)
    reduction = reduction or ("softmax_sum" if profile is None else profile.reduction)

    def attention(
        module: Any, query: Tensor, key: Tensor, value: Tensor, attention_mask: Tensor | None, **kwargs: Any
    ) -> tuple[Tensor, None]:
        layer = layers[module]
        if query.shape[2] != 1 or (profile is not None and (layer is None or layer.dense)):
            return sdpa_attention_forward(module, query, key, value, attention_mask, **kwargs)
        n_fac = budget.n_fac if layer is None or layer.n_fac is None else layer.n_fac
        *packed, slopes = _packed(layer, key, fc_format, reduction)
        out = reference.sparse_decode(
            query,
            key,
            value,
            *packed,
            mask=attention_mask,
            scale=kwargs["scaling"],
            n_fac=n_fac,
            n_sink=budget.n_sink,
            n_recent=budget.n_recent,
            fmt=fc_format,
            reduction=reduction,
            slopes=slopes,
        )
        return out.transpose(1, 2).contiguous(), None  # [B, Hq, 1, D] -> [B, 1, Hq, D], as the interface wants it

    AttentionInterface.register(NAME, attention)
    AttentionMaskInterface.register(NAME, sdpa_mask)
    before = model.config._attn_implementation
    model.set_attn_implementation(NAME)
    try:
        yield
    finally:
        model.set_attn_implementation(before)


def _packed(layer: LayerProfile | None, key: Tensor, fc_format: str, reduction: str) -> tuple[Tensor | None, ...]:
    """``(data, meta, dims, centre, spread, norm, slopes)`` of a key cache ``[B, Hkv, L, D]``; all None where there is no profile."""
    if layer is None:
        return (None,) * 7
    centre, spread = (x.to(key.device) for x in layer.gathered())
    dims = layer.dims().to(key.device)
    data, meta = reference.pack(key, dims, centre, spread, fc_format)
    norm, slopes = layer.normaliser(reduction)
    return data, meta, dims, centre, spread, norm.to(key.device), None if slopes is None else slopes.to(key.device)
