"""MME, MMBench and SEED-Bench as tasks of lm-eval's multimodal models."""
