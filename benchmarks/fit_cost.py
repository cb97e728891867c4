"""Fits the cost model's constants of a card to times measured by ``benchmarks/attention.py``.

    python benchmarks/fit_cost.py benchmarks/results/attention-h100.json

Least squares on relative errors: two constants on the dense kernel's times, three on those of every sparse format at once; the
searching steps ("jump") are left out, being one in a thousand. Writes the card's entry in ``fasa_compile/cards.json`` and prints
how far each time is from the fit. ``tests/cost`` repeats that check.
"""

from __future__ import annotations

import argparse
import json
import re
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np
import sympy

from fasa_compile import cost
from fasa_compile.triton_kernels.formats import bytes_per_token

CARDS = Path(cost.__file__).parent / "cards.json"


def samples(record: dict[str, Any]) -> list[tuple[str, cost.Shape, float]]:
    """(kind, shape, microseconds) of each measured time; kind is "dense" or a format's name."""
    found = []
    G, d, n_fac = record["query heads"] // record["kv heads"], record["head_dim"], record["n_fac"]

    def add(kind: str, B: int, L: int, n_tip: int, us: Any) -> None:
        w, fc = (2 * n_tip, bytes_per_token(2 * n_tip, kind)) if n_tip else (0, 1)
        # Within the budget the sparse operator is the dense kernel.
        if isinstance(us, int | float) and (not n_tip or n_fac < L):
            found.append((kind, cost.Shape(B, L, record["kv heads"], G, d, d, 2, n_fac, w, fc), float(us)))

    for row in record["rows"]:
        if "sparse" in row:
            add("dense", row["B"], row["L"], 0, row["dense kernel us"])
            for case in row["sparse"]:
                add(case["fmt"], row["B"], row["L"], case["n_tip"], case["us"])
            continue
        for name, us in row.items():  # records made before formats had fields of their own
            form = re.fullmatch(r"(fp8|int8|int4|bf16|fp16) n_tip (\d+)", name)
            if form or name == "dense kernel":
                add(form[1] if form else "dense", row["batch"], row["context"], int(form[2]) if form else 0, us)
    return found


def fit(record: dict[str, Any]) -> cost.Card:
    unit = cost.Card(record["card"], record["multiprocessors"], 1.0, 1.0, 1.0, 1.0, 1.0)
    values: dict[str, float] = {}
    for formula, names, dense in (
        (cost.DENSE_US, ("dense_start", "dense_rate"), True),
        (cost.SPARSE_US, ("sparse_start", "tip_rate", "fac_rate"), False),
    ):
        rows = [(shape, us) for kind, shape, us in samples(record) if (kind == "dense") == dense]
        # The formula is linear in its constants: the coefficient of each is the derivative by it.
        parts = [sympy.diff(formula, next(s for s in formula.free_symbols if s.name == name)) for name in names]
        matrix = np.array([[cost.evaluate(part, shape, unit) / us for part in parts] for shape, us in rows])
        scale = np.abs(matrix).max(axis=0)
        solution = np.linalg.lstsq(matrix / scale, np.ones(len(rows)), rcond=None)[0] / scale
        if (solution <= 0).any():
            raise SystemExit(f"the fit gave {dict(zip(names, solution, strict=True))}: constants must be positive")
        values |= {name: float(f"{x:.4g}") for name, x in zip(names, solution, strict=True)}
    return cost.Card(record["card"], record["multiprocessors"], **values)


def errors(record: dict[str, Any], card: cost.Card) -> list[tuple[str, cost.Shape, float, float]]:
    """(kind, shape, measured, predicted) of each measured time."""
    return [
        (kind, shape, us, cost.evaluate(cost.DENSE_US if kind == "dense" else cost.SPARSE_US, shape, card))
        for kind, shape, us in samples(record)
    ]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("record", type=Path)
    options = parser.parse_args()
    record = json.loads(options.record.read_text())
    card = fit(record)
    for kind, shape, us, predicted in errors(record, card):
        print(
            f"{kind:6s} {shape.B:3d} x {shape.L:7d}  measured {us:6.1f}  fit {predicted:6.1f}  {predicted / us - 1:+.0%}"
        )
    document = json.loads(CARDS.read_text()) if CARDS.exists() else {"cards": []}
    fitted = f"benchmarks/results/{options.record.name}: {record['date']}, torch {record['torch']}, triton {record['triton']}"
    entry = {**asdict(card), "unit": "microseconds per launch, microseconds per byte", "fitted to": fitted}
    document["cards"] = [c for c in document["cards"] if c["name"] != card.name] + [entry]
    CARDS.write_text(json.dumps(document, indent=1) + "\n")


if __name__ == "__main__":
    main()
