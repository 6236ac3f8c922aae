"""The self-check: run a short piece of a batch whole and sharded through the user's model, and compare the two runs.

features               finds features of a batch; a batch with new features is checked
piece                  cuts the piece out of a batch
runs                   runs the piece whole and sharded
recorded_run           records the outputs of all modules, and the gradients at the outputs, in one run
traceless              runs the model without changing it
parameter_gradients    projects gradients of parameters on a few numbers
comparison             computes errors by token and module, relative to the model's rounding noise
training_mode          detects models that compute something else in training than in evaluation
check                  agrees with all ranks on the steps above, and refuses a model whose runs differ
"""

from ds_hetero.frameworks.transformers.self_check.check import SelfCheck, check_batch

__all__ = ["SelfCheck", "check_batch"]
