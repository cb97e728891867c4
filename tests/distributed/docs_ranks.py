"""What each of two processes runs of docs/distributed.md (``launching.py``): its blocks of Python, on a CPU."""

from __future__ import annotations

import os
import re
import sys
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.nn import functional as F
from transformers import AutoModelForCausalLM

sys.path.insert(0, str(Path(__file__).parents[1] / "end_to_end"))
sys.path.insert(0, str(Path(__file__).parent))
from launching import run
from models import llama_profile, tiny_llama

import fasa_compile

RANK = int(os.environ["RANK"])
IDS = torch.randint(0, 512, (1, 40), generator=torch.Generator().manual_seed(1))
PAGE = Path(__file__).parents[2] / "docs" / "distributed.md"
BLOCKS = re.findall(r"```python\n(.*?)```", PAGE.read_text(encoding="utf-8"), flags=re.S)
CONTEXT = 64  # in place of the page's


def fasa_backend(profile: Any, **how: Any) -> Any:
    return fasa_compile.fasa_backend(profile, n_fac=24, check_weights=False, inner="eager", **how)


def block(words: str, names: dict[str, Any]) -> None:
    """Executes the only block that has these words."""
    (text,) = [b for b in BLOCKS if words in b]
    exec(compile(text.replace("262144", str(CONTEXT)), PAGE.name, "exec"), names)


def sparse_steps(names: dict[str, Any]) -> int:
    """Of a generation of five tokens."""
    fasa_compile.reset_stats()
    names["model"].generate(IDS, max_new_tokens=5, do_sample=False, cache_implementation="static", disable_compile=True)
    return int(fasa_compile.stats()["sparse_steps"])


def blocks(folder: Path) -> dict[str, Any]:
    """Those that need no GPU: how many steps were sparse, and how far attention over sharded buffers is from that over whole ones."""
    path = folder / "llama"
    if RANK == 0:
        tiny_llama(2).save_pretrained(path)
    dist.barrier()
    names: dict[str, Any] = {"path": path, "profile": llama_profile(2), "fasa_backend": fasa_backend, "torch": torch}
    names |= {"AutoModelForCausalLM": AutoModelForCausalLM, "F": F, "fasa_compile": fasa_compile}
    names |= {"SequenceShardedCache": fasa_compile.SequenceShardedCache, "SequenceShard": fasa_compile.SequenceShard}
    found: dict[str, Any] = {"python blocks": len(BLOCKS)}
    block('tp_plan="auto"', names)
    found["tensor parallel"] = sparse_steps(names)
    torch._dynamo.reset()
    names["model"] = AutoModelForCausalLM.from_pretrained(path, tp_plan="auto")
    block("skip_guard_on_inbuilt_nn_modules_unsafe", names)
    found["without guards"] = sparse_steps(names)

    torch._dynamo.reset()
    names["model"] = AutoModelForCausalLM.from_pretrained(path)
    names["model"].generation_config.update(max_new_tokens=5, do_sample=False)
    names["inputs"] = {"input_ids": IDS}
    fasa_compile.reset_stats()
    block("SequenceShardedCache", names)
    found["tokens"] = fasa_compile.stats()["sparse_steps"]

    g = torch.Generator().manual_seed(2)
    k, v = torch.randn(2, 1, 2, 10, 8, generator=g)
    q = torch.randn(1, 2, 1, 8, generator=g)
    shard = fasa_compile.SequenceShard.of(20)
    v_cache = torch.zeros(1, 2, shard.rows + 1, 8).index_copy_(2, shard.slots(torch.arange(5, 15)), v)
    mask = ((torch.arange(20) >= 5) & (torch.arange(20) < 15)).view(1, 1, 1, 20)
    names |= {"B": 1, "Hkv": 2, "D": 8, "length": 20, "positions": torch.arange(5, 15), "q": q, "k": k}
    names |= {"v_cache": v_cache, "mask": mask}
    block("k_cache.index_copy_", names)
    expected = F.scaled_dot_product_attention(q, k, v)
    found["module"] = float((names["y"] - expected).abs().max())
    return found


if __name__ == "__main__":
    run(globals())
