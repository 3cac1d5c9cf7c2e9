"""Every error that Leyden raises on purpose, named by the boundary at which it is raised.

    LeydenError
    ├── ConfigError            the run file or a command-line override is wrong
    ├── RequestError           a caller of the gateway sent something that cannot be served (4xx)
    │   ├── Unauthorized         no key, a key that is forged, expired or of the wrong scope (401, 403)
    │   ├── NotFound             the named thing does not exist (404)
    │   ├── Conflict             a state change that does not apply any more (409)
    │   ├── TooLarge             a body over its limit (413)
    │   ├── Unsupported          a body in an encoding that is not read (415)
    │   ├── Unprocessable        a value that is not one, such as a NaN reward (422)
    │   ├── BudgetExceeded       a limit of the rollout: turns, tokens, context (400)
    │   ├── Unwritable           the store cannot be written now, for example on a full disk: held or tried again (503)
    │   └── InternalError        not the caller's fault: a bug of Leyden's (500)
    ├── EngineError            the inference engine failed or broke its contract
    │   ├── EngineUnavailable    connection refused or lost, 5xx: worth another try
    │   ├── EngineRejected       the engine said no (4xx): trying again cannot help
    │   ├── EngineBroken         it answers /health and samples nothing, for longer than a call waits
    │   └── EngineUnsuitable     as it was started it cannot serve this run; the message names the option to set
    ├── CaptureError           tokens cannot be recorded exactly: the attempt is incomplete
    ├── StoreError             the data base is of another version, or damaged
    ├── GatewayError           the control API could not be reached, or refused (raised by clients)
    ├── LaunchError            a harness or grader could not be started
    │   └── NoRoom               the machine has no room for it now: disk, inodes, descriptors
    └── TrainingError          a step cannot be computed or resumed

Who retries: the gateway's engine client retries `EngineUnavailable`, of engines that answer otherwise for
`engine.give_up_s`; the control client retries a connection that was refused, `Unwritable`, and
`UnprovenGateway` where the gateway was there before; nothing else retries.
A message names the value, the limit and the fix. Catch by type, never by text.
"""

from __future__ import annotations

LONGEST_MESSAGE = 1000  # characters; messages quote what callers send


class LeydenError(Exception):
    """Base of all errors below."""


class ConfigError(LeydenError):
    """The run file or an override is wrong. `path` is the key path, for example `trainer.group_size`."""

    def __init__(self, path: str, message: str) -> None:
        self.path = path
        super().__init__(f"{path}: {message}" if path else message)


class RequestError(LeydenError):
    """A request that the gateway refuses. `status` is the HTTP status, `param` the offending field if any."""

    status = 400
    code = "invalid_request"

    def __init__(self, message: str, *, param: str | None = None, code: str | None = None) -> None:
        super().__init__(message if len(message) <= LONGEST_MESSAGE else f"{message[:LONGEST_MESSAGE]}…")
        self.param = param
        if code is not None:
            self.code = code


class Unauthorized(RequestError):
    """The key is missing, forged or expired (401), or of another scope or attempt (403)."""

    status = 401
    code = "invalid_api_key"

    def __init__(self, message: str, *, forbidden: bool = False) -> None:
        super().__init__(message)
        if forbidden:
            self.status, self.code = 403, "forbidden"


class NotFound(RequestError):
    status = 404
    code = "not_found"


class Conflict(RequestError):
    status = 409
    code = "conflict"


class TooLarge(RequestError):
    status = 413
    code = "request_too_large"


class Unsupported(RequestError):
    status = 415
    code = "unsupported_media_type"


class Unprocessable(RequestError):
    status = 422
    code = "unprocessable"


class BudgetExceeded(RequestError):
    """A budget of the rollout is used up. 400 and never 429 or 5xx, so that no SDK tries again."""

    code = "budget_exceeded"


class Unwritable(RequestError):
    """A disk without room, or one that fails. What was asked for has not happened; model calls are held meanwhile."""

    status = 503
    code = "store_unwritable"


class InternalError(RequestError):
    """What a caller hears of a bug. The log has the rest; nothing of it is in the message."""

    status = 500
    code = "internal_error"


class EngineError(LeydenError):
    """The inference engine failed."""


class EngineUnavailable(EngineError):
    """`status` is that of the engine's answer, None without one; `retry_after_s` how long it asked to wait."""

    def __init__(self, message: str, *, status: int | None = None, retry_after_s: float = 0.0) -> None:
        super().__init__(message)
        self.status = status
        self.retry_after_s = retry_after_s

    @property
    def busy(self) -> bool:
        """Whether the engine said that it has no time now, which is no sign of a fault."""
        return self.status is not None and (400 <= self.status < 500 or self.status == 503)


class EngineBroken(EngineError):
    """It is there, but calls of it fail: no reason to wait for ever, and none to score an agent."""


class EngineRejected(EngineError):
    """`status` is that of the engine's answer."""

    def __init__(self, message: str, *, status: int = 400) -> None:
        super().__init__(message)
        self.status = status


class EngineUnsuitable(EngineError):
    """For example an engine that gives no token ids."""


class CaptureError(LeydenError):
    """Token ids are missing or contradict each other; the attempt must not be trained."""


class StoreError(LeydenError):
    pass


class GatewayError(LeydenError):
    """The gateway's control API refused a request or could not be reached. `status` is None without a reply."""

    def __init__(self, message: str, *, status: int | None = None) -> None:
        super().__init__(message)
        self.status = status


class LaunchError(LeydenError):
    """`final`: it is the task's or the run file's doing, so that another attempt would meet it too."""

    def __init__(self, message: str, *, final: bool = False) -> None:
        super().__init__(message)
        self.final = final


class NoRoom(LaunchError):
    """It passes, and no attempt can help it: the attempt is given back."""


class TrainingError(LeydenError):
    pass
