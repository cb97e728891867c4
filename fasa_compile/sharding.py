"""Several processes: which of a model's heads this one has (tensor parallelism), and whether all of them decided alike.

Tensor parallelism communicates nothing in a step: selection is local to a KV head, and each process has whole KV heads. What is
exchanged, once per graph and over the process group's key-value store, is what each process is about to do; likewise by processes that
share out a KV cache's tokens (``sequence.py``).
"""

from __future__ import annotations

import datetime
import hashlib
import importlib.metadata
import json
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import fx

from fasa_compile.capture import Shadow
from fasa_compile.errors import FasaError
from fasa_compile.profiles.schema import FCProfile, LayerProfile
from fasa_compile.sites import AttentionSite, NoMatch, Shard

if TYPE_CHECKING:
    from fasa_compile.plan import Plan, Policy

#: How long a process waits for the others to have compiled the same graph.
PATIENCE = datetime.timedelta(minutes=10)


@dataclass(frozen=True)
class Share:
    """Part ``index`` of ``parts`` equal parts of an attention's query heads; ``ranks`` hold one part each, in this order."""

    index: int
    parts: int
    ranks: tuple[int, ...]


class Disagreement(FasaError):
    """A process of a group is about to run something else than the others, or has not come."""


def is_dtensor(value: Any) -> bool:
    if not dist.is_available():
        return False
    from torch.distributed.tensor import DTensor

    return isinstance(value, DTensor)


def communicates(shadow: Shadow) -> bool:
    """Whether running the graph takes other processes: it is sharded, or has collectives of its own."""
    return any(map(is_dtensor, shadow.example_inputs)) or any(
        "c10d" in str(n.target) or "gather_sequence" in str(n.target) for n in shadow.gm.graph.nodes
    )


def _weight_below(node: fx.Node, examples: Mapping[fx.Node, Any]) -> Any:
    """The DTensor input that ``node`` is, or is made of alone; None if there is none."""
    while node.op != "placeholder":
        if len(node.all_input_nodes) != 1:
            return None
        node = node.all_input_nodes[0]
    value = examples.get(node)
    return value if is_dtensor(value) else None


def _rows_shared(weight: Any) -> Share | None:
    """How a weight's output features (dim 0) are shared out over the mesh; None where each process has them all."""
    mesh, index, parts = weight.device_mesh, 0, 1
    dims = [i for i, p in enumerate(weight.placements) if getattr(p, "dim", None) == 0]
    for i in dims:
        index, parts = index * mesh.size(i) + mesh.get_local_rank(i), parts * mesh.size(i)
    if parts == 1:
        return None
    here = list(mesh.get_coordinate())
    for i in dims:
        here[i] = slice(None)
    return Share(index, parts, tuple(mesh.mesh[tuple(here)].flatten().tolist()))


def shares_of(sites: Iterable[AttentionSite | NoMatch], shadow: Shadow) -> dict[int, Share]:
    """The part of each attention's heads that this process has, by the site's index, read off the weights that its operands were
    projected with. Left out where these are no DTensors sharded by rows, or do not agree."""
    if not any(map(is_dtensor, shadow.example_inputs)):
        return {}
    examples = dict(zip(shadow.dynamo.graph.find_nodes(op="placeholder"), shadow.example_inputs, strict=True))
    outputs = {node.name: node for node in shadow.dynamo.graph.nodes}
    found = {s.index: _share(outputs[s.output], examples) for s in sites if isinstance(s, AttentionSite)}
    return {index: share for index, share in found.items() if share is not None}


def _share(start: fx.Node, examples: Mapping[fx.Node, Any]) -> Share | None:
    todo, seen, found = [start], {start}, set()
    while todo:
        node = todo.pop()
        weights = [w for w in (_weight_below(n, examples) for n in node.all_input_nodes) if w is not None]
        found |= {_rows_shared(w) for w in weights if w.dim() > 1}
        for source in node.all_input_nodes:
            if source not in seen and not weights:
                seen.add(source)
                todo.append(source)
    shares = found - {None}
    return shares.pop() if len(shares) == 1 else None


def local_layer(layer: LayerProfile, num_heads: int, num_kv_heads: int, share: Share | None) -> LayerProfile:
    """The layer as this process sees it, whose attention has ``num_heads`` query and ``num_kv_heads`` KV heads.

    Query heads are shared out in order. A KV head whose query heads are on several processes is on each of these. Anything
    else than that comes back unchanged, for ``check_layer`` to refuse.
    """
    if (num_heads, num_kv_heads) == (layer.num_heads, layer.num_kv_heads) or share is None:
        return layer
    if num_heads * share.parts != layer.num_heads:
        return layer
    group = layer.num_heads // layer.num_kv_heads
    heads = range(share.index * num_heads, (share.index + 1) * num_heads)
    kv_heads = range(heads.start // group, (heads.stop - 1) // group + 1)
    if len(kv_heads) != num_kv_heads or num_heads % num_kv_heads:
        return layer
    if len(kv_heads) > 1 and (heads.start % group or heads.stop % group):
        return layer  # parts of two groups: consecutive query heads would not be equal groups of these KV heads
    part = layer.slice_heads(kv_heads)
    mine = slice(heads.start, heads.stop)
    return replace(part, num_heads=num_heads, norm=layer.norm[mine].clone(), affine=layer.affine[mine].clone())


def _profile_digest(profile: Any) -> str:
    if not isinstance(profile, FCProfile):
        return str(profile)
    digest = hashlib.sha256(f"{profile.fc_format} {profile.reduction}".encode())
    for layer in profile.layers:
        digest.update(f"{layer.layer} {layer.dense} {layer.n_fac} {layer.rope}".encode())
        for tensor in (layer.fcs, layer.centre, layer.spread, layer.norm, layer.affine):
            digest.update(tensor.contiguous().numpy().tobytes())
    return digest.hexdigest()[:16]


def _version(package: str) -> str:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return "none"


def _parts(shard: Shard | None) -> str:
    return "" if shard is None else f" {shard.ranks} x {shard.rows} tokens"


def software() -> dict[str, str]:
    """The versions that must be the same on every process."""
    return {"fasa_compile": _version("fasa-compile"), "torch": torch.__version__, "triton": _version("triton")}


def _account(planned: Plan, policy: Policy) -> dict[str, Any]:
    """What this process is about to run, in the parts that must be the same everywhere."""
    sites = [
        f"{d.site.layer}: {d.action} {d.reason} {d.fc_format} {d.budget} {getattr(d.site, 'shape', ())}"
        f"{_parts(getattr(d.site, 'shard', None))}"
        for d in planned.decisions
    ]
    return software() | {
        "profile": _profile_digest(policy.profile),
        "budget": repr((policy.budget_for(None), policy.share)),
        "dense_below": policy.dense_below,
        "attention sites": sites,
    }


_met: Counter[tuple[int, ...]] = Counter()  # meetings so far, by group of ranks


def agree(planned: Plan, policy: Policy, shares: Iterable[Share], *, peer_memory: bool = False) -> None:
    """Compare what the processes that share these heads, or a KV cache's tokens, are about to run. Raises ``Disagreement``."""
    shards = {d.site.shard for d in planned.decisions if isinstance(d.site, AttentionSite) and d.site.shard is not None}
    groups = {(share.ranks, share.index, "tensor-parallel") for share in shares}
    groups |= {(ranks_of(shard.group), shard.rank, "sequence") for shard in shards}
    for ranks, index, kind in sorted(groups):
        meet(ranks, index, kind, "a graph", {**_account(planned, policy), "peer_memory": peer_memory})


def ranks_of(group: str) -> tuple[int, ...]:
    """The global ranks of the process group of that name."""
    return tuple(dist.get_process_group_ranks(dist.distributed_c10d._resolve_process_group(group)))  # type: ignore[attr-defined, arg-type]


def meet(ranks: tuple[int, ...], index: int, kind: str, what: str, account: Mapping[str, Any]) -> None:
    """Compare ``account``, in JSON, with that of all ``ranks``, of which this process is the ``index``-th. Each calls it as often.

    ``kind`` of group and ``what`` they compile or make are for the message. Raises ``Disagreement`` with the rank and what differs, or
    the rank that did not come within ``PATIENCE``.
    """
    _met[ranks] += 1
    store = dist.distributed_c10d._get_default_store()
    stem = f"fasa_compile/{'-'.join(map(str, ranks))}/{_met[ranks]}"
    mine = {"compiles or makes": what, **account}
    store.set(f"{stem}/{ranks[index]}", json.dumps(mine))
    for rank in ranks:
        try:
            store.wait([f"{stem}/{rank}"], PATIENCE)
        except RuntimeError as error:  # what the kinds of store raise has no closer ancestor
            raise Disagreement(
                f"rank {rank} has not come to make {what} (meeting {_met[ranks]}) of the {kind} group {list(ranks)} within "
                f"{PATIENCE.total_seconds():.0f} s: it was lost, or does not run the model as the others do"
            ) from error
        theirs = json.loads(store.get(f"{stem}/{rank}"))
        for name, value in mine.items():
            if theirs.get(name) != value:
                raise Disagreement(
                    f"rank {rank} and rank {ranks[index]} of a {kind} group differ in {name}: "
                    f"{_difference(theirs.get(name), value)}. Give every rank the same profile, options and package versions"
                )


def _difference(theirs: Any, mine: Any) -> str:
    if isinstance(theirs, list) and isinstance(mine, list):
        if len(theirs) != len(mine):
            return f"{len(theirs)} against {len(mine)}"
        theirs, mine = next((a, b) for a, b in zip(theirs, mine, strict=True) if a != b)
    return f"{theirs!r} against {mine!r}"
