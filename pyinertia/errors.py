"""What can go wrong. Every message says what was given, what is allowed and what to do."""


class PyInertiaError(Exception):
    """Base of all errors that pyinertia raises by itself."""


class NativeLibraryError(PyInertiaError, ImportError):
    """The llama.cpp library is missing, is not ours, or does not fit this package."""


class PolicyError(PyInertiaError, ValueError):
    """An eviction policy is unknown, out of range, or cannot run on this model."""


class ModelError(PyInertiaError, ValueError):
    """A model file cannot be read, or does not go with an adapter or a draft model."""


class BenchError(PyInertiaError, ValueError):
    """A benchmark cannot run as it was asked for."""


class EvalError(PyInertiaError, ValueError):
    """An evaluation cannot start, or cannot go on."""


class ClusterError(PyInertiaError, RuntimeError):
    """A Ray cluster is not there, or has no room for a worker."""


class CommandError(PyInertiaError, ValueError):
    """A command cannot do what it was asked for."""
