"""A sample of architectures, rewritten: every site that should be, no other, and the same logits."""

from __future__ import annotations

import pytest
import torch

pytest.importorskip("transformers")

from architectures import SAMPLE, Architecture, build, decode_steps, name_of

from fasa_compile.capture import capture
from fasa_compile.match import match
from fasa_compile.sites import AttentionSite


@pytest.mark.parametrize(
    "architecture, kind", [pytest.param(a, kind, id=f"{name_of(a)}-{kind}") for a in SAMPLE for kind in a.kinds]
)
def test_sites(architecture: Architecture, kind: str) -> None:
    """Matching alone: what is found in every decode graph, in whatever pieces Dynamo traces it."""
    if not architecture.runs(kind):
        pytest.skip(
            f"{architecture.model_type} itself fails with a {kind} cache up to transformers {architecture.broken[kind]}"
        )
    try:
        model = build(architecture)
    except (KeyError, ValueError) as error:
        pytest.skip(f"this transformers has no {architecture.model_type}: {error}")
    graphs = []

    def backend(gm, example_inputs, **_):
        graphs.append([s for s in match(capture(gm, example_inputs)) if isinstance(s, AttentionSite)])
        return gm.forward

    expected, got = decode_steps(model, kind, backend)
    assert sum(len(sites) for sites in graphs) == architecture.sites
    for sites in graphs:
        assert all(s.cache.kind == kind and s.shape[3] == 1 for s in sites)
    for ours, plain in zip(got, expected, strict=True):
        torch.testing.assert_close(ours, plain, atol=1e-5, rtol=1e-4)
