"""The fenced blocks of a Markdown page, in order."""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path

NOT_RUN = re.compile(r"<!-- not run: (.*) -->")
FENCE = re.compile(r"^```(\w*)$")
LINK = re.compile(r"\[[^]]*\]\(([^)#]+)(?:#[^)]*)?\)")


@dataclass(frozen=True, slots=True)
class Block:
    """One fenced block; `line` is that of its first line, `not_run` why it is not executed."""

    language: str
    text: str
    line: int
    not_run: str

    def commands(self) -> list[tuple[str, list[str]]]:
        """Shell commands, each with the output that the page shows below it."""
        lines = re.sub(r"\\\n\s*", "", self.text).splitlines()
        if self.language == "bash":
            return [(line, []) for line in lines if line.strip() and not line.startswith("#")]
        found: list[tuple[str, list[str]]] = []
        for line in lines:
            if line.startswith("$ "):
                found.append((line[2:], []))
            else:
                found[-1][1].append(line)
        return found


def blocks(path: Path) -> list[Block]:
    """The blocks of a page."""
    found, before, start, body, language = [], "", 0, [], ""
    for number, line in enumerate(path.read_text(encoding="utf-8").splitlines(), start=1):
        fence = FENCE.match(line)
        if start and line == "```":
            reason = NOT_RUN.fullmatch(before)
            found.append(Block(language, "\n".join(body), start, reason[1] if reason else ""))
            start, before = 0, ""
        elif start:
            body.append(line)
        elif fence:
            start, body, language = number + 1, [], fence[1]
        elif line.strip():
            before = line
    assert not start, f"{path.name}: the block at line {start} is not closed"
    return found


def links(path: Path) -> list[str]:
    """Relative links of a page."""
    text = path.read_text(encoding="utf-8")
    return [link for link in LINK.findall(text) if "://" not in link]
