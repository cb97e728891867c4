"""A KV cache whose tokens lie on several processes: each selects and attends to its own, and all get the same tokens out.

    torchrun --nproc_per_node 2 examples/sequence_parallel.py [FOLDER OF A MODEL] [PROFILE]

Without a model, a small random Llama is made and calibrated, on CPUs or on as many GPUs as there are processes. The model is whole on
every process; only its KV cache is shared out.
"""

from __future__ import annotations

import argparse
import tempfile
from pathlib import Path

import torch
import torch.distributed as dist
from transformers import AutoModelForCausalLM

from fasa_compile import SequenceShardedCache, fasa_backend
from tensor_parallel import make_model


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", nargs="?", help="a causal LM of transformers")
    parser.add_argument("profile", nargs="?", help="its profile, from fasa_compile.calibrate")
    parser.add_argument(
        "--n-fac", type=int, default=128, help="tokens attended to per KV head and step, of all processes"
    )
    given = parser.parse_args()
    if (given.model is None) != (given.profile is None):
        parser.error("give a model and its profile, or neither")

    gpu = torch.cuda.is_available()
    dist.init_process_group("nccl" if gpu else "gloo")
    rank = dist.get_rank()
    device = torch.device("cuda", rank) if gpu else torch.device("cpu")
    if gpu:
        torch.cuda.set_device(device)
    model_path, profile = given.model, given.profile
    if model_path is None:
        shared = [tempfile.mkdtemp() if rank == 0 else None]
        dist.broadcast_object_list(shared)
        model_path, profile = shared[0], f"{shared[0]}/profile.json"
        if rank == 0:
            make_model(Path(model_path))
        dist.barrier()

    model = AutoModelForCausalLM.from_pretrained(model_path, dtype="auto").to(device).eval()
    backend = fasa_backend(profile, n_fac=given.n_fac, inner="inductor" if gpu else "eager")
    model.forward = torch.compile(model.forward, backend=backend)
    prompt = torch.randint(0, model.config.vocab_size, (1, 400), generator=torch.Generator().manual_seed(1))
    cache = SequenceShardedCache(model.config, max_cache_len=512)  # of all processes; each holds its part
    out = model.generate(
        prompt.to(device), past_key_values=cache, max_new_tokens=8, do_sample=False, disable_compile=True
    )

    tokens = [torch.empty_like(out) for _ in range(dist.get_world_size())]
    dist.all_gather(tokens, out)
    if rank == 0:
        held = cache.layers[0].shard.rows
        print(f"{out[0, -8:].tolist()} on {'every process' if all(t.equal(out) for t in tokens) else 'only some'}")
        print(f"each of {dist.get_world_size()} processes holds {held} of {cache.get_max_length()} tokens")
        print(backend.explain())
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
