"""Real language models as Mixture-of-Experts models: base, text, partition, training, assembly."""
