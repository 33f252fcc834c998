"""Every exception that jaxrl raises on purpose, in one tree.

    JaxrlError
    |-- ConfigError (ValueError)            the user's configuration is wrong; raised before any device or socket is touched
    |-- ModelLoadError (ValueError)         a model directory, tokenizer or weight file cannot be used
    |-- SampleError (ValueError)            one rollout's tokens or streams break a contract; the rollout is marked, the run goes on
    |-- PackingError (ValueError)           samples cannot be packed into the configured shapes
    |-- EngineError (RuntimeError)          the engine refused or lost a request
    |   `-- PromptTooLongError (ValueError) a prompt leaves no room for one generated token
    |-- EnvError (RuntimeError)             an environment broke its own contract
    |-- DeadlineError (TimeoutError)        a named wait ran past its deadline
    |-- CheckpointError (RuntimeError)      a checkpoint could not be written, found or restored
    `-- RunFailedError (RuntimeError)       the run cannot go on; says what was saved and how to resume

Each class also is the standard-library exception that it refines, so callers may catch either. A failing rollout is data
(`types.rollout.Failure`), not one of these: only the boundary that plays a rollout turns an exception into a `Failure`.
"""


class JaxrlError(Exception):
    """Base of every exception raised on purpose by jaxrl."""


class ConfigError(JaxrlError, ValueError):
    """A setting is unknown, of the wrong type, or inconsistent with another one."""


class ModelLoadError(JaxrlError, ValueError):
    """A model directory, its tokenizer or a weight file is missing, damaged or of an unsupported family."""


class SampleError(JaxrlError, ValueError):
    """The tokens or streams of one rollout break a contract, so that rollout cannot be trained on."""


class PackingError(JaxrlError, ValueError):
    """Samples cannot be packed into the configured static shapes, or a packed batch breaks an invariant."""


class EngineError(JaxrlError, RuntimeError):
    """The inference engine refused a request or lost it."""


class PromptTooLongError(EngineError, ValueError):
    """A prompt leaves no room for even one generated token in the engine's window."""


class EnvError(JaxrlError, RuntimeError):
    """An environment broke its own contract (tasks, rewards, or the shape of a reply)."""


class DeadlineError(JaxrlError, TimeoutError):
    """A named wait ran past its deadline."""


class CheckpointError(JaxrlError, RuntimeError):
    """A checkpoint could not be written, found or restored."""


class RunFailedError(JaxrlError, RuntimeError):
    """The run cannot go on; the message says what was saved and how to resume."""
