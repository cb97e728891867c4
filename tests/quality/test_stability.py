"""Sets of FCs by text and length, and the pictures of records."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

import fasa_compile

pytest.importorskip("transformers")

import one_pass
import stability


def test_sets_of_a_prefix_are_those_of_its_own_calibration(model: Any) -> None:
    ids = torch.randint(1, 128, (96,))
    profile = fasa_compile.calibrate(model, ids, progress=False)
    with one_pass.harness(model) as h:
        found = stability.sets(h, profile, ids, [48, 96])
    assert stability.overlap(found[96], found[96], 4) == 1.0
    for layer in profile.layers:
        n_tip = layer.n_tip
        assert torch.equal(found[96][layer.layer][:, :n_tip].sort(1).values, layer.fcs.long())
    half = fasa_compile.calibrate(model, ids[:48], progress=False)
    by_hand = []
    for a, b in zip(profile.layers, half.layers, strict=True):
        for x, y in zip(a.fcs.tolist(), b.fcs.tolist(), strict=True):
            by_hand.append(len(set(x) & set(y)) / len(x))
    assert stability.overlap(found[48], found[96], profile.layers[0].n_tip) == pytest.approx(
        sum(by_hand) / len(by_hand)
    )


def test_pictures_are_drawn_from_records(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    import plot_quality

    plot_quality.main(["--out", str(tmp_path)])
    for name in ("methods", "mass", "frequencies", "halves", "overlap"):
        assert "</svg>" in (tmp_path / f"quality-{name}.svg").read_text()
