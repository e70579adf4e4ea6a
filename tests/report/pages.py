"""Pages as a parser and as a browser see them: what the tests of every page ask."""

from html.parser import HTMLParser
from pathlib import Path
from typing import Any

VOID = {"meta", "link", "br"}
# Everything the page is made of. A tag or attribute outside this list came from data, or needs a thought.
TAGS = """html head meta title link style body header main footer nav section article h1 h2 h3 p a b bdi small strong
    span div dl dt dd ul ol li table caption thead tbody tr th td details summary figure figcaption pre code kbd samp
    svg desc line text path circle rect"""


class Page(HTMLParser):
    """Collects elements and text; checks that every end tag closes the element that is open."""

    def __init__(self, path: Path) -> None:
        super().__init__(convert_charrefs=True)
        self.elements: list[tuple[str, dict[str, str]]] = []
        self.texts: list[str] = []
        self.open: list[str] = []
        self.source = path.read_text(encoding="utf-8")
        self.feed(self.source)
        self.close()
        assert self.open == []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.elements.append((tag, {name: value or "" for name, value in attrs}))
        if tag not in VOID:
            self.open.append(tag)

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        if self.open[-1:] != ["style"]:
            self.texts.append(data)

    @property
    def text(self) -> str:
        return "".join(self.texts)

    def attributes(self, name: str) -> list[str]:
        return [attributes[name] for _, attributes in self.elements if name in attributes]


def assert_harmless(page: Page) -> None:
    assert {tag for tag, _ in page.elements} <= set(TAGS.split())
    names = {name for _, attributes in page.elements for name in attributes}
    assert not {name for name in names if name.startswith("on") or name in ("style", "srcdoc", "action", "formaction")}
    for value in page.attributes("href"):
        assert value.startswith(("#", "data:image/svg+xml;base64,"))
    assert page.attributes("src") == []


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
