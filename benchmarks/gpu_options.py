"""Options that the programs that time a GPU share; no program."""

from __future__ import annotations

import argparse
from pathlib import Path

import torch


def gpu_parser(doc: str | None) -> argparse.ArgumentParser:
    """A parser with a program's first line, where its JSON goes, and what commit it is of."""
    parser = argparse.ArgumentParser(description=(doc or "").splitlines()[0])
    add = parser.add_argument
    add("--output", type=Path, required=True, help="JSON file to write")
    add("--commit", help="in place of what git says, where the checkout has no history")
    return parser


def on_gpu(
    parser: argparse.ArgumentParser, args: argparse.Namespace, why: str
) -> argparse.Namespace:
    """The options of a run on this machine's GPU; ends the program where there is none."""
    if not args.output.parent.is_dir():
        parser.error(f"argument --output: {args.output.parent} is not a folder")
    if not torch.cuda.is_available():
        parser.error(f"there is no GPU that torch can use, and {why}")
    args.device = "cuda"
    return args
