"""Audit: the attention mass that selection lost, measured while decoding.

The rewritten graph leaves each step's queries and valid range in small buffers. On every n-th step, after the graph, one KV head
of some layers is scored again, exactly and as TIP scores it, by plain operators on the device: nothing is read back until
somebody asks. What a selection lost of a query head is ``1 - sum of its tokens' exact attention weights``.

With a bound, each audit also leaves on the device how often in a row a layer was above it, and has that copied to the host. The
copy is looked at when the next audit is due, and only if it has arrived by then: the host never waits for the device.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from fasa_compile import counters
from fasa_compile.plan import Decision
from fasa_compile.sites import AttentionSite
from fasa_compile.triton_kernels import reference

#: An audited step looks at every ``STRIDE``-th layer, the next one at those beside them: it costs a few layers' launches.
STRIDE = 4

#: Audits in a row that a layer must be above the bound before it goes dense: they look at different KV heads and tokens.
IN_A_ROW = 4

#: Gives a site's ``(k [B, Hkv, L, D], data, meta)`` as its last step left them, or None where there is no cache any more.
Caches = Callable[[int], tuple[Tensor, Tensor, Tensor] | None]


@dataclass
class _Watched:
    keeper: int
    decision: Decision
    constants: dict[str, Tensor]
    q: Tensor  # fp32 [B, Hq, 1, D], written by the graph
    bounds: Tensor | None  # int32 [B, 2], written by the graph; None where there is no mask
    lost: Tensor  # fp32 [3]: sum over audited steps of the mean loss, number of audited steps, of these the last ones above the bound


class Audit:
    """Counts the steps of one graph and audits every ``every``-th. ``bound``: the loss beyond which ``too_lossy`` names a layer."""

    def __init__(self, every: int, bound: float | None = None) -> None:
        self.every = every
        self.bound = bound
        self.steps = 0
        self.turn = 0
        self._sites: list[_Watched] = []
        self._seen: Tensor | None = None  # on the host: each site's last number, as of some audit
        self._arrived: torch.cuda.Event | None = None  # when that copy is there; None on a CPU, where it is at once
        counters.watch(self)

    def add(
        self,
        keeper: int,
        decision: Decision,
        constants: dict[str, Tensor],
        audit_q: Tensor,
        audit_bounds: Tensor | None = None,
    ) -> None:
        lost = torch.zeros(3, dtype=torch.float32, device=audit_q.device)
        self._sites.append(_Watched(keeper, decision, constants, audit_q, audit_bounds, lost))

    def due(self) -> bool:
        """Counts a step; whether it is one to audit."""
        self.steps += 1
        return self.steps % self.every == 0

    @torch.no_grad()
    def run(self, caches: Caches) -> None:
        """Audits the step that has just run."""
        stride = min(STRIDE, len(self._sites))
        for number, watched in enumerate(self._sites):
            if number % stride == self.turn % stride:
                found = caches(watched.keeper)
                if found is not None:
                    loss = lost_mass(watched, *found, head=self.turn // stride)
                    watched.lost[0] += loss
                    watched.lost[1] += 1
                    if self.bound is not None:
                        watched.lost[2] = (watched.lost[2] + 1) * (loss > self.bound)
        self.turn += 1
        if self.bound is not None and self._sites:
            self._send()

    def _send(self) -> None:
        """Has each site's last number copied to the host."""
        device = self._sites[0].lost.device  # layers may lie on several
        rows = torch.stack([w.lost[2].to(device) for w in self._sites])
        if not rows.is_cuda:
            self._seen = rows
            return
        if self._seen is None:
            self._seen = torch.zeros(len(self._sites), pin_memory=True)
            self._arrived = torch.cuda.Event()
        assert self._arrived is not None
        self._seen.copy_(rows, non_blocking=True)
        self._arrived.record()

    def too_lossy(self) -> list[int]:
        """Sites (indices in their graph) above the bound in ``IN_A_ROW`` audits, as far as the host knows without waiting. Told once
        all layers have had their turn: each answer costs a compilation, so those that go dense go together."""
        if self.turn % min(STRIDE, max(len(self._sites), 1)):
            return []
        if self._seen is None or (self._arrived is not None and not self._arrived.query()):
            return []
        return [w.decision.site.index for w, n in zip(self._sites, self._seen.tolist(), strict=True) if n >= IN_A_ROW]

    def rows(self) -> list[tuple[str, float, float]]:
        """``(layer, sum of losses, steps)``; waits for the device."""
        return [(w.decision.site.layer, *w.lost[:2].tolist()) for w in self._sites]

    def clear(self) -> None:
        for watched in self._sites:
            watched.lost.zero_()


def lost_mass(watched: _Watched, k: Tensor, data: Tensor, meta: Tensor, head: int) -> Tensor:
    """Share of attention mass outside the selection, mean over the batch and the query heads of KV head ``head % Hkv``: fp32 scalar."""
    site, budget = watched.decision.site, watched.decision.budget
    assert isinstance(site, AttentionSite) and budget is not None
    Hkv, L = k.shape[1], k.shape[2]
    G, head = watched.q.shape[1] // Hkv, head % Hkv
    one, group = slice(head, head + 1), slice(head * G, (head + 1) * G)
    q, k = watched.q[:, group], k[:, one]
    per_query_head = ("norm", "slopes")
    c = {name: value[group if name in per_query_head else one] for name, value in watched.constants.items()}
    key = reference.tip_keys(
        q,
        k,
        data[:, one],
        meta[:, one],
        c["dims"],
        c["spread"],
        c["norm"],
        None,
        watched.bounds,
        scale=site.scale,
        n_sink=budget.n_sink,
        n_recent=budget.n_recent,
        softcap=site.softcap,
        fmt=watched.decision.fc_format,
        reduction=watched.decision.reduction,
        slopes=c.get("slopes"),
    )  # [B, 1, L]
    chosen = torch.zeros_like(key, dtype=torch.bool).scatter_(-1, key.topk(min(budget.n_fac, L), dim=-1).indices, True)
    scores = reference.capped(
        site.scale * (q.float()[:, :, 0] @ k[:, 0].float().transpose(1, 2)), site.softcap
    )  # [B, G, L]
    scores = scores.masked_fill(key == -torch.inf, -torch.inf)
    kept = scores.softmax(-1).masked_fill(~chosen, 0.0).sum(-1)
    return (1.0 - kept).nan_to_num(0.0).mean()
