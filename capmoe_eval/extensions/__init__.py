"""Methods of other papers, one folder each, which may be removed.

A folder's package registers its method when it is imported, and imports no torch at its top. It may
import everything below this package; nothing imports it by name.
"""
