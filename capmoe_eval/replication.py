"""``python -m capmoe_eval.replication profile=zoo``: test the claims on every model."""

from capmoe_eval.report.replication.command import main

if __name__ == "__main__":
    main()
