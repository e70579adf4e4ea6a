"""The rules of the secret scanner: literals to search for, and who looks where one is met.

`FORMATS` are tokens known by their own shape (a prefix, a length, an alphabet). `NAMES` are literals around a secret
without a shape of its own: the names of variables, `scheme://`, names of services. The shapes follow what the services
publish and what gitleaks and detect-secrets look for. A finder gets the document and the place of the literal, and
returns the span of the secret and its kind, or None. Every repetition in an expression is bounded.

`SECRET_RULES_VERSION` goes into the store's options: a change of rules is a change of the digest.
"""

from __future__ import annotations

import base64
import binascii
import math
import re
from collections import Counter
from collections.abc import Callable

__all__ = ["FORMATS", "KINDS", "NAMES", "OPENINGS", "SECRET_RULES_VERSION", "Finder", "Span"]

SECRET_RULES_VERSION = 2

Span = tuple[int, int, str]
"""Start, end, kind."""
Finder = Callable[[bytes, int, int], Span | None]

MIN_VARIETY = 8
MIN_VALUE_VARIETY = 6
MIN_LETTERS_ONLY = 16
MAX_PEM_BYTES = 2**15
MAX_JWT_HEADER_BYTES = 1024
MAX_USER_BYTES = 128
MIN_PEM_BASE64_BYTES = 64
MIN_PEM_BASE64_SHARE = 0.7

# Long enough that a random token doesn't hold one by chance: "fake" is in one key of 600.
_PLACEHOLDER = re.compile(
    rb"(?i:x{6}|example|sample|placeholder|redacted|your[_-])|\*{3}|\.{3}|0{8}|123456789|abcdefgh|<"
)
# Of a value that only its name makes a secret.
_PLACEHOLDER_VALUE = re.compile(
    rb"x{4}|_{4}|-{4}|0{6}|1{6}|a{6}|12345678|your|change_?me|dummy|fake|replace|deadbeef|insert_|test|secret|passw|token"
    rb"|qwert|abc123|123abc|lorem|none|null|undefined|\$[{(]|\{\{|%\(|^[\"'$%{<]",
    re.IGNORECASE,
)


def _is_placeholder(secret: bytes) -> bool:
    """Whether something of the right shape only stands for a secret."""
    return len(set(secret)) < MIN_VARIETY or _PLACEHOLDER.search(secret) is not None


def _prefixed(kind: str, expression: bytes, *, skip: int = 0, left: bytes = rb"(?<![A-Za-z0-9_])") -> Finder:
    """Finds a token that begins with the literal, or `skip` bytes after its start."""
    pattern = re.compile(left + expression)

    def find(data: bytes, start: int, end: int) -> Span | None:
        found = pattern.match(data, start + skip)
        if found is None or _is_placeholder(found[0]):
            return None
        return found.start(), found.end(), kind

    return find


def _nearby(kind: str, expression: bytes, *, before: int = 0, after: int = 0) -> Finder:
    """Finds a token within so many bytes of the literal."""
    pattern = re.compile(expression)

    def find(data: bytes, start: int, end: int) -> Span | None:
        found = pattern.search(data, max(0, start - before), end + after)
        if found is None or _is_placeholder(found[0]):
            return None
        return found.start(), found.end(), kind

    return find


_PEM_HEADER = re.compile(rb"-----BEGIN (?:[A-Z0-9]{1,12} ){0,4}PRIVATE KEY(?: BLOCK)?-----")
_PEM_FOOTER = re.compile(rb"-----END (?:[A-Z0-9]{1,12} ){0,4}PRIVATE KEY(?: BLOCK)?-----")
_PEM_RUN = re.compile(rb"[A-Za-z0-9+/=\s\\]{64,32768}")
_NOT_BASE64 = bytes(set(range(256)) - set(b"ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789+/="))


def _private_key(data: bytes, start: int, end: int) -> Span | None:
    """A whole PEM block, in a file of its own, in a string with `\\n`, or in a diff; without its end, what is there."""
    start -= len("----")
    header = _PEM_HEADER.match(data, start) if start >= 0 else None
    if header is None:
        return None
    limit = header.end() + MAX_PEM_BYTES
    # Up to the next dashes, whatever they begin: a file of nothing but headers is read once, not once per header.
    body_end = data.find(b"-----", header.end(), limit)
    footer = _PEM_FOOTER.match(data, body_end) if body_end >= 0 else None
    if footer is not None:
        body, stop = data[header.end() : body_end], footer.end()
    elif run := _PEM_RUN.match(data, header.end(), limit):
        body, stop = run[0].rstrip(), header.end() + len(run[0].rstrip())
    else:
        return None
    body = body.replace(b"\\r", b"").replace(b"\\n", b"")
    size = len(body.translate(None, _NOT_BASE64))
    letters = len(body.translate(None, b" \t\r\n"))
    if size < MIN_PEM_BASE64_BYTES or size < MIN_PEM_BASE64_SHARE * letters or len(set(body)) < 20:
        return None
    return start, stop, "private-key"


_BASE64_RUN = re.compile(rb"[A-Za-z0-9+/]{64,32768}={0,2}")


def _encoded_private_key(data: bytes, start: int, end: int) -> Span | None:
    """A PEM block in Base64, as Kubernetes writes it."""
    try:
        beginning = base64.b64decode(data[start : start + 64])
    except binascii.Error:
        return None
    if b"PRIVATE KEY" not in beginning:
        return None
    run = _BASE64_RUN.match(data, start)
    return (start, run.end(), "private-key") if run else None


_JWT_TAIL = re.compile(rb"\.eyJ[A-Za-z0-9_-]{5,8192}\.[A-Za-z0-9_-]{16,2048}")
_BASE64_URL = re.compile(rb"[A-Za-z0-9_-]{8,1024}")


def _json_web_token(data: bytes, start: int, end: int) -> Span | None:
    """Header, payload and signature, each Base64; the literal is the payload's beginning, because it is rarer."""
    tail = _JWT_TAIL.match(data, start)
    if tail is None:
        return None
    reversed_header = _BASE64_URL.match(data[max(0, start - MAX_JWT_HEADER_BYTES) : start][::-1])
    if reversed_header is None:
        return None
    offset = reversed_header[0][::-1].find(b"eyJ")
    return (start - reversed_header.end() + offset, tail.end(), "jwt") if offset >= 0 else None


_URL_PASSWORD = re.compile(
    rb"://(?P<user>[^\s/@:\"'`<>{}$\[\]\\]{0,64}+):(?P<password>[^\s/@\"'`<>{}$\[\]\\]{3,128}+)@[A-Za-z0-9.\[-]"
)
_URL_PLACEHOLDER = re.compile(
    rb"\A(?:pass|passwd|password|pwd|pw|secret|token|port|user|username|x{2,}|\*+|\.+|%[^0-9].*|:.*)\Z", re.IGNORECASE
)


def _url_password(data: bytes, start: int, end: int) -> Span | None:
    """The password of scheme://user:password@host."""
    if data.find(b"@", end, end + MAX_USER_BYTES) < 0:
        return None  # nearly always, and at a fifth of what the expression costs
    found = _URL_PASSWORD.match(data, end - 3)
    if found is None:
        return None
    password = found["password"]
    is_word = password.isalpha() and password.islower() and len(password) < MIN_LETTERS_ONLY
    if is_word or password == found["user"] or _URL_PLACEHOLDER.match(password) or _PLACEHOLDER.search(password):
        return None
    return *found.span("password"), "url-password"


# After a name that promises a secret: the rest of the name, an operator, and a value in quotes or bare. Nothing is
# tried twice (possessive and atomic groups): what isn't an assignment is left after a microsecond.
_ASSIGNED = re.compile(
    rb"""
    (?P<rest>[A-Za-z0-9_.-]{0,40}+)
    (?:\\?["'`]|\]){0,2}+ [ \t]{0,8}+
    (?> :[ ]?[A-Za-z_.\[\]]{1,24}[ ]=(?!=) | :=|=>|={1,3}|:|,|\(|> ) [ \t]{0,8}+
    (?> [bBrRuU]{0,2}\\?(?P<quote>["'`]) (?P<quoted>[^\s"'`\\<>]{8,256}+) \\?(?P=quote)
      | (?P<bare>[^\s"'`\\<>(){}\[\],;:$&|=]{8,256}+={0,2}+) (?=[\s"'`,;&<\\]|\Z) )
    """,
    re.VERBOSE,
)
_NO_SECRET = re.compile(
    rb"hash|sha\d|md5|digest|checksum|_?(?:url|uri|path|file|name|type|id|ids|field|class|regex|pattern|length|len|size"
    rb"|count|format|prefix|header|expir\w*|index|pos|map|public\w*|label|title|text|color|module)\Z",
    re.IGNORECASE,
)
_NEVER_SECRET = re.compile(
    rb"[0-9]{4}-[0-9]{2}-[0-9]{2}[T ]?|arn:|urn:|https?:|[0-9a-f]{8}-(?:[0-9a-f]{4}-){3}[0-9a-f]{12}\Z", re.IGNORECASE
)
"""Times, names of resources, addresses, and UUIDs, which mark requests far more often than they open anything."""
_AWS_SECRET = re.compile(rb"[A-Za-z0-9/+]{40}\Z")
_SHAPES = (
    ("twilio-key", re.compile(rb"(?:SK|AC)[0-9a-f]{32}\Z")),
    ("discord-token", re.compile(rb"[MNO][A-Za-z0-9_-]{23,27}\.[A-Za-z0-9_-]{6}\.[A-Za-z0-9_-]{27,38}\Z")),
)
_WORD_LIKE = re.compile(
    rb"[A-Za-z]{1,40}[0-9]{0,4}[!.?]?\Z|(?:[A-Z]?[a-z]+|[A-Z]+|[0-9]{1,3})(?:[_./:@-](?:[A-Z]?[a-z]+|[A-Z]+|[0-9]{1,4})){0,40}\Z"
)


def _assigned(kind: str, *, word: str = "") -> Finder:
    """Finds the value given to a name that promises a secret.

    Args:
        kind: what it is.
        word: what of the literal is the name, where more than that was searched for.
    """
    is_password = kind == "password"

    def find(data: bytes, start: int, end: int) -> Span | None:
        found = _ASSIGNED.match(data, start + len(word) if word else end)
        if found is None:
            return None
        group = "quoted" if found["quote"] else "bare"
        value = found[group]
        if not _is_random(value, is_password=is_password, is_bare=group == "bare") or _NO_SECRET.search(found["rest"]):
            return None
        return *found.span(group), _kind_of(value, kind, data[max(0, start - 12) : found.end("rest")])

    return find


_BEARER = re.compile(rb"[A-Za-z0-9._~+/-]{20,512}+={0,2}")


def _bearer_token(data: bytes, start: int, end: int) -> Span | None:
    """What follows `Bearer ` in the header of a request."""
    found = _BEARER.match(data, end)
    return (*found.span(), "secret") if found and _is_random(found[0], is_password=False, is_bare=True) else None


def _kind_of(value: bytes, kind: str, name: bytes) -> str:
    """A closer name where the value's own shape has one, too common to be searched for on its own."""
    for closer, shape in _SHAPES:
        if shape.match(value):
            return closer
    if kind == "secret" and _AWS_SECRET.match(value) and re.search(rb"(?i)aws|access", name):
        return "aws-secret-access-key"
    return kind


def _is_random(value: bytes, *, is_password: bool, is_bare: bool) -> bool:
    """Whether a value looks made by a generator or a careful person, rather than like a word, a name or an example.

    By the kinds of characters, the changes between them along the value, and Shannon's entropy. A value without quotes
    may be an expression of the language, so more is asked of it.
    """
    if not is_password and len(value) < (20 if is_bare else 16):
        return False
    kinds = value.translate(_CHARACTER_KINDS)
    has_digit, has_letter, has_symbol = b"d" in kinds, b"l" in kinds or b"u" in kinds, b"s" in kinds
    if not has_letter or not (has_digit or (is_password and has_symbol)):
        return False
    changes = sum(map(int.__ne__, kinds, kinds[1:]))
    if is_password:
        is_varied = changes >= (4 if is_bare else 3) and _entropy(value) >= (3.0 if is_bare else 2.75)
    else:
        is_varied = changes >= (6 if is_bare else 4) and _entropy(value) >= (3.2 if is_bare else 3.0)
    return is_varied and not _is_placeholder_value(value)


def _is_placeholder_value(value: bytes) -> bool:
    """Whether a value with the variety of a secret is a name, a time, an address or an example."""
    return (
        len(set(value)) < MIN_VALUE_VARIETY
        or value.endswith(b"*")
        or _WORD_LIKE.match(value) is not None
        or _NEVER_SECRET.match(value) is not None
        or _PLACEHOLDER.search(value) is not None
        or _PLACEHOLDER_VALUE.search(value) is not None
    )


# Lower, upper, digit, joint (what names and paths are joined with), symbol.
_CHARACTER_KINDS = bytes(
    ord("l" if 97 <= b <= 122 else "u" if 65 <= b <= 90 else "d" if 48 <= b <= 57 else "j" if b in b"_-./: +=" else "s")
    for b in range(256)
)


def _entropy(value: bytes) -> float:
    """Bits per character."""
    size = len(value)
    return -sum(count / size * math.log2(count / size) for count in Counter(value).values())


def _literals(finder: Finder, literals: str) -> list[tuple[bytes, Finder]]:
    return [(literal.encode(), finder) for literal in literals.split()]


BORDERS = "\"'= :"


def _after_a_border(prefix: str, finder: Finder, borders: str = BORDERS) -> list[tuple[bytes, Finder]]:
    """A prefix of three characters together with what may stand before it: four bytes are needed."""
    return [((border + prefix).encode(), finder) for border in borders]


_END = rb"(?![A-Za-z0-9])"
_SK = _prefixed(
    "openai-key",
    rb"sk-(?:(?:proj|svcacct|admin|None|or-v1)-[A-Za-z0-9_-]{20,220}|[A-Za-z0-9]{20,64}(?![A-Za-z0-9_-]))",
)
_ANTHROPIC = _prefixed("anthropic-key", rb"sk-ant-[A-Za-z0-9_-]{20,220}")


def _sk(data: bytes, start: int, end: int) -> Span | None:
    """What begins with sk- after a border."""
    return _ANTHROPIC(data, start + 1, end) or _SK(data, start + 1, end)


_HUGGING_FACE = _prefixed("huggingface-token", rb"hf_[A-Za-z0-9]{30,50}" + _END, skip=1)
_SENDGRID = _prefixed("sendgrid-key", rb"SG\.[A-Za-z0-9_-]{20,24}\.[A-Za-z0-9_-]{39,50}", skip=1)


_OPENAI_OLD = _nearby(
    "openai-key", rb"(?<![A-Za-z0-9])sk-[A-Za-z0-9_-]{16,100}T3BlbkFJ[A-Za-z0-9_-]{16,100}", before=108, after=108
)
_DIGITALOCEAN = _prefixed("digitalocean-token", rb"do[opr]_v1_[0-9a-f]{64}" + _END)
_GITLAB = _prefixed("gitlab-token", rb"gl(?:pat|dt|rt|ptt|ft)-[A-Za-z0-9_-]{20,60}")
_SLACK = _prefixed("slack-token", rb"xox[a-z](?:\.xox[a-z])?-[A-Za-z0-9-]{10,250}")
_STRIPE = _prefixed("stripe-key", rb"(?<=[sr])k_(?:live|test)_[A-Za-z0-9]{10,99}" + _END, left=b"")
_SQUARE = _prefixed("square-token", rb"sq0(?:atp|csp|idp)-[A-Za-z0-9_-]{22,43}")

FORMATS = [
    *_literals(_prefixed("aws-access-key-id", rb"(?:AKIA|ASIA)[A-Z0-9]{16}" + _END), "AKIA ASIA"),
    *_literals(_prefixed("github-token", rb"gh[oprsu]_[A-Za-z0-9]{36,251}" + _END), "ghp_ gho_ ghs_ ghu_ ghr_"),
    *_literals(_prefixed("github-token", rb"github_pat_[A-Za-z0-9_]{60,100}"), "github_pat_"),
    *_literals(_GITLAB, "glpat- gldt- glrt- glptt- glft-"),
    *_literals(_SLACK, "xoxb- xoxp- xoxa- xoxr- xoxs- xoxe"),
    *_literals(_prefixed("slack-token", rb"xapp-[0-9]-[A-Z0-9]{8,20}-[0-9]{8,20}-[a-z0-9]{32,80}"), "xapp-"),
    *_literals(
        _prefixed(
            "slack-webhook",
            rb"hooks\.slack\.com/(?:services|workflows|triggers)/[A-Za-z0-9+/]{20,90}",
            left=b"",
        ),
        "hooks.slack.com/",
    ),
    *_literals(_STRIPE, "k_live_ k_test_"),
    *_literals(_prefixed("stripe-key", rb"whsec_[A-Za-z0-9+/=]{24,80}"), "whsec_"),
    *_literals(_prefixed("google-api-key", rb"AIza[A-Za-z0-9_-]{35}" + _END), "AIza"),
    *_literals(_prefixed("google-oauth-token", rb"ya29\.[A-Za-z0-9_-]{20,500}"), "ya29."),
    *_literals(_prefixed("google-oauth-secret", rb"GOCSPX-[A-Za-z0-9_-]{28}"), "GOCSPX-"),
    *_literals(_prefixed("npm-token", rb"npm_[A-Za-z0-9]{36}" + _END), "npm_"),
    *_literals(_prefixed("pypi-token", rb"pypi-A[A-Za-z0-9_-]{50,500}"), "pypi-A"),
    *_after_a_border("hf_", _HUGGING_FACE),
    *_after_a_border("SG.", _SENDGRID),
    *_after_a_border("sk-", _sk),
    *_literals(_ANTHROPIC, "sk-ant-"),
    *_literals(_SK, "sk-proj-"),
    *_literals(_OPENAI_OLD, "T3BlbkFJ"),
    *_literals(_DIGITALOCEAN, "dop_v1_ doo_v1_ dor_v1_"),
    *_literals(
        _prefixed("shopify-token", rb"shp(?:at|ss|ca|pa)_[0-9a-fA-F]{32}" + _END), "shpat_ shpss_ shpca_ shppa_"
    ),
    *_literals(_SQUARE, "sq0atp- sq0csp-"),
    *_literals(_prefixed("square-token", rb"EAAA[A-Za-z0-9_+-]{56,64}" + _END), "EAAA"),
    *_literals(_json_web_token, ".eyJ"),
    (b"-BEGIN ", _private_key),  # more dashes would be met in every ruler of a comment
    *_literals(_encoded_private_key, "LS0tLS1CRUdJTi"),
    *_literals(
        _prefixed("azure-key", rb"(?<=AccountKey=)[A-Za-z0-9+/]{86}==", skip=len("AccountKey="), left=b""),
        "AccountKey=",
    ),
    *_literals(
        _prefixed("azure-key", rb"(?<=AccessKey=)[A-Za-z0-9+/]{43}=", skip=len("AccessKey="), left=b""), "AccessKey="
    ),
    *_literals(_prefixed("mailgun-key", rb"key-[0-9a-f]{32}" + _END), "key-"),
    *_literals(_prefixed("groq-key", rb"gsk_[A-Za-z0-9]{50,56}" + _END), "gsk_"),
]
"""Literals of tokens that are known by their own shape."""

OPENINGS: tuple[tuple[bytes, Finder], ...] = ((b"hf_", _HUGGING_FACE), (b"SG.", _SENDGRID), (b"sk-", _sk))
"""Those that need something before them, for the start of a document, where nothing is: its finder is asked at -1."""

_PASSWORD, _SECRET = _assigned("password"), _assigned("secret")
_DISCORD = _nearby(
    "discord-token",
    rb"(?<![A-Za-z0-9_.-])[MNO][A-Za-z0-9_-]{23,27}\.[A-Za-z0-9_-]{6}\.[A-Za-z0-9_-]{27,38}(?![A-Za-z0-9_-])",
    after=200,
)
_TWILIO = _nearby("twilio-key", rb"(?<![A-Za-z0-9])(?:SK|AC)[0-9a-f]{32}(?![A-Za-z0-9])", after=200)
_TELEGRAM = re.compile(rb"[0-9]{8,10}:AA[A-Za-z0-9_-]{33}(?![A-Za-z0-9_-])")
_DIGITS_BEFORE = 10


def _telegram(data: bytes, start: int, end: int) -> Span | None:
    """digits:AA and 33 more; the literal is the last digit and :AA."""
    first = start
    while start - first < _DIGITS_BEFORE and first > 0 and 48 <= data[first - 1] <= 57:
        first -= 1
    found = _TELEGRAM.match(data, first)
    return (first, found.end(), "telegram-token") if found and not _is_placeholder(found[0]) else None


NAMES = [
    *_literals(_PASSWORD, "assword PASSWORD asswd PASSWD assphrase PASSPHRASE ASS= pwd= PWD="),
    *_literals(_SECRET, "ecret SECRET pi_key pi-key piKey pi_Key pikey API_KEY APIKEY API-KEY redential TOKEN"),
    # The word alone is met 300 times per MB of code about text.
    *_literals(_assigned("secret", word="oken"), "oken= oken: oken\" oken'"),
    (b"oken =", _assigned("secret", word="oken")),
    (b"earer ", _bearer_token),
    *_literals(_url_password, "p:// s:// l:// b:// v:// h:// t:// a:// r:// n:// c://"),
    *[(b"%d:AA" % digit, _telegram) for digit in range(10)],
    *_literals(_TWILIO, "wilio WILIO ount_sid ountSid OUNT_SID"),
    *_literals(_DISCORD, "iscord ISCORD login(' login(\" .run(' .run(\""),
    # For which the other search, of 64 at most, has no room.
    *_after_a_border("hf_", _HUGGING_FACE, "\n`"),
    *_after_a_border("SG.", _SENDGRID, "\n`"),
    *_after_a_border("sk-", _sk, "\n"),
]
"""Literals around secrets that have no shape of their own."""

KINDS = (
    "anthropic-key", "aws-access-key-id", "aws-secret-access-key", "azure-key", "digitalocean-token", "discord-token",
    "github-token", "gitlab-token", "google-api-key", "google-oauth-secret", "google-oauth-token", "groq-key",
    "huggingface-token", "jwt", "mailgun-key", "npm-token", "openai-key", "password", "private-key", "pypi-token",
    "secret", "sendgrid-key", "shopify-token", "slack-token", "slack-webhook", "square-token", "stripe-key",
    "telegram-token", "twilio-key", "url-password",
)  # fmt: skip
"""Every word that can stand in a marker and in the facts."""
