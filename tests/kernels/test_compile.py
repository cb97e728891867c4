"""Every kernel compiles for the GPUs it is meant for, from the very launches that its launcher makes."""

from __future__ import annotations

import contextlib
import re
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch

pytest.importorskip("triton")
from compile_only import Launch, recording, registers

from fasa_compile.triton_kernels.formats import HINT_COLUMNS, fc_cache_spec
from fasa_compile.triton_kernels.hot_slots import HotSize, fac_parts, hot_spec


def launches_of(
    device: Any,
    fmt: str,
    mask: torch.dtype | None,
    monkeypatch: pytest.MonkeyPatch,
    note: Callable[[], Any] = lambda: None,
) -> list[Launch]:
    """Of every kernel, for tensors that hold no numbers, as on ``device``."""
    from fasa_compile.triton_kernels import bounds, dense_decode, pack, shard, sparse_decode

    for module in (sparse_decode, dense_decode, shard):
        monkeypatch.setattr(module, "device_of", lambda _: device)
    B, Hq, Hkv, L, D, W = 2, 32, 8, 32768, 128, 64
    with torch.device("meta"), recording(note) as launches:
        q, kv = torch.empty(B, Hq, 1, D, dtype=torch.bfloat16), torch.empty(B, Hkv, L, D, dtype=torch.bfloat16)
        data, meta = (torch.empty(shape, dtype=dtype) for shape, dtype in fc_cache_spec(B, Hkv, L, W, fmt))
        dims, centre = torch.empty(Hkv, W, dtype=torch.int32), torch.empty(Hkv, W)
        slots, hint = torch.empty(1, dtype=torch.int64), torch.empty(B, Hkv, HINT_COLUMNS)
        m = None if mask is None else torch.empty(B, 1, 1, L, dtype=mask)
        sparse_decode.sparse_decode(
            q, kv, kv, data, meta, dims, centre, centre, torch.empty(Hq), m, None, slots, hint, scale=0.1, n_fac=1024,
            n_sink=4, n_recent=16, fmt=fmt, sinks=torch.empty(Hq) if mask is None else None,
            **({"reduction": "affine", "slopes": torch.empty(Hq, W)} if fmt == "int4" else {}),
        )  # fmt: skip
        size = HotSize(fac_parts(B * Hkv, 1024, 132), 48)
        hot = (torch.empty(shape, dtype=dtype) for shape, dtype in hot_spec(B, Hkv, size, D, D, torch.bfloat16))
        sparse_decode.sparse_decode(
            q, kv, kv, data, meta, dims, centre, centre, torch.empty(Hq), m, None, slots, hint, *hot, scale=0.1, n_fac=1024,
            n_sink=4, n_recent=16, fmt=fmt,
        )  # fmt: skip
        sparse_decode.sparse_decode(
            q, kv, kv, data, meta, dims, centre, centre, torch.empty(Hq), m, None, slots, hint, scale=0.1, n_fac=1024, fmt=fmt,
            reduction="softmax_sum",
        )  # fmt: skip
        sparse_decode.sparse_decode(
            q, kv, kv, data, meta, dims, centre, centre, None, m, None, slots, hint, scale=0.1, n_fac=L, fmt=fmt
        )  # within the budget: dense, and rows refreshed on the way
        dense_decode.dense_decode(q, kv, kv, m, scale=0.1)
        pack.pack(kv, dims, centre, centre, fmt)
        if m is not None:
            own, some, limits = (q, kv, data, meta, dims, centre), m[..., : L - 1], torch.empty(B, 2, dtype=torch.int32)
            how = {"scale": 0.1, "softcap": 0.0, "n_fac": 1024}
            more = {"rows": L - 1, "n_sink": 4, "n_recent": 16, "fmt": fmt, "reduction": "static", **how}
            listed, tokens = shard.candidates(*own, torch.empty(B, Hq), some, limits, hint, **more)
            shard.attend(q, kv, kv, some, torch.cat([listed, listed], -1), tokens, rank=1, **how)
            dense_decode.dense_decode(q, kv[:, :, 1:], kv[:, :, 1:], some, limits, scale=0.1, shard=True)
            bounds.mask_bounds(m, L)
        if mask is not None and fmt == "int4":
            sparse_decode.sparse_decode(
                q.expand(-1, -1, 3, -1).contiguous(), kv, kv, data, meta, dims, centre, centre, torch.empty(Hq),
                m.expand(-1, -1, 3, -1).contiguous(), None, slots, hint, scale=0.1, n_fac=1024, fmt=fmt,
            )  # of three query tokens  # fmt: skip
    names = {launch.kernel.fn.__name__ for launch in launches}
    assert names >= {
        "query_kernel",
        "tip_kernel",
        "fac_kernel",
        "fetching_fac_kernel",
        "merge_kernel",
        "dense_kernel",
        "pack_kernel",
    }
    assert mask is None or names >= {"bounds_kernel", "select_kernel", "list_kernel", "chosen_fac_kernel"}
    return launches


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize("capability", [80, 90, 100])
@pytest.mark.parametrize("fmt, mask", [("int4", torch.bool), ("fp8", None), ("bf16", torch.bfloat16)])
def test_kernels_compile(capability: int, fmt: str, mask: torch.dtype | None, monkeypatch: pytest.MonkeyPatch) -> None:
    from fasa_compile.triton_kernels.launch import Device

    for recorded in launches_of(Device(132, capability, True), fmt, mask, monkeypatch):
        assert len(recorded.compile(capability).asm["cubin"]) > 0


@pytest.mark.parametrize("capability", [80, 90])
@pytest.mark.parametrize("fmt, W", [("int4", 64), ("int8", 32), ("bf16", 20)])
def test_an_element_of_a_fragment_is_a_thread(
    capability: int, fmt: str, W: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What ``fragments`` builds on: one layout, an element to a thread in their order, and no exchange between threads."""
    from fasa_compile.triton_kernels import sparse_decode
    from fasa_compile.triton_kernels.launch import Device

    monkeypatch.setattr(sparse_decode, "device_of", lambda _: Device(132, capability, True))
    with torch.device("meta"), recording() as launches:
        q, kv = torch.empty(2, 32, 1, 128, dtype=torch.bfloat16), torch.empty(2, 8, 32768, 128, dtype=torch.bfloat16)
        data, meta = (torch.empty(shape, dtype=dtype) for shape, dtype in fc_cache_spec(2, 8, 32768, W, fmt))
        dims, spread, mask = torch.empty(8, W, dtype=torch.int32), torch.empty(8, W), torch.empty(2, 1, 1, 32768)
        cache = (data, meta, dims, spread, spread)
        sparse_decode.sparse_decode(q, kv, kv, *cache, None, mask, scale=0.1, n_fac=1024, fmt=fmt)
    (tip,) = (launch for launch in launches if launch.kernel.fn.__name__ == "tip_kernel")
    assert tip.arguments["ENGINE"] == "fragments"
    warps = tip.options["num_warps"]
    assert tip.arguments["BLOCK_T"] == 64 * warps
    code = tip.compile(capability).asm
    loop = code["ttgir"][code["ttgir"].index("scf.for") : code["ttgir"].index("tt.return")]
    assert "convert_layout" not in loop
    layout = f"#ttg.blocked<{{sizePerThread = [1], threadsPerWarp = [32], warpsPerCTA = [{warps}], order = [0]}}>"
    (name,) = re.findall(rf"^(#\w+) = {re.escape(layout)}", code["ttgir"], re.MULTILINE)
    inputs = re.findall(r"elementwise_inline_asm \"[^\"]*mma.sync.*", code["ttgir"])
    assert inputs and all(set(re.findall(r"tensor<\d+x\w+, (#\w+)>", line)) == {name} for line in inputs)
    assert "mma.sync" in code["ptx"] and not re.search(r"@%p\d+\s+mma\.sync", code["ptx"])


@pytest.mark.parametrize("fmt, W", [("int4", 64), ("fp8", 32), ("bf16", 32), ("int8", 32)])
def test_programs_of_tip_have_room(fmt: str, W: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """As many as are launched for a multiprocessor fit there by their registers: one that has to wait for another's end costs a fifth."""
    from fasa_compile.triton_kernels import sparse_decode
    from fasa_compile.triton_kernels.launch import Device

    monkeypatch.setattr(sparse_decode, "device_of", lambda _: Device(132, 90, True))
    with torch.device("meta"), recording() as launches:
        q, kv = torch.empty(8, 32, 1, 128, dtype=torch.bfloat16), torch.empty(8, 8, 32768, 128, dtype=torch.bfloat16)
        data, meta = (torch.empty(shape, dtype=dtype) for shape, dtype in fc_cache_spec(8, 8, 32768, W, fmt))
        dims, spread, norm = torch.empty(8, W, dtype=torch.int32), torch.empty(8, W), torch.empty(32)
        bounds, slots, hint = (
            torch.empty(8, 2, dtype=torch.int32),
            torch.empty(1).long(),
            torch.empty(8, 8, HINT_COLUMNS),
        )
        cache = (data, meta, dims, spread, spread, norm)
        sparse_decode.sparse_decode(
            q, kv, kv, *cache, None, bounds, slots, hint, scale=0.1, n_fac=1024, n_sink=4, n_recent=16, fmt=fmt
        )
    (tip,) = (launch for launch in launches if launch.kernel.fn.__name__ == "tip_kernel")
    assert tip.arguments["ENGINE"] == "fragments" and tip.options["num_warps"] == 4
    programs = -(-64 * tip.arguments["CHUNKS"] // 132)
    assert programs in (4, 5) and 128 * registers(tip.compile(90)) * programs <= 65536


def test_kernels_are_launched_on_the_device_of_their_tensors(monkeypatch: pytest.MonkeyPatch) -> None:  # trial L1
    """Not on the one that happens to be current: each launcher opens the guard around its launches."""
    from fasa_compile.triton_kernels import bounds, dense_decode, pack, shard, sparse_decode
    from fasa_compile.triton_kernels.launch import Device

    current: list[str] = []

    @contextlib.contextmanager
    def guard(tensor: torch.Tensor) -> Iterator[None]:
        current.append(tensor.device.type)
        yield
        current.pop()

    for module in (bounds, dense_decode, pack, shard, sparse_decode):
        monkeypatch.setattr(module, "on_device", guard)
    launches = launches_of(Device(132, 90, True), "int4", torch.bool, monkeypatch, lambda: current[-1:])
    assert [launch.noted for launch in launches] == [["meta"]] * len(launches)
