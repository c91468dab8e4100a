"""``python -m capmoe_eval.loads RECORD.json OUT.png``: draw the load of one layer."""

from capmoe_eval.report.figures.loads import main

if __name__ == "__main__":
    main()
