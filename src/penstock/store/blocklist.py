"""Documents that must not be in a store, now or after any later run.

A rule is a pattern over document keys in the language of .gitignore (`code/keys/*.pem`, `docs/`), or
`content:HEX`, the content hash of a document, which holds wherever a copy of it turns up. Rules are recorded in the
version's options and honoured by every later `prepare`: what they match is left out before it is encoded, counted as
`removed`.
"""

from __future__ import annotations

import re
from collections.abc import Sequence

from penstock.errors import ConfigError
from penstock.hashing import STRONG_HASH_BYTES
from penstock.sources import SkipTally, UnitText
from penstock.sources.hygiene import PathRules
from penstock.store.reader import Store

__all__ = ["REMOVED", "Blocklist", "recorded_rules"]

REMOVED = "removed"
CONTENT = "content:"


class Blocklist:
    """A set of rules; see the module's docstring.

    Attributes:
        rules: sorted, each once.
    """

    def __init__(self, rules: Sequence[str]) -> None:
        self.rules = sorted(set(rules))
        patterns = [rule for rule in self.rules if not rule.startswith(CONTENT)]
        if any(not rule.strip() or rule.startswith("!") for rule in patterns):
            raise ConfigError(
                f"a rule of the blocklist is {next(r for r in patterns if not r.strip() or r.startswith('!'))!r}",
                hint="write a pattern of keys, such as 'code/keys/*.pem', or content:HEX",
            )
        self._keys = PathRules(include=(), exclude=patterns)
        self._contents = {_content_of(rule) for rule in self.rules if rule.startswith(CONTENT)}

    def blocks(self, key: bytes, content: bytes) -> bool:
        """Whether a document of this key and content hash must stay out."""
        return content in self._contents or self._keys.problem(key) is not None

    def without_blocked(self, text: UnitText, contents: Sequence[bytes]) -> tuple[UnitText, list[bytes]]:
        """What of a unit may be in the store; the rest is counted."""
        left = UnitText(documents=[], skips=SkipTally(each=text.skips.each))
        left.skips.merge([text.skips])
        hashes = []
        for document, content in zip(text.documents, contents, strict=True):
            if self.blocks(document.key, content):
                left.skips.add(REMOVED, document.key)
            else:
                left.documents.append(document)
                hashes.append(content)
        return left, hashes


def recorded_rules(store: Store | None) -> list[str]:
    """The rules that a version was made under."""
    rules = store.manifest.options.get("blocklist", []) if store is not None else []
    return [rule for rule in rules if isinstance(rule, str)]


def _content_of(rule: str) -> bytes:
    digits = rule.removeprefix(CONTENT)
    if not re.fullmatch(rf"[0-9a-f]{{{2 * STRONG_HASH_BYTES}}}", digits):
        raise ConfigError(
            f"{rule!r} is no content hash of {2 * STRONG_HASH_BYTES} hexadecimal digits",
            hint="`penstock inspect STORE --doc N --json` shows a document's",
        )
    return bytes.fromhex(digits)
