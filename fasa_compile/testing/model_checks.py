"""What must hold for a model under the backend, for any model: each check takes a ``Subject`` and a ``Trial``, and needs no Hypothesis.

A check raises ``AssertionError`` with what was expected and found, or ``NotApplicable`` where the model cannot be asked. Random
profiles are used throughout: which tokens they select is arbitrary, so a wrong selection cannot hide behind a good one.
"""

from __future__ import annotations

import copy
import warnings
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn

from fasa_compile import FasaWarning, fasa_backend, stats
from fasa_compile.plan import Decision
from fasa_compile.profiles.schema import Budget, FCProfile
from fasa_compile.profiles.stand_in import random_profile
from fasa_compile.runtime import Runtime
from fasa_compile.sites import AttentionSite
from fasa_compile.testing.drivers import Driver, driver_for, tokens
from fasa_compile.testing.plain import Entry, PlainFasa

#: Keys of tokens this close to each other may be ranked either way: what comes before an attention is rounded otherwise when compiled.
CLOSE = 1e-4


class NotApplicable(Exception):
    """The check asks for what the model or its driver does not have."""


@dataclass(frozen=True)
class Trial:
    """One way to run a model: a prompt of ``prompt`` tokens, then ``steps`` tokens one by one.

    ``fc_format``: of a random profile, or ``all`` for exact scores. ``share``: of the frequency chunks that are dominant.
    """

    kind: str = "static"
    rows: int = 1
    prompt: int = 24
    steps: int = 5
    n_fac: int = 8
    n_sink: int = 1
    n_recent: int = 2
    fc_format: str = "int4"
    reduction: str = "static"
    share: float = 0.5
    seed: int = 0

    @property
    def context(self) -> int:
        return self.prompt + self.steps

    @property
    def budget(self) -> dict[str, int]:
        return {"n_fac": self.n_fac, "n_sink": self.n_sink, "n_recent": self.n_recent}


class Compiled:
    """A model under ``torch.compile`` with the backend. ``runtimes``: those of its decode graphs so far."""

    def __init__(self, model: nn.Module, profile: FCProfile | str, inner: Any, how: dict[str, Any]) -> None:
        self.backend = fasa_backend(profile, inner=inner, check_weights=False, **how)
        self.runtimes: list[Runtime] = []

        def keep(gm: Any, example_inputs: Any) -> Any:
            made = self.backend(gm, example_inputs)
            if isinstance(made, Runtime):
                self.runtimes.append(made)
            return made

        self.step: Any = torch.compile(model, backend=keep)

    def invalidate(self) -> None:
        """Have every packed FC cache made anew from K before the next step."""
        for runtime in self.runtimes:
            runtime.invalidate()

    @property
    def decisions(self) -> list[Decision]:
        """Those of the first graph in which something is sparse."""
        return next(
            (list(g.decisions) for g in self.backend.graphs if any(d.action == "sparse" for d in g.decisions)), []
        )


class Subject:
    """A model to be checked: made once by ``make()``, run by ``driver``. ``inner`` compiles the rewritten graphs."""

    def __init__(self, make: Callable[[], nn.Module], driver: Driver | None = None, inner: Any = "eager") -> None:
        self.model = make().eval()
        self.driver = driver or driver_for(self.model)
        self.inner = inner
        self._decisions: dict[str, list[Decision]] = {}

    def decisions(self, kind: str) -> list[Decision]:
        """What the backend decides for a decode step. Raises ``AssertionError`` where nothing becomes sparse."""
        if kind not in self._decisions:
            trial = Trial(kind=kind, prompt=8, steps=3, n_fac=4, n_sink=0, n_recent=0)
            compiled = self.compiled("all", trial.budget)
            self.decode(compiled, trial)
            if not compiled.decisions:
                raise AssertionError(
                    f"no attention decodes sparsely with a {kind} cache:\n{compiled.backend.explain()}"
                )
            self._decisions[kind] = compiled.decisions
        return self._decisions[kind]

    def sites(self, kind: str) -> list[AttentionSite]:
        """The attentions that decode sparsely."""
        return [d.site for d in self.decisions(kind) if d.action == "sparse" and isinstance(d.site, AttentionSite)]

    def profile(self, trial: Trial) -> FCProfile | str:
        """A random profile for this model; ``"all"`` where the trial says so, or where its layers have no names of their own."""
        sites = self.sites(trial.kind)
        names = {s.layer for s in sites}
        if trial.fc_format == "all" or "" in names or len(names) < len(sites):
            return "all"
        return random_profile(
            sites, Budget(**trial.budget), trial.fc_format, trial.reduction, share=trial.share, seed=trial.seed
        )

    def compiled(self, profile: FCProfile | str, how: dict[str, Any], model: nn.Module | None = None) -> Compiled:
        """A model (by default this one) under a fresh ``torch.compile``; ``how``: a budget, and other arguments of the backend.

        Dynamo forgets all it saw: it would make the first graph for any length where it has met several, and for the one it sees
        where it has not, and within the budget that one is dense.
        """
        torch._dynamo.reset()
        return Compiled(model or self.model, profile, self.inner, how)

    def tokens(self, trial: Trial) -> Tensor:
        return tokens(self.driver, trial.rows, trial.context, trial.seed)

    @torch.no_grad()
    def decode(
        self,
        step: Compiled | nn.Module,
        trial: Trial,
        ids: Tensor | None = None,
        *,
        keep: Tensor | None = None,
        cache: Any = None,
        model: nn.Module | None = None,
        anew: bool = False,
        each: Callable[[int, Any], None] | None = None,
    ) -> Tensor:
        """Logits ``[B, steps, V]`` of a trial, teacher-forced; the prompt runs uncompiled. ``each(i, cache)`` before step i."""
        model = model or self.model
        ids = self.tokens(trial) if ids is None else ids
        call = step.step if isinstance(step, Compiled) else step
        first = ids.shape[1] - trial.steps

        def kept(stop: int) -> Tensor | None:
            return None if keep is None else keep[:, :stop]

        if cache is None:
            cache = self.driver.new_cache(model, trial.kind, ids.shape[0])
        self.driver.call(model, ids[:, :first], 0, cache, kept(first))
        out = []
        with many_graphs(), warnings.catch_warnings():
            warnings.simplefilter("ignore", FasaWarning)
            for i in range(first, ids.shape[1]):
                if each is not None:
                    each(i - first, cache)
                if anew and isinstance(step, Compiled):
                    step.invalidate()
                out.append(self.driver.call(call, ids[:, i : i + 1], i, cache, kept(i + 1))[:, -1].clone())
        return torch.stack(out, 1)

    def plain(self, trial: Trial, profile: FCProfile | str, model: nn.Module) -> PlainFasa:
        """The plain reference for ``model``, a copy of this one."""
        entries: dict[tuple[nn.Module, int], Entry] = {}
        runs: dict[str, int] = {}
        for decision in self.decisions(trial.kind):
            name = decision.site.layer.split("#")[0]
            if not name:
                raise NotApplicable("an attention without a module path")
            runs[name] = runs.get(name, 0) + 1
            if decision.action == "sparse" and isinstance(decision.site, AttentionSite):
                site = decision.site
                layer = profile.by_layer(site.layer) if isinstance(profile, FCProfile) else None
                entries[model.get_submodule(name), runs[name]] = (layer, site.shape[1], site.shape[2], site.softcap)
        return PlainFasa(model, entries, profile if isinstance(profile, FCProfile) else None, Budget(**trial.budget))

    def decode_plainly(
        self,
        trial: Trial,
        profile: FCProfile | str,
        ids: Tensor | None = None,
        *,
        change: Callable[[nn.Module, Any], None] | None = None,
    ) -> Tensor:
        """``decode`` under the plain reference, uncompiled. Raises ``NotApplicable`` where rounding may decide between tokens.

        ``change(model, cache)`` is called after the prompt.
        """
        if next(self.model.parameters()).dtype != torch.float32:
            raise NotApplicable("in half precision, rounding decides between tokens")
        model = copy.deepcopy(self.model)
        step = Plainly(self.plain(trial, profile, model), model)

        def each(i: int, cache: Any) -> None:
            if change is not None and i == 0:
                change(model, cache)

        out = self.decode(step, trial, ids, model=model, each=each)
        met, sites = step.plain.applied, len(self.sites(trial.kind))
        assert met == sites * trial.steps, (
            f"the plain reference met {met} attentions in {trial.steps} steps, not {sites} in each"
        )
        if step.plain.closest < CLOSE:
            raise NotApplicable("two tokens at the budget's edge are too close to call")
        return out


class Plainly(nn.Module):
    """A model that runs under its plain reference."""

    def __init__(self, plain: PlainFasa, model: nn.Module) -> None:
        super().__init__()
        self.plain, self.inside = plain, model

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        self.plain.runs.clear()
        with self.plain.following():
            return self.inside(*args, **kwargs)


def many_graphs() -> Any:
    """Dynamo counts compilations by code, over all backends, and runs a model unseen past its limit."""
    return torch._dynamo.config.patch(recompile_limit=512, accumulated_recompile_limit=8192)


def tolerance(logits: Tensor) -> float:
    """Allowed difference of logits: 1e-4 of the largest in float32 (of 1 where they are smaller), 4e-2 in half precision."""
    relative = 1e-4 if logits.dtype in (torch.float32, torch.float64) else 4e-2
    return relative * max(1.0, float(logits.float().abs().max()))


def near(got: Tensor, expected: Tensor, what: str) -> None:
    assert bool(expected.isfinite().all()), f"{what}: the logits expected are not finite"
    worst = float((got.float() - expected.float()).abs().max())
    assert worst <= tolerance(expected), f"{what}: logits differ by {worst:.3e}, allowed {tolerance(expected):.1e}"


def equal(got: Tensor, expected: Tensor, what: str) -> None:
    if not torch.equal(got, expected):
        worst = float((got.float() - expected.float()).abs().max())
        raise AssertionError(f"{what}: expected the same bits, logits differ by {worst:.3e}")


def _sparse_steps(run: Callable[[], Tensor], least: int) -> Tensor:
    """What ``run`` returns; at least ``least`` of its steps must have run a sparse graph."""
    before = int(stats()["sparse_steps"])
    out = run()
    found = int(stats()["sparse_steps"]) - before
    assert found >= least, f"{found} sparse steps ran, expected at least {least}: the rewritten graph was not used"
    return out


def _least(subject: Subject, trial: Trial, n_fac: int) -> int:
    """How many steps of a trial must run sparsely: all, but for the first one with a growing cache where the budget holds its context,
    since its graph is for that length alone, and dense."""
    growing = any(site.cache.kind == "dynamic" for site in subject.sites(trial.kind))
    return trial.steps - (growing and trial.prompt + 1 <= n_fac)


def check_dense_parity(subject: Subject, trial: Trial) -> None:
    """With a budget of at least the context, the logits are the uncompiled model's."""
    dense = subject.decode(subject.model, trial)
    n_fac = subject.driver.length - 1
    compiled = subject.compiled(subject.profile(trial), {**trial.budget, "n_fac": n_fac})
    got = _sparse_steps(lambda: subject.decode(compiled, trial), _least(subject, trial, n_fac))
    near(got, dense, "budget >= context")


def check_plain_reference(subject: Subject, trial: Trial) -> None:
    """With any budget, the logits are those of the model run uncompiled with the tokens hidden that the specification ranks lowest."""
    profile = subject.profile(trial)
    expected = subject.decode_plainly(trial, profile)
    compiled = subject.compiled(profile, trial.budget)
    got = _sparse_steps(lambda: subject.decode(compiled, trial), _least(subject, trial, trial.n_fac))
    near(got, expected, "sparse against the plain reference")


def check_kept_state(subject: Subject, trial: Trial) -> None:
    """Keeping the packed FC cache between steps changes no bit against making it anew from K before each step."""
    profile = subject.profile(trial)
    kept, anew = (subject.decode(subject.compiled(profile, trial.budget), trial, anew=anew) for anew in (False, True))
    equal(kept, anew, "packed FC cache kept, against made anew")


def check_repeat(subject: Subject, trial: Trial) -> None:
    """The same run gives the same bits: with the same graphs, and with graphs compiled anew.

    The first run with a growing cache is no such run: its first graph is for one length alone, and within the budget dense.
    """
    profile = subject.profile(trial)
    found = []
    for _ in range(2):
        compiled = subject.compiled(profile, trial.budget)
        first = subject.decode(compiled, trial)
        again = [subject.decode(compiled, trial) for _ in range(2)]
        if len(compiled.backend.graphs) == 1:
            equal(again[0], first, "a second run")
        near(again[0], first, "a second run")
        found += again
    for what, other in zip(
        ("a further run", "a run compiled anew", "a further run compiled anew"), found[1:], strict=True
    ):
        equal(other, found[0], what)


def check_neighbours(subject: Subject, trial: Trial) -> None:
    """A row's logits are the same whatever the other rows of the batch hold."""
    rows = subject.driver.rows
    if rows < 2:
        raise NotApplicable("the driver has batches of one row only")
    trial = replace(trial, rows=rows)
    compiled = subject.compiled(subject.profile(trial), trial.budget)
    ids = subject.tokens(trial)
    together = subject.decode(compiled, trial, ids)
    for row in range(rows):
        others = tokens(subject.driver, rows, trial.context, trial.seed + 1 + row)
        others[row] = ids[row]
        near(subject.decode(compiled, trial, others)[row], together[row], f"row {row} beside other rows")


def check_padding(subject: Subject, trial: Trial) -> None:
    """A row that is padded on the left has the logits of its own run."""
    driver = subject.driver
    if not driver.padding:
        raise NotApplicable("the driver has no padding")
    trial = replace(trial, rows=1)
    profile = subject.profile(trial)
    ids = subject.tokens(trial)
    subject.decode_plainly(
        trial, profile, ids
    )  # for its closest keys: the padded run has other shapes, so other rounding
    compiled = subject.compiled(profile, trial.budget)
    alone = subject.decode(compiled, trial, ids)
    pad = 1 + trial.seed % 7
    keep = torch.ones(1, trial.context + pad, dtype=torch.bool)
    keep[:, :pad] = False
    filler = tokens(driver, 1, pad, trial.seed + 1)
    got = subject.decode(compiled, trial, torch.cat([filler, ids], 1), keep=keep)
    near(got, alone, f"{pad} tokens of padding on the left")


def check_permutation(subject: Subject, trial: Trial) -> None:
    """Cached keys carry their positions: cached tokens in another order of the slots give the same next logits (none forced)."""
    trial = replace(trial, n_sink=0, n_recent=0, steps=1)
    order = torch.randperm(trial.prompt, generator=torch.Generator().manual_seed(trial.seed))

    def permute(i: int, cache: Any) -> None:
        pairs = subject.driver.keys_values(subject.model, cache)
        if not pairs:
            raise NotApplicable("the driver gives no keys and values to write into")
        for k, v in pairs:
            for x in (k, v):
                x[:, :, : trial.prompt] = x[:, :, : trial.prompt][:, :, order]

    dense, moved = (subject.decode(subject.model, trial, each=e) for e in (None, permute))
    if float((dense - moved).abs().max()) > tolerance(dense):
        raise NotApplicable("the model itself depends on the order of its slots (a window)")
    profile = subject.profile(trial)
    subject.decode_plainly(trial, profile)  # for its closest keys: sums run in another order
    compiled = subject.compiled(profile, trial.budget)
    near(subject.decode(compiled, trial, each=permute), subject.decode(compiled, trial), "permuted cached tokens")


def check_duplicates(subject: Subject, trial: Trial) -> None:
    """Cached tokens with the same key are told apart by their index alone: the first is selected first, as in the plain reference."""
    trial = replace(trial, n_sink=0, n_recent=0, steps=1)

    def twins(model: nn.Module, cache: Any) -> None:
        pairs = subject.driver.keys_values(model, cache)
        if not pairs:
            raise NotApplicable("the driver gives no keys and values to write into")
        for k, _ in pairs:
            later = range(1, trial.prompt, 2)
            k[:, :, later] = k[:, :, [i - 1 for i in later]]

    profile = subject.profile(trial)
    expected = subject.decode_plainly(trial, profile, change=twins)
    compiled = subject.compiled(profile, trial.budget)
    found = [
        subject.decode(compiled, trial, each=lambda i, cache: None if i else twins(subject.model, cache))
        for _ in range(2)
    ]
    equal(found[1], found[0], "a second run with equal keys")
    near(found[0], expected, "equal keys, against the plain reference")


def check_host_memory(subject: Subject, trial: Trial) -> None:
    """With K and V in host memory (``offload="cpu"``) the logits are those with K and V on the device, bit for bit."""
    cache = subject.driver.host_cache(subject.model, trial.rows) if trial.kind == "static" else None
    profile = subject.profile(trial)
    if cache is None or profile == "all":
        raise NotApplicable("the driver has no cache in host memory, or the profile no packed FC cache")
    expected = subject.decode(subject.compiled(profile, trial.budget), trial)
    compiled = subject.compiled(profile, {**trial.budget, "offload": "cpu"})
    got = subject.decode(compiled, trial, cache=cache)
    if not any(d.hot is not None for d in compiled.decisions):
        raise NotApplicable("no site keeps a hot buffer: its packed FC cache is not kept")
    equal(got, expected, "K and V in host memory")


def check_gradients(subject: Subject, trial: Trial) -> None:
    """In training mode, and with gradients recorded, loss and gradients are the uncompiled model's, and nothing runs sparsely.

    Of a prompt, and of one token after a prompt that is cached without gradients.
    """
    ids, driver = subject.tokens(trial), subject.driver
    found: list[list[tuple[Tensor, dict[str, Tensor]]]] = []
    steps = 0
    for use in (False, True):
        model = copy.deepcopy(subject.model).train()
        call: Any = subject.compiled(subject.profile(trial), trial.budget, model).step if use else model
        found.append([])
        for first in (0, trial.prompt):
            cache = driver.new_cache(model, trial.kind, trial.rows)
            torch.manual_seed(trial.seed)
            with many_graphs(), warnings.catch_warnings():
                warnings.simplefilter("ignore", FasaWarning)
                if first:
                    with torch.no_grad():
                        driver.call(model, ids[:, :first], 0, cache)
                before = int(stats()["sparse_steps"])
                with torch.enable_grad():
                    model.zero_grad()
                    loss = (
                        driver.call(call, ids[:, first : trial.prompt + (first > 0)], first, cache)
                        .float()
                        .square()
                        .mean()
                    )
                    loss.backward()
                steps += int(stats()["sparse_steps"]) - before
            grads = {n: p.grad.clone() for n, p in model.named_parameters() if p.grad is not None}
            found[-1].append((loss.detach(), grads))
    assert steps == 0, "a step ran sparsely while gradients were recorded"
    half = next(subject.model.parameters()).dtype != torch.float32
    for what, (loss, expected), (got_loss, got) in zip(("a prompt", "one token"), *found, strict=True):
        assert set(got) == set(expected) and expected, f"{what}: other parameters have gradients"
        torch.testing.assert_close(got_loss, loss, rtol=4e-2 if half else 1e-4, atol=1e-5)
        for name, g in expected.items():
            size = max(float(g.float().abs().max()), 1e-6)
            worst = float((got[name] - g).float().abs().max()) / size
            assert worst <= (8e-2 if half else 1e-3), (
                f"{what}: the gradient of {name} differs by {worst:.2e} of its largest"
            )


#: The checks of a model by name.
MODEL_CHECKS: dict[str, Callable[[Subject, Trial], None]] = {
    "dense parity": check_dense_parity,
    "plain reference": check_plain_reference,
    "kept state": check_kept_state,
    "repeat": check_repeat,
    "neighbours": check_neighbours,
    "padding": check_padding,
    "permutation": check_permutation,
    "duplicates": check_duplicates,
    "host memory": check_host_memory,
    "gradients": check_gradients,
}
