"""Cases distilled from public bug reports: caches, masks, recompiles and the life of a compiled model. Numbers: docs/trials.md."""

from __future__ import annotations

import warnings

import pytest
import torch
from models import (
    SHARPEN,
    backend,
    cache_for,
    compiled,
    decode,
    difference,
    eager_fasa,
    half_split,
    llama_profile,
    profile_of,
    tiny_llama,
)
from torch import Tensor, nn
from torch.nn import functional as F

import fasa_compile

IDS = torch.randint(0, 512, (4, 130), generator=torch.Generator().manual_seed(11))
SMALL = {"n_fac": 12, "n_sink": 1, "n_recent": 2}


def test_a_compiled_model_is_not_tied_to_its_first_prompt():  # trial B1
    model = tiny_llama(layers=2)
    step = compiled(model, llama_profile(2), n_fac=250)
    prompts = [IDS[:1, :20], IDS[1:2, :20], IDS[2:3, :60], IDS[:1, :20]]
    found = []
    for ids, length in [*((p, 256) for p in prompts), (prompts[0], 512)]:
        dense = decode(model, model, ids, cache_for(model, "static", length), 6)
        found.append(decode(model, step, ids, cache_for(model, "static", length), 6))
        assert difference(found[-1], dense) <= 1e-4
    assert torch.equal(found[3], found[0])
    assert fasa_compile.stats()["sparse_steps"] >= 24


def test_after_the_recompile_limit_answers_stay_right_and_the_stats_show_it():  # trial B2
    model = tiny_llama(layers=1)
    with torch._dynamo.config.patch(recompile_limit=1, automatic_dynamic_shapes=False):
        step = compiled(model, n_fac=64)
        ids = IDS[:1, :30]
        out = decode(model, step, ids, cache_for(model, "dynamic"), 10)
    assert difference(out, decode(model, model, ids, cache_for(model, "dynamic"), 10)) <= 1e-4
    assert fasa_compile.stats()["sparse_steps"] < 10, "the limit was not reached: nothing was tested"


def test_writing_past_the_end_fails_as_it_does_without_us():  # trial B5
    model = tiny_llama(layers=1)
    outcomes = []
    for step in (model, compiled(model, **SMALL)):
        cache = cache_for(model, "static", 32)
        with torch.no_grad():
            model(IDS[:1, :30], past_key_values=cache)
            for i in range(8):
                try:
                    step(input_ids=IDS[:1, 30 + i : 31 + i].clone(), past_key_values=cache)
                except Exception as error:
                    outcomes.append((i, type(error), str(error).splitlines()[0]))
                    break
    assert len(outcomes) == 2
    assert outcomes[0] == outcomes[1]


class Cell(nn.Module):
    """One attention, half-split RoPE, ``H`` query and ``HKV`` KV heads of ``D`` dims, over a static cache ``[B, HKV, L, D]``.

    ``rounded``: rotation in fp32 that is cast back; else what it gives is stored as the cache casts it.
    """

    def __init__(self, H=4, HKV=2, D=32, width=64, length=64, cache_dtype=None, rounded=False) -> None:
        super().__init__()
        self.H, self.HKV, self.D, self.rounded = H, HKV, D, rounded
        self.q = nn.Linear(width, H * D, bias=False)
        self.k = nn.Linear(width, HKV * D, bias=False)
        self.v = nn.Linear(width, HKV * D, bias=False)
        self.o = nn.Linear(H * D, width, bias=False)
        for projection in (self.q, self.k):
            projection.weight.data *= SHARPEN
        self.register_buffer("inverse", 1000.0 ** (-torch.arange(0, D, 2) / D), persistent=False)
        self.register_buffer("keys", torch.zeros(1, HKV, length, D, dtype=cache_dtype))
        self.register_buffer("values", torch.zeros(1, HKV, length, D, dtype=cache_dtype))

    def rotate(self, x: Tensor, pos: Tensor) -> Tensor:
        angle = pos.float()[:, None] * self.inverse.float()
        cos, sin = (t.repeat(1, 2) for t in (angle.cos(), angle.sin()))
        wide = x.float()
        a, b = wide.chunk(2, -1)
        turned = wide * cos + torch.cat([-b, a], -1) * sin
        return turned.to(x.dtype) if self.rounded else turned

    def project(self, x: Tensor, pos: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        B, T, _ = x.shape
        q, k, v = (
            p(x).view(B, T, n, self.D).transpose(1, 2)
            for p, n in ((self.q, self.H), (self.k, self.HKV), (self.v, self.HKV))
        )
        return self.rotate(q, pos), self.rotate(k, pos), v

    def stored(self, k: Tensor, v: Tensor, pos: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        """Writes the new rows; the whole caches as the attention reads them."""
        self.keys.index_copy_(2, pos, k.to(self.keys.dtype))
        self.values.index_copy_(2, pos, v.to(self.values.dtype))
        return self.keys.to(dtype), self.values.to(dtype)

    def output(self, y: Tensor, x: Tensor) -> Tensor:
        return self.o(y.transpose(1, 2).reshape(*x.shape[:2], -1).to(x.dtype))

    def forward(self, x: Tensor, pos: Tensor) -> Tensor:
        q, k, v = self.project(x, pos)
        keys, values = self.stored(k, v, pos, q.dtype)
        seen = torch.arange(self.keys.shape[2], device=x.device) <= pos[:, None]
        y = F.scaled_dot_product_attention(q, keys, values, attn_mask=seen[None, None], enable_gqa=True)
        return self.output(y, x)


class Stack(nn.Module):
    """Cells one after another; ``model(x [1, T, 64], pos [T])``."""

    def __init__(self, cells: list[nn.Module]) -> None:
        super().__init__()
        self.cells = nn.ModuleList(cells)

    def forward(self, x: Tensor, pos: Tensor) -> Tensor:
        for cell in self.cells:
            x = x + cell(x, pos)
        return x


def run(model: nn.Module, step, steps: int = 8, prompt: int = 40, dtype=torch.float32) -> Tensor:
    """Caches zeroed, a prompt by ``model``, then ``step`` token by token: ``[steps, 64]``."""
    x = torch.randn(1, prompt + steps, 64, generator=torch.Generator().manual_seed(4)).to(dtype)
    with torch.no_grad():
        for name, buffer in model.named_buffers():
            if name.endswith(("keys", "values")):
                buffer.zero_()
        model(x[:, :prompt], torch.arange(prompt))
        return torch.cat(
            [step(x[:, i : i + 1].clone(), torch.tensor([i]))[0].clone() for i in range(prompt, prompt + steps)]
        )


@pytest.mark.parametrize("cache_dtype", [torch.bfloat16, torch.float32, torch.float16])
@pytest.mark.parametrize("rounded", [True, False])
def test_a_rotation_in_fp32_over_a_narrow_cache(cache_dtype, rounded):  # trial B9
    torch.manual_seed(0)
    model = Stack([Cell(cache_dtype=cache_dtype, rounded=rounded) for _ in range(2)]).eval()
    for cell in model.cells:  # a bf16 model whose cache has a dtype of its own
        for projection in (cell.q, cell.k, cell.v, cell.o):
            projection.to(torch.bfloat16)
    outcomes = []
    for step in (model, compiled(model, n_fac=60, n_sink=0, n_recent=0)):
        try:
            outcomes.append(run(model, step, dtype=torch.bfloat16))
        except RuntimeError as error:
            outcomes.append(str(error).splitlines()[0])
    dense, found = outcomes
    if isinstance(dense, str):
        assert dense == found
    else:
        assert difference(found, dense) <= 3e-2 * dense.abs().max().item()
        assert fasa_compile.stats()["sparse_steps"] == 8


def test_layers_may_differ_in_heads_and_dims():  # trial B11
    torch.manual_seed(0)
    shapes = [(8, 2, 32), (12, 3, 32), (4, 4, 64), (8, 1, 128)]
    model = Stack([Cell(*shape) for shape in shapes]).eval()
    dense = run(model, model)
    profile = profile_of([(f"cells.{i}", H, K, D, half_split(D)) for i, (H, K, D) in enumerate(shapes)], 8)
    made = backend(profile, n_fac=60)
    found = run(model, torch.compile(model, backend=made))
    assert difference(found, dense) <= 1e-4 * dense.abs().max().item()
    assert [row.decision for row in made.explain().rows] == ["sparse"] * 4
    # Below the budget: scores of all dims choose the largest weights; what is dropped shows.
    sparse = run(model, compiled(model, profile, **SMALL))
    assert difference(sparse, dense) > 1e-3 * dense.abs().max().item()


class Quantised(Cell):
    """Keys are kept as int8 with a scale per token and read back in float."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("key_scales", torch.ones(1, self.HKV, 64, 1))
        self.keys = self.keys.to(torch.int8)

    def stored(self, k: Tensor, v: Tensor, pos: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        scale = k.abs().amax(-1, keepdim=True).clamp(min=1e-6) / 127
        self.keys.index_copy_(2, pos, (k / scale).round().to(torch.int8))
        self.key_scales.index_copy_(2, pos, scale)
        self.values.index_copy_(2, pos, v)
        return self.keys.float() * self.key_scales, self.values


class Float8(Cell):
    """Keys and values are kept in e4m3 with a scale per layer."""

    def __init__(self) -> None:
        super().__init__(cache_dtype=torch.float8_e4m3fn)
        self.register_buffer("k_scale", torch.tensor(0.05))
        self.register_buffer("v_scale", torch.tensor(0.02))

    def stored(self, k: Tensor, v: Tensor, pos: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        self.keys[:, :, pos] = (k / self.k_scale).to(torch.float8_e4m3fn)
        self.values[:, :, pos] = (v / self.v_scale).to(torch.float8_e4m3fn)
        return self.keys.to(dtype) * self.k_scale, self.values.to(dtype) * self.v_scale


@pytest.mark.parametrize("cell", [Quantised, Float8])
def test_keys_that_are_stored_in_codes_are_never_scored_as_codes(cell):  # trials B15 and N4
    torch.manual_seed(0)
    model = Stack([cell() for _ in range(2)]).eval()
    dense = run(model, model)
    made = backend(n_fac=60, n_sink=0, n_recent=0, strict=False)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", fasa_compile.FasaWarning)
        found = run(model, torch.compile(model, backend=made))
    assert difference(found, dense) <= 1e-4 * dense.abs().max().item()
    rows = made.explain().rows
    assert len(rows) == 2
    assert all(row.decision == "sparse" or row.reason for row in rows)


@pytest.mark.parametrize("kind", ["static", "dynamic"])
def test_a_second_turn(kind):  # trial B13
    model = tiny_llama(layers=2)
    outcomes = []
    for step in (model, compiled(model, llama_profile(2), n_fac=120)):
        cache = cache_for(model, kind)
        pieces = [slice(0, 40), *(slice(i, i + 1) for i in range(40, 50)), slice(50, 75)]
        pieces += [slice(i, i + 1) for i in range(75, 85)]
        with torch.no_grad():
            logits = [step(input_ids=IDS[:1, piece].clone(), past_key_values=cache).logits for piece in pieces]
        outcomes.append(torch.cat(logits, 1))
    assert outcomes[0].shape[1] == 85
    assert difference(*outcomes) <= 1e-4
    # Dynamo's first graph of a growing cache is for its length alone, 41 tokens: within the budget.
    assert fasa_compile.stats()["sparse_steps"] == (20 if kind == "static" else 19)


def test_positions_that_are_not_the_slots():  # trial C2
    model = tiny_llama(layers=2)
    ids = IDS[:3, :44]
    shift = torch.tensor([0, 1000, 0])[:, None]

    def steps(step):
        cache = cache_for(model, "static")
        position = torch.arange(44) + shift
        with torch.no_grad():
            model(ids[:, :40], past_key_values=cache, position_ids=position[:, :40])
            return torch.cat(
                [
                    step(
                        input_ids=ids[:, i : i + 1].clone(),
                        past_key_values=cache,
                        position_ids=position[:, i : i + 1].clone(),
                    ).logits
                    for i in range(40, 44)
                ],
                1,
            )

    dense = steps(model)
    assert difference(steps(compiled(model, llama_profile(2), n_fac=64)), dense) <= 1e-4
    profile = llama_profile(2)
    with eager_fasa(model, profile, **SMALL):
        reference = steps(model)
    assert difference(steps(compiled(model, profile, **SMALL)), reference) <= 1e-4
    assert difference(reference, dense) > 0.05


class Causes(Cell):
    """The mask by ``how``: "sliced" keys with none at all, a bool mask over the whole buffer, or is_causal with one query."""

    def __init__(self, how: str) -> None:
        super().__init__()
        self.how = how

    def forward(self, x: Tensor, pos: Tensor, stop: int) -> Tensor:
        q, k, v = self.project(x, pos)
        keys, values = self.stored(k, v, pos, q.dtype)
        mask = None
        if self.how == "mask":
            mask = (torch.arange(64, device=x.device) <= pos[:, None])[None, None]
        else:
            keys, values = keys[:, :, :stop], values[:, :, :stop]
        causal = mask is None and (x.shape[1] > 1 or self.how == "causal")
        y = F.scaled_dot_product_attention(q, keys, values, attn_mask=mask, is_causal=causal, enable_gqa=True)
        return self.output(y, x)


@pytest.mark.parametrize("how", ["sliced", "mask", "causal"])
def test_how_one_query_is_told_what_it_may_see(how):  # trial C7
    torch.manual_seed(0)
    model = Causes(how).eval()
    x = torch.randn(1, 48, 64, generator=torch.Generator().manual_seed(4))

    def steps(step):
        with torch.no_grad():
            model.keys.zero_(), model.values.zero_()
            model(x[:, :40], torch.arange(40), 40)
            return torch.cat([step(x[:, i : i + 1].clone(), torch.tensor([i]), i + 1)[0] for i in range(40, 48)])

    dense = steps(model)
    made = backend(n_fac=60, n_sink=0, n_recent=0, strict=False)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", fasa_compile.FasaWarning)
        found = steps(torch.compile(model, backend=made))
    assert difference(found, dense) <= 1e-4
    if how == "causal":
        assert {row.reason for row in made.explain().rows} == {"causal-single-query"}
    else:
        assert fasa_compile.stats()["sparse_steps"] >= 7


def test_beam_search():  # trial D1
    model = tiny_llama(layers=2)
    how = dict(max_new_tokens=12, num_beams=4, do_sample=False, pad_token_id=0, return_dict_in_generate=True)
    ids = IDS[:1, :20]
    expected = model.generate(ids, output_scores=True, **how)
    model.forward = torch.compile(model.forward, backend=backend(llama_profile(2), n_fac=100))
    found = model.generate(ids, output_scores=True, **how)
    assert torch.equal(found.sequences, expected.sequences)
    assert difference(found.sequences_scores, expected.sequences_scores) <= 1e-4
    assert fasa_compile.stats()["sparse_steps"] > 0


def test_assisted_decoding():  # trial D3
    model, draft = tiny_llama(layers=2), tiny_llama(layers=1)
    how = dict(max_new_tokens=16, do_sample=False, pad_token_id=0)
    expected = model.generate(IDS[:1, :20], assistant_model=draft, **how)
    model.forward = torch.compile(model.forward, backend=backend(n_fac=100))
    draft.forward = torch.compile(draft.forward, backend=backend(n_fac=100))
    assert torch.equal(model.generate(IDS[:1, :20], assistant_model=draft, **how), expected)
    assert fasa_compile.stats()["sparse_steps"] > 0


@pytest.mark.parametrize("kind", ["static", "dynamic"])
def test_a_verification_step_equals_single_steps(kind):  # trial D5
    model = tiny_llama(layers=2)
    step = compiled(model, llama_profile(2), n_fac=120)
    single = decode(model, model, IDS[:1, :105], cache_for(model, kind), 5)
    cache = cache_for(model, kind)
    with torch.no_grad():
        model(IDS[:1, :100], past_key_values=cache)
        block = step(input_ids=IDS[:1, 100:105].clone(), past_key_values=cache).logits
    assert difference(block, single) <= 1e-4


def test_strides_alone_make_no_new_graphs():  # trial E1
    model = tiny_llama(layers=1)
    step = compiled(model, n_fac=64)
    outcomes, graphs = [], []
    for wide in (1, 8, 9, 50):
        cache = cache_for(model, "static")
        with torch.no_grad():
            model(IDS[:2, :20], past_key_values=cache)
            ids = torch.zeros(2, wide, dtype=torch.long)
            ids[:, -1] = IDS[:2, 20]
            outcomes.append(step(input_ids=ids[:, -1:], past_key_values=cache).logits)
        graphs.append(fasa_compile.stats()["graphs"])
    assert all(torch.equal(one, outcomes[0]) for one in outcomes)
    assert graphs[-1] <= 2


def test_a_mask_that_grows_settles_on_one_graph():  # trial E2
    model = tiny_llama(layers=1)
    step = compiled(model, llama_profile(1), n_fac=250)
    ids, keep = IDS[:2, :84], torch.ones(2, 84, dtype=torch.long)
    keep[0, :5] = 0
    dense = decode(model, model, ids, cache_for(model, "static", 256), 64, attention_mask=keep)
    seen = []
    found = decode(
        model,
        step,
        ids,
        cache_for(model, "static", 256),
        64,
        attention_mask=keep,
        each=lambda i: seen.append(fasa_compile.stats()["graphs"]),
    )
    assert difference(found, dense) <= 1e-4
    assert seen[-1] == seen[4] <= 3, "a graph for every length"


def test_the_rewrite_adds_no_guard_on_the_batch():  # trial E4
    model = tiny_llama(layers=1)
    step = compiled(model, llama_profile(1), n_fac=64)
    for rows in (2, 3, 4):
        ids = IDS[:rows, :21]
        cache = cache_for(model, "static")
        with torch.no_grad():
            expected = decode(model, model, ids, cache_for(model, "static"), 1)
            model(ids[:, :20], past_key_values=cache)
            token = ids[:, 20:].clone()
            torch._dynamo.mark_dynamic(token, 0)
            for layer in cache.layers:
                torch._dynamo.mark_dynamic(layer.keys, 0)
                torch._dynamo.mark_dynamic(layer.values, 0)
            found = step(input_ids=token, past_key_values=cache).logits
        assert difference(found, expected) <= 1e-4
    assert fasa_compile.stats()["graphs"] == 1
    one = decode(model, step, IDS[:1, :3], cache_for(model, "static"), 2)  # a prompt of one token, a batch of one
    assert difference(one, decode(model, model, IDS[:1, :3], cache_for(model, "static"), 2)) <= 1e-4


def test_logits_of_earlier_steps_stay_what_they_were():  # trial F2
    model = tiny_llama(layers=1)
    step = compiled(model, **SMALL)
    cache = cache_for(model, "static")
    with torch.no_grad():
        model(IDS[:1, :40], past_key_values=cache)
        kept, copies = [], []
        for i in range(40, 47):
            kept.append(step(input_ids=IDS[:1, i : i + 1].clone(), past_key_values=cache).logits)
            copies.append(kept[-1].clone())
    assert all(torch.equal(a, b) for a, b in zip(kept, copies, strict=True))


@pytest.mark.parametrize("first", ["no_grad", "inference_mode"])
def test_grad_modes_may_change_between_steps(first):  # trial G1
    model = tiny_llama(layers=2)
    ids = IDS[:1, :52]
    dense = decode(model, model, ids, cache_for(model, "static"), 12)
    modes = {"no_grad": torch.no_grad, "inference_mode": torch.inference_mode}
    order = list(modes) if first == "no_grad" else list(modes)[::-1]
    step = compiled(model, llama_profile(2), n_fac=100)
    with modes[first]():
        cache = cache_for(model, "static")
        model(ids[:, :40], past_key_values=cache)
    out = []
    for i in range(12):
        # A tensor made in inference mode may only be written in inference mode: that is PyTorch's rule, with us or without.
        mode = order[i % 2] if first == "no_grad" else "inference_mode"
        with modes[mode]():
            out.append(step(input_ids=ids[:, 40 + i : 41 + i].clone(), past_key_values=cache).logits[:, -1].clone())
    assert difference(torch.stack(out, 1), dense) <= 1e-4
    assert fasa_compile.stats()["sparse_steps"] == 12
    assert fasa_compile.stats()["graphs"] <= 4


def test_autocast_is_part_of_what_a_graph_is_for():  # trial G3
    model = tiny_llama(layers=1)
    made = backend(llama_profile(1), strict=False, **SMALL)
    step = torch.compile(model, backend=made)
    ids = IDS[:1, :41]
    with eager_fasa(model, llama_profile(1), **SMALL):
        sparse = decode(model, model, ids, cache_for(model, "dynamic"), 1)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", fasa_compile.FasaWarning)
        for dtype in (None, torch.bfloat16, torch.float16, None):
            logits = []
            for one in (model, step):
                cache = cache_for(model, "dynamic")
                with torch.no_grad():
                    model(ids[:, :40], past_key_values=cache)
                    with torch.autocast("cpu", dtype or torch.bfloat16, enabled=dtype is not None):
                        logits.append(one(input_ids=ids[:, 40:].clone(), past_key_values=cache).logits)
            assert logits[0].dtype == logits[1].dtype
            if dtype is None:
                assert difference(logits[1], sparse) <= 1e-4
            else:
                assert difference(*logits) <= 3e-2 * logits[0].abs().max().item()
    assert {row.reason for row in made.explain().rows if row.graph in (1, 2)} == {"autocast"}


def test_adapters_that_are_switched():  # trial O1
    """Low-rank updates of q and k, switched between calls without a compiler being told."""

    class Adapted(nn.Module):
        def __init__(self, base: nn.Linear) -> None:
            super().__init__()
            self.base = base
            self.down = nn.Parameter(torch.zeros(4, base.in_features))
            self.up = nn.Parameter(torch.zeros(base.out_features, 4))

        def forward(self, x):
            return self.base(x) + x @ self.down.T @ self.up.T

    model = tiny_llama(layers=2)
    made = []
    for layer in model.model.layers:
        for name in ("q_proj", "k_proj"):
            adapter = Adapted(getattr(layer.self_attn, name))
            setattr(layer.self_attn, name, adapter)
            made.append(adapter)
    step = compiled(model, llama_profile(2), n_fac=64)
    seen = []
    for seed in (1, 2, None, 1):
        g = torch.Generator().manual_seed(seed or 0)
        with torch.no_grad():
            for adapter in made:
                for p in (adapter.down, adapter.up):
                    p.copy_(torch.randn(p.shape, generator=g) * 0.2 if seed else torch.zeros(p.shape))
        dense = decode(model, model, IDS[:1, :44], cache_for(model, "static"), 4)
        seen.append(decode(model, step, IDS[:1, :44], cache_for(model, "static"), 4))
        assert difference(seen[-1], dense) <= 1e-4
    assert torch.equal(seen[0], seen[3])
    assert difference(seen[0], seen[1]) > 0.05
    assert fasa_compile.stats()["graphs"] == 1


def test_generate_and_train_in_turns():  # trial P3
    model = tiny_llama(layers=1)
    step = compiled(model, llama_profile(1), n_fac=64, strict=False)
    optimiser = torch.optim.SGD(model.parameters(), lr=0.05)
    ids = IDS[:1, :40]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", fasa_compile.FasaWarning)
        before = None
        for _ in range(3):
            dense = decode(model, model, ids, cache_for(model, "static"), 4)
            assert difference(decode(model, step, ids, cache_for(model, "static"), 4), dense) <= 1e-4
            assert before is None or difference(dense, before) > 1e-3, "training changed nothing"
            before = dense
            grads = []
            for one in (model, step):
                optimiser.zero_grad()
                loss = F.cross_entropy(one(input_ids=ids, use_cache=False).logits[0, :-1], ids[0, 1:])
                loss.backward()
                grads.append([p.grad.clone() for p in model.parameters()])
            for a, b in zip(*grads, strict=True):
                torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-6)
            optimiser.step()
    assert fasa_compile.stats()["sparse_steps"] == 12


def test_a_static_cache_within_the_budget_is_left_alone_bit_for_bit():  # trial R2
    model = tiny_llama(layers=1)
    base = torch.compile(model, backend="eager")
    lengths = (64, 128)
    left_alone = [decode(model, base, IDS[:1, :43], cache_for(model, "static", n), 3) for n in lengths]
    step = compiled(model, llama_profile(1), n_fac=64)
    for length, expected, sparse in zip(lengths, left_alone, (0, 3), strict=True):
        found = decode(model, step, IDS[:1, :43], cache_for(model, "static", length), 3)
        assert fasa_compile.stats()["sparse_steps"] == sparse
        assert torch.equal(found, expected) if length == 64 else difference(found, expected) <= 1e-4
