"""Contexts larger than the card: K and V in host memory, a few rows fetched in each step (FASA-M).

    python examples/offload.py

A small Llama with random weights decodes 60 tokens twice: with transformers' static cache, and with one in host memory. On a GPU the
second is host memory that kernels read across PCIe; on a CPU the same plan runs on plain tensors. The tokens are the same.
"""

from __future__ import annotations

from typing import Any

import torch
from transformers import LlamaConfig, LlamaForCausalLM, StaticCache

import fasa_compile
from fasa_compile import FasaStaticCache, calibrate, fasa_backend

LENGTH, PROMPT, STEPS, N_FAC = 1024, 600, 60, 64


def model_on(device: str) -> Any:
    torch.manual_seed(0)
    config = LlamaConfig(
        hidden_size=256, num_hidden_layers=2, num_attention_heads=8, num_key_value_heads=2, intermediate_size=512, vocab_size=512
    )  # fmt: skip
    model = LlamaForCausalLM(config).eval().to(device)
    for layer in model.model.layers:  # random models attend to everything alike; sharper ones have something to select
        layer.self_attn.q_proj.weight.data *= 6
        layer.self_attn.k_proj.weight.data *= 6
    return model


@torch.no_grad()
def decode(model: Any, backend: Any, cache: Any, ids: torch.Tensor) -> tuple[list[int], float]:
    """Greedy tokens: the prompt by the model itself, then one token at a time by the compiled one; and the share of attended rows that
    did not have to be fetched. It is counted as long as the compiled model lives."""
    torch._dynamo.reset()
    step = torch.compile(model, backend=backend)
    out = [model(ids, past_key_values=cache).logits[:, -1].argmax(-1)]
    for _ in range(STEPS - 1):
        out.append(step(input_ids=out[-1][:, None], past_key_values=cache).logits[:, -1].argmax(-1))
    counts = fasa_compile.stats().get("hot", {}).values()
    fetched, attended = (sum(c[name] for c in counts) for name in ("fetched", "attended"))
    return [int(token) for token in out], 1 - fetched / max(attended, 1)


def main(device: str, inner: str = "inductor") -> tuple[list[int], list[int], float, str]:
    model = model_on(device)
    ids = torch.randint(0, 512, (1, PROMPT), device=device)
    profile = calibrate(model, torch.randint(0, 512, (1, 512), device=device))
    how: dict[str, Any] = {"n_fac": N_FAC, "dense_below": 0, "inner": inner}
    on_card, _ = decode(model, fasa_backend(profile, **how), StaticCache(model.config, max_cache_len=LENGTH), ids)
    backend = fasa_backend(profile, offload="cpu", **how)
    cache = FasaStaticCache(model.config, max_cache_len=LENGTH)
    in_host_memory, hits = decode(model, backend, cache, ids)
    return on_card, in_host_memory, hits, str(backend.explain())


if __name__ == "__main__":
    plain, offloaded, hits, report = main("cuda" if torch.cuda.is_available() else "cpu")
    print(report)
    print(f"hit rate of the hot buffer: {hits:.2f}; the same {STEPS} tokens: {plain == offloaded}")
