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
