"""Counters of one gateway, in a registry of its own."""

from __future__ import annotations

from collections import Counter as Counted
from collections.abc import Iterable

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest

from leyden.protocols.wishes import label


class Metrics:
    def __init__(self) -> None:
        self.registry = CollectorRegistry()
        self.turns = Counter("leyden_turns", "Model calls by how they ended", ["state"], registry=self.registry)
        self.tokens = Counter("leyden_sampled_tokens", "Tokens of committed turns", registry=self.registry)
        self.forks = Counter("leyden_forks", "Turns that did not continue one", ["cause"], registry=self.registry)
        self.replays = Counter("leyden_replays", "Retries answered from the record", registry=self.registry)
        self.ignored = Counter("leyden_ignored_fields", "Fields without effect", ["field"], registry=self.registry)
        self.refused = Counter("leyden_refused", "Requests answered with an error", ["code"], registry=self.registry)
        self.halves = Counter(
            "leyden_replaced_surrogates", "Halves of surrogate pairs in requests, now U+FFFD", registry=self.registry
        )
        self.no_logprobs = Counter(
            "leyden_turns_without_logprobs", "Turns whose log-probs were missing or not finite", registry=self.registry
        )
        self.double_bos = Counter(
            "leyden_double_bos", "Prompts of /v1/completions that begin with two BOS tokens", registry=self.registry
        )
        self.no_stop_token = Counter(
            "leyden_turns_without_stop_token",
            "Turns that stopped by themselves and whose ids do not end with a stop token",
            registry=self.registry,
        )
        self.truncated = Counter("leyden_truncated_turns", "Turns that ended at a token limit", registry=self.registry)
        self.engine_errors = Counter("leyden_engine_errors", "Broken engine calls", registry=self.registry)
        self.held_seconds = Counter("leyden_held_seconds", "Time calls were held", registry=self.registry)
        self.in_flight = Gauge("leyden_calls_in_flight", "Model calls open now", registry=self.registry)
        self.engine_seconds = Histogram("leyden_engine_seconds", "Time of one engine call", registry=self.registry)
        self.engine_up = Gauge("leyden_engine_up", "Whether an engine works", ["engine"], registry=self.registry)
        self.engine_calls = Gauge("leyden_engine_calls", "Calls open at an engine", ["engine"], registry=self.registry)
        self.continued = Counter(
            "leyden_continued_calls", "Engine calls cut short and gone on with from their ids", registry=self.registry
        )
        self.interrupted = Counter(
            "leyden_interrupted_calls", "Engine calls ended by the gateway to be made again", registry=self.registry
        )

    def ignore(self, protocol: str, fields: Iterable[str]) -> None:
        """Count fields without effect. Names that are not in the table count as one, since anybody may invent them."""
        for name, count in Counted(label(protocol, field) for field in fields).items():
            self.ignored.labels(name).inc(count)

    def text(self) -> bytes:
        text: bytes = generate_latest(self.registry)
        return text
