"""Errors of ds_hetero, all of which a user can cause and mend.

    HeteroError (ValueError)
      ConfigError       the "heterogeneity" section: unknown key, wrong type, impossible combination
      ScheduleError     a schedule that is inconsistent, or does not fit the model, the job's ranks or the batch
      ClusterError      a cluster file or device catalogue entry
      PlanError         no schedule exists for this cluster, model and length, or a plan file is wrong
        MemoryPlanError   no schedule fits into memory
      ModelError        a model, layer or attention feature that cannot be split over the sequence
      CheckpointError   a checkpoint that cannot be saved, is incomplete, damaged, of two saves, or of another model
      SyncError         shards of a parameter that do not fit it or one another; gradients in the wrong order
      BatchError        a batch that cannot be sharded, or that differs between ranks
        SamplingError     ranks, or a resumed job, draw other samples than they have to
      StepError         a forward, backward, step or batch that some ranks left out
      VersionError      an installed framework outside the range that works
      DependencyError (also ImportError)   a package that training needs is not installed
    PeerError (RuntimeError)   another rank failed or stopped answering

Messages name the rule, the values seen and what to change, in the user's field names.
"""


class HeteroError(ValueError):
    """Base class of all errors that a user can cause and mend."""


class ConfigError(HeteroError):
    """The "heterogeneity" section of ds_config.json is wrong."""


class ScheduleError(HeteroError):
    """A schedule is inconsistent, or does not fit the model, the world or the batch."""


class ClusterError(HeteroError):
    """A cluster description is wrong: an unknown device or key, a link to an unknown node, a bad number."""


class PlanError(HeteroError):
    """No schedule or plan satisfies the limits, or a plan file is wrong; the message says which rule is broken."""


class MemoryPlanError(PlanError):
    """No schedule fits into memory; the message says by how much, and what would help."""


class ModelError(HeteroError):
    """The model has a layer or a feature that cannot be split over the sequence."""


class CheckpointError(HeteroError):
    """A checkpoint cannot be saved, is incomplete or damaged, of two saves, or was written for another model."""


class SyncError(HeteroError):
    """The shards of a parameter do not fit it or one another, or gradients came in the wrong order."""


class BatchError(HeteroError):
    """A batch cannot be sharded, or ranks that need the same batch hold different ones."""


class SamplingError(BatchError):
    """Samples would be trained on twice or never, since ranks or a resumed job draw other samples than they have to."""


class StepError(HeteroError):
    """Some ranks left out a forward, a backward, a step or a batch in which other ranks wait for them."""


class VersionError(HeteroError):
    """An installed framework is outside the range of versions that work."""


class DependencyError(HeteroError, ImportError):
    """A package that training needs is not installed."""


class PeerError(RuntimeError):
    """Another rank failed or stopped answering while this one waited for it."""
