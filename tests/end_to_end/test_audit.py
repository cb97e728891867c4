"""The run-time audit reports the attention mass that selection loses, and changes nothing else."""

from __future__ import annotations

import pytest
import torch
from models import cache_for, llama_profile, tiny_llama

import fasa_compile
from fasa_compile import audit, fasa_backend

IDS = torch.randint(0, 512, (2, 120), generator=torch.Generator().manual_seed(3))
STEPS, SINK, RECENT = 16, 3, 5


def decoded(every: int, inner: str = "eager") -> torch.Tensor:
    """Logits of ``STEPS`` steps in which only forced tokens are attended to."""
    torch._dynamo.reset()
    model = tiny_llama(layers=2)
    budget = {"n_fac": SINK + RECENT, "n_sink": SINK, "n_recent": RECENT}
    backend = fasa_backend(llama_profile(2), check_weights=False, inner=inner, strict=True, audit=every, **budget)
    compiled, cache, start = (
        torch.compile(model, backend=backend),
        cache_for(model, "static", 160),
        IDS.shape[1] - STEPS,
    )
    with torch.no_grad():
        model(IDS[:, :start], past_key_values=cache)
        rows = [
            compiled(input_ids=IDS[:, i : i + 1].clone(), past_key_values=cache).logits[:, -1].clone()
            for i in range(start, IDS.shape[1])
        ]
    decoded.kept = compiled  # type: ignore[attr-defined]  # the audit lives as long as the compiled model
    return torch.stack(rows, 1)


def true_loss() -> torch.Tensor:
    """``[STEPS, Hq]``: mass of layer 0 outside the forced tokens, by transformers' own attention weights, batch mean.

    What goes into layer 0 depends on the tokens alone, so no selection has touched it.
    """
    model = tiny_llama(layers=2)
    model.set_attn_implementation("eager")
    with torch.no_grad():
        weights = model(IDS, output_attentions=True).attentions[0]  # [B, Hq, T, T]
    rows = []
    for t in range(IDS.shape[1] - STEPS, IDS.shape[1]):
        rows.append(weights[:, :, t, SINK : t + 1 - RECENT].sum(-1).mean(0))
    return torch.stack(rows)


def test_reports_the_mass_that_attention_weights_say_is_lost() -> None:
    fasa_compile.reset_stats()
    decoded(every=1)
    found = fasa_compile.stats()["lost_mass"]
    assert sorted(found) == ["model.layers.0.self_attn", "model.layers.1.self_attn"]
    assert [entry["steps"] for entry in found.values()] == [STEPS // 2, STEPS // 2]  # two layers take turns
    loss = true_loss()
    heads = loss.shape[1]
    kv = 2
    by_kv = loss.view(STEPS, kv, heads // kv).mean(-1)
    expected = torch.stack([by_kv[step, (step // 2) % kv] for step in range(0, STEPS, 2)]).mean()
    assert expected > 0.1
    assert found["model.layers.0.self_attn"]["mean"] == pytest.approx(float(expected), abs=1e-4)


def test_every_nth_step_and_never_when_off() -> None:
    fasa_compile.reset_stats()
    decoded(every=8)
    assert sum(entry["steps"] for entry in fasa_compile.stats()["lost_mass"].values()) == STEPS // 8
    fasa_compile.reset_stats()
    assert fasa_compile.stats()["lost_mass"] == {}
    decoded(every=0)
    assert not fasa_compile.stats().get("lost_mass")


def test_logits_do_not_change() -> None:
    assert torch.equal(decoded(every=0), decoded(every=1))


def test_a_full_selection_loses_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[float] = []
    true = audit.lost_mass

    def with_all(watched, k, *rest, **how):
        watched.decision = type(watched.decision)(
            **{**watched.decision.__dict__, "budget": fasa_compile.profiles.Budget(k.shape[2], 0, 0)}
        )
        seen.append(float(true(watched, k, *rest, **how)))
        return torch.tensor(seen[-1])

    monkeypatch.setattr(audit, "lost_mass", with_all)
    decoded(every=4)
    assert seen and max(abs(x) for x in seen) < 1e-5


@pytest.mark.parametrize("every", [-1, True, 2.5, "3"])
def test_a_wrong_number_of_steps_is_an_error(every: object) -> None:
    with pytest.raises(TypeError, match="audit"):
        fasa_backend("all", audit=every)  # type: ignore[arg-type]


@pytest.mark.inductor
def test_compiled_graphs_leave_the_same_queries() -> None:
    fasa_compile.reset_stats()
    decoded(every=1)
    eager = fasa_compile.stats()["lost_mass"]
    fasa_compile.reset_stats()
    decoded(every=1, inner="inductor")
    compiled = fasa_compile.stats()["lost_mass"]
    assert {k: v["steps"] for k, v in compiled.items()} == {k: v["steps"] for k, v in eager.items()}
    for layer, entry in eager.items():
        assert compiled[layer]["mean"] == pytest.approx(entry["mean"], abs=1e-4)


def bounded(
    bound: float | None, *, inner: str = "eager", budget: int = SINK + RECENT, steps: int = STEPS
) -> list[torch.Tensor]:
    """Logits by step, every step audited."""
    torch._dynamo.reset()
    fasa_compile.reset_stats()
    model = tiny_llama(layers=2)
    how = {"n_fac": budget, "n_sink": SINK, "n_recent": RECENT, "audit": 1, "audit_bound": bound}
    backend = fasa_backend(llama_profile(2), check_weights=False, inner=inner, strict=True, **how)
    compiled, cache = torch.compile(model, backend=backend), cache_for(model, "static", 160)
    bounded.kept, bounded.backend, start = compiled, backend, IDS.shape[1] - steps  # type: ignore[attr-defined]
    with torch.no_grad():
        model(IDS[:, :start], past_key_values=cache)
        return [
            compiled(input_ids=IDS[:, i : i + 1].clone(), past_key_values=cache).logits[:, -1].clone()
            for i in range(start, IDS.shape[1])
        ]


def dense_steps() -> torch.Tensor:
    with torch.no_grad():
        return tiny_llama(layers=2)(IDS).logits


@pytest.mark.parametrize("inner", ["eager", pytest.param("inductor", marks=pytest.mark.inductor)])
def test_layers_that_stay_above_the_bound_go_dense(inner: str) -> None:
    """Layers take turns, so that four audits of each are eight steps; what they found is heeded one step later."""
    logits = bounded(0.0, inner=inner)
    rows = bounded.backend.explain().rows  # type: ignore[attr-defined]
    assert [(r.decision, r.reason) for r in rows] == [("dense", "audit-bound")] * 2
    assert "more than 0.0 in 4 audits in a row" in rows[0].why
    found = fasa_compile.stats()
    assert found["declined"] == {"audit-bound": 2} and found["rewritten_sites"] == 0
    assert found["sites"] == found["rewritten_sites"] + sum(found["declined"].values())
    assert [entry["steps"] for entry in found["lost_mass"].values()] == [4, 4]
    assert found["sparse_steps"] + found["dense_steps"] == STEPS and found["dense_steps"] == STEPS - 9
    true = dense_steps()[:, -STEPS:]
    apart = [(step - true[:, i]).abs().max().item() for i, step in enumerate(logits)]
    assert min(apart[:9]) > 1e-3, "these steps were sparse, else nothing is shown"
    # Layer 1's keys of the sparse steps stay in its cache as they were made, so later steps are near to dense, not equal.
    torch._dynamo.reset()
    assert max(apart[9:]) < 0.5 * max(apart[:9])


def test_layers_below_the_bound_stay_sparse() -> None:
    assert all(torch.equal(a, b) for a, b in zip(bounded(0.999), bounded(None), strict=True))
    assert len(bounded.backend.explain().sparse) == 2  # type: ignore[attr-defined]
    assert fasa_compile.stats()["declined"] == {}


def test_one_layer_goes_dense_and_the_other_stays(monkeypatch: pytest.MonkeyPatch) -> None:
    """The loss of layer 1 alone is above the bound, by what the audit is told; its selection goes and layer 0's is as before."""
    true = audit.lost_mass

    def told(watched, *rest, **how):
        return true(watched, *rest, **how) * 0 + float(".1." in watched.decision.site.layer)

    monkeypatch.setattr(audit, "lost_mass", told)
    bounded(0.5)
    by_layer = {r.layer: r.decision for r in bounded.backend.explain().rows}  # type: ignore[attr-defined]
    assert by_layer == {"model.layers.0.self_attn": "sparse", "model.layers.1.self_attn": "dense"}
    found = fasa_compile.stats()
    assert found["rewritten_sites"] == 1 and found["declined"] == {"audit-bound": 1}
    assert found["sparse_steps"] == STEPS
    assert found["lost_mass"]["model.layers.0.self_attn"]["steps"] > 4, "the layer that is left is still audited"


def test_one_audit_below_the_bound_starts_the_count_anew(monkeypatch: pytest.MonkeyPatch) -> None:
    """Three losses of four above the bound, for ever: never four in a row."""
    audits: dict[str, int] = {}

    def told(watched, k, *rest, **how):
        layer = watched.decision.site.layer
        audits[layer] = audits.get(layer, 0) + 1
        return k.new_tensor(float(audits[layer] % 4 > 0))

    monkeypatch.setattr(audit, "lost_mass", told)
    bounded(0.5)
    assert min(audits.values()) >= 8
    assert len(bounded.backend.explain().sparse) == 2  # type: ignore[attr-defined]


def test_a_layer_that_went_dense_is_dense_in_later_graphs() -> None:
    bounded(0.0)
    model = tiny_llama(layers=2)
    compiled, cache = torch.compile(model, backend=bounded.backend), cache_for(model, "static", 200)  # type: ignore[attr-defined]
    with torch.no_grad():
        model(IDS[:, :100], past_key_values=cache)
        torch._dynamo.reset()
        compiled(input_ids=IDS[:, 100:101].clone(), past_key_values=cache)
    assert [r.reason for r in bounded.backend.explain().rows] == ["audit-bound"] * 4  # type: ignore[attr-defined]


def test_a_graph_that_cannot_be_compiled_again_stays_sparse_and_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    from fasa_compile import backend

    def broken(*_, **__):
        raise RuntimeError("out of luck")

    real = backend.rewrite
    calls = iter([real, broken, broken])
    monkeypatch.setattr(backend, "rewrite", lambda *a, **k: next(calls)(*a, **k))
    monkeypatch.setattr(backend, "go_dense", lambda plan, *_: plan)
    with pytest.warns(fasa_compile.FasaWarning, match="stays sparse: out of luck"):
        bounded(0.0)
    assert fasa_compile.stats()["sparse_steps"] == STEPS


@pytest.mark.parametrize(
    "how", [{"audit": 4, "audit_bound": x} for x in (-0.1, 1, "half", True)] + [{"audit_bound": 0.5}]
)
def test_a_wrong_bound_is_an_error(how: dict) -> None:
    with pytest.raises(TypeError, match="audit_bound"):
        fasa_backend("all", **how)
