"""Define the placements with loops; the tests compare the array code with them.

Nothing at run time uses this module. It works on Python lists, and takes its definitions from the
sources that the other modules name.
"""

from __future__ import annotations

from collections.abc import Sequence

Loads = Sequence[float]  # one number for each expert of a layer
Slots = Sequence[Sequence[int]]  # the expert in every slot of each rank of a layer


def eplb(load: Loads, ranks: int, slots: int, groups: int = 1, nodes: int = 1) -> list[list[int]]:
    """Return the experts of each rank: groups into nodes, then replicas into ranks of a node."""
    if groups % nodes:
        groups = nodes = 1
    size = len(load) // groups
    blocks = [list(range(g * size, (g + 1) * size)) for g in range(groups)]
    placed = []
    for node in packed([sum(load[e] for e in block) for block in blocks], nodes):
        experts = [expert for group in node for expert in blocks[group]]
        copies = replicated([load[e] for e in experts], ranks * slots // nodes)
        shares = [load[experts[i]] / copies.count(i) for i in copies]
        ranked = packed(shares, ranks // nodes)
        placed += [[experts[copies[copy]] for copy in rank] for rank in ranked]
    return placed


def replicated(load: Loads, slots: int) -> list[int]:
    """Return the expert of every replica: the highest load per replica gets the next one."""
    copies = list(range(len(load)))
    while len(copies) < slots:
        per_replica = [load[e] / copies.count(e) for e in range(len(load))]
        copies.append(per_replica.index(max(per_replica)))
    return copies


def packed(weights: Sequence[float], bins: int) -> list[list[int]]:
    """Return the items of each bin: the heaviest first, into the lightest bin that has room."""
    room = len(weights) // bins
    if room == 1:
        return [[item] for item in range(bins)]
    contents: list[list[int]] = [[] for _ in range(bins)]
    weight = [0.0] * bins
    for item in sorted(range(len(weights)), key=lambda i: -weights[i]):
        best = min((b for b in range(bins) if len(contents[b]) < room), key=weight.__getitem__)
        contents[best].append(item)
        weight[best] += weights[item]
    return contents


def round_robin(load: Sequence[int], slots: Slots) -> list[list[int]]:
    """Return the tokens of each slot: an expert's tokens go to its slots in turn."""
    tokens = [[0] * len(rank) for rank in slots]
    for expert, pairs in enumerate(load):
        places = [(r, n) for r, rank in enumerate(slots) for n, e in enumerate(rank) if e == expert]
        for token in range(pairs):
            rank, slot = places[token % len(places)]
            tokens[rank][slot] += 1
    return tokens
