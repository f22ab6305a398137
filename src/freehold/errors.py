"""Every error that freehold raises on purpose.

One family, so that a trainer can catch them all with ``except FreeholdError``. Each class is also a ``ValueError``,
``TypeError`` or ``RuntimeError``, so that code which knows nothing of freehold treats it as PyTorch's own.
"""

__all__ = [
    "CheckpointError",
    "ConsistencyError",
    "FreeholdError",
    "LayoutError",
    "LifecycleError",
    "NonFiniteGradientError",
    "PeerError",
    "PlanError",
    "PlanTypeError",
    "RoutingError",
    "RuleError",
    "SourceError",
    "UnsupportedError",
]


class FreeholdError(Exception):
    """The common base of all of freehold's errors."""


class PlanError(FreeholdError, ValueError):
    """A planning problem that cannot be laid out as it is stated (bad shape, bucket size, policy name ...)."""


class PlanTypeError(FreeholdError, TypeError):
    """An argument of the wrong type, where Python would raise ``TypeError`` (a bool as a size, a set of params)."""


class LayoutError(FreeholdError, ValueError):
    """A layout that breaks an invariant or cannot be read, or a question that this layout has no answer to."""


class RoutingError(FreeholdError, ValueError):
    """Params cannot be given to rules as asked: a pattern that matches nothing, no matrix, a name claimed twice."""


class RuleError(FreeholdError, ValueError):
    """An option that a rule cannot work with, at construction or after an edit of a param group."""


class SourceError(FreeholdError, ValueError):
    """A model source that cannot be read: a damaged file, an unknown architecture, a package that is missing."""


class ConsistencyError(FreeholdError, RuntimeError):
    """Ranks disagree, or one of them refused; raised on every rank of the group with the same text."""


class CheckpointError(FreeholdError, RuntimeError):
    """A checkpoint that cannot be written, is damaged or incomplete, or does not fit the model; nothing was loaded."""


class LifecycleError(FreeholdError, RuntimeError):
    """A call at a moment when it cannot be honoured (closed optimizer, second owner of a param, thawed param ...)."""


class NonFiniteGradientError(FreeholdError, RuntimeError):
    """A reduced gradient holds inf or NaN; nothing was updated on any rank."""


class PeerError(FreeholdError, RuntimeError):
    """Another rank died, stopped answering within ``timeout_s``, or gave up; this optimizer cannot go on."""


class UnsupportedError(FreeholdError, RuntimeError):
    """A feature of PyTorch that freehold does not support (sparse gradients, GradScaler ...)."""
