"""Figures of the paper, and some that it lacks, from finished results alone.

A figure is declared as data (:mod:`capmoe_eval.figures.catalogue`): which parts of the experiment
``figures`` it shows, what is measured from their records, and how that is drawn. What is drawn is
exactly what is written beside it as JSON: ``measure`` turns records into plain numbers, ``draw``
sees those numbers alone. Nothing here needs torch, and matplotlib is imported by drawing only.

    catalogue   every figure: name, parts, title, caption
    spec        what such a declaration is
    evidence    the records of a figure, and what is missing
    studies     the same of figures that show benchmarks, not records
    pooling     sums and means over layers, tasks and seeds
    style       sizes, colours, fonts, and bytes that do not depend on the day
    write       SVG, PDF, PNG and JSON
    print_values  what could be read from the paper's own figures and Table 1
    expert_load, layer_load, dropped, gate_scores, gamma_curve, rounds, pareto, waste, companions
                what the figures of records measure and draw
    speedup, breakdown, placement, skew
                what the figures of benchmarks measure and draw
"""

from capmoe_eval.figures.catalogue import FIGURES, get_figure
from capmoe_eval.figures.evidence import FigureRecords, gather
from capmoe_eval.figures.spec import FigureSpec, Measured, StudySpec
from capmoe_eval.figures.studies import FigureStudies, gather_study
from capmoe_eval.figures.write import write_figure

__all__ = [
    "FIGURES",
    "FigureRecords",
    "FigureSpec",
    "FigureStudies",
    "Measured",
    "StudySpec",
    "gather",
    "gather_study",
    "get_figure",
    "write_figure",
]
