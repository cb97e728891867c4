"""Collectives of small tensors over GPUs that read and write each other's memory, in one kernel each.

NCCL takes 11 us for 32 kB inside a CUDA graph, this 2.4 (``benchmarks/results/distributed-h200.json``). A process writes its words into the memory of all
others and waits for theirs in its own. A word travels as 8 bytes, 4 of them data and 4 the number of the exchange, stored and
read whole: whoever reads the number it expects has the data as well, so there is nothing else to wait for and no flag to reset.

Each program exchanges its own block of words with the same programs of the other processes, and counts its exchanges. Odd and even ones use
different halves of the memory, so a block is overwritten only two exchanges later. By then it has been read: who sends
exchange n + 2 has the words of n + 1 from every process, and these sent them after they had read those of n. The processes must make
the same calls in the same order, on one stream each. One that waits longer than the process group's timeout ends its kernel with an error.

Sums are made in fp32 and in the order of the ranks, so every process has the same bits.
"""

# ruff: noqa: RUF005, SIM300 (Triton concatenates tuples, it does not unpack into them; they grow, so mypy's fixed lengths don't fit)
# mypy: disable-error-code="assignment"

from __future__ import annotations

import threading
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
import triton
import triton.language as tl
from torch import Tensor

from .launch import admit_successor, device_of, on_device, wait_for_predecessor
from .ops import MOST_BYTES, MOST_RANKS

BLOCK = 256  # words of a program, one to a thread
PROGRAMS = MOST_BYTES // 4 // BLOCK


@triton.jit
def _send(to, word, use, NATIVE: tl.constexpr):
    """Stores words of 8 bytes, each whole, where ``use``, in memory that may be another GPU's."""
    if NATIVE:
        tl.inline_asm_elementwise(
            "{ .reg .pred p; setp.ne.s32 p, $3, 0; @p st.volatile.global.b64 [$1], $2; mov.u32 $0, 0; }",
            "=r,l,l,r", [to, word, use.to(tl.int32)], dtype=tl.int32, is_pure=False, pack=1,
        )  # fmt: skip
    else:
        tl.store(to, word, mask=use)


@triton.jit
def _clock(NATIVE: tl.constexpr):
    """Nanoseconds."""
    now = tl.full((), 0, tl.int64)
    if NATIVE:
        now = tl.inline_asm_elementwise(
            "mov.u64 $0, %globaltimer;", "=l", [], dtype=tl.int64, is_pure=False, pack=1
        )  # fmt: skip
    return now


@triton.jit
def _receive(at, number, use, began, patience, NATIVE: tl.constexpr):
    """The words that arrive at ``at`` with exchange ``number``, where ``use``. Ends the kernel with an error after ``patience``."""
    none = number.to(tl.int64) << 32
    got = tl.load(at, mask=use, other=none, volatile=True)
    while tl.max(((got >> 32).to(tl.int32) != number).to(tl.int32), axis=0) != 0:
        if NATIVE:
            tl.inline_asm_elementwise(
                "{ .reg .pred p; setp.gt.s64 p, $1, $2; @p trap; mov.u32 $0, 0; }",
                "=r,l,l", [_clock(NATIVE) - began, patience], dtype=tl.int32, is_pure=False, pack=1,
            )  # fmt: skip
        got = tl.load(at, mask=use, other=none, volatile=True)
    return got.to(tl.int32)


@triton.jit
def _numbers(word, DTYPE: tl.constexpr):
    """The one or two numbers of a word of 4 bytes, in fp32."""
    if DTYPE == tl.float32:
        low = word.to(tl.float32, bitcast=True)
        high = low
    else:
        low = word.to(tl.int16).to(DTYPE, bitcast=True).to(tl.float32)
        high = (word >> 16).to(tl.int16).to(DTYPE, bitcast=True).to(tl.float32)
    return low, high


@triton.jit
def _word(low, high, DTYPE: tl.constexpr):
    """Undoes ``_numbers``, rounding."""
    if DTYPE == tl.float32:
        word = low.to(tl.int32, bitcast=True)
    else:
        word = low.to(DTYPE).to(tl.int16, bitcast=True).to(tl.int32) & 0xFFFF
        word |= high.to(DTYPE).to(tl.int16, bitcast=True).to(tl.int32) << 16
    return word


@triton.jit
def exchange_kernel(
    x, out, memory, numbers, patience, words, distances,
    RANK: tl.constexpr, RANKS: tl.constexpr, CAPACITY: tl.constexpr, BLOCK: tl.constexpr,
    SUM: tl.constexpr, DTYPE: tl.constexpr,
    SEND: tl.constexpr, RECEIVE: tl.constexpr,  # both, but in tests, where processes take turns
    NATIVE: tl.constexpr, EARLY: tl.constexpr,
):  # fmt: skip
    """Grid (programs,): ``x`` and ``out`` as int32 ``[words]``, or ``out [RANKS * words]`` without SUM. ``memory`` int64 ``[2, RANKS,
    CAPACITY]`` is this process's, ``distances`` int64 ``[RANKS]`` how many elements further that of each rank begins; ``numbers`` int32
    ``[programs]``, of the last exchange; ``patience`` in nanoseconds."""
    program = tl.program_id(0)
    i = program * BLOCK + tl.arange(0, BLOCK)
    use = i < words
    further = ()
    for step in tl.static_range(1, RANKS):
        further = further + (tl.load(distances + (RANK + step) % RANKS),)
    wait_for_predecessor(EARLY)
    number = tl.load(numbers + program) + 1
    own = tl.load(x + i, mask=use, other=0)
    at = (number & 1).to(tl.int64) * (RANKS * CAPACITY) + i
    if SEND:
        labelled = (own.to(tl.int64) & 0xFFFFFFFF) | (number.to(tl.int64) << 32)
        for step in tl.static_range(1, RANKS):
            _send(memory + further[step - 1] + at + RANK * CAPACITY, labelled, use, NATIVE)
    if RECEIVE:
        began = _clock(NATIVE)
        low = tl.zeros((BLOCK,), tl.float32)
        high = tl.zeros((BLOCK,), tl.float32)
        for source in tl.static_range(RANKS):
            word = own
            if source != RANK:
                word = _receive(memory + at + source * CAPACITY, number, use, began, patience, NATIVE)
            if SUM:
                more_low, more_high = _numbers(word, DTYPE)
                low += more_low
                high += more_high
            else:
                tl.store(out + source * words + i, word, mask=use)
        if SUM:
            tl.store(out + i, _word(low, high, DTYPE), mask=use)
        tl.debug_barrier()  # all have read the number
        tl.store(numbers + program, number)
    admit_successor(EARLY)


@dataclass(frozen=True)
class Workspace:
    """What one process needs for the exchanges of a group."""

    memory: Tensor  # int64 [2, ranks, words], where the others write
    numbers: Tensor  # int32 [PROGRAMS], of each program's last exchange
    distances: Tensor  # int64 [ranks], from the beginning of ``memory`` to that of each rank's, in elements
    rank: int
    ranks: int
    patience: int  # nanoseconds
    handle: Any  # keeps the others' memory mapped


class PeerMemoryError(RuntimeError):
    """The processes of a group cannot write each other's memory."""


# By the group's name: the group itself, since names are used again, and its workspace.
_workspaces: dict[str, tuple[dist.ProcessGroup, Workspace]] = {}


def workspace(group: str) -> Workspace:
    """That of the process group of that name. The first call makes it, which all its processes must do at the same point.

    Raises ``PeerMemoryError`` where they are too many, on several hosts, or on GPUs without access to each other.
    """
    processes = dist.distributed_c10d._resolve_process_group(group)  # type: ignore[arg-type, attr-defined]
    if group not in _workspaces or _workspaces[group][0] is not processes:
        if torch.cuda.is_current_stream_capturing():
            raise PeerMemoryError("run the step once before a CUDA graph is captured: its first call allocates")
        # On a thread of its own: while a CUDA graph warms up, this thread's allocations go to the graph's pool.
        made: list[Workspace | Exception] = []
        device = torch.cuda.current_device()

        def make() -> None:
            try:
                made.append(_make(processes, device))
            except Exception as problem:
                made.append(problem)

        maker = threading.Thread(target=make)
        maker.start()
        maker.join()
        (result,) = made
        if isinstance(result, Exception):
            raise PeerMemoryError(
                f"the processes of group {group!r} cannot exchange through each other's memory ({result}): they must be at most "
                f"{MOST_RANKS}, on one host, on GPUs with access to each other (nvidia-smi topo -p2p r). Leave peer_memory out"
            ) from result
        _workspaces[group] = processes, result
    return _workspaces[group][1]


def _make(processes: dist.ProcessGroup, device: int) -> Workspace:
    import torch.distributed._symmetric_memory as symmetric

    torch.cuda.set_device(device)
    rank, ranks = dist.get_rank(processes), dist.get_world_size(processes)
    if ranks > MOST_RANKS:
        raise ValueError(f"there are {ranks}")
    words = PROGRAMS * BLOCK
    size = 2 * ranks * words
    whole = symmetric.empty(size + PROGRAMS + ranks, dtype=torch.int64, device=torch.device("cuda", device))
    whole.zero_()
    torch.cuda.synchronize(device)  # before another process writes there
    handle = symmetric.rendezvous(whole, processes)
    begins = torch.tensor(handle.buffer_ptrs)
    distances = whole[-ranks:]
    distances.copy_((begins - begins[rank]) // 8)
    handle.barrier()
    torch.cuda.synchronize(device)
    patience = processes._get_backend(torch.device("cuda", device)).options._timeout
    return Workspace(
        whole[:size].view(2, ranks, words),
        whole[size:].view(torch.int32)[:PROGRAMS],
        distances,
        rank,
        ranks,
        int(patience.total_seconds() * 1e9),
        handle,
    )


def exchange(x: Tensor, shared: Workspace, *, add: bool, send: bool = True, receive: bool = True) -> Tensor:
    """The sum of every process's ``x``, of the same shape, or with ``add=False`` all of them, ``[ranks, *x.shape]``.

    ``x``: contiguous, of at most ``MOST_BYTES`` bytes, a multiple of 4; for a sum fp32, fp16 or bf16. ``ValueError`` otherwise.
    """
    device = device_of(x)
    size = x.numel() * x.element_size()
    if not 0 < size <= MOST_BYTES or size % 4 or (add and x.dtype not in _TRITON):
        raise ValueError(
            f"cannot exchange {tuple(x.shape)} {x.dtype} through peers' memory: see MOST_BYTES, and fp32, fp16 or bf16 sums"
        )
    words = size // 4
    out = torch.empty_like(x) if add else x.new_empty((shared.ranks, *x.shape))
    with on_device(x):
        exchange_kernel[(triton.cdiv(words, BLOCK),)](
            x.view(-1).view(torch.int32), out.view(-1).view(torch.int32), shared.memory, shared.numbers, shared.patience, words,
            shared.distances,
            RANK=shared.rank, RANKS=shared.ranks, CAPACITY=shared.memory.shape[2], BLOCK=BLOCK,
            SUM=add, DTYPE=_TRITON[x.dtype] if add else tl.float32, SEND=send, RECEIVE=receive,
            NATIVE=device.native, EARLY=device.early, num_warps=BLOCK // 32, launch_pdl=device.early,
        )  # fmt: skip
    return out


_TRITON = {torch.float32: tl.float32, torch.float16: tl.float16, torch.bfloat16: tl.bfloat16}


def all_reduce(x: Tensor, group: str) -> Tensor:
    """The sum of ``x`` over the processes of the group of that name, as ``exchange`` makes it."""
    return exchange(_aligned(x), workspace(group), add=True)


def all_gather(x: Tensor, ranks: int, group: str) -> Tensor:
    """``x [n, ...]`` of all ``ranks`` processes of the group, one after another: ``[ranks * n, ...]``."""
    return exchange(_aligned(x), workspace(group), add=False).flatten(0, 1)


def _aligned(x: Tensor) -> Tensor:
    """Contiguous and readable by words."""
    x = x.contiguous()
    return x.clone() if x.data_ptr() % 4 else x
