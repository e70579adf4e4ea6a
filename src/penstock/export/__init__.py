"""Beside the flow: store -> files that other programs read."""

from penstock.export.exporting import ExportResult, export_store
from penstock.export.options import FORMATS, ExportOptions

__all__ = ["FORMATS", "ExportOptions", "ExportResult", "export_store"]
