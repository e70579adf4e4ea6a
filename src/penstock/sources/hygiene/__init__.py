"""What keeps unsuitable text out, rule by rule, each with the name it is counted under.

    paths       vendored folders, include and exclude patterns          before a file is read
    content     not text at all; minified; generated                    over a document's bytes
    secrets     keys, tokens, passwords, private keys                   over a document's bytes
    cleaning    the step that applies the last two to what a source read

docs/hygiene.md has the rules, their thresholds and what they cost.
"""

from penstock.sources.hygiene.cleaning import Cleaning, CleaningOptions
from penstock.sources.hygiene.content import content_problem
from penstock.sources.hygiene.languages import LANGUAGES, language_of
from penstock.sources.hygiene.paths import RULES_VERSION, VENDORED_FOLDERS, PathRules

__all__ = [
    "LANGUAGES",
    "RULES_VERSION",
    "VENDORED_FOLDERS",
    "Cleaning",
    "CleaningOptions",
    "PathRules",
    "content_problem",
    "language_of",
]
