"""The engine checks itself: a short piece of a batch runs whole and sharded through the user's model.

piece        the short batch, of the batch's own keys, and what it can show that those before it could not
recorded_run outputs of all modules, and the gradients at them, of one run that leaves no trace
parameter_gradients  gradients of parameters, projected on few numbers
runs         the runs that are compared: of one piece, whole and sharded
training_mode  whether the model computes something else in training than in evaluation
comparison   errors by token and module, against the model's own rounding
check        what all ranks do together, and the verdict
"""

from ds_hetero.frameworks.transformers.self_check.check import SelfCheck, check_batch

__all__ = ["SelfCheck", "check_batch"]
