"""Which federation [workers] asks for."""

from __future__ import annotations

from typing import TYPE_CHECKING

from mpitrain.config import Config

if TYPE_CHECKING:
    from mpitrain.train.build.federation import Federation
    from mpitrain.train.build.inputs import Inputs


def federation_of(config: Config, inputs: Inputs) -> Federation:
    """The federation of a configuration that has one."""
    if config.workers.arrival:
        from mpitrain.train.build.paced import PacedFederation  # few federations do not wait
        return PacedFederation(config, inputs)
    from mpitrain.train.build.federation import Federation
    return Federation(config, inputs)
