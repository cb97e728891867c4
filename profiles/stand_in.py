"""A profile that is made up: for timing and for tests, where what is selected means nothing."""

from __future__ import annotations

import zlib
from collections.abc import Sequence

import torch

from fasa_compile.profiles.schema import Budget, FCProfile, LayerProfile, ModelFacts, RopeFacts
from fasa_compile.sites import AttentionSite


def random_profile(
    sites: Sequence[AttentionSite],
    budget: Budget | None = None,
    fc_format: str = "int4",
    reduction: str = "static",
    *,
    share: float = 0.5,
    seed: int = 0,
) -> FCProfile:
    """Random frequency chunks and constants for each site, drawn by its layer's name: the ``share`` of its chunks, at least one."""
    layers = []
    for site in sites:
        g = torch.Generator().manual_seed(seed + zlib.crc32(site.layer.encode()))
        Hq, Hkv, D = (int(site.shape[i]) for i in (1, 2, 5))
        n = len(site.rope.pairs)
        fcs = [torch.randperm(n, generator=g)[: max(1, round(share * n))].sort().values for _ in range(Hkv)]
        layers.append(
            LayerProfile(
                layer=site.layer,
                num_heads=Hq,
                num_kv_heads=Hkv,
                head_dim=D,
                rope=RopeFacts(D, site.rope.pairs, site.rope.magnitude),
                dense=False,
                fcs=torch.stack(fcs).to(torch.int32),
                centre=torch.randn(Hkv, D, generator=g) * 0.1,
                spread=torch.rand(Hkv, D, generator=g) + 0.5,
                norm=torch.randn(Hq, generator=g),
            )
        )
    facts = ModelFacts("random", "0" * 16, len(layers), {})
    return FCProfile(tuple(layers), budget or Budget(), fc_format, reduction, "random", facts)
