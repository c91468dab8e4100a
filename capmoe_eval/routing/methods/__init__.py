"""The methods of the paper, one module each; importing them imports no torch."""
