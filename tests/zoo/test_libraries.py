"""Model libraries that nobody here wrote, as installed: litgpt, torchtune and x-transformers, tiny, with their own KV caches.

``make zoo`` installs them (requirements in ``tests/zoo/libraries.txt``); without one, its tests skip.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from fasa_compile import fasa_backend
from fasa_compile.profiles import Budget

PROMPT, STEPS, LENGTH, VOCAB = 12, 3, 64, 128
#: A decode step: ``(model, tokens so far [1, n], how many of them are new) -> logits [1, V]`` of the last.
Call = Callable[[Any, Tensor, int], Tensor]


def library(name: str) -> Any:
    try:
        return importlib.import_module(name)
    except ImportError as error:
        pytest.skip(f"{name} cannot be imported ({error}); `make zoo` installs it")


def litgpt() -> tuple[nn.Module, Call]:
    lib = library("litgpt")
    config = lib.Config(
        block_size=LENGTH,
        vocab_size=VOCAB,
        padded_vocab_size=VOCAB,
        n_layer=2,
        n_head=4,
        n_embd=64,
        n_query_groups=2,
        head_size=16,
        rotary_percentage=0.5,
        parallel_residual=False,
        bias=False,
        norm_class_name="RMSNorm",
        mlp_class_name="LLaMAMLP",
        intermediate_size=128,
    )
    model = lib.GPT(config)
    model.set_kv_cache(batch_size=1, max_seq_length=LENGTH)

    def call(step: Any, ids: Tensor, new: int) -> Tensor:
        n = ids.shape[1]
        return step(ids[:, n - new :].clone(), input_pos=torch.arange(n - new, n))[:, -1]

    return model, call


def torchtune() -> tuple[nn.Module, Call]:
    builders = library("torchtune.models.llama3_2")
    model = builders.llama3_2(
        vocab_size=VOCAB,
        num_layers=2,
        num_heads=4,
        num_kv_heads=2,
        embed_dim=64,
        max_seq_len=LENGTH,
        intermediate_dim=128,
    )
    model.setup_caches(batch_size=1, dtype=torch.float32, decoder_max_seq_len=LENGTH)
    causal = torch.ones(LENGTH, LENGTH, dtype=torch.bool).tril()

    def call(step: Any, ids: Tensor, new: int) -> Tensor:
        n = ids.shape[1]
        positions = torch.arange(n - new, n)[None]
        return step(ids[:, n - new :].clone(), mask=causal[positions], input_pos=positions)[:, -1]

    return model, call


def x_transformers() -> tuple[nn.Module, Call]:
    lib = library("x_transformers")
    layers = lib.Decoder(
        dim=64, depth=2, heads=4, attn_dim_head=32, rotary_pos_emb=True, attn_flash=True, attn_kv_heads=2
    )
    model = lib.TransformerWrapper(num_tokens=VOCAB, max_seq_len=LENGTH, attn_layers=layers, use_abs_pos_emb=False)
    past: list[Any] = []

    def call(step: Any, ids: Tensor, new: int) -> Tensor:
        if new == ids.shape[1]:
            past.clear()
        logits, kept = step(ids.clone(), return_intermediates=True, cache=past[0] if past else None)
        past[:] = [kept]
        return logits[:, -1]

    return model, call


def decode(model: nn.Module, step: Any, call: Call, ids: Tensor) -> Tensor:
    for module in model.modules():  # torchtune counts its own positions
        if hasattr(module, "reset") and "KVCache" in type(module).__name__:
            module.reset()
    call(model, ids[:, :PROMPT], PROMPT)
    return torch.stack([call(step, ids[:, : i + 1], 1) for i in range(PROMPT, PROMPT + STEPS)], 1)


@pytest.mark.parametrize("made", [litgpt, torchtune, x_transformers], ids=lambda f: f.__name__)
@torch.no_grad()
def test_library(made: Callable[[], tuple[nn.Module, Call]]) -> None:
    model, call = made()
    model.eval()
    for name, x in model.named_parameters():
        if any(part in name for part in ("q_proj", "k_proj", "qkv", "to_q", "to_k")) and x.dim() == 2:
            x *= 6 if "qkv" not in name else 6**0.5
    ids = torch.randint(3, VOCAB, (1, PROMPT + STEPS))
    dense = decode(model, model, call, ids)
    for n_fac in (16, 6):
        budget = Budget(n_fac=n_fac, n_sink=1, n_recent=2)
        torch._dynamo.reset()
        backend = fasa_backend("all", n_fac=n_fac, n_sink=1, n_recent=2, inner="eager")
        # A cache that grows gets a length of its own in each step unless it may be a symbol.
        step = torch.compile(model, backend=backend, dynamic=True if made is x_transformers else None)
        got = decode(model, step, call, ids)
        first = next(g for g in backend.graphs if g.decisions)
        assert [d.action for d in first.decisions] == ["sparse", "sparse"], str(backend.explain())
        if n_fac >= PROMPT + STEPS:
            torch.testing.assert_close(got, dense, atol=1e-4, rtol=1e-4)
        else:
            sites: list[Any] = [d.site for d in first.decisions]
            torch.testing.assert_close(got, plain(model, call, ids, sites, budget), atol=1e-4, rtol=1e-4)
            assert (got - dense).abs().max() > 1e-3  # the budget was too small to change nothing


def plain(model: nn.Module, call: Call, ids: Tensor, sites: list[Any], budget: Budget) -> Tensor:
    from fasa_compile.testing.plain import PlainFasa

    entries = {
        (m, n): (None, sites[0].shape[1], sites[0].shape[2], 0.0) for m in model.modules() for n in range(1, STEPS + 1)
    }
    reference = PlainFasa(model, entries, None, budget)

    def step(*args: Any, **kwargs: Any) -> Any:
        reference.start()
        with reference.following():
            out = model(*args, **kwargs)
        assert reference.applied == len(sites)
        return out

    return decode(model, step, call, ids)
