"""Fingerprints: whether a profile was made on this model, and on which tokens.

They tell things apart that were mixed up by mistake. They are no proof against someone who wants two models to look alike.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence

import torch
from torch import Tensor, nn

_VERSION = "1"
_SAMPLES = 64  # values read of each parameter
_WRAPPER = "_orig_mod"  # the module that torch.compile(model) puts around a model, or around a part of one
#: Smaller magnitudes count as zero: fp16 is exact for bf16 values above it only.
_TINY = 2.0**-14

#: The second part of the fingerprint of a model whose values cannot be read.
UNREAD = "unread"


def weights_fingerprint(model: nn.Module) -> str:
    """``"1-<names and shapes>-<values>"``: a deterministic hash of a model's parameters, cheap at any size.

    Hashed are every parameter's name, shape, and 64 values at fixed places. Buffers are not (they are often derived, and
    RoPE is checked on the graph).

    Independent of: device, memory layout, whether the model or a part of it is wrapped by ``torch.compile``, the order of
    registration; and of the dtype where the checkpoint's values are exact in it: values are compared rounded to bf16, so a
    checkpoint loaded as fp32 or bf16 gives one fingerprint, and a bf16 checkpoint loaded as fp16 (below 65504) too. An fp32
    checkpoint loaded as fp16 may differ: it was rounded twice. A new value, name or shape changes the fingerprint, unless
    the value is none of the sampled ones or is less than a bf16 step away.

    When any parameter's values cannot be read (meta and fake tensors, quantised, sharded and other tensor subclasses), the
    values part is ``unread`` and only names and shapes tell models apart; compare fingerprints with ``same_weights``.
    """
    shapes, values = hashlib.sha256(), hashlib.sha256()
    readable = True
    # Tied parameters are listed under each of their names: which one comes first is not the model's property.
    named = [(_plain_name(name), p) for name, p in model.named_parameters(remove_duplicate=False)]
    for name, parameter in sorted(named, key=lambda entry: entry[0]):
        label = f"{name}:{','.join(map(str, parameter.shape))};".encode()
        shapes.update(label)
        sample = _sample(parameter) if readable else None
        if sample is None:
            readable = False
        else:
            values.update(label)
            values.update(sample)
    return f"{_VERSION}-{shapes.hexdigest()[:16]}-{values.hexdigest()[:16] if readable else UNREAD}"


def weights_stamp(model: nn.Module) -> int:
    """A number that changes when a parameter is replaced, moved or written, as far as PyTorch counts writes; nothing is read."""
    return hash(tuple((id(p), -1 if p.is_inference() else p._version, _address(p)) for p in model.parameters()))


def _address(parameter: Tensor) -> int:
    try:
        return parameter.data_ptr()
    except RuntimeError:  # a fake tensor, or a subclass without memory of its own
        return 0


def same_weights(recorded: str, found: str) -> bool:
    """Whether two weight fingerprints can be of one model; names and shapes decide alone where one has no values."""
    a, b = recorded.split("-"), found.split("-")
    if len(a) != 3 or len(b) != 3:
        return recorded == found
    return a[:2] == b[:2] and (a[2] == b[2] or UNREAD in (a[2], b[2]))


def data_fingerprint(token_ids: Tensor | Sequence[Tensor]) -> str:
    """16 hex digits of the token ids, integers of any shape, and of their shapes; a sequence of texts hashes in its order.

    The integer dtype and the device do not matter. Raises ``TypeError`` for tokens that are not integers.
    """
    texts = [token_ids] if isinstance(token_ids, Tensor) else list(token_ids)
    digest = hashlib.sha256()
    for text in texts:
        if not isinstance(text, Tensor) or text.is_floating_point() or text.is_complex() or text.dtype == torch.bool:
            kind = text.dtype if isinstance(text, Tensor) else type(text).__name__
            raise TypeError(f"token_ids: expected integer tensors, found {kind}. Pass the tokenizer's ids.")
        digest.update(f"{','.join(map(str, text.shape))};".encode())
        digest.update(text.detach().to("cpu", torch.int64).contiguous().numpy().astype("<i8").tobytes())
    return digest.hexdigest()[:16]


def _plain_name(name: str) -> str:
    return ".".join(part for part in name.split(".") if part != _WRAPPER)


def _sample(parameter: Tensor) -> bytes | None:
    """Up to ``_SAMPLES`` evenly spread values, as little-endian fp32 of their bf16 rounding; ``None`` if they can't be read."""
    if type(parameter) not in (nn.Parameter, Tensor) or parameter.is_meta or parameter.layout != torch.strided:
        return None
    values, size = parameter.detach(), parameter.numel()
    if size == 0:
        return b""
    count = min(size, _SAMPLES)
    places = torch.arange(count, dtype=torch.int64) * (size - 1) // max(count - 1, 1)
    if values.dim():
        # By index, not by reshape: a parameter stored transposed would be copied whole, and must hash alike.
        values = values[torch.unravel_index(places.to(values.device), values.shape)]
    read = values.to("cpu", torch.float32).to(torch.bfloat16).float()
    read = torch.where(read.abs() < _TINY, 0.0, read)  # and no negative zero
    return read.numpy().astype("<f4").tobytes()
