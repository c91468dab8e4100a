"""``python -m capmoe_eval.adaptive profile=zoo``: adaptive γ against every static one."""

from capmoe_eval.report.adaptive import main

if __name__ == "__main__":
    main()
