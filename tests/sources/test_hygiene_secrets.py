"""The secret scanner: what it finds, what it leaves alone, and that nothing slows it down."""

from __future__ import annotations

import itertools
import random
import re
from collections import Counter
from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from penstock.bench.planted import FORMATS as PLANTED_FORMATS
from penstock.bench.planted import planted_secrets
from penstock.sources.hygiene.secret_rules import FORMATS, KINDS, NAMES
from penstock.sources.hygiene.secrets import STRETCH_BYTES, redacted, secret_spans

PLANTED = list(planted_secrets(4 * (len(PLANTED_FORMATS) + 1), seed=1))
LITERALS = [literal for literal, _ in [*FORMATS, *NAMES]]
TOKEN = b"ghp_" + b"aB3dE6gH9jK2mN5pQ8sT1vW4yZ7bC0dF3gH6"


def redact(data: bytes) -> bytes:
    return redacted(data, {})


@pytest.mark.torture(lane="I")
def test_planted_secrets_are_found(scale: Callable[..., int], torture_figures: Callable[..., None]) -> None:
    planted, missed, kinds = Counter[str](), Counter[str](), dict[str, int]()
    for each in planted_secrets(scale(test=320, torture=10_000)):
        planted[each.format] += 1
        missed[each.format] += each.secret in redacted(each.data, kinds)
    too_many = {name: missed[name] for name in planted if missed[name] > 0.05 * planted[name]}
    for name in planted:
        torture_figures(
            lane="I",
            case=f"planted: {name}",
            trials=planted[name],
            failures=too_many.get(name, 0),
            found=planted[name] - missed[name],
            allowed="5 %",
        )
    assert len(planted) >= 25
    assert too_many == {}
    assert set(kinds) <= set(KINDS)


def test_what_is_planted_is_in_the_document_and_the_same_each_time() -> None:
    assert all(each.secret in each.data for each in PLANTED)
    assert list(planted_secrets(40)) == list(planted_secrets(40))
    assert len({each.format for each in PLANTED}) >= 25


def test_the_rest_of_a_document_stays() -> None:
    for each in PLANTED:
        before, _, after = each.data.partition(each.secret)
        first_line, last_line = before.partition(b"\n")[0], after.rpartition(b"\n")[2]
        if before.count(b"\n") and after.count(b"\n") and each.format != "private key":
            assert redact(each.data).startswith(first_line)
            assert redact(each.data).endswith(last_line)


def test_nothing_of_a_secret_is_in_the_counts() -> None:
    for each in PLANTED:
        found: dict[str, int] = {}
        redacted(each.data, found)
        assert set(found) <= set(KINDS)


pieces = st.one_of(
    st.sampled_from(LITERALS),
    st.sampled_from([each.data for each in PLANTED]),
    st.sampled_from([each.secret for each in PLANTED]),
    st.sampled_from(
        [b"[redacted password]", b"[redacted jwt]", b'"', b"'", b" = ", b": ", b"\n", b"@", b"=", b"-----"]
    ),
    st.text(max_size=12).map(str.encode),
)


@settings(max_examples=300, deadline=None)
@given(st.lists(pieces, max_size=12))
def test_redacting_twice_changes_nothing_and_text_stays_text(parts: list[bytes]) -> None:
    data = b"".join(parts)
    once = redact(data)
    once.decode()
    assert redact(once) is once
    assert (once is data) == (not secret_spans(data))


@given(st.binary(max_size=300))
def test_any_bytes_are_taken(data: bytes) -> None:
    assert redact(redact(data)) == redact(data)


def test_markers_are_no_secrets() -> None:
    for kind in KINDS:
        marker = f"[redacted {kind}]".encode()
        for context in (
            b'password = "%s"',
            b"TOKEN=%s",
            b"https://u:%s@host/",
            b"Bearer %s",
            b"%s%s" % (marker, b"%s"),
        ):
            assert secret_spans(context % marker) == []


@pytest.mark.parametrize(
    "text",
    [
        'password = "changeme"',
        'password = "********"',
        "password = getpass.getpass()",
        'api_key = os.environ["API_KEY"]',
        'api_key = "your_api_key_goes_here_1"',
        'token = "xxxxxxxxxxxxxxxxxxxxxxxx"',
        'token = "<insert token here>"',
        "TOKEN=${GITHUB_TOKEN}",
        "token: ${{ secrets.GITHUB_TOKEN }}",
        "password: {{ vault_password }}",
        'aws_access_key_id = "AKIA' + 'IOSFODNN7EXAMPLE"',
        'key = "ghp_' + "x" * 36 + '"',
        "postgres://user:password@localhost/db",
        "https://example.com:8080/path@home",
        "git@github.com:someone/something.git",
        'if b"-----BEGIN PRIVATE KEY-----" in data:',
        "-----BEGIN PRIVATE KEY-----\n...\n-----END PRIVATE KEY-----",
        "-----BEGIN PUBLIC KEY-----\n" + "MIIB" * 40 + "\n-----END PUBLIC KEY-----",
        'secret_name = "projects/1234/secrets/database2"',
        'password_hash = "5f4dcc3b5aa765d61d8327deb882cf99"',
        '"ClientRequestToken": "f4c94ed7-238d-4c46-93db-48cd62ec33b7"',
        "token = tokens2ids[index4words]",
        '"token": "begin_of_text"',
        'class="sk-estimator-doc-link sk-text-repr-fallback"',
    ],
)
def test_placeholders_and_expressions_are_left_alone(text: str) -> None:
    assert secret_spans(text.encode()) == []


@pytest.mark.parametrize(
    ("text", "kind"),
    [
        ("db_password = 'Tr0ub4dor&3x'", "password"),
        ("password: str = 'k9#Lm2qwZ'", "password"),
        ('smtp.setPassword("k9#Lm2qwZ")', "password"),
        ("<password>k9Lm2qwZ7p</password>", "password"),
        ('\\"password\\": \\"k9#Lm2qwZ\\"', "password"),
        ("+  api_key: 9f8a7b6c5d4e3f2a1b0c9d8e7f6a5b4c", "secret"),
        ("curl -H 'Authorization: Bearer 9f8a7b6c5d4e3f2a1b0c9d8e7f6a5b4c'", "secret"),
        ("redis://:k9Lm2qwZ7p@cache:6379", "url-password"),
        ("git clone https://me:" + TOKEN.decode() + "@github.com/me/it", "github-token"),
    ],
)
def test_forms_of_an_assignment(text: str, kind: str) -> None:
    assert [found for _, _, found in secret_spans(text.encode())] == [kind]


def test_a_key_without_its_end_goes_as_far_as_it_is_there() -> None:
    body = b"\n".join(bytes(random.Random(1).choices(b"ABCDEFGHIJabcdefghij0123456789+/", k=64)) for _ in range(5))
    data = b"-----BEGIN RSA PRIVATE KEY-----\n" + body + b"\n\n# the rest of the file\n"
    assert redact(data) == b"[redacted private-key]\n\n# the rest of the file\n"


@pytest.mark.parametrize("before", range(0, len(TOKEN) + 8, 3))
def test_a_secret_on_the_border_of_two_stretches_is_found(before: int) -> None:
    data = bytearray(b"\n" * (2 * STRETCH_BYTES + 100))
    data[STRETCH_BYTES - before : STRETCH_BYTES - before + len(TOKEN)] = TOKEN
    data[-len(TOKEN) :] = TOKEN
    assert [start for start, _, _ in secret_spans(bytes(data))] == [STRETCH_BYTES - before, len(data) - len(TOKEN)]


@pytest.mark.parametrize("before", [b"", b"\n", b"x = 1\r\n", b"`", b" ", b'"', b"key="], ids=repr)
@pytest.mark.parametrize("after", [b"", b"\n", b"`, and so on"], ids=repr)
@pytest.mark.parametrize(
    "token",
    [
        b"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",
        b"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",
        b"sk-proj-Zk3vQm8Rt5Yb1Nc7Xd2Wf6Hg4Jp9Ls",
        b"ghp_iPWhPlGqvkkoEYoqqdokNtXeOyINCngAEZ12",
    ],
    ids=lambda token: token[:3].decode(),
)
def test_a_token_is_found_wherever_a_line_or_a_document_begins_with_it(before, token, after) -> None:
    data = before + token + after
    assert [(start, end) for start, end, _ in secret_spans(data)] == [(len(before), len(before) + len(token))]


def test_the_native_search_has_literals_it_is_fast_with() -> None:
    for rules in (FORMATS, NAMES):
        assert len(rules) <= 64
        assert len({literal for literal, _ in rules}) == len(rules)
        assert min(len(literal) for literal, _ in rules) >= 4
    assert max(map(len, LITERALS)) <= 32


HOSTILE = [
    *LITERALS,
    b"a", b"=", b"-", b"@", b"-----BEGIN PRIVATE KEY-----", b"-----BEGIN PRIVATE KEY-----\n" + b"A" * 32_000,
    b".eyJ" + b"a" * 2000, b"eyJa.eyJ", b'password="', b"password=aB3$", b"token=aB3", b"p://a:", b"p://a:b@",
    b" sk-sk-T3BlbkFJ", b"sk-" * 30 + b"T3BlbkFJ", b"discord M", b"twilio SK", b'password = "aB3$xZ9!k"\n',
    b"LS0tLS1CRUdJTiBQUklWQVRFIEtFWS0tLS0t", b"password:" + b" " * 8, b"token" + b"_" * 40,
]  # fmt: skip


@pytest.mark.torture(lane="I")
def test_hostile_repetition_takes_linear_time(scale: Callable[..., int], torture_figures: Callable[..., None]) -> None:
    """At 10 MB each, quadratic work would take days: that this ends is what is tested."""
    size = scale(test=20_000, torture=10_000_000)
    for piece in HOSTILE:
        data = piece * (size // len(piece) + 1)
        spans = secret_spans(data)
        assert all(0 <= start < end <= len(data) for start, end, _ in spans)
        assert all(first[1] <= second[0] for first, second in itertools.pairwise(spans))
    torture_figures(lane="I", case="hostile repetition", trials=len(HOSTILE), failures=0, bytes_each=size)


def test_every_expression_is_bounded() -> None:
    """No `*`, `+` or open `{n,}` that could run through a whole document."""
    patterns: list[re.Pattern[Any]] = []
    for _, finder in [*FORMATS, *NAMES]:
        patterns += [
            cell.cell_contents for cell in finder.__closure__ or () if isinstance(cell.cell_contents, re.Pattern)
        ]
    assert len(patterns) > 30
    for pattern in patterns:
        source = re.sub(rb"\\.|\[[^\]]*\]", b"x", pattern.pattern)
        assert not re.search(rb"[*]|[^}?]\+|,\}", source), pattern.pattern
