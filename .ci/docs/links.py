"""Follow every link of a built website that stays on it: `links.py DIRECTORY`. Exits with 1 after naming the links that lead nowhere."""

from __future__ import annotations

import sys
from html.parser import HTMLParser
from pathlib import Path
from urllib.parse import unquote, urlsplit


class Page(HTMLParser):
    """A page's links and the names that links can lead to."""

    def __init__(self, path: Path) -> None:
        super().__init__()
        self.links: list[str] = []
        self.anchors: set[str] = set()
        self.feed(path.read_text(encoding="utf-8"))

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        """Note what the tag links to, and its own name."""
        named = dict(attrs)
        self.anchors |= {value for value in (named.get("id"), named.get("name")) if value}
        link = named.get("href") if tag in {"a", "link"} else named.get("src")
        if link:
            self.links.append(link)


def main(root: Path) -> int:
    """Return the number of links that lead nowhere, each named on a line."""
    pages = {path: Page(path) for path in root.rglob("*.html") if path.name != "404.html"}
    broken = checked = 0
    for path, page in sorted(pages.items()):
        for link in page.links:
            parts = urlsplit(link)
            if parts.scheme or parts.netloc:
                continue
            checked += 1
            target = path.parent.joinpath(unquote(parts.path)).resolve() if parts.path else path
            target = target / "index.html" if target.is_dir() else target
            is_there = target.is_file() and (
                not parts.fragment or target not in pages or unquote(parts.fragment) in pages[target].anchors
            )
            if not is_there:
                broken += 1
                print(f"{path.relative_to(root)}: {link}")
    print(f"{len(pages)} pages, {checked} links, {broken} lead nowhere")
    return broken


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1]).resolve()) > 0)
