"""``python -m capmoe_eval.tables table2 profile=zoo``: render a table from finished records."""

from capmoe_eval.report.tables.command import main

if __name__ == "__main__":
    main()
