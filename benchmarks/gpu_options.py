"""Options that the programs that time a GPU share; no program."""

from __future__ import annotations

import argparse
from collections.abc import Callable, Collection
from pathlib import Path

import torch


def gpu_parser(doc: str | None) -> argparse.ArgumentParser:
    """A parser with a program's first line, where its JSON goes, and what commit it is of."""
    parser = argparse.ArgumentParser(description=(doc or "").splitlines()[0])
    add = parser.add_argument
    add("--output", type=Path, required=True, help="JSON file to write")
    add("--commit", help="in place of what git says, where the checkout has no history")
    return parser


def positive(text: str) -> float:
    """A number above zero."""
    found = float(text)
    if not found > 0:
        raise argparse.ArgumentTypeError("needs a number above zero")
    return found


def beginnings(known: Collection[str]) -> Callable[[str], list[str]]:
    """An option that names those of `known` by their beginnings, separated by commas."""

    def named(text: str) -> list[str]:
        found = [name for name in known if name.startswith(tuple(text.split(",")))]
        if not found:
            raise argparse.ArgumentTypeError(f"{text!r} names none of {', '.join(known)}")
        return found

    return named


def on_gpu(
    parser: argparse.ArgumentParser, args: argparse.Namespace, why: str
) -> argparse.Namespace:
    """The options of a run on this machine's GPU, or of a tiny model on its CPU; else the end."""
    if not args.output.parent.is_dir():
        parser.error(f"argument --output: {args.output.parent} is not a folder")
    args.device = "cuda" if torch.cuda.is_available() else "cpu"
    if args.device == "cpu" and not getattr(args, "tiny", False):
        parser.error(f"there is no GPU that torch can use, and {why}")
    return args
