"""The package's named errors.

Knows: the names. Does not know: who raises them. All are ``ValueError``: each says what was
given, what is allowed and what to do, and is raised before anything has changed.
"""


class CacheFullError(ValueError):
    """More tokens, rows or positions than the cache or the model holds."""


class OutOfBlocksError(CacheFullError):
    """More blocks than the pool can lend now."""


class BlockNotInUseError(ValueError):
    """A block that does not exist, or that has no owner: released twice, say."""


class SequenceEndedError(ValueError):
    """A sequence that has ended, or that another cache began."""


class UnsupportedModelError(ValueError):
    """A model configuration that kvbook does not implement."""


class WeightFileError(ValueError):
    """A weight file that is truncated, altered, incomplete or does not fit the configuration."""


class DownloadError(ValueError):
    """The weight file could not be fetched or stored."""


class UnfinishedStepError(ValueError):
    """A forward pass that was begun and did not come to its end, and what follows it."""


class QueueFullError(ValueError):
    """More requests than may wait."""


class UnknownRequestError(ValueError):
    """A request that is not under way: it has ended, or never was."""
