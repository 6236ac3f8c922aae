"""Every error a user of ds_hetero can cause.

    HeteroError (ValueError)
      ConfigError       the "heterogeneity" section: unknown key, wrong type, impossible combination
      ScheduleError     a schedule that is not consistent in itself, or does not fit the model or the world
      ClusterError      a cluster file or device catalogue entry
      PlanError         no schedule exists for this cluster, model and length
        MemoryPlanError   because nothing fits into memory
      ModelError        a model, layer or attention feature that cannot be split over the sequence
      CheckpointError   a checkpoint that cannot be saved, is incomplete, damaged, of two saves, or of another model
      SyncError         replicas whose cuts of a parameter do not fit it or one another; gradients out of turn
      BatchError        a batch that cannot be sharded, or that differs between ranks
        SamplingError     because ranks, or a job and the one it goes on from, draw other samples than they have to
      StepError         a forward, backward, step or batch that some ranks left out
      VersionError      an installed framework outside the range that works
      DependencyError (also ImportError)   a package that training needs is not installed
    PeerError (RuntimeError)   another rank failed or stopped answering

Messages name the rule, the values seen and what to change, in the user's field names.
"""


class HeteroError(ValueError):
    """Base of all errors that a user can cause and mend."""


class ConfigError(HeteroError):
    """The "heterogeneity" section of ds_config.json is wrong."""


class ScheduleError(HeteroError):
    """A schedule is inconsistent, or does not fit the model, the world or the batch."""


class ClusterError(HeteroError):
    """A cluster description is wrong: unknown device or key, a link to nowhere, a bad number."""


class PlanError(HeteroError):
    """No schedule satisfies the limits; the message says by how much and on which rank."""


class MemoryPlanError(PlanError):
    """No schedule fits into memory; the message says by how much, and what would help."""


class ModelError(HeteroError):
    """The model has a layer or a feature that cannot be split over the sequence."""


class CheckpointError(HeteroError):
    """A checkpoint cannot be saved, is incomplete or damaged, of two saves, or was written for another model."""


class SyncError(HeteroError):
    """The shards of a parameter do not fit it or one another, or its gradient came out of turn."""


class BatchError(HeteroError):
    """A batch cannot be sharded, or the ranks do not hold the same one."""


class SamplingError(BatchError):
    """Samples would be trained on twice or never: ranks, or a job that goes on, draw others than they have to."""


class StepError(HeteroError):
    """Some ranks left out a forward, a backward, a step or a batch in which other ranks wait for them."""


class VersionError(HeteroError):
    """An installed framework is outside the range of versions that work."""


class DependencyError(HeteroError, ImportError):
    """A package that training needs is not installed."""


class PeerError(RuntimeError):
    """Another rank failed or stopped answering while this one waited for it."""
