"""The card that a command answers for: one that is here, or one that files recorded."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from sage_plugin.errors import UsageError
from sage_plugin.schema import DeviceFacts

As = Annotated[
    str | None,
    typer.Option(
        "--as", metavar="CARD", help="Answer for a card with configs, such as nvidia-h200."
    ),
]


def facts_of(device: str | None, card: str | None, config_dir: Path | None) -> DeviceFacts:
    """Return the facts of the device here, or those that were recorded for a named card."""
    from sage_plugin import device as devices
    from sage_plugin.registry import cards

    if card is None:
        return devices.chosen(device)[1]
    if device is not None:
        raise UsageError("give --device, which is here, or --as, a card that is not; not both")
    return cards.recorded(card, config_dir)
