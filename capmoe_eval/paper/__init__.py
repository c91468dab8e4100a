"""The paper: its printed values, its tables as data, its claims, and the statistics that test them.

Nothing here renders, and neither torch nor lm-eval may be imported.
"""
