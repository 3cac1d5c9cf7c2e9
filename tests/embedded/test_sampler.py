import inspect
import threading
from typing import Any

import numpy as np
import pytest
import torch
from transformers import Qwen3Config

from leyden.errors import ConfigError, EngineError, EngineRejected, EngineUnavailable
from leyden.trainer.embedded.architecture import check_supported
from leyden.trainer.embedded.requests import SampleRequest
from leyden.trainer.embedded.sampler import Sampler
from leyden.types import FinishReason

from .conftest import VOCABULARY, tiny_model

TIMEOUT_S = 300


@pytest.fixture
def make():
    """Builds started samplers and closes them."""
    made = []

    def make(model=None, *, slots=4, context_tokens=128, **options):
        sampler = Sampler(model or tiny_model(), slots=slots, context_tokens=context_tokens, **options)
        made.append(sampler)
        sampler.start()
        return sampler

    yield make
    for sampler in made:
        sampler.close()


def prompt(seed, length):
    return np.random.default_rng(seed).integers(0, VOCABULARY, length).tolist()


def run(sampler, *requests):
    futures = [sampler.submit(r) for r in requests]
    return [f.result(TIMEOUT_S) for f in futures]


@torch.no_grad()
def recomputed(model, prompt_ids, token_ids, temperature=1.0):
    """The log-probs that a trainer computes: one full forward pass without a cache."""
    logits = model(input_ids=torch.tensor([[*prompt_ids, *token_ids]])).logits[0].float() / temperature
    positions = torch.arange(len(prompt_ids) - 1, len(prompt_ids) + len(token_ids) - 1)
    return torch.log_softmax(logits, -1)[positions, torch.tensor(token_ids)].tolist()


@pytest.mark.parametrize("kind", ["qwen3", "qwen2", "llama"])
def test_logprobs_are_the_trainers(make, kind):
    """Mixed lengths and temperatures, more requests than slots, slots used again."""
    model = tiny_model(kind)
    sampler = make(tiny_model(kind))
    requests = [
        SampleRequest(prompt(i, 3 + 7 * i), 5 + 3 * (i % 4), temperature=0.7 + 0.1 * i, seed=i) for i in range(10)
    ]
    for request, answer in zip(requests, run(sampler, *requests), strict=True):
        assert len(answer.token_ids_T) == request.max_tokens
        assert answer.finish_reason == FinishReason.LENGTH
        assert answer.spans == ((0, request.max_tokens),)
        expected = recomputed(model, request.prompt_ids, answer.token_ids_T, request.temperature)
        np.testing.assert_allclose(answer.logprobs_T, expected, atol=1e-4)
    assert sampler.load == (0, 0)


def test_turns_of_a_conversation_reuse_their_slot(make):
    model = tiny_model()
    sampler = make(tiny_model())
    conversations = [prompt(i, 20) for i in range(3)]
    for turn in range(3):
        answers = run(sampler, *[SampleRequest(c, 6, seed=turn) for c in conversations])
        for conversation, answer in zip(conversations, answers, strict=True):
            expected = recomputed(model, conversation, answer.token_ids_T)
            np.testing.assert_allclose(answer.logprobs_T, expected, atol=1e-4)
            conversation.extend(answer.token_ids_T + prompt(turn, 4))
    # turn 1: 3 x 20 tokens; turns 2 and 3: the last sampled token (which was never fed) and 4 new ones
    assert sampler.stats.prefilled == 3 * 20 + 2 * 3 * 5
    assert sampler.stats.reused == 3 * 25 + 3 * 35


def test_group_computes_its_prompt_once(make):
    model = tiny_model()
    sampler = make(tiny_model(), slots=8)
    shared = prompt(0, 100)
    answers = run(sampler, *[SampleRequest(shared, 8, seed=i) for i in range(8)])
    for answer in answers:
        np.testing.assert_allclose(answer.logprobs_T, recomputed(model, shared, answer.token_ids_T), atol=1e-4)
    assert len({tuple(a.token_ids_T) for a in answers}) > 1
    assert sampler.stats.prefilled <= 2 * 100 + 7


def test_seed_decides_whatever_the_neighbours(make):
    sampler = make(slots=4)
    alone = run(sampler, SampleRequest(prompt(0, 9), 12, seed=7))[0]
    crowd = [SampleRequest(prompt(i, 5 + i), 12, seed=i) for i in range(1, 7)]
    again = run(sampler, *crowd, SampleRequest(prompt(0, 9), 12, seed=7))[-1]
    assert again.token_ids_T == alone.token_ids_T
    other = run(sampler, SampleRequest(prompt(0, 9), 12, seed=8))[0]
    assert other.token_ids_T != alone.token_ids_T


def test_sampling_without_seed_differs_but_runs_are_repeatable(make):
    def twice(sampler):
        return [run(sampler, SampleRequest(prompt(0, 9), 12))[0].token_ids_T for _ in range(2)]

    first = twice(make(seed=3))
    assert first[0] != first[1]
    assert twice(make(seed=3)) == first


def test_truncated_distribution_has_its_own_logprobs(make):
    model = tiny_model()
    request = SampleRequest(prompt(0, 9), 10, temperature=1.5, top_k=3, seed=1)
    answer = run(make(tiny_model()), request)[0]
    with torch.no_grad():
        logits = model(input_ids=torch.tensor([[*request.prompt_ids, *answer.token_ids_T]])).logits[0] / 1.5
    for t, (token, logprob) in enumerate(zip(answer.token_ids_T, answer.logprobs_T, strict=True)):
        best = logits[len(request.prompt_ids) - 1 + t].topk(3)
        assert token in best.indices.tolist()
        expected = torch.log_softmax(best.values, 0)[best.indices.tolist().index(token)].item()
        assert logprob == pytest.approx(expected, abs=1e-4)


def test_greedy(make):
    model = tiny_model()
    answer = run(make(tiny_model()), SampleRequest(prompt(0, 9), 8, temperature=0.0))[0]
    with torch.no_grad():
        logits = model(input_ids=torch.tensor([prompt(0, 9) + answer.token_ids_T])).logits[0]
    assert answer.token_ids_T == logits[8:-1].argmax(-1).tolist()
    assert answer.logprobs_T == [0.0] * 8


def test_stop_token_is_kept_and_ends(make):
    sampler = make()
    free = run(sampler, SampleRequest(prompt(0, 9), 12, seed=7))[0]
    stop = free.token_ids_T[4]
    expected = free.token_ids_T[: free.token_ids_T.index(stop) + 1]
    answer = run(sampler, SampleRequest(prompt(0, 9), 12, seed=7, stop_token_ids=[299, stop]))[0]
    assert answer.token_ids_T == expected
    assert answer.finish_reason == FinishReason.STOP
    assert answer.stop_string is None


def test_stop_string_is_found_across_tokens(make):
    sampler = make(decode=lambda ids: "".join(f"<{i}>" for i in ids))
    free = run(sampler, SampleRequest(prompt(0, 9), 12, seed=7))[0].token_ids_T
    stop = f"{free[3]}><{free[4]}"
    answer = run(sampler, SampleRequest(prompt(0, 9), 12, seed=7, stop=["nothing", stop]))[0]
    assert answer.token_ids_T == free[:5]
    assert answer.stop_string == stop
    assert answer.finish_reason == FinishReason.STOP


def test_context_limit(make):
    sampler = make(context_tokens=32)
    answer = run(sampler, SampleRequest(prompt(0, 28), 100))[0]
    assert len(answer.token_ids_T) == 4
    assert answer.finish_reason == FinishReason.LENGTH
    answer = run(sampler, SampleRequest(prompt(0, 31), 100))[0]
    assert len(answer.token_ids_T) == 1


class Gate:
    """Holds the sampler's thread inside a weight update until it is opened."""

    def __init__(self, sampler, apply=lambda: None, version=0):
        self._open = threading.Event()
        self.reached = threading.Event()

        def wait():
            self.reached.set()
            assert self._open.wait(TIMEOUT_S)
            apply()

        self.future = sampler.update_weights(wait, version)

    def open(self):
        self._open.set()
        self.future.result(TIMEOUT_S)


def slowed(model, wait):
    """A model that calls `wait(number of the forward pass)` before each one."""
    forward, calls = model.forward, []

    def counted(*args, **kwargs):
        calls.append(1)
        wait(len(calls))
        return forward(*args, **kwargs)

    counted.__signature__ = inspect.signature(forward)  # type: ignore[attr-defined]
    model.forward = counted
    return model


def test_weight_update_in_the_middle(make):
    """T04, L17: tokens before and after belong to their own weights; no old key or value is read again."""
    old, new, live = tiny_model(seed=0), tiny_model(seed=1), tiny_model(seed=0)
    submitted, reached, go_on = threading.Event(), threading.Event(), threading.Event()

    def wait(call):
        if call == 1:
            assert submitted.wait(TIMEOUT_S)
        if call == 6:
            reached.set()
            assert go_on.wait(TIMEOUT_S)

    sampler = make(slowed(live, wait))
    requests = [SampleRequest(prompt(i, 10 + 5 * i), 15, seed=i) for i in range(3)]
    futures = [sampler.submit(r) for r in requests]
    submitted.set()
    assert reached.wait(TIMEOUT_S)
    update = sampler.update_weights(lambda: live.load_state_dict(new.state_dict()) and None, 1)
    go_on.set()
    update.result(TIMEOUT_S)
    assert sampler.version == 1
    for request, future in zip(requests, futures, strict=True):
        answer = future.result(TIMEOUT_S)
        (v0, n0), (v1, n1) = answer.spans
        assert (v0, v1) == (0, 1)
        assert n0 + n1 == 15
        assert n0 > 0
        before = recomputed(old, request.prompt_ids, answer.token_ids_T)[:n0]
        after = recomputed(new, request.prompt_ids, answer.token_ids_T)[n0:]
        np.testing.assert_allclose(answer.logprobs_T, before + after, atol=1e-4)
    # and a continued conversation does not find keys of version 0 either
    follow = SampleRequest([*requests[0].prompt_ids, *futures[0].result().token_ids_T, 5], 4)
    answer = run(sampler, follow)[0]
    np.testing.assert_allclose(answer.logprobs_T, recomputed(new, follow.prompt_ids, answer.token_ids_T), atol=1e-4)


def test_failed_update_stops_sampling_until_one_succeeds(make):
    sampler = make()

    def fail():
        raise RuntimeError("no such weights")

    with pytest.raises(RuntimeError, match="no such weights"):
        sampler.update_weights(fail, 1).result(TIMEOUT_S)
    assert sampler.version == 0
    with pytest.raises(EngineUnavailable, match="update to version 1 failed: no such weights"):
        sampler.submit(SampleRequest([1], 1))
    sampler.update_weights(lambda: None, 2).result(TIMEOUT_S)
    assert run(sampler, SampleRequest([1], 3))[0].spans == ((2, 3),)


def test_cancel_while_waiting_and_while_sampling(make):
    reached, go_on = threading.Event(), threading.Event()

    def wait(call):
        if call == 4:
            reached.set()
            assert go_on.wait(TIMEOUT_S)

    sampler = make(slowed(tiny_model(), wait), slots=1)
    first = sampler.submit(SampleRequest(prompt(0, 5), 100))
    waiting = sampler.submit(SampleRequest(prompt(1, 5), 100))
    last = sampler.submit(SampleRequest(prompt(2, 5), 3))
    assert reached.wait(TIMEOUT_S)
    assert first.cancel()
    assert waiting.cancel()
    go_on.set()
    assert len(last.result(TIMEOUT_S).token_ids_T) == 3
    assert sampler.stats.sampled < 20
    assert sampler.load == (0, 0)


def test_first_come_first_served(make):
    order = []
    sampler = make(slots=1)
    gate = Gate(sampler)
    futures = []
    for i in range(5):
        future = sampler.submit(SampleRequest(prompt(i, 5), 3))
        future.add_done_callback(lambda _, i=i: order.append(i))
        futures.append(future)
    gate.open()
    for future in futures:
        future.result(TIMEOUT_S)
    assert order == [0, 1, 2, 3, 4]


def test_new_request_does_not_wait_for_the_batch_to_drain(make):
    sampler = make(slots=2)
    gate = Gate(sampler)
    long = sampler.submit(SampleRequest(prompt(0, 5), 110))
    short = sampler.submit(SampleRequest(prompt(1, 5), 2))
    done = []
    long.add_done_callback(lambda _: done.append("long"))
    short.add_done_callback(lambda _: done.append("short"))
    third: list[Any] = []
    short.add_done_callback(lambda _: third.append(sampler.submit(SampleRequest(prompt(2, 5), 2))))
    gate.open()
    short.result(TIMEOUT_S)
    long.result(TIMEOUT_S)
    assert done == ["short", "long"]
    assert len(third[0].result(TIMEOUT_S).token_ids_T) == 2
    assert sampler.stats.decode_steps == 109  # the third was sampled in steps that the first needed anyway


def test_error_in_the_thread_fails_the_requests_and_the_sampler_goes_on(make):
    def wait(call):
        if call == 3:
            raise RuntimeError("out of memory")

    sampler = make(slowed(tiny_model(), wait))
    gate = Gate(sampler)
    futures = [sampler.submit(SampleRequest(prompt(i, 5), 20)) for i in range(6)]
    gate.open()
    for future in futures:
        with pytest.raises(EngineError, match="RuntimeError: out of memory"):
            future.result(TIMEOUT_S)
    assert len(run(sampler, SampleRequest(prompt(0, 5), 3))[0].token_ids_T) == 3


def test_broken_weights_are_an_error(make):
    model = tiny_model()
    with torch.no_grad():
        model.model.norm.weight.fill_(torch.nan)
    with pytest.raises(EngineError, match="log-prob nan"):
        run(make(model), SampleRequest([1, 2], 3))


def test_close_fails_what_is_left(make):
    sampler = make()
    gate = Gate(sampler)
    assert gate.reached.wait(TIMEOUT_S)
    future = sampler.submit(SampleRequest([1, 2], 3))
    closing = threading.Thread(target=sampler.close)
    closing.start()
    gate.open()
    closing.join(TIMEOUT_S)
    with pytest.raises(EngineUnavailable, match="closed"):
        future.result(TIMEOUT_S)
    with pytest.raises(EngineUnavailable, match="closed"):
        sampler.submit(SampleRequest([1, 2], 3))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"prompt_ids": []}, "prompt_ids is empty"),
        ({"prompt_ids": [1] * 128}, "128 tokens; with context_tokens 128 it may have 127"),
        ({"prompt_ids": [1, 300]}, "holds 300; ids are 0 to 299"),
        ({"prompt_ids": [1, -1]}, "holds -1; ids are 0 to 299"),
        ({"max_tokens": 0}, "max_tokens is 0"),
        ({"temperature": -1.0}, "temperature is -1.0"),
        ({"temperature": float("nan")}, "temperature is nan"),
        ({"top_p": 0.0}, "top_p is 0.0"),
        ({"top_p": 1.1}, "top_p is 1.1"),
        ({"top_k": -1}, "top_k is -1"),
        ({"stop": ["x", ""]}, "empty string"),
        ({"stop": ["x"]}, "need a tokenizer"),
    ],
)
def test_what_can_never_work_is_refused(make, change, message):
    request = SampleRequest(**({"prompt_ids": [1, 2], "max_tokens": 4} | change))
    with pytest.raises(EngineRejected, match=message):
        make().submit(request)


def test_unsupported_models_are_named():
    with pytest.raises(ConfigError, match="300 is over the model's 256"):
        check_supported(Qwen3Config(max_position_embeddings=256).to_dict(), 300)
    windowed = Qwen3Config(
        max_position_embeddings=256,
        use_sliding_window=True,
        sliding_window=16,
        max_window_layers=0,
        num_hidden_layers=2,
    )
    with pytest.raises(ConfigError, match="sliding_attention"):
        check_supported(windowed.to_dict(), 64)
    check_supported(windowed.to_dict(), 16)
