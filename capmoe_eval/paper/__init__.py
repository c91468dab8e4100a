"""The paper: its printed values, its tables and claims as data, and their tests.

Nothing here renders, and neither torch nor lm-eval may be imported.
"""
