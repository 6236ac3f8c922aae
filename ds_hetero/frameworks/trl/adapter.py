"""The adapter of TRL: this module implements `ds_hetero.engine.adapters.TrainerAdapter`."""

from __future__ import annotations

from ds_hetero.frameworks.trl.completions import note_constructed as note_constructed
from ds_hetero.frameworks.trl.known_trainers import averages_router_losses as averages_router_losses
from ds_hetero.frameworks.trl.known_trainers import expect_known as expect_known
from ds_hetero.frameworks.trl.known_trainers import needs_whole_sequences as needs_whole_sequences
from ds_hetero.frameworks.trl.names import SHORTER_OUTPUTS
from ds_hetero.frameworks.trl.running_state import running_state as running_state
from ds_hetero.frameworks.trl.running_state import set_running_state as set_running_state

shorter_outputs = SHORTER_OUTPUTS
