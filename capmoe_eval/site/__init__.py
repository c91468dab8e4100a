"""A report to browse: one static site from finished records, without server, network or torch.

__main__   the command
inventory  what is there: records, unreadable files, cells that are missing
command    the command line that reproduces a cell
page       the frame of a page, its addresses and filters
overview, results, figures, efficiency, claims, listing, cell_page
           what each kind of page shows; its HTML is a template of capmoe_eval.report.templates
build      all pages as texts, and their way to the disk
assets/    the stylesheet and the script, copied beside the pages
"""

from capmoe_eval.site.build import build, write_site
from capmoe_eval.site.inventory import Inventory, take_inventory

__all__ = ["Inventory", "build", "take_inventory", "write_site"]
