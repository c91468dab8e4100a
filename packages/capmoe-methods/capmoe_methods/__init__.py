"""Methods of other papers for ``capmoe_eval``, a folder each, which finds them by entry points.

A folder's package registers its method when it is imported, and imports no torch at its top. It may
import all of the suite; the suite imports no folder by its name.
"""
