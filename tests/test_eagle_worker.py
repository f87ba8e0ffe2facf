"""The speculative loop with the trained models: lossless, accounted for, as good as the weights promise."""

import functools
import random
import statistics

import pytest
import torch

from lib.eagle import EagleConfig
from lib.eagle.fields import LAYOUTS
from lib.eagle.model import load_prompts, load_trained
from lib.eagle.worker import EagleWorker, greedy_decode
from tests.test_eagle_runners import WAYS

NEW_TOKENS = 24
ROUNDING = 1e-4  # two ways of summing the same float32 logits differ by less: so may the token that leads
PINNED_ACCEPTANCE = {1: 2.82, 2: 3.25, 4: 3.44}
OPTIONS = [way.options for name, way in WAYS.items() if name != "fused"]  # which is slow where interpreted

pytestmark = pytest.mark.usefixtures("one_thread")


@functools.cache
def reference(prompt):
    """The target's own greedy text after a prompt, and the leads of its tokens."""
    target, _ = load_trained(EagleConfig.tiny(dtype=torch.float32))
    return greedy_decode(target, prompt, NEW_TOKENS)


def make_worker(options=(), dtype=torch.float32, **sizes):
    config = EagleConfig.tiny(dtype=dtype, max_context_len=128, **sizes)
    return EagleWorker(config, *load_trained(config), **dict(options))


def generate(worker, count):
    requests = [worker.submit(prompt, NEW_TOKENS) for prompt in load_prompts()[:count]]
    worker.run()
    return requests


def check_texts(requests):
    """They are the reference's; a first difference is where two tokens tie within rounding, and rare."""
    ties = []
    for request in requests:
        tokens, leads = reference(tuple(request.prompt))
        assert len(request.output) == request.max_new_tokens
        differ = [lead for got, token, lead in zip(request.output, tokens, leads) if got != token]
        assert not differ or differ[0] < ROUNDING, bytes(request.prompt)
        ties += differ[:1]
    assert len(ties) <= 2


def check_slots(worker):
    """Every request has its own row and its own slots, whatever their order; 0 is padding's."""
    slots = worker.req_to_token.sort(dim=1).values
    assert torch.equal(slots, worker.config.request_table("cpu"))
    rows = [*worker.free_requests, *(request.req_pool_index for request in worker.running)]
    assert sorted(rows) == list(range(1, 9))


@pytest.mark.parametrize("run", range(9))
def test_text_is_the_targets_own(run):
    """Requests of 6 to 12 new tokens come and go, so that every tree meets every batch size."""
    topk, num_steps = (1, 2, 4)[run // 3], 2 + run % 3
    options = OPTIONS[run % len(OPTIONS)]
    bytes_alone = "uint8_view" in options.values()  # they cannot convert
    layout = "2026-06" if bytes_alone else sorted(LAYOUTS)[(run + run // 3) % 3]
    worker = make_worker(options, topk=topk, num_steps=num_steps, layout=layout)
    rng, requests, sizes = random.Random(run), [], []
    queue = load_prompts()[:20]
    while queue or worker.waiting or worker.running:
        room = max(1 + len(sizes) % 8 - len(worker.running), 0)
        requests += [worker.submit(prompt, rng.randint(6, 12)) for prompt in queue[:room]]
        del queue[:room]
        running = worker.running + worker.waiting[: len(worker.free_requests)]
        worker.step()
        sizes.append(len(running))
        check_slots(worker)
        for request, tokens, accepted in zip(running, worker.tree.tokens, worker.accepted, strict=True):
            kept, gained = tokens[accepted].tolist(), request.accept_lengths[-1]
            assert len(kept) == gained  # the root, then what was drafted
            assert request.finished or request.output[-gained - 1 : -1] == kept
    check_texts(requests)
    lengths = {length for request in requests for length in request.accept_lengths}
    assert lengths <= set(range(1, num_steps + 2)) and max(lengths) == num_steps + 1
    assert set(sizes) >= set(range(1, 8)) and len(requests) == 20


def test_acceptance_lengths_of_the_committed_weights():
    """3 steps, float32, 64 prompts, the bonus token included; the verify budget is the config's own."""
    mean = {}
    for topk, budget in ((1, 4), (2, 11), (4, 16)):
        worker = make_worker(topk=topk, layout="2026-10" if topk == 2 else "2026-06")
        requests = generate(worker, 64)
        check_texts(requests[:20])
        mean[topk] = statistics.mean(length for r in requests for length in r.accept_lengths)
        assert worker.config.num_draft_tokens == budget
    assert mean == pytest.approx(PINNED_ACCEPTANCE, abs=0.15)


def test_bfloat16_differs_only_where_the_choice_was_close():
    """In bfloat16 a tree of rows and a single row round differently, so near-ties may flip: not lossless."""
    for request in generate(make_worker(dtype=torch.bfloat16), 16):
        tokens, leads = reference(tuple(request.prompt))
        flips = [lead for got, want, lead in zip(request.output, tokens, leads) if got != want]
        assert not flips or flips[0] < 0.5  # of logits around 10, where bfloat16 steps by 1/16


def test_requests_that_can_never_run_are_refused():
    worker = make_worker()
    for prompt, new, says in (
        *((wrong, 4, "prompt: expected tokens from 0 to 127") for wrong in ([], [1, 128], "ab", [1.5])),
        *(([1], 0, "max_new_tokens"), ([1] * 100, 20, "max_new_tokens: expected 1 to 12, got 20")),
    ):
        with pytest.raises(ValueError, match=says):
            worker.submit(prompt, new)
        assert not worker.waiting


PARTS = ["draft.copy_inputs", "draft.replay_graph", "extend.copy_inputs", "extend.replay_graph"]


@pytest.mark.parametrize("part", ["target.forward", "model.head.forward", *PARTS])
def test_an_error_anywhere_leaves_every_slot_where_it_was(part, monkeypatch):
    """The error comes at any call of a part, before or after its work. The text is right all the same."""
    worker, rng, failed = make_worker(), random.Random(0), 0
    *path, method = part.split(".")
    owner = functools.reduce(getattr, path, worker)
    real = getattr(owner, method)

    def failing(*args):
        fails = rng.choice([False, False, "before", "after"])
        out = fails == "before" or real(*args)
        if fails:
            raise KeyboardInterrupt
        return out

    monkeypatch.setattr(owner, method, failing)
    requests = [worker.submit(prompt, 8) for prompt in load_prompts()[:3]]
    while worker.waiting or worker.running:
        try:
            worker.step()
        except KeyboardInterrupt:
            failed += 1
        check_slots(worker)
    check_texts(requests)
    assert failed
