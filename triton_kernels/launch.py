"""What every launcher needs: the device guard, kernels that start early, and masks and bounds as pointers and strides."""

from __future__ import annotations

import ctypes
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from functools import cache
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from .driver import driver

#: Natural-log units to the base-2 units in which the kernels work.
LOG2E = 1.4426950408889634

NO_MASK, BOOL_MASK, ADDITIVE_MASK = 0, 1, 2


def on_device(tensor: Tensor) -> AbstractContextManager[None]:
    """Launches go to the current device, which need not be the tensors' own. (On CPU: Triton's interpreter.)"""
    return torch.cuda.device(tensor.device) if tensor.is_cuda else nullcontext()


@dataclass(frozen=True)
class Device:
    """What configurations are chosen by."""

    sms: int
    capability: int  # 80 for compute capability 8.0
    native: bool  # False in the interpreter: no inline PTX

    @property
    def fp8(self) -> bool:
        """Whether the tensor cores take e4m3 operands."""
        return self.capability >= 89

    @property
    def early(self) -> bool:
        """Whether a kernel may be launched while the one before it still runs (``wait_for_predecessor``)."""
        return self.native and self.capability >= 90 and hasattr(tl.extra.cuda, "gdc_wait")


@triton.jit
def wait_for_predecessor(EARLY: tl.constexpr):
    """What a kernel launched with ``launch_pdl`` does before it touches what a step writes: waits until its predecessor has
    completed. Since every kernel does so, unconditionally, all kernels before that one have completed too, and neither reads
    nor writes can overtake theirs. Before the wait a kernel may read what its predecessor does not write, if that one admits it
    only after a wait of its own: what came earlier is complete by then."""
    if EARLY:
        tl.extra.cuda.gdc_wait()


@triton.jit
def admit_successor(EARLY: tl.constexpr):
    """Lets the next kernel be set up, once all programs have come here. It will wait for this one's end, but its programs take
    their places now: a kernel that fills the GPU calls this near its end, or the next one's are spread unevenly."""
    if EARLY:
        tl.extra.cuda.gdc_launch_dependents()


@cache
def _cuda_device(index: int) -> Device:
    properties = torch.cuda.get_device_properties(index)
    return Device(properties.multi_processor_count, 10 * properties.major + properties.minor, True)


def device_of(tensor: Tensor) -> Device:
    if not tensor.is_cuda:
        return Device(sms=4, capability=90, native=False)
    return _cuda_device(tensor.device.index)


_PARTITIONED: set[int] = set()


def partition_alike(kernel: Any) -> None:
    """Asks for half of the L1 as shared memory for a kernel that was just launched, from its next launch on. The driver would
    choose for each kernel by what it needs, and a multiprocessor that has to change the partition takes nothing of the next
    kernel before all of the last is gone: for kernels of a microsecond or two that follow each other, that is what costs."""
    function = getattr(kernel, "function", None)  # None where launches are interpreted or only recorded
    if function is None or function in _PARTITIONED:
        return
    _PARTITIONED.add(function)
    preferred_shared_memory_carveout = 9
    driver().cuFuncSetAttribute(
        ctypes.c_void_p(function), preferred_shared_memory_carveout, 50
    )  # a wish: no error to meet


def power_of_2(n: int) -> int:
    """The smallest power of two that is at least ``n``."""
    return 1 << max(0, (n - 1).bit_length())


def split_width(n: int, least: int = 16) -> tuple[int, int]:
    """``n`` columns as two power-of-two blocks, the second 0 where one is enough: 576 -> (512, 64), 80 -> (64, 16)."""
    first = power_of_2(n)
    if first != n and first > least:
        first //= 2
    rest = n - first
    return max(first, least), max(power_of_2(rest), least) if rest > 0 else 0


@dataclass(frozen=True)
class Mask:
    """A mask as the kernels take it. ``per_head``: it differs between query heads."""

    tensor: Tensor | None
    kind: int
    strides: tuple[int, int, int]  # batch, head, token; 0 where it is broadcast
    per_head: bool


def mask_arguments(mask: Tensor | None) -> Mask:
    if mask is None:
        return Mask(None, NO_MASK, (0, 0, 0), False)
    if mask.dtype == torch.bool:
        kind, mask = BOOL_MASK, mask.view(torch.uint8)
    else:
        kind = ADDITIVE_MASK
    while mask.dim() < 4:
        mask = mask[None]
    strides = [0 if size == 1 else stride for size, stride in zip(mask.shape, mask.stride(), strict=True)]
    return Mask(mask, kind, (strides[0], strides[1], strides[3]), strides[1] != 0)
