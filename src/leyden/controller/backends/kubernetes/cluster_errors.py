"""What the API server can refuse.

ClusterError               the API server refused; `status` and the server's own message
├── ClusterUnavailable       no answer, 429, 5xx: worth another try, and the call may have been carried out
├── QuotaExceeded            403 of a ResourceQuota: worth another try later
├── ClusterForbidden         401, 403, a certificate that is not trusted: rights are missing
├── ObjectExists             409 on creation
│   └── ObjectBeingDeleted     the one of that name is on its way out
├── ObjectMissing            404
└── VersionGone              410: the resource version is too old to watch from
"""

from __future__ import annotations

from leyden.errors import LeydenError


class ClusterError(LeydenError):
    """The Kubernetes API refused. `status` is the HTTP status, None without an answer."""

    def __init__(self, message: str, *, status: int | None = None) -> None:
        super().__init__(message)
        self.status = status


class ClusterUnavailable(ClusterError):
    pass


class QuotaExceeded(ClusterError):
    pass


class ClusterForbidden(ClusterError):
    pass


class ObjectExists(ClusterError):
    pass


class ObjectBeingDeleted(ObjectExists):
    pass


class ObjectMissing(ClusterError):
    pass


class VersionGone(ClusterError):
    pass
