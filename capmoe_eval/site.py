"""``python -m capmoe_eval.site profile=zoo``: build a report to browse from finished records."""

from capmoe_eval.report.site.command import main

if __name__ == "__main__":
    main()
