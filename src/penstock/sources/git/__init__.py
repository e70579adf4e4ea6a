"""Git history as a source: a private clone of an untrusted repository, its commits rendered to text, its files.

words -> repository -> objects -> rendering -> history
"""

from penstock.sources.git.history import GitOptions, GitSource

__all__ = ["GitOptions", "GitSource"]
