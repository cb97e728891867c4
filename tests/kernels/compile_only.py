"""Compiles what a launcher launches for GPUs that are not here: the launch is recorded and compiled, not run."""

from __future__ import annotations

import contextlib
import re
import subprocess
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from triton.runtime.jit import JITFunction

_TYPES = {
    torch.float32: "*fp32", torch.float16: "*fp16", torch.bfloat16: "*bf16", torch.int32: "*i32", torch.int64: "*i64",
    torch.uint8: "*u8", torch.int8: "*i8", torch.float8_e4m3fn: "*fp8e4nv",
}  # fmt: skip
_OPTIONS = ("num_warps", "num_stages", "launch_pdl", "maxnreg")


@dataclass
class Launch:
    """One recorded launch: ``compile`` it for a compute capability (90 for 9.0)."""

    kernel: JITFunction
    arguments: dict[str, Any]
    options: dict[str, Any]
    noted: Any

    def compile(self, capability: int) -> Any:
        signature: dict[str, str] = {}
        constants: dict[tuple[int, ...], Any] = {}
        attributes: dict[tuple[int, ...], Any] = {}
        for i, parameter in enumerate(self.kernel.params):
            value = self.arguments[parameter.name]
            if parameter.is_constexpr or value is None or (isinstance(value, int) and value == 1):
                signature[parameter.name] = "constexpr"
                constants[(i,)] = value
                continue
            if isinstance(value, torch.Tensor):
                signature[parameter.name] = _TYPES[value.dtype]
                aligned = True
            else:
                signature[parameter.name] = (
                    "fp32" if isinstance(value, float) else "i32" if abs(value) < 2**31 else "i64"
                )
                aligned = isinstance(value, int) and value % 16 == 0
            if aligned:
                attributes[(i,)] = [["tt.divisibility", 16]]
        source = ASTSource(fn=self.kernel, signature=signature, constexprs=constants, attrs=attributes)
        return triton.compile(source, target=GPUTarget("cuda", capability, 32), options=self.options)


def registers(compiled: Any) -> int:
    """Of a thread, as a multiprocessor gives them out: in eights."""
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(compiled.asm["cubin"])
        file.flush()
        command = [triton.knobs.nvidia.cuobjdump.path, "-res-usage", file.name]
        found = re.search(r"REG:(\d+)", subprocess.run(command, capture_output=True, text=True, check=True).stdout)
    assert found
    return -(-int(found[1]) // 8) * 8


@contextlib.contextmanager
def recording(note: Callable[[], Any] = lambda: None) -> Iterator[list[Launch]]:
    """While open, launches of Triton kernels are recorded and not run. ``note`` is called at each."""
    launches: list[Launch] = []
    run = JITFunction.run

    def record(self: JITFunction, *args: Any, grid: Any, warmup: bool, **kwargs: Any) -> None:
        options = {name: kwargs.pop(name) for name in _OPTIONS if name in kwargs}
        arguments = dict(zip([p.name for p in self.params], args, strict=False)) | kwargs
        launches.append(Launch(self, arguments, options, note()))

    JITFunction.run = record
    try:
        yield launches
    finally:
        JITFunction.run = run
