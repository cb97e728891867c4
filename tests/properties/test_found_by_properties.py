"""What the property tests found, shrunk."""

from __future__ import annotations

import pytest
import torch

from fasa_compile.testing.model_checks import MODEL_CHECKS, Subject, Trial
from fasa_compile.testing.tiny import Tiny, TinyDriver, TinySpec


def test_a_magnitude_told_by_half_precision_tables() -> None:
    """Rounded to bf16, the cosines and sines of few planes tell the magnitude otherwise at each position: the model's own profile was
    refused as another model's, from the second graph on."""
    spec = TinySpec(rope="first dims", cache="concatenated", D=8, layers=1, table=False, dtype=torch.bfloat16)
    one = Subject(lambda: Tiny(spec), TinyDriver(spec))
    found = set()
    for prompt in (8, 15, 36):
        torch._dynamo.reset()
        trial = Trial(kind="dynamic", prompt=prompt, steps=3, n_fac=4)
        made = one.compiled(one.profile(trial), trial.budget)
        one.decode(made, trial)
        found |= {d.site.rope.magnitude for d in made.decisions}
    assert max(found) - min(found) > 1e-3, "the tables tell the same at each position: nothing was tested"


@pytest.mark.parametrize("check", ["repeat", "kept state", "plain reference"])
def test_the_first_graph_of_a_growing_cache_is_for_one_length(check: str) -> None:
    """A fault of the checks: Dynamo makes the first graph of a growing cache for its length alone, unless it has seen other lengths
    before; within the budget that graph is dense. One of two runs compared had it, the other had not; and every step was
    expected to be sparse."""
    spec = TinySpec(rope="half-split", cache="concatenated", attention="repeated", Hkv=1, G=1, layers=1, table=False)
    one = Subject(lambda: Tiny(spec), TinyDriver(spec))
    trial = Trial(kind="dynamic", prompt=2, steps=3, n_fac=3, n_sink=0, n_recent=0, fc_format="fp32")
    one.sites("dynamic")
    torch._dynamo.reset()
    MODEL_CHECKS[check](one, trial)
    torch._dynamo.reset()
    fresh = Subject(lambda: Tiny(spec), TinyDriver(spec))
    MODEL_CHECKS[check](fresh, trial)
