"""SmolLM2-135M-Instruct as a Mixture-of-Experts model, made of its own neurons."""
