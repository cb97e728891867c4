"""``fasa-compile generate``: a completion or a chat, with what it took."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.markup import escape

from fasa_compile.cli.app import (
    ANYWAY,
    DEVICE,
    INNER,
    JSON,
    MODEL,
    N_FAC,
    PROFILE,
    app,
    budget_options,
    busy,
    command,
    need_tokenizer,
    pick_device,
    pick_inner,
    print_json,
    read_profile,
    stderr,
)
from fasa_compile.report_html import size

if TYPE_CHECKING:
    from fasa_compile.generation import Clock
    from fasa_compile.report import Report


@command(app, "generate")
def generate(
    model: MODEL,
    prompt: Annotated[str | None, typer.Option(help="What to continue or answer; without it, a chat on stdin.")] = None,
    file: Annotated[Path | None, typer.Option(help="A text that stands before the prompt (a long document).")] = None,
    profile: PROFILE = None,
    n_fac: N_FAC = None,
    new_tokens: Annotated[int, typer.Option("--new-tokens", min=1, help="Tokens at most.")] = 128,
    dense: Annotated[bool, typer.Option("--dense", help="Exact attention, for comparison.")] = False,
    chat: Annotated[bool | None, typer.Option(help="Use the chat template (where there is one).")] = None,
    temperature: Annotated[float, typer.Option(min=0.0, help="0: the likeliest token.")] = 0.0,
    device: DEVICE = None,
    inner: INNER = None,
    any_weights: ANYWAY = False,
    as_json: JSON = False,
) -> None:
    """Continue a text or answer a question, sparsely, with statistics. Without --prompt: a chat, one line a turn."""
    import fasa_compile
    from fasa_compile import loading
    from fasa_compile.generation import Clock, Printer
    from fasa_compile.generation import generate as run

    found = loading.source(model)
    loaded = None if dense else (read_profile(profile) or "all")
    place, compiler = pick_device(device), pick_inner(inner)
    with busy(f"loading {escape(found.name)}"):
        real, tokenizer = loading.load(found, place)
    tokenizer = need_tokenizer(tokenizer, model)
    if loaded == "all":
        stderr().print(
            "[yellow]note:[/] no profile: tokens are scored with all dims of the keys, which is right and saves little",
            highlight=False,
        )
    templated = bool(getattr(tokenizer, "chat_template", None)) if chat is None else chat
    if templated and not getattr(tokenizer, "chat_template", None):
        raise typer.BadParameter("--chat: the tokenizer has no chat template")
    options: dict[str, Any] = {} if dense else budget_options(n_fac)
    if any_weights:
        options["check_weights"] = False
    document = file.read_text(encoding="utf-8") + "\n\n" if file is not None else ""
    turns: list[dict[str, str]] = []
    results = []
    interactive = prompt is None and sys.stdin.isatty()

    def questions() -> Iterator[str]:
        if prompt is not None:
            yield prompt
            return
        while True:
            if interactive:
                stderr().print("[bold]> [/]", end="")
            line = sys.stdin.readline()
            if not line:
                return
            if line.strip():
                yield line.strip()

    for number, question in enumerate(questions()):
        turns.append({"role": "user", "content": (document if number == 0 else "") + question})
        if templated:
            made = tokenizer.apply_chat_template(
                turns, add_generation_prompt=True, return_tensors="pt", return_dict=True
            )
        else:
            made = tokenizer("".join(turn["content"] for turn in turns), return_tensors="pt")
        ids = made["input_ids"].to(real.device)
        if not ids.shape[1]:
            raise typer.BadParameter("--prompt: the tokenizer makes no token of it")
        clock = Clock() if as_json else Printer(tokenizer, sys.stdout)
        fasa_compile.reset_stats()
        end = tokenizer.pad_token_id if tokenizer.pad_token_id is not None else tokenizer.eos_token_id
        sampling = {"do_sample": True, "temperature": temperature} if temperature > 0 else {"do_sample": False}
        run(
            real,
            {"input_ids": ids, "attention_mask": ids.new_ones(ids.shape)},
            profile=loaded,
            inner=compiler,
            backend=options,
            max_new_tokens=new_tokens,
            streamer=clock,
            pad_token_id=end,
            **sampling,
        )
        answer = tokenizer.decode(clock.tokens, skip_special_tokens=True)
        turns.append({"role": "assistant", "content": answer})
        result = {"prompt": question, "answer": answer, **statistics(ids.shape[1], clock, fasa_compile.explain())}
        results.append(result)
        if not as_json:
            stderr().print(statistics_line(result), highlight=False)
    if as_json:
        print_json(results)


def statistics(prompt_tokens: int, clock: Clock, report: Report) -> dict[str, Any]:
    """What a generation took, as JSON data. Bytes are those of the last decode graph's sites, cache full."""
    import fasa_compile

    stats = fasa_compile.stats()
    decode = [g.index for g in report.graphs if g.kind == "decode"]
    rows = [r for r in report.rows if decode and r.graph == decode[-1]]
    step = clock.step()
    return {
        "prompt_tokens": prompt_tokens,
        "new_tokens": len(clock.tokens),
        "prefill_s": clock.prefill(),
        "ms_per_token": 1e3 * step,
        "tokens_per_s": 1 / step if step else 0.0,
        "sites": len(rows),
        "sparse_sites": sum(r.decision == "sparse" for r in rows),
        "sparse_steps": stats["sparse_steps"],
        "dense_steps": stats["dense_steps"],
        "state_rebuilds": stats["state_rebuilds"],
        "kv_bytes_read": sum(r.sparse_bytes for r in rows),
        "kv_bytes_dense": sum(r.dense_bytes for r in rows),
    }


def statistics_line(found: dict[str, Any]) -> str:
    parts = [
        f"{found['prompt_tokens']:,} tokens read in {found['prefill_s']:.2f} s",
        f"{found['new_tokens']} written at [bold]{found['tokens_per_s']:.1f}/s[/]",
        f"{found['sparse_sites']} of {found['sites']} sites sparse",
        f"{found['sparse_steps']} sparse steps",
    ]
    if found["kv_bytes_dense"] > found["kv_bytes_read"]:
        parts.append(f"{size(found['kv_bytes_read'])} of {size(found['kv_bytes_dense'])} K and V read per step")
    return f"[dim]{'  |  '.join(parts)}[/]"
