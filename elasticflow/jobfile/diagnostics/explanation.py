"""What is told about one code."""

from __future__ import annotations

from typing import NamedTuple


class Explanation(NamedTuple):
    """What `elasticflow explain` prints about one code."""

    title: str
    why: str
    bad: str = ""
    good: str = ""

    def text(self) -> str:
        """Return reason and examples as plain text."""
        return "\n\n".join([self.why, *(f"{name}:\n{example}" for name, example in self._examples())])

    def markdown(self) -> str:
        """Return reason and examples as Markdown."""
        return "\n\n".join(
            [self.why, *(f"{name}:\n\n```\n{example}\n```" for name, example in self._examples())]
        )

    def _examples(self) -> list[tuple[str, str]]:
        return [(name, example) for name, example in (("Bad", self.bad), ("Good", self.good)) if example]
