"""Secrets of known formats, made up and planted in the kinds of file that real ones are found in.

In: a seeded generator. Out: documents that hold one secret each, with the secret and its format, for the figures of
`bench hygiene` and of the tests. Half of the tokens with a shape of their own are given to a variable whose name says
nothing, so that it is the shape that is found and not the name. Nothing here opens anything.
"""

from __future__ import annotations

import base64
import json
import random
import string
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

__all__ = ["FORMATS", "Planted", "planted_secrets"]

LETTERS_DIGITS = string.ascii_letters + string.digits
LOWER_DIGITS = string.ascii_lowercase + string.digits
HEX = "0123456789abcdef"
URL_SAFE = LETTERS_DIGITS + "_-"
BASE64 = LETTERS_DIGITS + "+/"
PASSWORD = LETTERS_DIGITS + "!#%*+?@^~"

Random = random.Random
Maker = Callable[[Random], str]


@dataclass(frozen=True, kw_only=True)
class Planted:
    """A document with one secret in it.

    Attributes:
        format: which of `FORMATS`.
        path: what the file is called.
        data: its content.
        secret: what must not be found in it after cleaning.
    """

    format: str
    path: bytes
    data: bytes
    secret: bytes


def _some(alphabet: str, size: int) -> Maker:
    return lambda rng: "".join(rng.choices(alphabet, k=size))


def _shape(*pieces: str | Maker) -> Maker:
    """Fixed pieces and random ones, one after the other."""
    return lambda rng: "".join(piece if isinstance(piece, str) else piece(rng) for piece in pieces)


def _one_of(*makers: Maker) -> Maker:
    return lambda rng: rng.choice(makers)(rng)


def _json_web_token(rng: Random) -> str:
    header = {"alg": rng.choice(["HS256", "RS256", "ES256"]), "typ": "JWT"}
    claims = {"sub": _some(LOWER_DIGITS, 12)(rng), "exp": rng.randrange(10**9, 2 * 10**9)}
    encoded = [base64.urlsafe_b64encode(json.dumps(part).encode()).decode().rstrip("=") for part in (header, claims)]
    return ".".join([*encoded, _some(URL_SAFE, 43)(rng)])


def _password(rng: Random) -> str:
    """As a password manager makes them: 12 to 24 characters, letters and digits for certain."""
    size = rng.randrange(12, 25)
    return rng.choice(string.ascii_letters) + _some(PASSWORD, size - 3)(rng) + rng.choice(string.digits) + "k"


@dataclass(frozen=True, kw_only=True)
class _Format:
    make: Maker
    names: tuple[str, ...]
    has_shape: bool = True
    """Whether it is known by its own shape, whatever the variable is called."""


_TOKEN = ("token", "auth", "API_TOKEN", "accessToken")
FORMATS: dict[str, _Format] = {
    "aws access key id": _Format(
        make=_shape("AKIA", _some(string.ascii_uppercase + "234567", 16)), names=("AWS_ACCESS_KEY_ID", "accessKeyId")
    ),
    "aws secret access key": _Format(
        make=_some(BASE64, 40),
        names=("AWS_SECRET_ACCESS_KEY", "aws_secret_access_key", "secretAccessKey"),
        has_shape=False,
    ),
    "github token": _Format(
        make=_one_of(*(_shape(prefix, _some(LETTERS_DIGITS, 36)) for prefix in ("ghp_", "gho_", "ghs_", "ghu_"))),
        names=("GITHUB_TOKEN", *_TOKEN),
    ),
    "github fine-grained token": _Format(
        make=_shape("github_pat_", _some(LETTERS_DIGITS, 22), "_", _some(LETTERS_DIGITS, 59)),
        names=("GH_TOKEN", *_TOKEN),
    ),
    "gitlab token": _Format(make=_shape("glpat-", _some(URL_SAFE, 20)), names=("GITLAB_TOKEN", *_TOKEN)),
    "slack token": _Format(
        make=_shape("xoxb-", _some(string.digits, 12), "-", _some(string.digits, 12), "-", _some(LETTERS_DIGITS, 24)),
        names=("SLACK_BOT_TOKEN", *_TOKEN),
    ),
    "slack webhook": _Format(
        make=_shape(
            "https://hooks.slack.com/services/T",
            _some(string.ascii_uppercase, 8),
            "/B",
            _some(string.ascii_uppercase, 8),
            "/",
            _some(LETTERS_DIGITS, 24),
        ),
        names=("SLACK_WEBHOOK", "webhook_url"),
    ),
    "stripe key": _Format(
        make=_one_of(_shape("sk_live_", _some(LETTERS_DIGITS, 24)), _shape("rk_live_", _some(LETTERS_DIGITS, 99))),
        names=("STRIPE_KEY", "stripe.api_key"),
    ),
    "google api key": _Format(make=_shape("AIza", _some(URL_SAFE, 34), "k"), names=("GOOGLE_API_KEY", "mapsKey")),
    "google oauth token": _Format(make=_shape("ya29.", _some(URL_SAFE, 120)), names=("access", *_TOKEN)),
    "google oauth secret": _Format(make=_shape("GOCSPX-", _some(URL_SAFE, 28)), names=("client_secret",)),
    "npm token": _Format(make=_shape("npm_", _some(LETTERS_DIGITS, 36)), names=("NPM_TOKEN", "_authToken")),
    "pypi token": _Format(make=_shape("pypi-AgEIcHlwaS5vcmc", _some(URL_SAFE, 150)), names=("TWINE_PASSWORD",)),
    "hugging face token": _Format(make=_shape("hf_", _some(LETTERS_DIGITS, 34)), names=("HF_TOKEN", *_TOKEN)),
    "openai key": _Format(
        make=_one_of(
            _shape("sk-", _some(LETTERS_DIGITS, 20), "T3BlbkFJ", _some(LETTERS_DIGITS, 20)),
            _shape("sk-proj-", _some(URL_SAFE, 74), "T3BlbkFJ", _some(URL_SAFE, 74)),
        ),
        names=("OPENAI_API_KEY", "openai.api_key"),
    ),
    "anthropic key": _Format(make=_shape("sk-ant-api03-", _some(URL_SAFE, 93), "AA"), names=("ANTHROPIC_API_KEY",)),
    "sendgrid key": _Format(
        make=_shape("SG.", _some(URL_SAFE, 22), ".", _some(URL_SAFE, 43)), names=("SENDGRID_API_KEY", "mailer")
    ),
    "twilio key": _Format(
        make=_one_of(_shape("SK", _some(HEX, 32)), _shape("AC", _some(HEX, 32))),
        names=("TWILIO_SID", "twilio_key", "account_sid"),
        has_shape=False,
    ),
    "mailgun key": _Format(make=_shape("key-", _some(HEX, 32)), names=("MAILGUN_API_KEY", "mailgun")),
    "azure storage key": _Format(
        make=_shape(
            "DefaultEndpointsProtocol=https;AccountName=logs;AccountKey=",
            _some(BASE64, 86),
            "==;EndpointSuffix=core.windows.net",
        ),
        names=("AZURE_STORAGE_CONNECTION_STRING", "connection"),
    ),
    "digitalocean token": _Format(make=_shape("dop_v1_", _some(HEX, 64)), names=("DIGITALOCEAN_TOKEN", *_TOKEN)),
    "shopify token": _Format(
        make=_one_of(_shape("shpat_", _some(HEX, 32)), _shape("shpss_", _some(HEX, 32))), names=("SHOPIFY", *_TOKEN)
    ),
    "square token": _Format(
        make=_one_of(_shape("sq0atp-", _some(URL_SAFE, 22)), _shape("EAAA", _some(LETTERS_DIGITS, 60))),
        names=("SQUARE_ACCESS_TOKEN", *_TOKEN),
    ),
    "telegram token": _Format(
        make=_shape(_some("123456789", 10), ":AA", _some(URL_SAFE, 32), "w"), names=("TELEGRAM_BOT_TOKEN", "bot")
    ),
    "discord token": _Format(
        make=_shape("MT", _some(LETTERS_DIGITS, 24), ".", _some(URL_SAFE, 6), ".", _some(URL_SAFE, 38)),
        names=("DISCORD_TOKEN", "discord_bot_token"),
        has_shape=False,
    ),
    "json web token": _Format(make=_json_web_token, names=("Authorization", "jwt", *_TOKEN)),
    "url password": _Format(
        make=_shape(
            _one_of(*(_shape(scheme) for scheme in ("postgresql", "mysql", "redis", "amqp", "mongodb+srv", "https"))),
            "://",
            _some(string.ascii_lowercase, 7),
            ":",
            _some(LETTERS_DIGITS, 14),
            "9@db.internal:5432/main",
        ),
        names=("DATABASE_URL", "dsn", "url"),
    ),
    "password": _Format(
        make=_password, names=("password", "DB_PASSWORD", "smtp_passwd", "adminPassword"), has_shape=False
    ),
    "api key": _Format(
        make=_one_of(_some(HEX, 32), _some(LETTERS_DIGITS, 40)), names=("api_key", "API_KEY", "apiKey"), has_shape=False
    ),
    "client secret": _Format(
        make=_one_of(_some(HEX, 64), _some(URL_SAFE, 43)),
        names=("client_secret", "SECRET_KEY", "jwtSecret"),
        has_shape=False,
    ),
    "access token": _Format(
        make=_one_of(_some(HEX, 40), _some(LETTERS_DIGITS, 32)),
        names=("access_token", "authToken", "TOKEN"),
        has_shape=False,
    ),
}
"""Everything but private keys, which have their own contexts."""

PRIVATE_KEY_LABELS = (
    "RSA PRIVATE KEY",
    "EC PRIVATE KEY",
    "OPENSSH PRIVATE KEY",
    "PRIVATE KEY",
    "ENCRYPTED PRIVATE KEY",
)
ENCODED_SHARE = 0.15
NEUTRAL_NAMES = ("value", "x", "config", "CURRENT", "extra")

CONTEXTS: dict[bytes, tuple[str, ...]] = {
    b"settings.py": (
        '{n} = "{s}"',
        "{n} = '{s}'",
        'client = Client({n}="{s}", retries=3)',
        'os.environ["{n}"] = "{s}"',
    ),
    b"deploy.yaml": ("env:\n  {n}: {s}", 'spec:\n  - name: app\n    {n}: "{s}"'),
    b"production.env": ("{n}={s}", 'export {n}="{s}"'),
    b"config.json": ('{{"debug": false, "{n}": "{s}", "port": 80}}', '{{\n  "{n}":"{s}"\n}}'),
    b"run.sh": ("export {n}={s}", "{n}='{s}' ./server --port 80"),
    b"README.md": ("Set it first:\n\n```\n{n}={s}\n```", "Use `{n}={s}` for this."),
    b"app.js": ("const {n} = '{s}';", 'module.exports = {{ {n}: "{s}" }};'),
    b"Main.java": ('private static final String {n} = "{s}";',),
    b"app.properties": ("{n} = {s}",),
}
PADDING = "some ordinary line with no more than words in it\n"


def planted_secrets(count: int, *, seed: int = 0) -> Iterator[Planted]:
    """`count` documents, the formats in turn, the contexts at random; the same for the same seed."""
    rng = random.Random(seed)  # noqa: S311  made-up secrets are meant to be the same each time
    names = [*FORMATS, "private key"]
    for number in range(count):
        name = names[number % len(names)]
        yield _planted_private_key(rng) if name == "private key" else _planted(rng, name)


def _planted(rng: Random, name: str) -> Planted:
    chosen = FORMATS[name]
    secret = chosen.make(rng)
    is_neutral = chosen.has_shape and rng.random() < 0.5
    variable = rng.choice(NEUTRAL_NAMES if is_neutral else chosen.names)
    path = rng.choice(list(CONTEXTS))
    text = rng.choice(CONTEXTS[path]).format(n=variable, s=secret)
    return Planted(format=name, path=path, data=_padded(rng, text), secret=_essence(name, secret).encode())


def _essence(name: str, secret: str) -> str:
    """What of a secret must not be left: of an address with a password in it, the password."""
    if name == "url password":
        return secret.split(":")[2].split("@")[0]
    if name == "azure storage key":
        return secret.split("AccountKey=")[1].split(";")[0]
    return secret.removeprefix("https://")


def _padded(rng: Random, text: str) -> bytes:
    return (PADDING * rng.randrange(4) + text + "\n" + PADDING * rng.randrange(4)).encode()


def _planted_private_key(rng: Random) -> Planted:
    label = rng.choice(PRIVATE_KEY_LABELS)
    lines = [_some(BASE64, 64)(rng) for _ in range(rng.randrange(3, 26))] + [_some(BASE64, 42)(rng) + "=="]
    block = [f"-----BEGIN {label}-----", *lines, f"-----END {label}-----"]
    secret = rng.choice(lines)
    if rng.random() < ENCODED_SHARE:
        path, secret = b"kubeconfig.yaml", base64.b64encode("\n".join(block).encode()).decode()
        text = f"    client-key-data: {secret}"
    else:
        path, text = rng.choice(_private_key_contexts(block))
    return Planted(format="private key", path=path, data=_padded(rng, text), secret=secret.encode())


def _private_key_contexts(block: Sequence[str]) -> list[tuple[bytes, str]]:
    whole = "\n".join(block)
    return [
        (b"id_rsa", whole),
        (b"service-account.json", json.dumps({"type": "service_account", "private_key": whole + "\n"})),
        (b"secret.yaml", "tls.key: |\n" + "\n".join(f"    {line}" for line in block)),
        (b"keys.py", f'KEY = """{whole}"""'),
        (b"production.env", 'PRIVATE_KEY="' + "\\n".join(block) + '"'),
        (b"change.diff", "\n".join(f"+{line}" for line in block)),
    ]
