"""The engine checks itself: a short piece of the first batch runs whole and sharded through the user's model.

piece        the short batch, of the batch's own keys
traceless    runs that leave gradients, hooks, buffers and random state as they were
recorded_run outputs of all modules, and the gradients at them, of one run
comparison   errors by token and module, against the model's own rounding
check        what all ranks do together, and the verdict
"""

from ds_hetero.integrations.transformers.self_check.check import check_first_batch

__all__ = ["check_first_batch"]
