"""A model sharded over processes decodes sparsely, each with its own heads: nothing about it is new to the backend.

    torchrun --nproc_per_node 2 examples/tensor_parallel.py [FOLDER OF A MODEL] [PROFILE]

Without a model, a small random Llama is made and calibrated, on CPUs or on as many GPUs as there are processes. A profile is made on the
whole model, in one process.
"""

from __future__ import annotations

import argparse
import tempfile
from pathlib import Path

import torch
import torch.distributed as dist
from transformers import AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM

from fasa_compile import calibrate, fasa_backend


def make_model(folder: Path) -> None:
    """A random Llama with 8 query and 4 KV heads, and its profile, in ``folder``."""
    torch.manual_seed(0)
    config = LlamaConfig(
        hidden_size=256,
        num_hidden_layers=2,
        num_attention_heads=8,
        num_key_value_heads=4,
        intermediate_size=512,
        vocab_size=512,
        max_position_embeddings=2048,
    )
    model = LlamaForCausalLM(config).eval()
    model.save_pretrained(folder)
    calibrate(model, torch.randint(0, 512, (1, 512))).save(folder / "profile.json")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", nargs="?", help="a model of transformers that has a tensor-parallel plan")
    parser.add_argument("profile", nargs="?", help="its profile, from fasa_compile.calibrate")
    parser.add_argument("--n-fac", type=int, default=128, help="tokens attended to per KV head and step")
    given = parser.parse_args()
    if (given.model is None) != (given.profile is None):
        parser.error("give a model and its profile, or neither")

    gpu = torch.cuda.is_available()
    dist.init_process_group("nccl" if gpu else "gloo")
    rank = dist.get_rank()
    if gpu:
        torch.cuda.set_device(rank)
    model_path, profile = given.model, given.profile
    if model_path is None:
        shared = [tempfile.mkdtemp() if rank == 0 else None]
        dist.broadcast_object_list(shared)
        model_path, profile = shared[0], f"{shared[0]}/profile.json"
        if rank == 0:
            make_model(Path(model_path))
        dist.barrier()

    model = AutoModelForCausalLM.from_pretrained(model_path, tp_plan="auto", dtype="auto").eval()
    backend = fasa_backend(profile, n_fac=given.n_fac, inner="inductor" if gpu else "eager")
    model.forward = torch.compile(model.forward, backend=backend)
    prompt = torch.randint(0, model.config.vocab_size, (1, 400), generator=torch.Generator().manual_seed(1))
    out = model.generate(
        prompt.to(model.device), max_new_tokens=8, do_sample=False, cache_implementation="static", disable_compile=True
    )
    if rank == 0:
        print(out[0, -8:].tolist())
        print(backend.explain())  # heads: those of this rank
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
