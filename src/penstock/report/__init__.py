"""Stage 7: run records -> manifest, page, summary. Imports neither torch nor jax.

Read in this order: fields, quantities and markup (values, numbers and text that can be anything), run and measures
(records -> figures), manifest, summary, charts, sections, page.
"""

from penstock.report.manifest import build_manifest, write_manifest
from penstock.report.page import write_page
from penstock.report.summary import summary_lines

__all__ = ["build_manifest", "summary_lines", "write_manifest", "write_page"]
