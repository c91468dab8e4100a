"""The training of the embedded models: recipes, corpora, losses, cards."""
