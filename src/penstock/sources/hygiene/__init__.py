"""What keeps unsuitable text out, rule by rule, each with the name it is counted under.

    paths       vendored folders, include and exclude patterns          before a file is read
    content     not text at all; minified; generated                    over a document's bytes
    secrets     keys, tokens, passwords, private keys                   over a document's bytes
    marks       one look that tells which of the last two needn't read a document
    cleaning    the step that applies these to what a source read

docs/hygiene.md has the rules, their thresholds and what they cost.
"""

from penstock.sources.hygiene.cleaning import Cleaning, CleaningOptions
from penstock.sources.hygiene.content import PROBLEMS, content_problem
from penstock.sources.hygiene.languages import LANGUAGES, language_of
from penstock.sources.hygiene.paths import RULES_VERSION, VENDORED_FOLDERS, PathRules

__all__ = [
    "LANGUAGES",
    "PROBLEMS",
    "RULES_VERSION",
    "VENDORED_FOLDERS",
    "Cleaning",
    "CleaningOptions",
    "PathRules",
    "content_problem",
    "language_of",
]
