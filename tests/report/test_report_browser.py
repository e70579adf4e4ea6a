"""The page in a real browser: it runs nothing, asks for nothing, complains of nothing, and fits a phone."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from penstock.report import write_page

from .pages import CONTRAST_BELOW_AA, Visit

pytestmark = pytest.mark.torture(lane="J", sample=True)

Records = list[dict[str, Any]]
RunOf = Callable[[Records], Path]


def test_no_payload_runs_and_nothing_is_fetched(hostile: Records, run_of: RunOf, browser: Any) -> None:
    visit = Visit(browser, write_page(run_of(hostile)))
    visit.stir()
    assert visit.page.evaluate("window.__pwned") is None
    assert visit.dialogs == []
    assert visit.fetched() == []
    assert visit.complaints == []
    assert visit.page.evaluate("document.scripts.length") == 0
    assert visit.page.url == visit.address
    visit.context.close()


def test_the_policy_stops_what_escaping_would_have_let_through(records: Records, run_of: RunOf, browser: Any) -> None:
    """The second wall alone: payloads put into the finished page as markup run only once the policy is taken out."""
    path = write_page(run_of(records))
    attack = (
        "<script>window.__pwned=1</script><img src=x onerror='window.__pwned=1'><svg onload='window.__pwned=1'></svg>"
        "<p style='color: rgb(255, 0, 0)' id=styled>x</p>"
    )
    attacked = path.read_text(encoding="utf-8").replace("<footer>", f"{attack}<footer>")
    for page, expected in ((attacked, None), (attacked.replace("Content-Security-Policy", "no-policy"), 1)):
        path.write_text(page, encoding="utf-8")
        visit = Visit(browser, path)
        colour = visit.page.evaluate("getComputedStyle(document.getElementById('styled')).color")
        assert visit.page.evaluate("window.__pwned") == expected
        assert (colour == "rgb(255, 0, 0)") == (expected == 1)
        visit.context.close()


@pytest.mark.parametrize("kind", ["records", "mixed_records", "hostile"])
@pytest.mark.parametrize("width", [320, 390, 768, 1200])
def test_the_page_never_scrolls_sideways(
    kind: str, width: int, run_of: RunOf, browser: Any, request: pytest.FixtureRequest
) -> None:
    visit = Visit(browser, write_page(run_of(request.getfixturevalue(kind))), width=width)
    visit.page.evaluate("document.querySelectorAll('details').forEach(one => one.open = true)")
    assert visit.page.evaluate("document.documentElement.scrollWidth") <= width
    assert visit.complaints == []
    visit.context.close()


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_text_has_contrast_enough_to_read(scheme: str, records: Records, run_of: RunOf, browser: Any) -> None:
    visit = Visit(browser, write_page(run_of(records)), scheme=scheme)
    visit.page.evaluate("document.querySelectorAll('details').forEach(one => one.open = true)")
    poor = visit.page.evaluate(CONTRAST_BELOW_AA)
    assert poor == []
    visit.context.close()
