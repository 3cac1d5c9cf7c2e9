"""A control client for a run folder: of the gateway that runs, or of one that is started for the moment."""

from __future__ import annotations

import contextlib
import tempfile
from collections.abc import AsyncIterator
from pathlib import Path

import orjson

from leyden.client import ControlClient, control_key, read_or_create_secret
from leyden.config import RunConfig
from leyden.errors import ConfigError, GatewayError
from leyden.run_file import parse
from leyden.trainer.supervise import Children, child_command, read_gateway_file, wait_for_gateway

PROBE_S = 0.2


def read_run(run_dir: Path) -> RunConfig:
    """The settings that a run was last started with."""
    path = run_dir / "run.json"
    try:
        settings = orjson.loads(path.read_bytes())["config"]
    except OSError:
        raise ConfigError("RUN_DIR", f"{run_dir} is not the folder of a run: it has no run.json") from None
    except (orjson.JSONDecodeError, KeyError, TypeError):
        raise ConfigError("RUN_DIR", f"{path} is damaged") from None
    settings.pop("config_dir", None)
    return parse(settings).model_copy(update={"run_dir": run_dir.resolve()})


@contextlib.asynccontextmanager
async def gateway_of(run_dir: Path, config: RunConfig, secret: bytes | None) -> AsyncIterator[ControlClient]:
    """Raises GatewayError if no gateway answers and none can be started."""
    key = control_key(secret or read_or_create_secret(run_dir))
    if url := config.gateway.url or await _answering(run_dir):
        async with ControlClient(url, key) as client:
            yield client
        return
    if not (run_dir / "store.sqlite").exists():
        raise GatewayError(f"{run_dir} has no store.sqlite: its gateway never started")
    settings = config.model_dump(mode="json", exclude={"config_dir"})
    with tempfile.TemporaryDirectory(prefix="leyden-show-") as folder:
        run_file = Path(folder) / "run.yaml"
        run_file.write_bytes(orjson.dumps(settings))
        async with Children(run_dir / "logs") as children:
            child = await children.start("gateway", child_command("gateway", run_file, ()))
            async with ControlClient(await wait_for_gateway(run_dir, child), key) as client:
                yield client


async def _answering(run_dir: Path) -> str | None:
    """The URL in gateway.json if a gateway answers there now."""
    found = read_gateway_file(run_dir)
    if found is None:
        return None
    async with ControlClient(found[0], "none", timeout_s=5.0, retry_limit_s=PROBE_S) as client:
        try:
            await client.health()
        except GatewayError:
            return None
    return found[0]
