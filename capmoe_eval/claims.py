"""``python -m capmoe_eval.claims profile=zoo``: judge every claim of the paper."""

from capmoe_eval.report.claims.command import main

if __name__ == "__main__":
    main()
