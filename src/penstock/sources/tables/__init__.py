"""Tables as sources: JSONL, CSV, TSV, Parquet, Arrow; plain or compressed; one document per row.

folders -> files -> source -> [text over streams | columns] -> documents
"""

from penstock.sources.tables.folders import found_tables, unread_tables
from penstock.sources.tables.source import TableOptions, TablesSource

__all__ = ["TableOptions", "TablesSource", "found_tables", "unread_tables"]
