"""The tables of docs/families.md: every model family, patched, on a tiny model of it.

python scripts/family_tables.py --write   run all families (some ten minutes) and write the page
python scripts/family_tables.py           say whether the page lists the families that the tests do
"""

from __future__ import annotations

import re
import sys
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from sage_plugin.plugin.patch import patched  # noqa: E402
from tests.plugin import tiny, tiny_families, tiny_transformers  # noqa: E402

PAGE = ROOT / "docs" / "families.md"
MARK = re.compile(r"(<!-- table: (\w+) -->\n).*?(<!-- end -->)", re.DOTALL)
FAMILIES: dict[str, dict[str, Callable[[str], Any]]] = {
    "diffusers": {
        **dict.fromkeys(tiny.CALLS, tiny.tiny),
        **dict.fromkeys(tiny_families.FAMILIES, tiny_families.tiny),
    },
    "transformers": dict.fromkeys(tiny_transformers.FAMILIES, tiny_transformers.tiny),
}
"""What makes a tiny model of each family."""
NEAR = "in which the host takes calls whose lengths follow from data"
HEAD = (
    "| family | model | attention calls | on a kernel | `sdpa` | `torch.compile(fullgraph=True)` |"
)


def table(library: str) -> str:
    """A row a family: what a patch catches of one forward, and what becomes of it."""
    lines = [HEAD, "|---|---|---|---|---|---|"]
    for name, make in FAMILIES[library].items():
        lines.append(row(name, make))
        print(lines[-1], file=sys.stderr, flush=True)
    return "\n".join(lines)


def row(name: str, make: Callable[[str], Any]) -> str:
    """One family."""
    model = make(name)
    before = model.run()
    with patched(model.module, kernel="sdpa", min_seq=0) as handle:
        same = torch.equal(model.run(), before)
    caught = handle.report().total_calls()
    with patched(model.module, kernel="sage", min_seq=0) as handle:
        ours = model.run()
        report = handle.report()
        graphs = compiled(model, ours, lambda: make(name))
    reasons: Counter[object] = Counter()
    for layer in report.rows:
        reasons.update(layer.fallbacks)
    why = "".join(f"; {count} not: {reason}" for reason, count in reasons.items())
    kind = type(model.module).__name__
    return (
        f"| {name} | `{kind}` | {caught} | {report.kernel_calls()}{why} | "
        f"{'same bits' if same else 'DIFFERS'} | {graphs} |"
    )


def compiled(model: Any, eager: torch.Tensor, again: Callable[[], Any]) -> str:
    """How a patched model compiles, beside how a fresh one does unpatched."""
    torch._dynamo.reset()
    if (error := _failure(model, eager)) is None:
        return "one graph"
    if error == NEAR:
        return f"one graph, {NEAR}"
    fresh = again()
    torch._dynamo.reset()
    if _failure(fresh, None) is not None:
        return "breaks unpatched too"
    return f"BREAKS: {error}"


def _failure(model: Any, expected: torch.Tensor | None) -> str | None:
    """Why a model does not compile to one graph that gives what eager mode gives."""
    whole = model.module
    whole.compile(fullgraph=True, backend="eager")
    try:
        made = model.run()
    except Exception as error:
        return f"{type(error).__name__}: {str(error).splitlines()[0][:80]}"
    finally:
        whole._compiled_call_impl = None
    if expected is None or torch.allclose(made, expected, atol=1e-5):
        return None
    return NEAR if torch.allclose(made, expected, atol=0.02) else "other results"


def _listed(page: str) -> dict[str, list[str]]:
    found = {}
    for match in MARK.finditer(page):
        rows = match[0].splitlines()[3:-1]
        found[match[2]] = [line.split("|")[1].strip() for line in rows]
    return found


def outdated(page: str) -> Iterator[str]:
    """What is wrong with a page, as far as can be seen without running the models."""
    for library, names in _listed(page).items():
        if names != list(FAMILIES[library]):
            yield f"the table of {library} does not list the families of the tests"
    if "DIFFERS" in page or "BREAKS" in page:
        yield "a family differs or breaks"


def main() -> int:
    """Write the page, or say that it is out of date."""
    page = PAGE.read_text(encoding="utf-8")
    if "--write" in sys.argv:
        page = MARK.sub(lambda match: f"{match[1]}{table(match[2])}\n{match[3]}", page)
        PAGE.write_text(page, encoding="utf-8")
    problems = list(outdated(page))
    for problem in problems:
        print(f"{PAGE}: {problem}; run this with --write", file=sys.stderr)
    return 1 if problems else 0


if __name__ == "__main__":
    sys.exit(main())
