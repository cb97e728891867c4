"""From a model to sparse generation: calibrate, generate, see what happened.

python examples/quickstart.py            SmolLM2-135M (90 MB, fetched once), minutes on a CPU
python examples/quickstart.py --tiny     a random model of two layers, seconds
"""

from __future__ import annotations

import argparse
from typing import Any

import torch
from torch import Tensor

import fasa_compile
import smollm2


def tiny() -> tuple[Any, Tensor]:
    """A random Llama of two layers, and 400 tokens."""
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    sizes = dict(hidden_size=128, intermediate_size=256, num_attention_heads=4, num_key_value_heads=2, vocab_size=512)
    model = LlamaForCausalLM(LlamaConfig(num_hidden_layers=2, **sizes)).eval()
    return model, torch.randint(1, 512, (1, 400))


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--tiny", action="store_true", help="a random model")
    parser.add_argument("--new-tokens", type=int, default=32)
    parser.add_argument("--n-fac", type=int, default=128, help="tokens attended to per KV head and step")
    parser.add_argument("--inner", choices=("inductor", "eager"), default="inductor")
    args = parser.parse_args(arguments)
    if args.tiny:
        model, ids = tiny()
    else:
        model, tokenizer = smollm2.load(smollm2.fetch())
        ids = smollm2.windows(tokenizer, 2048, 1)

    # 1. Once per model: which rotary frequencies of each head tell where it looks.
    profile = fasa_compile.calibrate(model, ids, progress=False)

    # 2. model.generate, with sparse decode steps.
    out = fasa_compile.generate(
        model,
        ids,
        profile=profile,
        inner=args.inner,
        backend={"n_fac": args.n_fac},
        max_new_tokens=args.new_tokens,
        do_sample=False,
        pad_token_id=0,
    )
    new = out[0, ids.shape[1] :]
    print(new.tolist() if args.tiny else tokenizer.decode(new))

    # 3. What happened to each attention, and how often.
    print(fasa_compile.explain())
    print(fasa_compile.stats())


if __name__ == "__main__":
    main()
