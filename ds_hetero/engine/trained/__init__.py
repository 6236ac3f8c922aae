"""One trained model, as an engine's hooks, loaders and handles see it; made of parts that only some kinds have.

model                 `TrainedModel`, its kinds and its parts
split_model           interface of a model that is split over the sequence; made of the following:
sequence_losses       state and checks of its losses
batch_placement       how its batches are placed on the ranks
shard_evaluation      how it is evaluated

staged_model          interface of a model that is cut into stages of pipelines
elastic_state         interface of the state that outlives the process in an elastic job

unlike_batches        ranks that take different batches, each of which runs the whole model; made of the following:
forward_arguments     arguments of a forward, and their samples
recorded_forwards     what forwards of training leave for the weighing of their loss
loss_operations       operations of losses, and whether some are new
micro_batch_order     the micro-batch that a loss was computed from
loss_unit             the unit that a loss is a mean over
sample_probes         probes whether samples influence each other
sample_readers        readers of samples, which follow changes of the ranks' batches
batch_memory          how many samples of a planned batch fit into memory
unlike_losses         weights of the ranks' losses
whole_model_checks    refusals for models that run whole on every rank
"""
