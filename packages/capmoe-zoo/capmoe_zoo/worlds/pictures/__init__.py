"""A closed world of drawn pictures, and questions in the form of real evaluation sets."""
