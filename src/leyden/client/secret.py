"""The run folder's secret: 32 random bytes as hexadecimal text, private to the user."""

from __future__ import annotations

import os
import secrets
from pathlib import Path

from leyden.errors import ConfigError

SECRET_BYTES = 32


def read_or_create_secret(run_dir: Path) -> bytes:
    """The HMAC secret in `run_dir/secret`, made by whoever comes first; safe when several programs start at once.

    The file appears complete or not at all (a private temporary file is linked to its name). Raises
    ConfigError if an existing file is too short or readable by others.
    """
    path = run_dir / "secret"
    if not path.exists():
        _create(path)
    if not path.is_file():
        raise ConfigError("run_dir", f"{path} is a folder or a device, not a file; move it away")
    if path.stat().st_mode & 0o077:
        raise ConfigError("run_dir", f"{path} can be read by other users; run `chmod 600 {path}`")
    try:
        secret = bytes.fromhex(path.read_text(encoding="ascii").strip())
    except OSError as error:
        raise ConfigError("run_dir", f"{path} cannot be read: {error.strerror}") from None
    except ValueError:
        raise ConfigError("run_dir", f"{path} is not hexadecimal; delete it and start again") from None
    if len(secret) < SECRET_BYTES:
        raise ConfigError(
            "run_dir",
            f"{path} holds {len(secret)} bytes, at least {SECRET_BYTES} are needed; delete it",
        )
    return secret


def _create(path: Path) -> None:
    temporary = path.with_name(f".{path.name}.{os.getpid()}.{secrets.token_hex(4)}")
    descriptor = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
    try:
        with os.fdopen(descriptor, "w") as file:
            file.write(secrets.token_hex(SECRET_BYTES) + "\n")
        path.hardlink_to(temporary)
    except FileExistsError:
        pass
    finally:
        temporary.unlink()
