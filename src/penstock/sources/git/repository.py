"""A private bare clone of a repository that nobody vouches for, and git processes that run nothing of its making.

In: a path, or with the network an https URL. Out: a `Clone`: a bare repository in a temporary folder of ours, and git
commands on it. All git processes get an environment made from nothing, a config file of ours instead of the user's and
the system's, and one allowed transport. The config, attributes and hooks of the foreign repository never reach it.

The objects of a local repository are borrowed where they lie (`objects/info/alternates` of an empty repository of ours)
and its refs are read from their files: no program of git's ever looks at the foreign config. `rev-list` tells whether
every object is there. A clone of 5,000 commits, 30 MB of packs, takes 2.9 seconds, as long as making all their diffs.
Should the owner throw objects away meanwhile, git stops at the commit that needs one. Where borrowing can't be done
(refs in a table, an object is missing, links or FIFOs among the objects) the repository is cloned, or git says what is
wrong with it. It is then touched by one program, `git upload-pack` (inside `git clone --no-local`), which is made to
serve the untrusted: it runs no hook, honours `uploadpack.packObjectsHook` only from the user's own config, and fetches
no missing object.

A partial clone can't be cloned without fetching what it lacks, and a git without the fixes of May 2024 can't be told to
fetch nothing (distributions mend theirs without changing its number). There objects are borrowed, whole or not.

Disk: a clone, where one is made, in the system's temporary folder (`TMPDIR` moves it). The folder goes with `close`, at
the exit of the process, or, after a kill, at the next start: a kernel lock inside tells the dead from the living.
Memory: none to speak of.
"""

from __future__ import annotations

import contextlib
import os
import re
import secrets
import selectors
import shutil
import signal
import subprocess
import tempfile
import time
import weakref
from collections.abc import Sequence
from functools import cache
from pathlib import Path
from typing import IO, Any

from penstock import fs
from penstock.errors import DiskError, InputError, StoreBusyError

__all__ = [
    "Clone",
    "check_url",
    "find_clone",
    "is_url",
    "local_git_folder",
    "make_clone",
    "new_clone_name",
    "remove_dead_clones",
    "without_secret",
]

FOLDER_PREFIX = "penstock-git-"
LOCK = "lock"
READY = "ready"
# A folder without a lock is about to get one, or its maker was killed in that moment.
LOCKLESS_SECONDS = 60.0
# git reports progress about every second; a config that includes a FIFO would keep it silent for ever.
SILENCE_SECONDS = 300.0
# Killed processes are gone at once, unless nobody reaps orphans here.
GROUP_SECONDS = 2.0
SILENT = b"fatal: git was silent for %d seconds and was stopped" % SILENCE_SECONDS

# The first of each series that can be told to fetch nothing (GIT_NO_LAZY_FETCH) and checks a repository's owner.
SAFE_VERSIONS = ((2, 39, 4), (2, 40, 2), (2, 41, 1), (2, 42, 2), (2, 43, 4), (2, 44, 1), (2, 45, 1))

_OBJECT_ID = re.compile(rb"[0-9a-f]{40}|[0-9a-f]{64}")

CONFIG = """\
# Stands in for the user's and the system's config.
[safe]
	directory = *
[core]
	hooksPath = /dev/null
	fsmonitor = false
	attributesFile = /dev/null
	excludesFile = /dev/null
	askPass = false
	sshCommand = false
	pager = cat
	editor = false
	quotePath = false
	bigFileThreshold = 32m
[attr]
	tree = 4b825dc642cb6eb9a060e54bf8d69288fbee4904
[credential]
	helper =
[protocol]
	allow = never
[protocol "{protocol}"]
	allow = always
[gpg]
	program = false
[init]
	defaultBranch = main
	templateDir =
[gc]
	auto = 0
[maintenance]
	auto = false
[fetch]
	recurseSubmodules = no
[advice]
	detachedHead = false
"""

NETWORK_VARIABLES = ("https_proxy", "HTTPS_PROXY", "all_proxy", "ALL_PROXY", "no_proxy", "NO_PROXY")
# What git itself reads first, then what the rest of the machine reads.
CERTIFICATE_VARIABLES = ("GIT_SSL_CAINFO", "SSL_CERT_FILE")


def is_url(place: str) -> bool:
    """Whether this names something on another machine, in any of git's ways to write it."""
    return not os.path.lexists(place) and ("://" in place or ":" in place.partition("/")[0])


def new_clone_name() -> str:
    """A name that nobody can guess, so that no other user can lie in wait under it."""
    return FOLDER_PREFIX + secrets.token_hex(16)


class Clone:
    """A bare repository of ours, and the way to run git on it.

    Args:
        folder: temporary folder that holds it.
        lock: held by the process that made the folder; None in a process that shares another's.
    """

    def __init__(self, folder: Path, lock: fs.FolderLock | None, *, protocol: str = "file") -> None:
        self.folder = folder
        self.git_folder = folder / "repository.git"
        self.environment = _environment(folder, protocol)
        self._remove = weakref.finalize(self, _remove_clone, folder, lock, os.getpid()) if lock else None

    def close(self) -> None:
        """Removes the folder, in the process that made it."""
        if self._remove is not None:
            self._remove()

    def command(self, *arguments: str) -> list[str]:
        """A git command on the clone."""
        safety = ("--no-pager", "--no-replace-objects", "--literal-pathspecs", f"--git-dir={self.git_folder}")
        return [_git(), *safety, *arguments]

    def output(self, *arguments: str, data: bytes = b"") -> bytes:
        """What a short command prints.

        Raises:
            InputError: it failed.
        """
        done = self.finished(*arguments, data=data)
        if done.returncode:
            raise InputError(
                f"git {arguments[0]} failed: {_last_words(done.stderr)}",
                hint="check the repository with `git fsck`, or clone it anew",
            )
        return done.stdout

    def finished(self, *arguments: str, data: bytes = b"") -> subprocess.CompletedProcess[bytes]:
        """A short command, ended well or not."""
        return subprocess.run(
            self.command(*arguments),
            input=data,
            capture_output=True,
            env=self.environment,
            cwd=self.folder,
            check=False,
        )

    def started(self, *arguments: str, errors: IO[bytes]) -> subprocess.Popen[bytes]:
        """A long-lived command that is talked to; what it complains of goes to a file."""
        return subprocess.Popen(
            self.command(*arguments),
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=errors,
            env=self.environment,
            cwd=self.folder,
            bufsize=0,
        )


def make_clone(place: str, *, name: str, network: bool) -> Clone:
    """Clones a repository into a new temporary folder.

    Args:
        place: path, or an https URL.
        name: of the folder, from `new_clone_name`.
        network: whether a URL may be opened.

    Raises:
        InputError: not a repository, not readable, or a transport that isn't allowed.
        FileExistsError: the folder is there.
    """
    if is_url(place):
        _refuse_old_git()
        protocol, path = check_url(place, network=network), place
    else:
        protocol, path = "file", os.path.realpath(place)  # begins with a slash: neither an option nor a host
        git_folder = local_git_folder(path)
    folder, lock = _new_folder(name)
    clone = Clone(folder, lock, protocol=protocol)
    try:
        fs.write_atomic(folder / "config", CONFIG.format(protocol=protocol).encode())
        if protocol == "file" and (_is_partial(git_folder) or not is_safe_version(_git_version())):
            _borrow(clone, path, git_folder)
        elif protocol != "file" or not _borrowed_whole(clone, path, git_folder):
            # Locally every ref comes along, so that any of them can be named; a host's pull requests would be too many.
            _run_clone(clone, path, shape="--mirror" if protocol == "file" else "--bare")
        fs.write_atomic(folder / READY, protocol.encode())
    except BaseException:
        clone.close()
        raise
    return clone


def find_clone(name: str) -> Clone | None:
    """The finished clone that another process of ours made under this name, if it is there."""
    folder = Path(tempfile.gettempdir(), name)
    try:
        if folder.lstat().st_uid != os.getuid():
            return None
        return Clone(folder, None, protocol=(folder / READY).read_text())
    except OSError:
        return None


def remove_dead_clones() -> int:
    """Removes the clones of processes that were killed; returns how many."""
    count = 0
    for folder in Path(tempfile.gettempdir()).glob(f"{FOLDER_PREFIX}*"):
        with contextlib.suppress(OSError):  # another process may be removing it too
            facts = folder.lstat()
            if facts.st_uid == os.getuid() and not folder.is_symlink() and folder.is_dir():
                count += _remove_if_dead(folder, age=time.time() - facts.st_mtime)
    return count


def _remove_if_dead(folder: Path, *, age: float) -> bool:
    if fs.is_temporary(folder):  # its removal was interrupted
        fs.remove_tree(folder)
        return True
    if age < LOCKLESS_SECONDS and not _names_a_holder(folder / LOCK):  # its maker is about to lock it
        return False
    lock = fs.FolderLock(folder / LOCK)
    try:
        lock.acquire()
    except StoreBusyError:
        return False
    _remove_clone(folder, lock, os.getpid())
    return True


def _names_a_holder(lock: Path) -> bool:
    try:
        return lock.stat().st_size > 0
    except FileNotFoundError:
        return False


def _remove_clone(folder: Path, lock: fs.FolderLock, owner: int) -> None:
    if os.getpid() != owner:  # a forked worker ends; the clone is its parent's
        return
    fs.remove_tree(folder)
    # Not if that was interrupted: without its lock file the folder would look as if it were just being made, and stay.
    # With it, the next start sees that nobody holds it.
    lock.release()


def _new_folder(name: str) -> tuple[Path, fs.FolderLock]:
    """A folder that only this user can enter, with its lock held."""
    folder = Path(tempfile.gettempdir(), name)
    # A signal between folder and lock would leave a folder that nobody can tell from one that is just being made.
    held_back = signal.pthread_sigmask(signal.SIG_BLOCK, (signal.SIGINT, signal.SIGTERM))
    try:
        folder.mkdir(mode=0o700)
        lock = fs.FolderLock(folder / LOCK)
        lock.acquire()
    except FileExistsError:
        raise  # for the caller: another process of ours was first
    except OSError as error:
        raise DiskError.from_os_error(error, doing="making a temporary folder") from error
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, held_back)
    return folder, lock


def _environment(folder: Path, protocol: str) -> dict[str, str]:
    """Everything that a git process of ours sees of the world."""
    kept = {}
    if protocol != "file":
        kept = {name: os.environ[name] for name in NETWORK_VARIABLES if name in os.environ}
        certificates = [os.environ[name] for name in CERTIFICATE_VARIABLES if os.environ.get(name)]
        kept |= {"GIT_SSL_CAINFO": certificates[0]} if certificates else {}
    return {
        **kept,
        "PATH": os.environ.get("PATH", os.defpath),
        "HOME": str(folder),
        "XDG_CONFIG_HOME": str(folder),
        "TMPDIR": str(folder),
        "LC_ALL": "C",
        "TZ": "UTC",
        "GIT_CONFIG_NOSYSTEM": "1",
        "GIT_CONFIG_SYSTEM": "/dev/null",
        "GIT_CONFIG_GLOBAL": str(folder / "config"),
        "GIT_ATTR_NOSYSTEM": "1",
        "GIT_ALLOW_PROTOCOL": protocol,
        "GIT_NO_LAZY_FETCH": "1",
        "GIT_NO_REPLACE_OBJECTS": "1",
        "GIT_OPTIONAL_LOCKS": "0",
        "GIT_TERMINAL_PROMPT": "0",
        "GIT_ASKPASS": "false",
        "GIT_SSH_COMMAND": "false",
        "GIT_PAGER": "cat",
        "GIT_EDITOR": "false",
        # Keeps freed memory instead of giving it back to the system for each blob: a tenth of the time of diffs.
        "MALLOC_MMAP_THRESHOLD_": str(64 * 2**20),
        "MALLOC_TRIM_THRESHOLD_": str(128 * 2**20),
    }


def _run_clone(clone: Clone, place: str, *, shape: str) -> None:
    # Progress is asked for because a write to our closed pipe ends a clone whose parent was killed.
    command = ["clone", shape, "--no-local", "--template=", "--no-recurse-submodules", "--progress"]
    status, words = _watched(clone, [_git(), *command, "--", place, str(clone.git_folder)])
    if status:
        shown = without_secret(place)
        raise InputError(
            f"{shown!r} can't be cloned: {without_secret(_last_words(words))}", hint=_clone_hint(words, shown)
        )


def _watched(clone: Clone, command: Sequence[str]) -> tuple[int, bytes]:
    """Runs a command that reports progress on stderr; ends it when it falls silent. Returns status and last words."""
    process = subprocess.Popen(
        command,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        env=clone.environment,
        cwd=clone.folder,
        bufsize=0,
        start_new_session=True,  # so that it ends with the programs it started
    )
    words = b""
    with process, selectors.DefaultSelector() as selector:
        stderr: Any = process.stderr
        selector.register(stderr, selectors.EVENT_READ)
        try:
            while selector.select(SILENCE_SECONDS):
                piece = stderr.read(2**16)
                if not piece:
                    return process.wait(), words
                words = (words + piece)[-(2**16) :]
        finally:
            _end_group(process)
    return 1, SILENT


def _end_group(process: subprocess.Popen[bytes]) -> None:
    """Ends a process and those it started, and waits until none of them writes into our folder any more."""
    deadline = time.monotonic() + GROUP_SECONDS
    with contextlib.suppress(ProcessLookupError):
        while time.monotonic() < deadline:
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()
            time.sleep(0.01)


def _clone_hint(words: bytes, place: str) -> str:
    if b"dubious ownership" in words:
        return "the repository belongs to another user; make a clone of your own and name that"
    if b"lazy" in words or b"promisor" in words:
        return "objects are missing; complete it with `git fetch --refetch`"
    if is_url(place):
        return "check the URL; a repository that needs a password: clone it yourself and give the path"
    return f"check it with `git -C {place} fsck`, or clone it anew"


def _last_words(words: bytes) -> str:
    """The last complaint of a git command, on one printable line."""
    lines = [line.strip() for line in re.split(r"[\r\n]+", words.decode("utf-8", "replace")) if line.strip()]
    complaints = [line for line in lines if line.startswith(("fatal:", "error:", "remote: fatal:", "remote: error:"))]
    chosen = (complaints or lines or ["git gave no reason"])[0]
    return "".join(character if character.isprintable() else "?" for character in chosen)[:400]


def _borrowed_whole(clone: Clone, path: str, git_folder: Path) -> bool:
    """Borrows where that can be done and every object is there, as a clone would find out; else leaves nothing."""
    objects = git_folder / "objects"
    if (objects / "info" / "alternates").exists() or not _holds_only_files(objects):
        return False
    try:
        _borrow(clone, path, git_folder)
        whole = clone.finished("rev-list", "--objects", "--all", "--quiet").returncode == 0
    except (InputError, OSError):  # refs in a table, an odd path, files out of reach: a clone works, or says why not
        whole = False
    if not whole and clone.git_folder.exists():
        fs.remove_tree(clone.git_folder)
    return whole


def _holds_only_files(folder: Path) -> bool:
    """Whether nothing below is a FIFO, for which git would wait for ever (a clone is watched), or a link."""
    folders = [os.fspath(folder)]
    while folders:
        with os.scandir(folders.pop()) as entries:
            for entry in entries:
                if entry.is_dir(follow_symlinks=False):
                    folders.append(entry.path)
                elif not entry.is_file(follow_symlinks=False):
                    return False
    return True


def _borrow(clone: Clone, path: str, git_folder: Path) -> None:
    """An empty repository of ours over the objects of theirs, with their refs."""
    refs, head = _refs_in_files(git_folder, path)
    objects = str(git_folder / "objects")
    if "\n" in objects or objects.startswith(('"', "#")):  # the file of alternates would read it otherwise
        raise InputError(f"{path!r} can't be read under so odd a name", hint="rename a folder, or clone it in full")
    longest = max((len(value) for value in refs.values()), default=40)
    clone.output("init", "--quiet", "--bare", "--template=", f"--object-format={'sha256' if longest > 40 else 'sha1'}")
    fs.make_folder(clone.git_folder / "objects" / "info")
    fs.write_atomic(clone.git_folder / "objects" / "info" / "alternates", os.fsencode(objects) + b"\n")
    shallow = git_folder / "shallow"
    if shallow.is_file():
        fs.write_atomic(clone.git_folder / "shallow", shallow.read_bytes())
    lines = [b"create %s %s\n" % (ref, value) for ref, value in sorted(refs.items())]
    clone.output("update-ref", "--stdin", data=b"".join(lines))
    if head.startswith(b"ref: refs/"):
        clone.output("symbolic-ref", "HEAD", os.fsdecode(head[5:]))
    elif _OBJECT_ID.fullmatch(head):
        clone.output("update-ref", "--no-deref", "HEAD", head.decode())


def _refs_in_files(git_folder: Path, path: str) -> tuple[dict[bytes, bytes], bytes]:
    """Name -> object id of every ref of a repository, and the content of HEAD; links aren't followed."""
    if (git_folder / "reftable").is_dir():
        raise InputError(
            f"{path!r} keeps its refs in a table, which is read by cloning only",
            hint="`git clone --bare` it, name that",
        )
    refs: dict[bytes, bytes] = {}
    packed = git_folder / "packed-refs"
    for line in packed.read_bytes().splitlines() if packed.is_file() else ():
        value, _, name = line.partition(b" ")
        if _OBJECT_ID.fullmatch(value) and name.startswith(b"refs/"):
            refs[name] = value
    for folder, _, names in os.walk(git_folder / "refs"):
        for file in (Path(folder, name) for name in names):
            if file.is_symlink() or not file.is_file():
                continue
            value = os.fsencode(_small_file(file)).strip()
            if _OBJECT_ID.fullmatch(value):  # else symbolic, as a remote's HEAD is: it names another of these
                refs[os.fsencode(file.relative_to(git_folder))] = value
    return refs, os.fsencode(_small_file(git_folder / "HEAD")).strip()


def local_git_folder(path: str) -> Path:
    """Where the objects and refs of the repository at `path` lie: a worktree, a bare repository or a submodule.

    Raises:
        InputError: there is none.
    """
    for candidate in (Path(path, ".git"), Path(path)):
        folder = _linked_folder(candidate) if candidate.is_file() else candidate
        common = folder / "commondir"
        if common.is_file():  # a worktree beside the main one
            folder = folder / _small_file(common)
        if (folder / "objects").is_dir() and os.path.lexists(folder / "HEAD"):
            _refuse_special(folder, path)
            return folder.resolve()
    raise InputError(
        f"{path!r} isn't a git repository",
        hint="give the folder that holds .git, or a bare repository; or leave out git:",
    )


def _refuse_special(folder: Path, path: str) -> None:
    """Refuses a FIFO or device where git expects a file: it would wait for ever."""
    for name in ("HEAD", "config", "config.worktree", "packed-refs", "shallow", "objects/info/alternates"):
        if (folder / name).exists() and not (folder / name).is_file():
            raise InputError(f"{path!r} isn't a git repository: its {name} is no file", hint="clone it anew")


def _linked_folder(file: Path) -> Path:
    """What the .git file of a worktree or submodule points at."""
    content = _small_file(file)
    return file.parent / content[8:] if content.startswith("gitdir: ") else file


def _small_file(path: Path) -> str:
    with path.open("rb") as file:
        return os.fsdecode(file.read(4096)).rstrip("\n")


def _is_partial(git_folder: Path) -> bool:
    """Whether objects may be missing by design: git marks the packs that came through a filter."""
    return any((git_folder / "objects" / "pack").glob("*.promisor"))


def check_url(url: str, *, network: bool) -> str:
    """The protocol of a URL.

    Raises:
        InputError: it may not be opened.
    """
    if not network:
        raise InputError(f"{without_secret(url)!r} is on the network, which isn't allowed", hint="add --network")
    if not url.startswith("https://"):
        raise InputError(
            f"{without_secret(url)!r} isn't an https URL, the only kind that is opened",
            hint="clone it yourself (`git clone --bare URL DIR`) and give git:DIR",
        )
    return "https"


def without_secret(url: str) -> str:
    """A URL that can be shown."""
    return re.sub(r"//[^/@]*@", "//", url)


@cache
def _git() -> str:
    program = shutil.which("git")
    if program is None:
        raise InputError("git isn't installed, and git: inputs need it", hint="install git 2.39.4 or newer")
    return program


@cache
def _git_version() -> str:
    return subprocess.run([_git(), "--version"], capture_output=True, text=True, check=False).stdout.strip()


def _refuse_old_git() -> None:
    """Refuses a URL to a git that a host might trick."""
    if not is_safe_version(_git_version()):
        raise InputError(
            f"{_git_version() or 'git'} is too old to clone from a host safely; needed: 2.39.4 or newer of its series",
            hint="install a newer git, or clone it yourself and give the path",
        )


def is_safe_version(words: str) -> bool:
    """Whether `git --version` names a release with the fixes of May 2024."""
    found = re.search(r"(\d+)\.(\d+)(?:\.(\d+))?", words)
    if not found:
        return False
    version = tuple(int(number or 0) for number in found.groups())
    return version >= SAFE_VERSIONS[-1] or any(version[:2] == first[:2] and version >= first for first in SAFE_VERSIONS)
