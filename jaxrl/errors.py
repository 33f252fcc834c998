"""What goes wrong in a run, in one tree: every exception that a user, a caller or a log may meet.

    JaxrlError
    |-- ConfigError (ValueError)            the user's configuration is wrong; raised before anything is trained
    |-- ModelLoadError (ValueError)         a model directory, tokenizer or weight file cannot be used
    |-- SampleError (ValueError)            one rollout's tokens or streams break a contract; the run goes on
    |-- PackingError (ValueError)           samples cannot be packed into the configured shapes
    |-- TransportError (ValueError)         bytes that came from the other arm are not the message that was expected
    |-- EngineError (RuntimeError)          the engine refused or lost a request
    |   |-- PromptTooLongError (ValueError) a prompt leaves no room for one generated token
    |   `-- EndpointDownError               a server cannot be reached, or goes on refusing work
    |-- EnvError (RuntimeError)             an environment broke its own contract
    |   |-- TaskAPIError                    a server that lists tasks failed, or answered what no such server answers
    |   |   `-- UnknownEnvironmentError (LookupError) it has no environment of that name
    |   `-- EnvUnreachableError (ConfigError) nobody answers where an environment is said to be
    |-- GraderError (RuntimeError)          a reward function raised, was late, or gave something that is no reward
    |-- DeadlineError (TimeoutError)        a named wait ran past its deadline
    |-- CheckpointError (RuntimeError)      a checkpoint could not be written, found or restored
    `-- RunFailedError (RuntimeError)       the run cannot go on; says what was saved and how to resume

Each class also is the standard-library exception that it refines, so callers may catch either. A failing rollout is
data (`types.rollout.Failure`), not one of these: the boundaries that play and score rollouts turn exceptions into
`Failure`s. A function that is called with senseless arguments raises a plain ValueError or asserts: that is a bug of
the caller, and no part of a run.
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


class TransportError(JaxrlError, ValueError):
    """Bytes that came from the other arm are cut short, damaged, or another message than the one that was expected."""


class EngineError(JaxrlError, RuntimeError):
    """The inference engine refused a request or lost it."""


class PromptTooLongError(EngineError, ValueError):
    """A prompt leaves no room for even one generated token in the engine's window."""


class EndpointDownError(EngineError):
    """A server could not be reached, or went on refusing work; another one may answer the same request."""


class PolicyFunctionError(EngineError):
    """A function that is measured gave no reply: it raised, or cannot be told what it must know."""


class NoReplyError(PolicyFunctionError, TypeError):
    """A function that is measured returned something that is no reply, which is a mistake in it and ends an evaluation."""


class EnvError(JaxrlError, RuntimeError):
    """An environment broke its own contract (tasks, rewards, or the shape of a reply)."""


class TaskAPIError(EnvError):
    """A server that lists tasks failed, or answered something that no such server answers."""


class UnknownEnvironmentError(TaskAPIError, LookupError):
    """A server that lists tasks has no environment of that name."""


class EnvUnreachableError(EnvError, ConfigError):
    """Nobody answers where an environment is said to be: before a run its address is wrong, in a rollout it has failed."""


class GraderError(JaxrlError, RuntimeError):
    """A reward function raised, gave something that is no reward, or was not done in time; what it raised in this process is the cause."""


class DeadlineError(JaxrlError, TimeoutError):
    """A named wait ran past its deadline."""


class CheckpointError(JaxrlError, RuntimeError):
    """A checkpoint could not be written, found or restored."""


class RunFailedError(JaxrlError, RuntimeError):
    """The run cannot go on; the message says what was saved and how to resume."""
