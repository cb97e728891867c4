"""Host memory that holds K and V (FASA-M), seen as tensors of the device.

A block holds one layer's rows: K and V of a token side by side, ``[B, Hkv, L, D + Dv]``. For a GPU its K and V are CUDA tensors over
that very memory: kernels read and write it across PCIe, so cache writes, CUDA graphs and every kernel of ours work on it
unchanged. On a CPU they are plain tensors. The sparse decode reads a few rows of it in a step, through a hot buffer on the GPU
(``triton_kernels/hot_slots.py``).

The memory is CUDA's managed memory, told to stay on the host: its address translations reach further than those of pinned memory,
whose rows a GPU gathers at half the speed once they are spread over more than some GiB. Where a system has no managed memory that
both sides may use at a time, it is pinned.

A block is found again by the address of a tensor, so views and whatever Dynamo hands on are recognised. It is returned to the
system when the last tensor over it is gone.
"""

from __future__ import annotations

import ctypes
import mmap
import os
import weakref
from collections.abc import Callable, Iterator, Sequence
from functools import cache, partial
from pathlib import Path
from typing import Any

import torch

from fasa_compile.errors import OffloadError
from fasa_compile.triton_kernels.driver import driver

_HUGE = 1 << 21
_MAPPED = 3  # cudaHostRegisterPortable | cudaHostRegisterMapped
# Of CUDA's driver.
_CONCURRENT_MANAGED_ACCESS, _ATTACH_GLOBAL, _PREFERRED_LOCATION, _ACCESSED_BY, _CPU = 89, 1, 3, 5, -1

_blocks: weakref.WeakValueDictionary[int, HostRows] = weakref.WeakValueDictionary()  # by first address
# Memory to give back when no CUDA graph is being captured.
_waiting: list[tuple[Callable[[], object], torch.device]] = []


class HostRows:
    """One layer's rows in host memory.

    ``rows`` is the memory as a CPU tensor ``[B, Hkv, L, D + Dv]``; ``keys`` and ``values`` are made of it once, by
    ``offloaded_cache``, and keep the block alive.
    """

    def __init__(self, shape: Sequence[int], v_dim: int, dtype: torch.dtype, device: torch.device) -> None:
        B, Hkv, L, D = shape
        self.device, self.k_dim, self.v_dim = device, D, v_dim
        self.bytes = B * Hkv * L * (D + v_dim) * dtype.itemsize
        size = -(-self.bytes // mmap.PAGESIZE) * mmap.PAGESIZE
        release: Callable[[], object] | None = None
        if device.type == "cuda" and _manages(device):
            self._all, release = _managed(size, device)
        else:
            self._all = _anonymous(size)
            if device.type == "cuda":
                release = _pinned(self._all, device)
        self.address, self.end = self._all.data_ptr(), self._all.data_ptr() + self.bytes
        if release is not None:
            # The GPU may still be using it.
            done = weakref.finalize(self, _give_back, release, device)
            done.atexit = False
        self.rows = self._all[: self.bytes].view(dtype).view(B, Hkv, L, D + v_dim)
        self.values: weakref.ref[torch.Tensor] | None = None
        _blocks[self.address] = self

    def part(self, first: int, width: int) -> torch.Tensor:
        """Columns ``[first, first + width)`` of the rows as a tensor of the device, with a storage of its own: to PyTorch, K and V
        share no memory, and indeed they share no byte."""
        offset = first * self.rows.element_size()
        window = _Window(self, self.address + offset, self.bytes - offset)
        with torch.inference_mode(False), torch.no_grad():
            if self.device.type == "cuda":
                whole = torch.as_tensor(window, device=self.device)
                if whole.data_ptr() != window.address:
                    raise OffloadError(
                        f"host memory of {self.device} was copied instead of mapped: it needs unified addressing"
                    )
            else:
                whole = torch.frombuffer(window.buffer(), dtype=torch.uint8)
            shape, strides = (*self.rows.shape[:3], width), self.rows.stride()
            return torch.empty(0, dtype=self.rows.dtype, device=self.device).set_(
                whole.untyped_storage(), 0, shape, strides
            )


class _Bytes:
    """Bytes at an address, for those who make tensors of addresses."""

    def __init__(self, address: int, size: int) -> None:
        self.address, self.size = address, size
        self.__cuda_array_interface__ = {
            "shape": (size,), "typestr": "|u1", "data": (address, False), "strides": None, "version": 3,
        }  # fmt: skip

    def buffer(self) -> Any:
        """The same for a CPU tensor, which holds this object."""
        made: Any = (ctypes.c_ubyte * self.size).from_address(self.address)
        made.owner = self
        return made


class _Window(_Bytes):
    """Bytes of a block. Whoever holds it holds the block."""

    def __init__(self, block: HostRows, address: int, size: int) -> None:
        super().__init__(address, size)
        self.block = block


# ---- where the memory comes from --------------------------------------------------------------------------------------


def _anonymous(size: int) -> torch.Tensor:
    """``size`` bytes of the process, zeros, as a CPU tensor."""
    try:
        memory = mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    except (OSError, ValueError) as problem:
        raise OffloadError(f"the system gives no {_gib(size)} of host memory for a KV cache: {problem}") from problem
    if size >= _HUGE and hasattr(mmap, "MADV_HUGEPAGE"):
        memory.madvise(mmap.MADV_HUGEPAGE)  # fewer address translations, for the GPU too
    return torch.frombuffer(memory, dtype=torch.uint8)


def _pinned(memory: torch.Tensor, device: torch.device) -> Callable[[], object]:
    """Pins and maps a CPU tensor; returns what undoes it, which keeps the tensor."""
    memory.zero_()  # by all cores: pinning would touch page after page on one
    with torch.cuda.device(device):
        error = torch.cuda.cudart().cudaHostRegister(memory.data_ptr(), memory.numel(), _MAPPED)
    if int(error) != 0:
        raise OffloadError(
            f"{_gib(memory.numel())} of host memory could not be pinned for {device} (CUDA error {int(error)}): "
            f"{_gib(host_available())} are available; a container may limit locked memory (ulimit -l)"
        )
    return lambda: torch.cuda.cudart().cudaHostUnregister(memory.data_ptr())


@cache
def _manages(device: torch.device) -> bool:
    """Whether CPU and GPU may use managed memory at a time (not on Windows, nor where pages always move)."""
    try:
        cuda = driver()
    except OSError:
        return False
    with torch.cuda.device(device):
        torch.cuda.cudart().cudaMemGetInfo(device.index)  # the context that the driver's calls need
        found = ctypes.c_int()
        error = cuda.cuDeviceGetAttribute(ctypes.byref(found), _CONCURRENT_MANAGED_ACCESS, device.index)
    return error == 0 and found.value == 1


def _managed(size: int, device: torch.device) -> tuple[torch.Tensor, Callable[[], object]]:
    """``size`` bytes of managed memory that stay on the host, mapped for a GPU, zeros, as a CPU tensor; and what frees them."""
    cuda, address, n = driver(), ctypes.c_uint64(), ctypes.c_size_t(size)
    with torch.cuda.device(device):
        error = cuda.cuMemAllocManaged(ctypes.byref(address), n, _ATTACH_GLOBAL)
        for advice, place in ((_PREFERRED_LOCATION, _CPU), (_ACCESSED_BY, device.index)):
            error = error or cuda.cuMemAdvise(address, n, advice, place)
    if error != 0:
        if address.value:
            cuda.cuMemFree_v2(address)
        raise OffloadError(
            f"{_gib(size)} of host memory could not be had for {device} (CUDA error {error}): {_gib(host_available())} are available"
        )
    release = partial(cuda.cuMemFree_v2, address)
    whole = _Bytes(address.value, size)
    try:
        # Pages come to be where they are touched first; by the GPU that takes a quarter of the time.
        torch.as_tensor(whole, device=device).zero_()
        torch.cuda.synchronize(device)
    except BaseException:
        release()
        raise
    return torch.frombuffer(whole.buffer(), dtype=torch.uint8), release


def _give_back(release: Callable[[], object], device: torch.device) -> None:
    """Gives back this memory and whatever waits. Waiting for the device would break a capture that happens to run: then it is put off."""
    _waiting.append((release, device))
    if torch.cuda.is_current_stream_capturing():
        return
    while _waiting:
        release, device = _waiting.pop()
        torch.cuda.synchronize(device)
        with torch.cuda.device(device):
            release()


# ---- caches -----------------------------------------------------------------------------------------------------------


def rows_of(tensor: torch.Tensor) -> HostRows | None:
    """The block in whose memory a tensor lies, if any."""
    if not _blocks or tensor.numel() == 0:
        return None
    try:
        address = tensor.data_ptr()
    except RuntimeError:  # a fake tensor has none
        return None
    return next((b for b in list(_blocks.values()) if b.address <= address < b.end), None)


def offloaded_cache(
    shape: Sequence[int],
    dtype: torch.dtype = torch.bfloat16,
    device: torch.device | str | int = "cuda",
    *,
    v_dim: int | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """K ``[B, Hkv, L, D]`` and V ``[B, Hkv, L, Dv]``, zeros, in host memory and usable as tensors of ``device``.

    For a module of your own: keep them where its cache was (register them as buffers, write them in place, attend to them), and
    compile it with ``fasa_backend(profile, offload="cpu")``. ``shape``: K's; ``v_dim``: V's last size where it is another. Reading
    all of it goes across PCIe: in prefill, attend to ``staged(k, v, length)``. What copies a tensor (``.to``, ``deepcopy``) leaves
    host memory.

    Raises ``OffloadError`` where host memory does not suffice or cannot be mapped for the device.
    """
    place = torch.device(device)
    if place.type == "cuda" and place.index is None:
        place = torch.device("cuda", torch.cuda.current_device())
    if place.type not in ("cuda", "cpu"):
        raise OffloadError(f"a KV cache can be kept in host memory for a CUDA device or the CPU, not for {place}")
    width = shape[3] if v_dim is None else v_dim
    check_host(shape[0] * shape[1] * shape[2] * (shape[3] + width) * dtype.itemsize)
    block = HostRows(shape, width, dtype, place)
    keys, values = block.part(0, shape[3]), block.part(shape[3], width)
    block.values = weakref.ref(values)
    # CUDA graphs would copy the whole cache in every step if its address could change.
    torch._dynamo.mark_static_address(keys)
    torch._dynamo.mark_static_address(values)
    return keys, values


def staged(keys: torch.Tensor, values: torch.Tensor, length: int) -> tuple[torch.Tensor, torch.Tensor]:
    """The first ``length`` tokens of an offloaded K and V in the memory of their device, for attention that reads them many times.

    One copy of a layer at a time is all that a prefill needs on a GPU. On a CPU, views.
    """
    block = rows_of(keys)
    if block is None or block.device.type != "cuda":
        return keys[:, :, :length], values[:, :, :length]
    rows = block.part(0, block.k_dim + block.v_dim)
    made = torch.empty((*rows.shape[:2], length, rows.shape[3]), dtype=rows.dtype, device=block.device)
    for b in range(rows.shape[0]):
        for h in range(rows.shape[1]):  # runs of bytes, which the copy engine takes
            made[b, h].copy_(rows[b, h, :length])
    return made[..., : block.k_dim], made[..., block.k_dim :]


def pieces(k: torch.Tensor, tokens: int = 16384) -> Iterator[tuple[int, torch.Tensor]]:
    """``k [B, Hkv, L, D]`` a stretch of L at a time, each with its first token: copies on the device where k lies in host memory,
    whose scattered dims a kernel would read slowly; else k itself."""
    block = rows_of(k)
    if block is None or block.device.type != "cuda":
        yield 0, k
        return
    for first in range(0, k.shape[2], tokens):
        yield first, k[:, :, first : first + tokens].contiguous()


# ---- memory that is there ---------------------------------------------------------------------------------------------


def _gib(n: int) -> str:
    return f"{n / 2**30:.2f} GiB"


def _number(path: str) -> int | None:
    try:
        return int(Path(path).read_text())
    except (OSError, ValueError):  # no such limit, or "max"
        return None


def host_available() -> int:
    """Bytes of host memory that can still be had: the system's, or what a container leaves of its limit."""
    found = []
    try:
        for line in Path("/proc/meminfo").read_text().splitlines():
            if line.startswith("MemAvailable:"):
                found.append(int(line.split()[1]) * 1024)
    except OSError:
        found.append(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"))
    for limit, used in (
        ("/sys/fs/cgroup/memory.max", "/sys/fs/cgroup/memory.current"),
        ("/sys/fs/cgroup/memory/memory.limit_in_bytes", "/sys/fs/cgroup/memory/memory.usage_in_bytes"),
    ):
        most, now = _number(limit), _number(used)
        if most is not None and now is not None:
            found.append(max(0, most - now))
    return min(found)


def check_host(size: int, what: str = "a KV cache") -> None:
    """Raises ``OffloadError``, with figures, where ``size`` bytes of host memory cannot be had."""
    there = host_available()
    if size > there:
        raise OffloadError(
            f"{what} needs {_gib(size)} of host memory and {_gib(there)} are available: shorten max_cache_len or the batch"
        )


def check_device(size: int, device: torch.device, what: str) -> None:
    """Raises ``OffloadError``, with figures, where ``size`` bytes cannot be had on a GPU."""
    if device.type != "cuda":
        return
    free, _ = torch.cuda.mem_get_info(device)
    there = free + torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
    if size > there:
        raise OffloadError(
            f"{what} need {_gib(size)} on {device} and {_gib(there)} are free: fewer dominant chunks, a narrower FC format, a "
            "smaller hot_tokens or a shorter cache need less"
        )
