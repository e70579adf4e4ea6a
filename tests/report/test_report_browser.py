"""The page in a real browser: it runs nothing, asks for nothing, complains of nothing, and fits a phone."""

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from penstock.report import write_page

playwright_api = pytest.importorskip("playwright.sync_api", reason="playwright isn't installed")

Records = list[dict[str, Any]]
RunOf = Callable[[Records], Path]

CHROMIUM = Path("/usr/bin/chromium")
CHROMIUM_ARGUMENTS = [
    "--headless",
    "--no-sandbox",
    "--disable-gpu",
    "--disable-quic",
    "--no-first-run",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
]

pytestmark = pytest.mark.skipif(not CHROMIUM.exists(), reason=f"no browser at {CHROMIUM}: apt-get install chromium")


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    with playwright_api.sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=str(CHROMIUM), args=CHROMIUM_ARGUMENTS)
        yield browser
        browser.close()


class Visit:
    """One page, opened, with all that it did."""

    def __init__(self, browser: Any, path: Path, *, width: int = 1200, scheme: str = "light") -> None:
        self.context = browser.new_context(viewport={"width": width, "height": 900}, color_scheme=scheme)
        self.page = self.context.new_page()
        self.requests: list[str] = []
        self.complaints: list[str] = []
        self.dialogs: list[str] = []
        self.page.on("request", lambda request: self.requests.append(request.url))
        self.page.on("console", lambda message: self.complaints.append(message.text))
        self.page.on("pageerror", lambda error: self.complaints.append(str(error)))
        self.page.on("dialog", self._dismiss)
        self.page.goto(path.as_uri(), wait_until="load")
        self.address = path.as_uri()

    def _dismiss(self, dialog: Any) -> None:
        self.dialogs.append(dialog.message)
        dialog.dismiss()

    def stir(self) -> None:
        """Does what a reader does: opens what can be opened, hovers, tabs through the page."""
        self.page.evaluate("document.querySelectorAll('details').forEach(one => one.open = true)")
        for place in self.page.locator("td, th, dd, pre, .origin").all()[:60]:
            place.hover(force=True)
        for _ in range(30):
            self.page.keyboard.press("Tab")

    def fetched(self) -> list[str]:
        """Requests beyond the page itself; the icon inside it is none."""
        return [url for url in self.requests if url != self.address and not url.startswith("data:image/svg+xml")]


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


@pytest.mark.parametrize("kind", ["records", "hostile"])
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


# Text against the first opaque background behind it, by WCAG 2's formula; AA asks 4.5 for text of this size.
CONTRAST_BELOW_AA = """() => {
  const channel = v => (v /= 255) <= 0.03928 ? v / 12.92 : ((v + 0.055) / 1.055) ** 2.4;
  const light = rgb => 0.2126 * channel(rgb[0]) + 0.7152 * channel(rgb[1]) + 0.0722 * channel(rgb[2]);
  const numbers = text => (text.match(/[\\d.]+/g) || []).map(Number);
  const behind = one => {
    for (; one; one = one.parentElement) {
      const colour = numbers(getComputedStyle(one).backgroundColor);
      if (colour.length === 3 || colour[3] > 0) return colour;
    }
    return [255, 255, 255];
  };
  const poor = [];
  for (const one of document.body.querySelectorAll('*')) {
    if (![...one.childNodes].some(node => node.nodeType === 3 && node.data.trim())) continue;
    const style = getComputedStyle(one);
    const ink = numbers(one.ownerSVGElement && one.tagName === 'text' ? style.fill : style.color);
    const [high, low] = [light(ink), light(behind(one))].sort((a, b) => b - a);
    if ((high + 0.05) / (low + 0.05) < 4.5) poor.push(one.tagName + ': ' + one.textContent.slice(0, 40));
  }
  return poor;
}"""
