"""SmolLM2-135M answers a question about one sentence in 3,000 tokens of a detective story: dense, then with FASA.

    python examples/demo.py                    on the CPU, or on a GPU where there is one
    python examples/demo.py --n-fac 64         with half the token budget

Both runs are `generate` on a static cache behind `torch.compile`; the only difference is the backend. The answer comes
first; then the model reads a second text through the same compiled decode step, which gives perplexity and speed.
"""

from __future__ import annotations

import argparse
import math
import os
import statistics
import time
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

import fasa_compile
import smollm2

FACT = "The secret code of the lighthouse is 71948."
QUESTION = "What is the secret code of the lighthouse? Answer in one short sentence."
ANSWER = "71948"


def parsed(arguments: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--tokens", type=int, default=3000, help="length of the prompt")
    parser.add_argument("--new-tokens", type=int, default=64, help="decode steps per run")
    parser.add_argument("--n-fac", type=int, default=128, help="tokens attended to per KV head and step")
    parser.add_argument("--n-tip", type=int, help="frequency chunks that score the tokens (default: half of the 32)")
    parser.add_argument("--inner", choices=("inductor", "eager"), help="default: inductor where it can compile")
    return parser.parse_args(arguments)


def prompt(tokenizer: Any, story: str, length: int) -> Tensor:
    """A chat turn of at most ``length`` tokens, int64 ``[1, n]``: paragraphs of ``story``, the fact among them, the question."""
    paragraphs = story.split("\n\n")
    while True:
        hidden = [*paragraphs[: len(paragraphs) // 3], FACT, *paragraphs[len(paragraphs) // 3 :]]
        chat = [{"role": "user", "content": "\n\n".join([*hidden, QUESTION])}]
        ids = tokenizer.apply_chat_template(chat, add_generation_prompt=True, return_tensors="pt", return_dict=True)[
            "input_ids"
        ]
        if ids.shape[1] <= length:
            return ids
        paragraphs.pop()


class Watch:
    """A logits processor for `generate` that notes when each token is due and, with a text to follow, how likely it was.

    ``follow`` int64 ``[n]``: the tokens that are to come, instead of the model's choices.
    """

    def __init__(self, follow: Tensor | None = None) -> None:
        self.follow, self.due, self.nll = follow, [], []
        self.step = 0

    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
        if scores.is_cuda:
            torch.cuda.synchronize()
        self.due.append(time.perf_counter())
        if self.follow is not None:
            target = self.follow[self.step]
            self.nll.append(-float(scores[0].float().log_softmax(-1)[target]))
            scores = torch.full_like(scores, -math.inf)
            scores[0, target] = 0.0
        self.step += 1
        return scores


@dataclass(frozen=True)
class Run:
    """``answer``: generated text; ``perplexity`` over decode steps only; ``step`` seconds (median); ``total`` seconds."""

    answer: str
    perplexity: float
    step: float
    total: float


def run(model: Any, tokenizer: Any, backend: Any, question: Tensor, text: Tensor, new_tokens: int) -> Run:
    """Generates the answer, then reads the end of ``text [1, n]``, through ``model.forward`` compiled with ``backend``."""
    torch._dynamo.reset()
    started = time.perf_counter()
    forward = model.forward
    model.forward = torch.compile(forward, backend=backend)
    try:
        # disable_compile: on a GPU `generate` would compile the model once more around ours, with its own backend.
        def generate(ids: Tensor, watch: Watch) -> Tensor:
            out = model.generate(
                ids,
                attention_mask=torch.ones_like(ids),
                max_new_tokens=new_tokens,
                do_sample=False,
                cache_implementation="static",
                disable_compile=True,
                logits_processor=[watch],
            )
            return out[0, ids.shape[1] :]

        answer = tokenizer.decode(generate(question, Watch()), skip_special_tokens=True)
        n = question.shape[1]
        reader = Watch(text[0, n : n + new_tokens])
        generate(text[:, :n], reader)
    finally:
        model.forward = forward
    # The first prediction came from the prefill. The first steps may still compile.
    steps = [b - a for a, b in zip(reader.due[2:], reader.due[3:], strict=False)]
    perplexity = math.exp(statistics.fmean(reader.nll[1:]))
    return Run(answer.strip(), perplexity, statistics.median(steps), time.perf_counter() - started)


def inner_compiler(device: str) -> str:
    """``inductor``, or ``eager`` where Inductor cannot compile: on a CPU it needs a C++ compiler and Python's headers."""
    compiled: Callable[[Tensor], Tensor] = torch.compile(lambda x: x * 2 + 1, backend="inductor")
    try:
        compiled(torch.ones(4, device=device))
    except Exception as error:
        print(
            f"Inductor cannot compile here, so graphs run uncompiled ({type(error).__name__}: see torch's message below)"
        )
        print(f"  {str(error).strip().splitlines()[0]}")
        return "eager"
    return "inductor"


def timed(what: str, since: float) -> None:
    print(f"[{time.perf_counter() - since:6.1f} s] {what}", flush=True)


def main(arguments: list[str] | None = None) -> None:
    args = parsed(arguments)
    warnings.filterwarnings("ignore", category=FutureWarning)
    torch.set_num_threads(min(torch.get_num_threads(), os.cpu_count() or 1))
    start = time.perf_counter()
    torch.manual_seed(0)

    model, tokenizer = smollm2.load(smollm2.fetch(), args.device)
    timed(f"SmolLM2-135M-Instruct on {args.device}, {str(model.dtype).removeprefix('torch.')}", start)
    inner = args.inner or inner_compiler(args.device)

    # Three stretches of the story: one to calibrate on, one to hide the fact in, one to read.
    length = max(args.tokens + args.new_tokens, 4096)
    calibration, hide, read = (w[None].to(args.device) for w in smollm2.windows(tokenizer, length, 3))
    given = {} if args.n_tip is None else {"n_tip": args.n_tip}
    profile = fasa_compile.calibrate(model, calibration, progress=False, **given)
    timed(f"calibrated on {calibration.shape[1]} tokens: {profile.layers[0].n_tip} frequency chunks per KV head", start)

    question = prompt(tokenizer, tokenizer.decode(hide[0]), args.tokens).to(args.device)
    print(f"\n{question.shape[1]} tokens of story, among them: {FACT}\nQuestion: {QUESTION}\n")
    timed("compiling, reading and answering, first dense, then sparse: minutes on a CPU ...", start)
    dense = run(model, tokenizer, inner, question, read, args.new_tokens)
    timed(f"dense: {dense.answer}", start)

    fasa_compile.reset_stats()
    backend = fasa_compile.fasa_backend(profile, n_fac=args.n_fac, n_sink=4, n_recent=16, dense_below=0, inner=inner)
    sparse = run(model, tokenizer, backend, question, read, args.new_tokens)
    timed(f"FASA:  {sparse.answer}", start)

    report = fasa_compile.explain(backend)
    stats = fasa_compile.stats()
    print(f"\n{report}\n")
    rows = report.sparse
    sites = len({row.layer for row in rows})
    print(
        f"{sites} of {len(model.model.layers)} layers decode sparsely; {stats['sparse_steps']} sparse steps,", end=" "
    )
    print(f"{stats['state_rebuilds']} rebuilds of a layer's packed FC cache\n")

    graph = max((row.graph for row in rows), default=0)
    read_dense = sum(row.dense_bytes for row in rows if row.graph == graph)
    read_sparse = sum(row.sparse_bytes for row in rows if row.graph == graph)
    print(f"{'':24s}{'dense':>12s}{'FASA':>12s}")
    print(f"{'tokens/s':24s}{1 / dense.step:12.1f}{1 / sparse.step:12.1f}")
    print(f"{'KV read per step, MB':24s}{read_dense / 1e6:12.2f}{read_sparse / 1e6:12.2f}")
    print(f"{'perplexity':24s}{dense.perplexity:12.2f}{sparse.perplexity:12.2f}")
    print(f"{'finds the fact':24s}{_yes(ANSWER in dense.answer):>12s}{_yes(ANSWER in sparse.answer):>12s}")
    print(
        f"\nbudget {args.n_fac} of {question.shape[1]} tokens per KV head; perplexity over {args.new_tokens - 1} decode steps"
    )
    timed("in all", start)
    if sites != len(model.model.layers) or not stats["sparse_steps"]:
        raise SystemExit("FASA did not run in every layer: see the reasons above")


def _yes(value: bool) -> str:
    return "yes" if value else "no"


if __name__ == "__main__":
    main()
