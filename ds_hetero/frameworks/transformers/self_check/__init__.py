"""The engine checks itself: a short piece of a batch runs whole and sharded through the user's model.

features     what a batch can show that those before it could not
piece        the short batch, of the batch's own keys
traceless    runs that leave gradients, hooks, buffers and random state as they were
recorded_run outputs of all modules, and the gradients at them, of one run
comparison   errors by token and module, against the model's own rounding
check        what all ranks do together, and the verdict
"""

from ds_hetero.frameworks.transformers.self_check.check import (
    check_batch,
    check_batches_of_ranks,
    check_same_batch,
)
from ds_hetero.frameworks.transformers.self_check.features import features_of

__all__ = ["check_batch", "check_batches_of_ranks", "check_same_batch", "features_of"]
