"""Pairwise covering arrays: few rows in which every two properties meet (greedy; Cohen et al. 1997, "AETG")."""

from __future__ import annotations

import itertools
import random
from typing import Any


def covering_array(factors: dict[str, tuple[Any, ...]]) -> list[dict[str, Any]]:
    """Rows in which every pair of values of every two factors occurs."""
    names = list(factors)
    missing = {(a, va, b, vb) for a, b in itertools.combinations(names, 2) for va in factors[a] for vb in factors[b]}
    rows = []
    rng = random.Random(5)
    while missing:
        best: tuple[int, dict[str, Any]] = (-1, {})
        for _ in range(30):
            row = {name: rng.choice(values) for name, values in factors.items()}
            for name in rng.sample(names, len(names)):  # improve one factor at a time
                row[name] = max(factors[name], key=lambda v: len(missing & pairs_of({**row, name: v})))  # noqa: B023
            best = max(best, (len(missing & pairs_of(row)), row), key=lambda entry: entry[0])
        missing -= pairs_of(best[1])
        rows.append(best[1])
    return rows


def pairs_of(row: dict[str, Any]) -> set[tuple[str, Any, str, Any]]:
    return {(a, row[a], b, row[b]) for a, b in itertools.combinations(row, 2)}
