"""Cache operations in any order: a state machine over a model's caches. Needs ``hypothesis``.

Three lanes get the same operations, each with caches of its own: the model compiled with the packed FC cache kept, the same with it
made anew before every step, and the model uncompiled under the plain reference. After each step the first two must agree bit for bit
and the third within rounding. Whatever is stale, written to a wrong row, or kept for another cache shows in the first comparison;
whatever both compiled lanes get wrong shows in the second.
"""

from __future__ import annotations

import copy
import warnings
from typing import Any

import torch
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, precondition, rule
from torch import Tensor, nn

from fasa_compile.counters import stats
from fasa_compile.errors import FasaWarning
from fasa_compile.testing.drivers import tokens
from fasa_compile.testing.model_checks import CLOSE, Compiled, Plainly, Subject, Trial, equal, many_graphs, near
from fasa_compile.testing.strategies import trials

#: Tokens of a verification step.
WIDE = 3


class _Lane:
    """One way to run the model, with its caches."""

    def __init__(self, subject: Subject, step: Any, model: nn.Module, caches: int, trial: Trial) -> None:
        self.driver, self.step, self.model = subject.driver, step, model
        self.caches = [self.driver.new_cache(model, trial.kind, trial.rows) for _ in range(caches)]

    def call(self, which: int, ids: Tensor, start: int, *, compiled: bool) -> Tensor:
        step = self.step.step if isinstance(self.step, Compiled) else self.step
        return self.driver.call(step if compiled else self.model, ids, start, self.caches[which]).clone()

    def pairs(self, which: int) -> list[tuple[Tensor, Tensor]]:
        return self.driver.keys_values(self.model, self.caches[which])


class CacheMachine(RuleBasedStateMachine):
    """Operations on two caches of a model (one, where the model holds its own). ``cache_machine`` makes a class of it for a subject."""

    subject: Subject
    #: Runs; steps compared, over all of them, and of these sparse ones of several tokens.
    runs = 0
    compared = 0
    several_compared = 0

    @initialize(data=st.data())
    def begin(self, data: st.DataObject) -> None:
        subject = self.subject
        type(self).runs += 1
        self.trial = data.draw(trials(subject.driver, steps=0, prompt=2), label="trial")
        self.profile = subject.profile(self.trial)
        torch._dynamo.reset()
        first = subject.driver.new_cache(copy.deepcopy(subject.model), self.trial.kind, self.trial.rows)
        caches = 1 if first is None else 2
        self.lanes = []
        for name in ("kept", "anew", "plain"):
            model = copy.deepcopy(subject.model)
            if name == "plain":
                step: Any = Plainly(subject.plain(self.trial, self.profile, model), model)
            else:
                step = subject.compiled(self.profile, self.trial.budget, model)
            self.lanes.append(_Lane(subject, step, model, caches, self.trial))
        self.which, self.at, self.drawn = 0, [0] * caches, 0
        self.exact = next(subject.model.parameters()).dtype == torch.float32

    def _tokens(self, n: int) -> Tensor:
        self.drawn += 1
        return tokens(self.subject.driver, self.trial.rows, n, self.trial.seed + self.drawn)

    @property
    def _room(self) -> int:
        return self.subject.driver.length - self.at[self.which]

    def _run(self, n: int, *, compiled: bool) -> None:
        ids, start = self._tokens(n), self.at[self.which]
        compiled = compiled and n in (1, WIDE)
        outs = []
        verified = stats()["multi_token_steps"]
        for lane, name in zip(self.lanes, ("kept", "anew", "plain"), strict=True):
            if name == "anew" and isinstance(lane.step, Compiled):
                lane.step.invalidate()
            if isinstance(lane.step, Plainly):
                lane.step.plain.start()
            with torch.no_grad(), many_graphs(), warnings.catch_warnings():
                warnings.simplefilter("ignore", FasaWarning)
                if name == "plain" and compiled and stats()["multi_token_steps"] > verified:
                    # The reference has one query token: several that select each for itself are steps of one.
                    each = [lane.call(self.which, ids[:, i : i + 1], start + i, compiled=True) for i in range(n)]
                    outs.append(torch.cat(each, 1))
                    type(self).several_compared += 1
                else:
                    outs.append(lane.call(self.which, ids, start, compiled=compiled))
        self.at[self.which] += n
        equal(outs[0], outs[1], "packed FC cache kept, against made anew")
        closest = self.lanes[2].step.plain.closest
        if self.exact and closest >= CLOSE:
            near(outs[0], outs[2], "sparse against the plain reference")
        type(self).compared += 1
        # The lanes' keys differ by rounding; the third starts its next step from the first's, lest that adds up.
        with torch.no_grad():
            for mine, theirs in zip(self.lanes[2].pairs(self.which), self.lanes[0].pairs(self.which), strict=True):
                for a, b in zip(mine, theirs, strict=True):
                    a.copy_(b)

    def _write(self, change: Any) -> None:
        """``change(x)`` in place, on the live keys and values of every lane."""
        with torch.no_grad():
            for lane in self.lanes:
                for k, v in lane.pairs(self.which):
                    change(k)
                    change(v)

    @precondition(lambda self: self._room >= 12)
    @rule(n=st.integers(1, 9))
    def prefill(self, n: int) -> None:
        """A prompt, or a further turn; uncompiled, so the backend does not see it being written."""
        self._run(n, compiled=False)

    @precondition(lambda self: self.at[self.which] > 0 and self._room >= 2)
    @rule(n=st.integers(1, 3))
    def decode(self, n: int) -> None:
        """Tokens one by one."""
        for _ in range(min(n, self._room - 1)):
            self._run(1, compiled=True)

    @precondition(lambda self: self.at[self.which] > 0 and self._room >= WIDE + 1)
    @rule()
    def several(self) -> None:
        """Several tokens at once, compiled: a verification step, which selects for each."""
        self._run(WIDE, compiled=True)

    @precondition(lambda self: self.subject.driver.crops and self.at[self.which] > 1)
    @rule(data=st.data())
    def crop(self, data: st.DataObject) -> None:
        """Back to a shorter context."""
        length = data.draw(st.integers(1, self.at[self.which] - 1), label="length")
        for lane in self.lanes:
            lane.driver.crop(lane.model, lane.caches[self.which], length)
        self.at[self.which] = length

    @rule()
    def new_prompt(self) -> None:
        """The cache is emptied and used again."""
        for lane in self.lanes:
            used = lane.caches[self.which]
            if self.at[self.which]:
                lane.caches[self.which] = lane.driver.reset(lane.model, used, self.trial.kind, self.trial.rows)
        self.at[self.which] = 0
        self._run(3, compiled=False)

    @precondition(lambda self: len(self.at) > 1)
    @rule()
    def other_cache(self) -> None:
        """The second cache's turn."""
        self.which = 1 - self.which

    @precondition(lambda self: self.trial.rows > 1 and self.at[self.which] > 0)
    @rule()
    def reorder(self) -> None:
        """Rows change places, or the first replaces the others, as beams do."""
        rows = self.trial.rows
        order = torch.arange(rows - 1, -1, -1) if self.drawn % 2 else torch.zeros(rows, dtype=torch.long)
        self._write(lambda x: x.copy_(x.index_select(0, order.to(x.device))))

    @precondition(lambda self: self.at[self.which] > 0)
    @rule(data=st.data(), factor=st.sampled_from([-1.0, 0.5, 0.0]))
    def write_outside(self, data: st.DataObject, factor: float) -> None:
        """Someone else writes into a slot."""
        slot = data.draw(st.integers(0, self.at[self.which] - 1), label="slot")
        self._write(lambda x: x[:, :, slot].mul_(factor))


def cache_machine(subject: Subject) -> type[CacheMachine]:
    """The state machine of a subject; ``hypothesis.stateful.run_state_machine_as_test`` runs it, ``.TestCase`` is for unittest."""
    return type("CacheMachine", (CacheMachine,), {"subject": subject, "runs": 0, "compared": 0, "several_compared": 0})
