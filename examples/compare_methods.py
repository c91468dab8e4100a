"""Compare the methods of Table 1 by γ, from finished records.

python examples/compare_methods.py [RESULTS_DIRECTORY]
"""

from __future__ import annotations

import sys

from capmoe_eval import load_frame

METHODS = ("order", "reverse_order", "random", "score")
GAMMAS = (1.0, 1.5, 2.0)


def main(results: str = "results/zoo") -> None:
    """Print the mean accuracy of the embedded OLMoE over whole tasks, by method and γ, in percent.

    Cells with a ``limit`` are left out.
    """
    frame = load_frame(results)
    cells = frame[
        (frame["model"] == "zoo_olmoe")
        & frame["method"].isin(METHODS)
        & frame["gamma"].isin(GAMMAS)
        & (frame["granularity"] == "expert")
        & (frame["ep_size"] == 8)
        & frame["shuffle"].isna()
        & (frame["count_padding"] == False)  # noqa: E712, a column with empty fields
        & (frame["batch_size"] == 64)
        & frame["limit"].isna()
    ]
    grid = cells.pivot_table(index="task", columns=["method", "gamma"], values="value")
    # A task counts if all of these cells have it.
    grid = grid.dropna()
    if grid.empty:
        sys.exit(f"{results}: no task has all of these cells without a limit")
    print(f"Mean of {', '.join(grid.index)}, all documents:")
    print((100 * grid.mean()).unstack("gamma").round(1).to_string())


if __name__ == "__main__":
    main(*sys.argv[1:])
