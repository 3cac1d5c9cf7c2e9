"""The settings of a run, typed and frozen: a section per part. `run_file` reads them; nothing else reads settings.

Durations are seconds (`_s`), sizes are bytes (`_bytes`) or tokens (`_tokens`). Relative paths start at the run file.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Annotated, Any, Literal
from urllib.parse import urlsplit

from pydantic import AfterValidator, BaseModel, BeforeValidator, ConfigDict, Field, field_validator, model_validator

PositiveInt = Annotated[int, Field(ge=1)]
PositiveSeconds = Annotated[float, Field(gt=0, allow_inf_nan=False)]
LOWEST_TEMPERATURE = 0.01  # below it vLLM samples at it, and logits overflow
Finite = Annotated[float, Field(allow_inf_nan=False)]
_WORDS = {"yes": True, "on": True, "no": False, "off": False}
Switch = Annotated[bool, BeforeValidator(lambda value: _WORDS.get(value, value) if isinstance(value, str) else value)]


def _http_url(value: str) -> str:
    try:
        parts = urlsplit(value)
        known = parts.scheme in ("http", "https") and parts.hostname and parts.port != 0 and not parts.query
    except ValueError:
        known = False
    if not known or not _BASE_URL.fullmatch(value):
        raise ValueError(f"{value!r} is no address; give http://host:port")
    return value.rstrip("/")


HttpUrl = Annotated[str, AfterValidator(_http_url)]
_BASE_URL = re.compile(r"[^\s?#@\\]+")


class Section(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True, strict=True, protected_namespaces=())


class ModelConfig(Section):
    """The policy. `path` is a Hugging Face model folder (or hub id); `name` is what harnesses call it.

    `thinking_history`: earlier reasoning as the chat template shows it, or all of it kept. `continuity`: a request
    whose history means the same goes on from the sampled ids, or (`off`) every request is rendered afresh and linked
    only where its ids go on from a turn's by themselves. `template_kwargs` are variables of the chat template, such as
    `enable_thinking: false`; a request's own `chat_template_kwargs` are put over them for that request.
    """

    path: str
    name: str = "policy"
    renderer: str = "auto"
    context_tokens: PositiveInt = 4096
    thinking_history: Literal["template", "keep"] = "template"
    template_kwargs: dict[str, bool | int | float | str | None] = {}
    continuity: Literal["semantic", "off"] = "semantic"


class DataConfig(Section):
    """JSON-lines files, one task per line. Validation tasks are sampled, never trained."""

    train: Path
    validation: Path | None = None
    shuffle: Switch = True


class WorkspaceConfig(Section):
    """What lies in an attempt's working directory: a copy of `template` and the files of the task's field
    `files`.

    `template` is a folder, as a Jinja template over `task`; what a task says chooses below the folder that stands
    before it (`repos/{{ task.repo }}`: below repos), or below the run file's own. The run's folder is never copied.
    `files` names a field of the task that maps relative paths to text.

    `keep` says whose workspaces stay: `failed` those of rollouts whose harness or machinery failed, whatever their
    reward, `unsolved` also those that ended well with a reward below `eval.pass_threshold`, `all`, or `none`.
    """

    template: str | None = None
    files: str | None = None
    keep: Literal["failed", "unsolved", "all", "none"] = "failed"


class LimitsConfig(Section):
    """What the processes of one attempt may use together; null is no limit. Its grader is bound by the same.

    `memory_bytes`, `cpus` (cores' worth of time) and `pids` (processes and threads) are kept by a cgroup, which Leyden
    must be able to make. `workspace_bytes` is looked at every second, with open files that have no name any more. A
    harness that is over it is killed; a grader may write as much beside what it finds. A harness that ends for a limit
    has failed by itself: it is graded.
    """

    memory_bytes: Annotated[int, Field(ge=4_000_000)] | None = None
    cpus: Annotated[float, Field(ge=0.01, le=4096)] | None = None
    pids: PositiveInt | None = None
    workspace_bytes: PositiveInt | None = None


class HarnessConfig(Section):
    """How to start the harness on one task.

    `command` is an argument list without a shell; each item, and each value of `env`, is a Jinja template over `task`,
    `workspace`, `run_dir`, `config_dir`, `rollout_id`, `model`, `url` (the gateway's). A bare command name is looked up
    beside the interpreter `python` (default: Leyden's own) first, then on PATH. With `preload`, that interpreter
    imports the modules once and is forked for each attempt; `command[0]` is then one of its console scripts, or
    `python`.
    Of the environment that Leyden runs in a local harness gets what every program needs (PATH, HOME, the locale,
    certificates, proxies), and the variables that `pass_env` names.
    After an infrastructure failure the next attempt waits `retry_backoff_s`, twice as long each time, a minute at most.

    `sandbox: bubblewrap` gives a local harness and its grader a system they can only read, their workspace and a
    private /tmp to write, and no network but the gateway. `readable` names what they may read besides the system and
    `python`'s environment; relative paths start at the run file.
    """

    command: Annotated[list[str], Field(min_length=1)]
    env: dict[str, str] = {}
    pass_env: list[str] = []
    python: str | None = None
    preload: list[str] = []
    timeout_s: PositiveSeconds = 1800
    max_turns: PositiveInt = 1000
    max_attempts: PositiveInt = 3
    retry_backoff_s: Annotated[float, Field(ge=0, le=60)] = 1.0
    log_bytes: PositiveInt = 16 * 2**20
    limits: LimitsConfig = LimitsConfig()
    sandbox: Literal["none", "bubblewrap"] = "none"
    readable: list[Path] = []

    @model_validator(mode="after")
    def _a_fork_cannot_enter(self) -> HarnessConfig:
        if self.sandbox != "none" and self.preload:
            raise ValueError(
                f"harness.preload {self.preload} cannot go with harness.sandbox: {self.sandbox}: a forked interpreter "
                "is outside the sandbox already; give up one of them"
            )
        return self


class GraderConfig(Section):
    """How a finished attempt gets its reward: exactly one of `command`, `function` (`module:name`), `harness:
    true`. A reward is one finite number, of 1e12 at most; true and false, and scalars of numpy and torch, are numbers.

    With `harness: true` the harness posts the reward itself, to LEYDEN_REWARD_URL with its own key, while it runs. The
    first one counts. A harness that fails (exit code, time-out, limit) without one gets 0; one that ends well without
    one makes its attempt void. `pass_env` is what `harness.pass_env` is, for a grader of its own.
    """

    command: list[str] | None = None
    function: str | None = None
    harness: Switch = False
    pass_env: list[str] = []
    timeout_s: PositiveSeconds = 120
    max_tries: PositiveInt = 2

    @model_validator(mode="after")
    def _exactly_one(self) -> GraderConfig:
        given = [n for n, v in (("command", self.command), ("function", self.function), ("harness", self.harness)) if v]
        if len(given) != 1:
            raise ValueError(f"give exactly one of command, function, harness; got {given or 'none'}")
        return self

    @field_validator("function")
    @classmethod
    def _module_and_name(cls, value: str | None) -> str | None:
        if value is not None and value.count(":") != 1:
            raise ValueError(f"{value!r} is not of the form 'module:function'")
        return value


class SamplingConfig(Section):
    """The distribution that training samples from. It overrides what the harness asks for.

    The embedded trainer computes the log-probs of what was sampled again, over all tokens: it takes no `top_p` below 1
    and no `top_k`. Engines may, for rollouts that are only recorded.
    """

    temperature: Annotated[float, Field(ge=LOWEST_TEMPERATURE, le=10)] = 1.0
    top_p: Annotated[float, Field(gt=0, le=1)] = 1.0
    top_k: Annotated[int, Field(ge=0)] = 0
    max_tokens: PositiveInt | None = None


class EvalSamplingConfig(SamplingConfig):
    """As `sampling`, with `temperature` 0 (the most likely token) and truncation as one likes."""

    temperature: Annotated[float, Field(ge=0, le=10)] = 1.0

    @field_validator("temperature")
    @classmethod
    def _zero_or_more_than_rounding(cls, value: float) -> float:
        if 0 < value < LOWEST_TEMPERATURE:
            raise ValueError(f"{value} is neither 0, the most likely token, nor at least {LOWEST_TEMPERATURE}")
        return value


class GatewayConfig(Section):
    """Where the gateway listens. `url` names one that already runs; then nothing is started.

    `max_body_bytes` bounds one model call; null is 16 MiB, or 32 MiB with `engine.render: engine`, for images.
    """

    url: HttpUrl | None = None
    host: str = "127.0.0.1"
    port: Annotated[int, Field(ge=0, le=65535)] = 0
    max_body_bytes: PositiveInt | None = None
    max_workspace_bytes: PositiveInt = 512 * 2**20
    keep_wire: Switch = False
    strict_logprobs: Switch = False


class EngineConfig(Section):
    """The inference engines, and who turns messages into token ids.

    `urls` are engines that run already, as `http://host:port`; without any, engines register themselves as the
    trainer's own does. `kind` is what they speak: Leyden's own contract, or vLLM's API; `model` is the name they know
    the model by, if they serve several. `render: engine` sends the messages to vLLM as they are, for images and for
    models without a renderer; an update then waits `drain_limit_s` for open calls and makes the rest again after it.

    `api_key_env` names the environment variable of the gateway that holds the key of the engines, if they want one.

    Engines that are gone are waited for. One that answers GET /health and fails calls is asked no more until it samples
    a token; a call that such engines fail for `give_up_s` makes its attempt incomplete.
    """

    kind: Literal["leyden", "vllm"] = "leyden"
    urls: list[str] = []
    render: Literal["gateway", "engine"] = "gateway"
    model: str | None = None
    api_key_env: Annotated[str, Field(pattern=r"^[A-Za-z_][A-Za-z0-9_]*$")] | None = None
    health_interval_s: PositiveSeconds = 5
    give_up_s: PositiveSeconds = 120
    drain_limit_s: Annotated[float, Field(ge=0, le=100)] = 30

    @field_validator("urls")
    @classmethod
    def _base_urls(cls, value: list[str]) -> list[str]:
        return list(dict.fromkeys(map(engine_url, value)))

    @model_validator(mode="after")
    def _only_vllm_renders(self) -> EngineConfig:
        if self.render == "engine" and self.kind != "vllm":
            raise ValueError("engine.render: engine needs engine.kind: vllm")
        return self


class ControllerConfig(Section):
    """Who runs harnesses. `start: false` leaves it to a controller that already runs.

    Attempts belong to the controller of that `name`; after a restart it knows them again. `start_timeout_s` bounds the
    wait for a place to run; that time does not count against the harness. `concurrency` is the most at once; on this
    machine fewer are started while its memory or processors are short, and none while the run folder's disk has less
    than `min_free_bytes` free: leave room for what runs, and for a checkpoint.
    """

    start: Switch = True
    name: Annotated[str, Field(min_length=1, max_length=200)] = "local"
    backend: Literal["local", "kubernetes"] = "local"
    concurrency: PositiveInt = 8
    min_free_bytes: Annotated[int, Field(ge=0)] = 2**30
    start_timeout_s: PositiveSeconds = 600


POD_FILES = ("task.json", "exit.json", "harness.log", "gitconfig")
"""What Leyden itself puts beside `kubernetes.files`."""


class KubernetesConfig(Section):
    """How attempts run as Jobs. `image` holds the harness; the grader runs in `grader_image`, and Leyden's small helper
    in `keeper_image` (any image with Python 3.8), both `image` unless given.

    `gateway_url` is the gateway as pods reach it. `files` (relative to the run file) lie in the pod's `config_dir`.
    `template` is a Jinja template of a Job; `resources` goes into the default one. Of a harness that is killed the
    workspace is saved within `save_s`; `image_wait_s` bounds the tries to pull an image; the controller ends attempts;
    where none runs, the cluster does, and allows for `pause_allowance_s` of held time. Credentials: `kubeconfig` and
    `context`, else KUBECONFIG, else the pod's own service account.
    """

    image: str | None = None
    grader_image: str | None = None
    keeper_image: str | None = None
    namespace: str | None = None
    kubeconfig: Path | None = None
    context: str | None = None
    gateway_url: HttpUrl | None = None
    template: Path | None = None
    files: list[Path] = []
    resources: dict[str, dict[str, str]] = {}
    creates_per_minute: PositiveInt = 600
    image_wait_s: PositiveSeconds = 60
    save_s: PositiveInt = 60
    ttl_s: Annotated[int, Field(ge=300)] = 3600
    pause_allowance_s: PositiveSeconds = 7 * 24 * 3600
    log_lines: PositiveInt = 1000

    @field_validator("files")
    @classmethod
    def _one_file_of_each_name(cls, value: list[Path]) -> list[Path]:
        """All lie in one folder of the pod, beside Leyden's own."""
        seen = dict.fromkeys(POD_FILES)
        for path in value:
            if path.name in POD_FILES:
                raise ValueError(f"{path}: {path.name} is a file of Leyden's own in the pod; rename it")
            if path.name in seen:
                raise ValueError(f"{seen[path.name]} and {path} would both be {path.name} in the pod; rename one")
            if not path.name or path.name.startswith(".."):
                raise ValueError(f"{str(path)!r} has no file name that a pod can have")
            seen[path.name] = path
        return value


class AlgorithmConfig(Section):
    """Formulas are in `leyden.algorithms`. `constant_tokens` is C of the `constant` weights."""

    advantage: Literal["grpo", "rloo", "mean_only"] = "grpo"
    weights: Literal["rollout_mean", "token_mean", "constant"] = "rollout_mean"
    constant_tokens: PositiveInt | None = None
    loss: Literal["ppo_clip"] = "ppo_clip"
    clip_low: Annotated[float, Field(ge=1e-5, lt=1)] = 0.2
    clip_high: Annotated[float, Field(ge=1e-5, le=10)] = 0.2
    dual_clip: Annotated[float, Field(gt=1, le=100)] = 3.0
    correction_clip: Annotated[float, Field(ge=1, le=100)] = 2.0
    kl_coef: Annotated[float, Field(ge=0, le=10)] = 0.0
    entropy_coef: Annotated[float, Field(ge=0, le=10)] = 0.0

    @model_validator(mode="after")
    def _constant_needs_tokens(self) -> AlgorithmConfig:
        if (self.weights == "constant") != (self.constant_tokens is not None):
            raise ValueError("constant_tokens goes with weights: constant, and only with it")
        return self


class OptimizerConfig(Section):
    """AdamW with linear warm-up to a constant rate. The bounds keep out what could learn nothing in float32."""

    lr: Annotated[float, Field(ge=1e-10, le=1)] = 1e-6
    betas: tuple[Finite, Finite] = (0.9, 0.95)
    eps: Annotated[float, Field(ge=1e-16, le=1e-3)] = 1e-8
    weight_decay: Annotated[float, Field(ge=0, le=1)] = 0.0
    warmup_steps: Annotated[int, Field(ge=0)] = 0
    max_grad_norm: Annotated[float, Field(ge=1e-3, allow_inf_nan=False)] = 1.0

    @field_validator("betas", mode="before")
    @classmethod
    def _list_is_tuple(cls, value: Any) -> Any:
        return tuple(value) if isinstance(value, list) else value

    @field_validator("betas")
    @classmethod
    def _within_unit(cls, value: tuple[float, float]) -> tuple[float, float]:
        if not all(0 <= b < 1 for b in value):
            raise ValueError(f"{list(value)}: both must be at least 0 and below 1")
        return value


class EmbeddedConfig(Section):
    """The one-process backend. `slots` requests are sampled at once; `micro_batch_tokens` bounds one backward pass."""

    device: Annotated[str, Field(pattern=r"^(auto|cpu|mps|cuda(:[0-9]+)?)$")] = "auto"
    threads: Annotated[int, Field(ge=0, le=4096)] = 0
    slots: PositiveInt = 32
    micro_batch_tokens: PositiveInt = 8192


class EvalConfig(Section):
    """Validation at one policy version. Without `sampling`, the harness's own sampling holds. A rollout passes, here
    and in training, with a reward of at least `pass_threshold`; the mean reward is reported beside it.
    """

    every: Annotated[int, Field(ge=0)] = 0
    at_start: Switch = True
    at_end: Switch = True
    tasks: PositiveInt | None = None
    samples: PositiveInt = 1
    pass_threshold: Finite = 1.0
    sampling: EvalSamplingConfig | None = None


class TrainerConfig(Section):
    """A run that cannot go on ends with the reason: after `max_empty_steps` steps in a row without a trained token, or
    after `max_same_failures` rollouts in a row that were lost, in all their attempts, to one and the same failure of
    the machinery (an image that cannot be pulled, a grader that crashes).

    The newest `keep_checkpoints` are kept, and the one with the best validation.
    """

    schedule: Literal["sync"] = "sync"
    steps: PositiveInt = 100
    groups_per_step: PositiveInt = 8
    group_size: PositiveInt = 8
    mini_batches: PositiveInt = 1
    max_sample_tokens: PositiveInt | None = None
    checkpoint_every: PositiveInt = 10
    keep_checkpoints: PositiveInt = 2
    max_empty_steps: PositiveInt = 5
    max_same_failures: PositiveInt = 16
    seed: Annotated[int, Field(ge=0)] = 0

    @model_validator(mode="after")
    def _batches_have_rollouts(self) -> TrainerConfig:
        if self.mini_batches > self.groups_per_step * self.group_size:
            raise ValueError(
                f"mini_batches {self.mini_batches} is more than the step's "
                f"{self.groups_per_step * self.group_size} rollouts"
            )
        return self


class RunConfig(Section):
    """A whole run file."""

    run_dir: Path
    model: ModelConfig
    data: DataConfig
    harness: HarnessConfig
    grader: GraderConfig
    workspace: WorkspaceConfig = WorkspaceConfig()
    sampling: SamplingConfig = SamplingConfig()
    gateway: GatewayConfig = GatewayConfig()
    engine: EngineConfig = EngineConfig()
    controller: ControllerConfig = ControllerConfig()
    kubernetes: KubernetesConfig = KubernetesConfig()
    trainer: TrainerConfig = TrainerConfig()
    algorithm: AlgorithmConfig = AlgorithmConfig()
    optimizer: OptimizerConfig = OptimizerConfig()
    embedded: EmbeddedConfig = EmbeddedConfig()
    eval: EvalConfig = EvalConfig()
    config_dir: Path = Path()

    @property
    def max_body_bytes(self) -> int:
        """`gateway.max_body_bytes`, resolved."""
        default = 32 * 2**20 if self.engine.render == "engine" else 16 * 2**20
        return self.gateway.max_body_bytes or default

    @model_validator(mode="after")
    def _combinations(self) -> RunConfig:
        if self.trainer.group_size == 1:
            raise ValueError(
                f"trainer.group_size 1 gives every rollout advantage 0 under algorithm.advantage "
                f"{self.algorithm.advantage}; use at least 2"
            )
        updates = self.trainer.steps * self.trainer.mini_batches
        if self.optimizer.warmup_steps > 100 * updates:
            raise ValueError(
                f"optimizer.warmup_steps {self.optimizer.warmup_steps}: the run has {updates} optimizer steps "
                "(trainer.steps x trainer.mini_batches), so the rate would stay under 1 % of optimizer.lr"
            )
        if self.controller.backend == "kubernetes":
            _fits_a_cluster(self)
        if self.eval.every and self.data.validation is None:
            raise ValueError(f"eval.every {self.eval.every} needs data.validation")
        if (key := self.engine.api_key_env) and key in (*self.harness.pass_env, *self.grader.pass_env):
            raise ValueError(
                f"pass_env names {key}, the key of the engines (engine.api_key_env), which no harness gets"
            )
        if self.engine.kind == "leyden" and not self.engine.urls and (self.sampling.top_p < 1 or self.sampling.top_k):
            raise ValueError(
                f"sampling.top_p {self.sampling.top_p} and sampling.top_k {self.sampling.top_k} cut off tokens, which "
                "the recomputed log-probs of training do not: leave both out, or set them in eval.sampling"
            )
        if self.sampling.max_tokens and self.sampling.max_tokens >= self.model.context_tokens:
            raise ValueError(
                f"sampling.max_tokens {self.sampling.max_tokens} leaves no room for a prompt in "
                f"model.context_tokens {self.model.context_tokens}"
            )
        if self.controller.start is False and self.gateway.url is None:
            raise ValueError("controller.start: false needs gateway.url, or nothing would ever run a harness")
        return self


_LOCAL_ONLY = {
    "sandbox": "a pod is one already; kubernetes.template says what it may do",
    "limits": "set kubernetes.resources: {limits: {memory: 1Gi, cpu: 1}} and gateway.max_workspace_bytes",
    "preload": "each pod imports its modules itself",
    "python": "the image's own interpreter runs the harness",
    "readable": "put files into the image, or name them in kubernetes.files",
    "log_bytes": "set kubernetes.log_lines",
    "pass_env": "give the variables in harness.env, or in kubernetes.template from a Secret of yours",
}
"""What `harness` and `grader` say about this machine, and what to do instead in a cluster."""


def _fits_a_cluster(config: RunConfig) -> None:
    """Raises ValueError for what a cluster would not heed."""
    if config.kubernetes.image is None:
        raise ValueError("controller.backend kubernetes needs kubernetes.image, the image that holds the harness")
    for section, given in (("harness", config.harness), ("grader", config.grader)):
        for name, instead in _LOCAL_ONLY.items():
            field = type(given).model_fields.get(name)
            value = getattr(given, name, None)
            if field is not None and value != field.default:
                shown = value.model_dump(exclude_none=True) if isinstance(value, LimitsConfig) else value
                raise ValueError(
                    f"{section}.{name} {shown} is for controller.backend local, and this is kubernetes: {instead}"
                )


def engine_url(text: str) -> str:
    """`http://host:port` from a base URL, with or without a scheme, a final slash or `/v1`. Raises ValueError."""
    scheme, separator, rest = text.rpartition("://")
    host, _, path = rest.partition("/")
    if host.count(":") > 1 and not host.startswith("["):
        address, _, port = host.rpartition(":")
        raise ValueError(
            f"{text!r} cannot be told from an address without a port: put an IPv6 address in brackets, "
            f"[{address}]:{port}"
        )
    base = f"{scheme if separator else 'http'}://{host}"
    try:
        parts = urlsplit(base)
        known = parts.scheme in ("http", "https") and parts.hostname and parts.port != 0
    except ValueError:
        known = False
    if not known or not _BASE_URL.fullmatch(rest):
        raise ValueError(f"{text!r} is not the base URL of an engine; give http://host:port")
    return base + f"/{path}".rstrip("/").removesuffix("/v1")
