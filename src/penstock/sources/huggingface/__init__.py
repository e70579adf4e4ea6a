"""Hugging Face data sets: words of the command line to local tables, from either cache or, when allowed, the hub."""
