"""An untrusted repository runs nothing (torture F), and what we leave on the disk is nothing."""

from __future__ import annotations

import errno
import functools
import http.server
import os
import shutil
import signal
import ssl
import stat
import subprocess
import sys
import tempfile
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from penstock.errors import InputError
from penstock.sources import DEFAULT_UNIT_BYTES, Document, GitSource, InputOptions, sources_from_inputs
from penstock.sources.git import repository as git_repository
from penstock.sources.git.repository import is_safe_version, remove_dead_clones

pytestmark = pytest.mark.torture(lane="F", sample=True)

CLEAN = {
    "PATH": os.environ["PATH"],
    "GIT_CONFIG_NOSYSTEM": "1",
    "GIT_CONFIG_GLOBAL": "/dev/null",
    "GIT_AUTHOR_NAME": "A",
    "GIT_AUTHOR_EMAIL": "a@example.org",
    "GIT_COMMITTER_NAME": "A",
    "GIT_COMMITTER_EMAIL": "a@example.org",
    "GIT_AUTHOR_DATE": "1600000000 +0000",
    "GIT_COMMITTER_DATE": "1600000000 +0000",
}


def content_of(document: Document) -> bytes:
    (part,) = document.parts
    return part.data


def git(folder: Path, *arguments: str, data: bytes | None = None, environment: dict[str, str] | None = None) -> bytes:
    return subprocess.run(
        ["git", *arguments],
        cwd=folder,
        env={**CLEAN, **(environment or {})},
        input=data,
        check=True,
        capture_output=True,
    ).stdout


def make_repository(folder: Path) -> Path:
    folder.mkdir(parents=True)
    git(folder, "init", "-q", "-b", "main")
    (folder / "a.txt").write_text("one\n")
    git(folder, "add", "-A")
    git(folder, "commit", "-q", "-m", "first")
    (folder / "a.txt").write_text("one\ntwo\n")
    git(folder, "commit", "-q", "-a", "-m", "second")
    return folder


def documents_of(source: GitSource, unit_bytes: int = DEFAULT_UNIT_BYTES):
    try:
        return [document for unit in source.units(unit_bytes) for document in source.read(unit).documents]
    finally:
        source.close()


def source_of(word: str, **options) -> GitSource:
    (source,) = sources_from_inputs([word], options=InputOptions(**options))
    assert isinstance(source, GitSource)
    return source


@pytest.fixture
def temporary(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A temporary folder of our own, so that tests side by side see only their own clones."""
    folder = tmp_path / "temporary"
    folder.mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(folder))
    return folder


@pytest.fixture
def canary(tmp_path: Path) -> tuple[Path, Path]:
    """A program that leaves a mark when it runs, and the folder of marks."""
    marks = tmp_path / "marks"
    marks.mkdir()
    program = tmp_path / "canary"
    program.write_text(f'#!/bin/sh\necho "$0 $*" >> {marks}/ran-$$\ncat\nexit 0\n')
    program.chmod(0o755)
    return program, marks


def hostile_config(program: Path) -> str:
    run = str(program)
    return f"""
[core]
	fsmonitor = {run}
	hooksPath = {program.parent}/hooks
	pager = {run}
	editor = {run}
	askPass = {run}
	sshCommand = {run}
	gitProxy = {run}
	alternateRefsCommand = {run}
	attributesFile = {program.parent}/attributes
[diff]
	external = {run}
	renames = copies
[diff "evil"]
	command = {run}
	textconv = {run}
	cachetextconv = false
[filter "evil"]
	clean = {run}
	smudge = {run}
	process = {run}
	required = true
[merge "evil"]
	driver = {run}
[mergetool "evil"]
	cmd = {run}
[difftool "evil"]
	cmd = {run}
[gpg]
	program = {run}
[gpg "ssh"]
	program = {run}
	defaultKeyCommand = {run}
[log]
	showSignature = true
[commit]
	gpgSign = true
[credential]
	helper = !{run}
[uploadpack]
	packObjectsHook = {run}
	allowFilter = true
	allowAnySHA1InWant = true
[remote "origin"]
	url = ext::{run} %S
	promisor = true
	partialclonefilter = blob:none
	uploadpack = {run}
	receivepack = {run}
	vcs = evil
	proxy = {run}
[extensions]
	partialClone = origin
[protocol]
	allow = always
[protocol "ext"]
	allow = always
[alias]
	upload-pack = !{run}
	clone = !{run}
	rev-list = !{run}
	diff-tree = !{run}
	cat-file = !{run}
[pager]
	diff-tree = {run}
	rev-list = {run}
[sequence]
	editor = {run}
[sendemail]
	smtpserver = {run}
[submodule "evil"]
	url = ext::{run} %S
	update = !{run}
	active = true
[submodule]
	recurse = true
[interactive]
	diffFilter = {run}
[web]
	browser = evil
[browser "evil"]
	cmd = {run}
[man "evil"]
	cmd = {run}
[trailer "evil"]
	command = {run}
	cmd = {run}
[fetch]
	recurseSubmodules = true
[maintenance]
	auto = true
[gc]
	auto = 1
	autoDetach = false
	recentObjectsHook = {run}
[trace2]
	eventTarget = {program.parent}/marks/trace
[init]
	templateDir = {program.parent}/hooks
[include]
	path = more
"""


HOOKS = """
applypatch-msg commit-msg fsmonitor-watchman post-applypatch post-checkout post-commit post-index-change
post-merge post-receive post-rewrite post-update pre-applypatch pre-auto-gc pre-commit pre-push pre-rebase pre-receive
prepare-commit-msg proc-receive push-to-checkout reference-transaction update post-upload-pack
"""


def make_hostile(folder: Path, program: Path) -> Path:
    folder = make_repository(folder)
    (folder / ".gitattributes").write_text("* diff=evil filter=evil merge=evil text eol=crlf\n")
    (folder / ".gitmodules").write_text(
        f'[submodule "evil"]\n\tpath = sub\n\turl = ext::{program} %S\n\tupdate = !{program}\n'
    )
    git(folder, "add", "-A", environment={})
    git(folder, "update-index", "--add", "--cacheinfo", "160000," + "1" * 40 + ",sub")
    git(folder, "commit", "-q", "-m", "attributes")
    git(folder, "replace", "HEAD", "HEAD~1")
    inside = folder / ".git"
    for hooks in (inside / "hooks", program.parent / "hooks"):
        hooks.mkdir(exist_ok=True)
        for name in HOOKS.split():
            (hooks / name).write_text(program.read_text())
            (hooks / name).chmod(0o755)
    (inside / "info").mkdir(exist_ok=True)
    (inside / "info" / "attributes").write_text("* diff=evil filter=evil\n")
    (program.parent / "attributes").write_text("* diff=evil\n")
    (inside / "more").write_text(f"[core]\n\tfsmonitor = {program}\n")
    other = make_repository(folder.parent / "alternate")
    (inside / "objects" / "info").mkdir(exist_ok=True)
    (inside / "objects" / "info" / "alternates").write_text(f"{other}/.git/objects\n")
    with (inside / "config").open("a") as config:
        config.write(hostile_config(program))
    return folder


@pytest.mark.parametrize("form", ["worktree", "bare", "partial", "old git"])
def test_no_program_named_by_a_repository_runs(
    form: str, tmp_path: Path, temporary: Path, canary: tuple[Path, Path], monkeypatch: pytest.MonkeyPatch
):
    if form == "old git":
        monkeypatch.setattr(git_repository, "is_safe_version", lambda words: False)
    program, marks = canary
    repository = make_hostile(tmp_path / "hostile", program)
    place = repository / ".git" if form == "bare" else repository
    expected = {b"first", b"second", b"attributes"}
    if form == "partial":  # the history is whole, one old blob isn't there
        git(repository, "-c", "core.fsmonitor=false", "repack", "-adq", environment={"GIT_NO_LAZY_FETCH": "1"})
        for mark in marks.iterdir():
            mark.unlink()
        (pack,) = (repository / ".git" / "objects" / "pack").glob("*.pack")
        pack.with_suffix(".promisor").touch()
    found = documents_of(source_of(f"hostile=git:{place}"))
    assert [mark.read_text() for mark in marks.iterdir()] == []
    subjects = {content_of(document).partition(b"\n")[0] for document in found if b"/commits/" in document.key}
    assert subjects == expected  # neither a replaced commit nor a driver's idea of the text
    attributes = next(document for document in found if content_of(document).startswith(b"attributes"))
    assert b"+* diff=evil filter=evil merge=evil text eol=crlf\n" in content_of(attributes)
    assert list(temporary.iterdir()) == []


def test_a_missing_object_is_not_fetched_from_where_the_repository_says(
    tmp_path: Path, temporary: Path, canary: tuple[Path, Path]
):
    program, marks = canary
    repository = make_hostile(tmp_path / "hostile", program)
    blob = (
        git(repository, "hash-object", "--no-filters", ".gitattributes", environment={"GIT_DIR": "/"}).decode().strip()
    )
    (repository / ".git" / "objects" / blob[:2] / blob[2:]).unlink()
    for mark in marks.iterdir():
        mark.unlink()
    with pytest.raises(InputError, match="can't be cloned"):
        documents_of(source_of(f"git:{repository}"))
    assert list(marks.iterdir()) == []
    assert list(temporary.iterdir()) == []


def test_the_canary_would_sing(tmp_path: Path, canary: tuple[Path, Path]):
    program, marks = canary
    repository = make_hostile(tmp_path / "hostile", program)
    subprocess.run(["git", "status"], cwd=repository, env=CLEAN, capture_output=True, check=False)
    subprocess.run(["git", "show", "HEAD~1"], cwd=repository, env=CLEAN, capture_output=True, check=False)
    assert list(marks.iterdir())


def test_programs_of_the_users_own_config_and_environment_stay_out(
    tmp_path: Path, temporary: Path, canary: tuple[Path, Path], monkeypatch: pytest.MonkeyPatch
):
    program, marks = canary
    home = tmp_path / "home"
    home.mkdir()
    (home / ".gitconfig").write_text(hostile_config(program).replace("[include]\n\tpath = more\n", ""))
    for name, value in {
        "HOME": str(home),
        "GIT_EXTERNAL_DIFF": str(program),
        "GIT_SSH_COMMAND": str(program),
        "GIT_PAGER": str(program),
        "GIT_DIR": "/nowhere",
        "GIT_OBJECT_DIRECTORY": "/nowhere",
        "GIT_CONFIG_COUNT": "1",
        "GIT_CONFIG_KEY_0": "uploadpack.packObjectsHook",
        "GIT_CONFIG_VALUE_0": str(program),
    }.items():
        monkeypatch.setenv(name, value)
    found = documents_of(source_of(f"git:{make_repository(tmp_path / 'plain')}"))
    assert len(found) == 3
    assert list(marks.iterdir()) == []


@pytest.mark.parametrize(
    "name", ["--upload-pack=touch oops", "-c", "a:b", "ext::sh -c touch% oops", "with 'quotes' $(x)\n"]
)
def test_odd_paths_are_paths(name: str, tmp_path: Path, temporary: Path, monkeypatch: pytest.MonkeyPatch):
    make_repository(tmp_path / "folder" / name)
    monkeypatch.chdir(tmp_path / "folder")
    before = sorted(tmp_path.rglob("*"))
    assert len(documents_of(GitSource(name="odd", place=name))) == 3
    assert sorted(tmp_path.rglob("*")) == before


@pytest.mark.parametrize(
    "url", ["https://example.org/x.git", "git@example.org:x/y.git", "ssh://example.org/x", "ext::sh -c id", "git://h/x"]
)
def test_a_url_needs_the_network_flag_and_https(url: str):
    with pytest.raises(InputError) as raised:
        source_of(f"git:{url}")
    assert "--network" in raised.value.hint
    if not url.startswith("https"):
        with pytest.raises(InputError, match="https"):
            source_of(f"git:{url}", network=True)


def test_a_password_in_a_url_is_shown_nowhere():
    source = source_of("git:https://me:secret@example.org/x.git", network=True)
    assert "secret" not in source.location
    assert "secret" not in str(source.options())
    assert source.name == "x"
    with pytest.raises(InputError) as raised:
        source_of("git:https://me:secret@example.org/x.git")
    assert "secret" not in str(raised.value)


@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize("detached", [False, True])
def test_an_old_git_gives_the_same_documents(
    packed: bool, detached: bool, tmp_path: Path, temporary: Path, monkeypatch: pytest.MonkeyPatch
):
    repository = make_repository(tmp_path / "r")
    git(repository, "tag", "-a", "-m", "a release", "v1")
    git(repository, "branch", "side/way", "HEAD~1")
    if detached:
        git(repository, "checkout", "-q", "--detach", "HEAD~1")
    if packed:
        git(repository, "pack-refs", "--all")
        git(repository, "branch", "after-packing")
    cloned = documents_of(source_of(f"git:{repository}"))
    monkeypatch.setattr(git_repository, "is_safe_version", lambda words: False)
    assert documents_of(source_of(f"git:{repository}")) == cloned
    with pytest.raises(InputError, match="too old to clone from a host"):
        documents_of(source_of("git:https://example.org/x.git", network=True))


def test_a_repository_of_another_user_works(tmp_path: Path, temporary: Path):
    repository = make_repository(tmp_path / "theirs")
    if os.getuid() != 0:
        pytest.skip("only root can give a folder away")
    for path in [repository, *repository.rglob("*")]:
        os.chown(path, 12345, 12345)
    assert len(documents_of(source_of(f"git:{repository}"))) == 3


def test_a_fifo_is_not_waited_for(tmp_path: Path, temporary: Path, monkeypatch: pytest.MonkeyPatch):
    repository = make_repository(tmp_path / "r")
    os.mkfifo(tmp_path / "fifo")
    with (repository / ".git" / "config").open("a") as config:
        config.write(f"[include]\n\tpath = {tmp_path}/fifo\n")
    monkeypatch.setattr(git_repository, "SILENCE_SECONDS", 0.5)
    assert len(documents_of(source_of(f"git:{repository}"))) == 3  # its config is never read
    os.mkfifo(repository / ".git" / "objects" / "pack" / "pack-1.idx")
    with pytest.raises(InputError, match="silent"):  # cloned, and the clone is watched
        documents_of(source_of(f"git:{repository}"))
    assert list(temporary.iterdir()) == []
    (repository / ".git" / "config").unlink()
    os.mkfifo(repository / ".git" / "config")
    with pytest.raises(InputError, match="config is no file"):
        source_of(f"git:{repository}")
    with pytest.raises(OSError, match=os.strerror(errno.ENXIO)):  # no process is left that waits at it
        os.open(tmp_path / "fifo", os.O_WRONLY | os.O_NONBLOCK)


def test_the_clone_is_private_and_goes(tmp_path: Path, temporary: Path):
    source = source_of(f"git:{make_repository(tmp_path / 'r')}")
    units = list(source.units(DEFAULT_UNIT_BYTES))
    (folder,) = temporary.iterdir()
    assert stat.S_IMODE(folder.stat().st_mode) == 0o700
    assert source.read(units[0]).documents
    source.close()
    source.close()
    assert list(temporary.iterdir()) == []
    assert source.read(units[0]).documents  # opened again
    source.close()
    assert list(temporary.iterdir()) == []


def test_local_objects_are_read_in_place_and_may_be_packed_anew_meanwhile(tmp_path: Path, temporary: Path):
    repository = make_repository(tmp_path / "r")
    whole = source_of(f"git:{repository}")
    expected = [document for unit in whole.units(1) for document in whole.read(unit).documents]
    whole.close()
    source = source_of(f"git:{repository}")
    units = list(source.units(1))
    (folder,) = temporary.iterdir()
    assert not list((folder / "repository.git" / "objects").rglob("*.pack"))
    assert source.read(units[0]).documents
    git(repository, "repack", "-a", "-d", "-f", "-q")
    git(repository, "prune-packed")
    assert [document for unit in units for document in source.read(unit).documents] == expected
    source.close()


KILLED = """
import os, signal, sys
from penstock.sources import GitSource
source = GitSource(name="r", place=sys.argv[1])
unit = next(source.units(1))
source.read(unit)
os.kill(os.getpid(), signal.SIGKILL)
"""


def test_what_a_killed_process_left_is_removed_and_a_living_ones_is_not(tmp_path: Path, temporary: Path):
    repository = make_repository(tmp_path / "r")
    done = subprocess.run(
        [sys.executable, "-c", KILLED, str(repository)], env={**os.environ, "TMPDIR": str(temporary)}, check=False
    )
    assert done.returncode == -signal.SIGKILL
    (dead,) = temporary.iterdir()
    alive = source_of(f"git:{repository}")
    units = list(alive.units(DEFAULT_UNIT_BYTES))
    assert not dead.exists()
    (clone,) = temporary.iterdir()
    stranger = temporary / "penstock-git-notes"
    stranger.mkdir()
    just_being_made = temporary / "penstock-git-0"  # between the creation of its lock file and the lock
    just_being_made.mkdir()
    (just_being_made / "lock").touch()
    assert remove_dead_clones() == 0
    assert sorted(temporary.iterdir()) == sorted([clone, stranger, just_being_made])
    assert alive.read(units[0]).documents
    alive.close()


@pytest.mark.parametrize(
    ("words", "safe"),
    [
        ("git version 2.39.5", True),
        ("git version 2.39.3", False),
        ("git version 2.40.1", False),
        ("git version 2.45.1.windows.1", True),
        ("git version 2.45.0", False),
        ("git version 2.34.1", False),
        ("git version 2.51.0 (Apple Git-155)", True),
        ("git version 3.0", True),
        ("nonsense", False),
    ],
)
def test_versions_that_can_be_told_to_fetch_nothing(words: str, safe: bool):
    assert is_safe_version(words) is safe


@pytest.fixture
def https_address(tmp_path: Path) -> Iterator[tuple[str, Path]]:
    """A web server on this machine that serves a folder, and the certificate to trust it by."""
    if shutil.which("openssl") is None:
        pytest.skip("openssl isn't installed, which makes the server's certificate")
    subprocess.run(
        ["openssl", "req", "-x509", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:P-256", "-nodes", "-days", "2",
         "-keyout", "key.pem", "-out", "cert.pem", "-subj", "/CN=localhost", "-addext", "subjectAltName=DNS:localhost"],
        cwd=tmp_path, check=True, capture_output=True,
    )  # fmt: skip
    (tmp_path / "web").mkdir()
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(tmp_path / "cert.pem", tmp_path / "key.pem")

    class Quiet(http.server.SimpleHTTPRequestHandler):
        def log_message(self, *arguments: object) -> None:
            pass

    handler = functools.partial(Quiet, directory=str(tmp_path / "web"))
    with http.server.ThreadingHTTPServer(("localhost", 0), handler) as server:
        server.socket = context.wrap_socket(server.socket, server_side=True)
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        yield f"https://localhost:{server.server_address[1]}", tmp_path / "cert.pem"
        server.shutdown()
        thread.join()


def test_an_https_repository_gives_what_its_copy_gives(
    https_address: tuple[str, Path], tmp_path: Path, temporary: Path, monkeypatch: pytest.MonkeyPatch
):
    address, certificate = https_address
    repository = make_repository(tmp_path / "r")
    git(tmp_path, "clone", "-q", "--bare", str(repository), "web/r.git")
    git(tmp_path / "web" / "r.git", "update-server-info")
    monkeypatch.setenv("GIT_SSL_CAINFO", str(certificate))
    found = documents_of(source_of(f"git:{address}/r.git#main", network=True))
    assert found == documents_of(source_of(f"git:{repository}#main"))
    password = address.replace("https://", "https://me:secret@")
    with pytest.raises(InputError, match="can't be cloned") as raised:
        documents_of(source_of(f"git:{password}/none.git", network=True))
    assert "secret" not in raised.value.message
    assert list(temporary.iterdir()) == []
