"""One graph whose layers lie on two devices: what each site needs is where its K is. The second device is ``meta`` here, which holds no
numbers; ``tests/gpu/test_two_gpus.py`` has real ones."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from models import Custom, Interleaved, backend, profile_of

import fasa_compile.backend
from fasa_compile.runtime import Runtime

LAYERS = [(f"blocks.{i}", 4, 2, 16, tuple((2 * j, 2 * j + 1) for j in range(8))) for i in range(2)]


@torch.no_grad()
def test_what_a_site_needs_is_on_the_device_of_its_keys(monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[tuple[Any, ...]] = []

    def keep(compiled: Any, extra: Any, relied: Any, examples: Any, **how: Any) -> Runtime:
        made.append((extra, examples, how))
        return Runtime(compiled, extra, relied, examples, **how)

    monkeypatch.setattr(fasa_compile.backend, "Runtime", keep)
    torch._dynamo.reset()
    step = torch.compile(Custom(Interleaved).eval(), backend=backend(profile_of(LAYERS, 4, "int4", "affine")))
    step(torch.tensor([[3]]), torch.tensor([5]))
    ((extra, examples, how),) = made
    second = {item.decision.site.index for item in extra} - {0}
    assert second == {1}

    def there(item: Any) -> Any:
        return replace(item, fake=torch.empty_like(item.fake, device="meta")) if item.decision.site.index == 1 else item

    bound: list[Any] = []
    runtime = Runtime(
        lambda *given: bound.append(given[len(examples) :]),
        list(map(there, extra)),
        tally=how["tally"],
        caches=how["caches"],
    )
    (place,) = {item.decision.site.cache.k_input for item in extra if item.decision.site.index == 1}

    runtime(*(x.to("meta") if i == place else x for i, x in enumerate(examples)))
    roles = [(item.decision.site.index, item.role) for item in extra]
    assert {"dims", "centre", "spread", "norm", "slopes", "data", "meta"} <= {role for _, role in roles}
    for (site, role), tensor in zip(roles, bound[0], strict=True):
        assert tensor.device.type == ("meta" if site == 1 else "cpu"), role
