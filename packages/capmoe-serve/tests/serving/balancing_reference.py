"""Define the placements with loops; the tests compare the array code with them.

Nothing at run time uses this module. It works on Python lists, and takes its definitions from the
sources that the other modules name.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from fractions import Fraction

from capmoe_serve.planners import LeastLoaded

Loads = Sequence[float]  # one number for each expert of a layer
Slots = Sequence[Sequence[int]]  # the expert in every slot of each rank of a layer
Shares = Sequence[Sequence[float]]  # the pairs of every slot of each rank


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


def largest_remainder(load: Sequence[int], slots: Slots, shares: Shares) -> list[list[int]]:
    """Return shares in whole tokens: rounded down, then an expert's largest remainders go up."""
    down = [[math.floor(share + 1e-6) for share in rank] for rank in shares]
    tokens = [list(rank) for rank in down]
    for expert, pairs in enumerate(load):
        places = [(r, n) for r, rank in enumerate(slots) for n, e in enumerate(rank) if e == expert]
        left = pairs - sum(down[r][n] for r, n in places)
        remainder = {(r, n): round(shares[r][n] - down[r][n], 6) for r, n in places}
        places.sort(key=lambda place: -remainder[place])
        for rank, slot in places[:left]:
            tokens[rank][slot] += 1
    return tokens


def lowest_fullest_rank(load: Loads, slots: Slots) -> float:
    """Return the lowest load that the fullest rank can have, whatever the split over replicas.

    By the duality of flows and cuts it is the highest mean, over the sets of ranks, of the loads
    whose experts have slots in that set alone.
    """
    homes = [{r for r, rank in enumerate(slots) if e in rank} for e in range(len(load))]
    sets = itertools.chain.from_iterable(
        itertools.combinations(range(len(slots)), size) for size in range(1, len(slots) + 1)
    )
    return max(
        sum(load[e] for e, home in enumerate(homes) if home <= set(ranks)) / len(ranks)
        for ranks in sets
    )


def llep(load: Sequence[int], ranks: int, settings: LeastLoaded) -> list[list[int]]:
    """Return the pairs of each expert on each rank, by Algorithms 2 to 4 as printed."""
    local, total = len(load) // ranks, sum(load)
    native = [sum(load[r * local : (r + 1) * local]) for r in range(ranks)]
    tokens = [[0] * len(load) for _ in range(ranks)]
    compared = load if settings.imbalance == "expert" else native
    if ranks == 1 or max(compared) * len(compared) < settings.threshold * total:
        for expert, pairs in enumerate(load):
            tokens[expert // local][expert] = pairs
        return tokens
    limit = math.ceil(Fraction(repr(settings.alpha)) * total / ranks)
    pending, assigned = list(native), [0] * ranks

    def give(rank: int, expert: int, pairs: int) -> None:
        tokens[rank][expert] += pairs
        assigned[rank] += pairs

    for expert in sorted(range(len(load)), key=lambda e: -load[e]):
        home, rest = expert // local, load[expert]
        pending[home] -= rest
        available = limit - assigned[home] - pending[home]
        if available > 0:
            give(home, expert, min(available, rest))
            rest -= min(available, rest)
        while rest > 0:
            others = [r for r in range(ranks) if r != home]
            others.sort(key=lambda r: assigned[r] + pending[r])
            for rank in others:
                chunk = min(rest, limit - assigned[rank] - pending[rank])
                if chunk < settings.least and rest > chunk:
                    continue
                give(rank, expert, chunk)
                rest -= chunk
                break
            else:
                give(others[0], expert, rest)
                rest = 0
    return tokens
