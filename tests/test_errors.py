"""Errors say what happened and the way out, also after the way between processes; the drawn tree is the real one."""

import errno
import re
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context

import pytest

from penstock import errors
from penstock.errors import ConfigError, DiskError, MissingExtraError, PenstockError, nearest_first


def classes_below(base: type[PenstockError]) -> list[type[PenstockError]]:
    return [base, *(found for child in base.__subclasses__() for found in classes_below(child))]


def tree_in_docstring() -> dict[str, str]:
    """Class name -> name of its base, read from the drawing: each level is indented by four characters."""
    parents: dict[str, str] = {}
    path: list[str] = []
    for line in (errors.__doc__ or "").splitlines():
        drawn = re.match(r"    ([│├└─ ]*)(\w+Error)\b", line)
        if drawn:
            depth = len(drawn[1]) // 4
            path[depth:] = [drawn[2]]
            parents[drawn[2]] = path[depth - 1] if depth else "Exception"
    return parents


def example_of(kind: type[PenstockError]) -> PenstockError:
    if kind is MissingExtraError:
        return MissingExtraError("torch", extra="torch", wanted_for="training")
    return kind("what happened", hint="the way out")


def test_the_tree_in_the_docstring_is_the_real_one():
    real = {kind.__name__: kind.__bases__[0].__name__ for kind in classes_below(PenstockError)}
    assert tree_in_docstring() == real


def test_every_class_is_public():
    names = {kind.__name__ for kind in classes_below(PenstockError)}
    assert names <= set(errors.__all__)


@pytest.mark.parametrize("kind", classes_below(PenstockError))
def test_every_error_has_a_message_and_a_hint(kind):
    error = example_of(kind)
    assert error.message
    assert error.hint
    assert str(error) == error.message
    assert kind.__doc__
    with pytest.raises(TypeError):
        kind("no way out")


def raise_example(name: str) -> None:
    raise example_of(getattr(errors, name))


def test_errors_come_back_whole_from_a_worker_process():
    with ProcessPoolExecutor(1, mp_context=get_context("spawn")) as pool:
        for kind in classes_below(PenstockError):
            met = pool.submit(raise_example, kind.__name__).exception(timeout=60)
            expected = example_of(kind)
            assert type(met) is kind
            assert (met.message, met.hint, met.args) == (expected.message, expected.hint, expected.args)


def test_a_missing_extra_names_the_package_and_the_command():
    error = MissingExtraError("safetensors", extra="torch", wanted_for="saving a checkpoint")
    assert "safetensors" in error.message
    assert "saving a checkpoint" in error.message
    assert "penstock[torch]" in error.hint


@pytest.mark.parametrize("code", [errno.ENOSPC, errno.EDQUOT, errno.EIO, errno.EROFS, errno.EACCES, errno.EMFILE])
def test_a_disk_error_says_what_where_and_why(code):
    cause = OSError(code, "what the system said", "/data/store/segment")
    error = DiskError.from_os_error(cause, doing="writing a segment")
    for part in ("writing a segment", "'/data/store/segment'", "what the system said"):
        assert part in error.message
    other = DiskError.from_os_error(OSError(errno.EXDEV, "x", "y"), doing="writing")
    assert error.hint
    assert error.hint != other.hint, "these causes have a way out of their own"


@pytest.mark.parametrize("code", [errno.ENOSPC, errno.EDQUOT, errno.EIO, errno.EMFILE, errno.EXDEV])
def test_a_disk_error_says_how_the_command_goes_on_that_met_it(code):
    error = DiskError.from_os_error(OSError(code, "what the system said", "x"), doing="writing")
    before = error.hint
    error.go_on_by("do that")
    assert error.hint == before.replace(errors.RUN_AGAIN, "do that") != before
    other = DiskError("what happened", hint="look at the disk")
    other.go_on_by("do that")
    assert other.hint == "look at the disk"


def test_a_disk_error_copes_with_an_error_that_says_little():
    error = DiskError.from_os_error(OSError("odd"), doing="writing")
    assert "writing" in error.message
    assert "odd" in error.message
    assert error.hint


def test_nearest_first_lists_every_name_once_with_the_nearest_in_front():
    known = ["cosine", "linear", "constant", "wsd"]
    names = nearest_first("consine", known).split(", ")
    assert names[0] == "cosine"
    assert sorted(names) == sorted(known)
    assert nearest_first("zzz", known).split(", ") == sorted(known)
    assert nearest_first("anything", []) == ""


def test_errors_are_caught_by_their_base():
    with pytest.raises(PenstockError):
        raise ConfigError("unknown key", hint="remove it")
