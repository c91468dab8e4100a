"""Draw the experiments of the methods beside Token Drop, as `catalogue.yaml` declares."""
