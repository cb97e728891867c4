"""Layers on several GPUs of one process, as ``device_map`` has them, in a form that ``torch.compile`` takes in one piece."""

from __future__ import annotations

from typing import Any, TypeVar

import torch
from torch import Tensor, nn

from fasa_compile.errors import ModelError

Model = TypeVar("Model", bound=nn.Module)


def traceable_device_map(model: Model) -> Model:
    """Lets ``torch.compile`` take a model whole that transformers or accelerate spread over several devices (``device_map=...``); returns it.

    accelerate moves what goes from one device to the next in hooks that Dynamo does not trace, so that the graph breaks at every
    module and no attention in it can be told from another layer's. They are taken off, and forward hooks of PyTorch's own do the same:
    what enters a module of ``model.hf_device_map`` is moved to its device, and what the model returns to the device of what it was given.
    Weights stay where they are, and each layer's KV cache and state lie where its keys are made.

    Call it once, before ``torch.compile``; a second call changes nothing. Raises ``ModelError`` for a model without a device map,
    and for one whose weights are on the host or on disk: these need accelerate's hooks.
    """
    places = getattr(model, "hf_device_map", None)
    if places is None:
        raise ModelError(
            "this model has no hf_device_map: only a model that was loaded with device_map=... has hooks to replace"
        )
    away = sorted({name for name, p in model.named_parameters() if p.is_meta})
    if away:
        raise ModelError(
            f"{len(away)} weights are not on a device, among them {away[0]}: accelerate brings them in at each call, which cannot be "
            "traced. Give device_map more memory on the GPUs, or leave the model as it is (attention then stays dense)"
        )
    if not any(hasattr(m, "_hf_hook") for m in model.modules()):
        return model
    from accelerate.hooks import remove_hook_from_submodules

    remove_hook_from_submodules(model)
    for name, place in places.items():
        device = torch.device("cuda", place) if isinstance(place, int) else torch.device(place)
        model.get_submodule(name).register_forward_pre_hook(_Arguments(device), with_kwargs=True, prepend=True)
    model.register_forward_hook(_returned, with_kwargs=True)
    return model


class _Arguments:
    """A forward pre-hook that moves a module's tensors to its device. Caches and other objects are left alone."""

    def __init__(self, device: torch.device) -> None:
        self.device = device

    def __call__(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Any, Any]:
        return _moved(args, self.device), _moved(kwargs, self.device)


def _moved(x: Any, device: torch.device) -> Any:
    """``x`` with its tensors on ``device``, through plain tuples, lists and dicts."""
    if isinstance(x, Tensor):
        return x.to(device)
    if type(x) in (tuple, list):
        return type(x)(_moved(y, device) for y in x)
    if type(x) is dict:
        return {key: _moved(y, device) for key, y in x.items()}
    return x


def _returned(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], out: Any) -> Any:
    """A forward hook that moves tensors of the output to where the first tensor among the arguments was."""
    given = next((x for x in (*args, *kwargs.values()) if isinstance(x, Tensor)), None)
    if given is None:
        return out
    if isinstance(out, dict):  # transformers' outputs are
        for key, x in out.items():
            if isinstance(x, Tensor):
                out[key] = x.to(given.device)
        return out
    return _moved(out, given.device)
