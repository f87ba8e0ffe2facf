"""The models, path by path, against recomputations without cache, pool, tree or graph."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from lib.eagle import DraftBatch, EagleConfig
from lib.eagle.model import DraftModel, causal_attention, draft_forward, load_prompts, load_trained
from lib.eagle.worker import EagleWorker, accept_greedy, build_tree
from tests.tensors import properties

pytestmark = pytest.mark.usefixtures("one_thread")


def all_candidates(topk, num_steps):
    """A budget that takes every candidate, so that draft_tokens lists them all in order."""
    return 1 + topk + (num_steps - 1) * topk * topk


@torch.no_grad()
def plain_head(target, head, text, drafted=()):
    """Logits of the head at every position of `text` and of a chain `drafted` after it, by causal attention.

    `text` includes the last token that is not committed yet. Returns (len(text) - 1 + len(drafted), V).
    """
    n = len(text) - 1
    positions = torch.arange(n + len(drafted))[None]
    hidden = target(torch.tensor([text[:-1]]), positions[:, :n], causal_attention)
    tokens = torch.tensor([text[1:] + list(drafted)])
    for end in range(n, n + len(drafted) + 1):
        features = head(target.embed(tokens[:, :end]), hidden, positions[:, :end], causal_attention)
        hidden = torch.cat((hidden, features[:, -1:]), dim=1)  # its own predicted feature fed back
    return target.lm_head(features)[0]


def lane_paths(out, request, topk):
    """[level][lane]: the drafted tokens up to that lane, from the output that lists all candidates."""
    parents, tokens = out.parent_list[request].tolist(), out.draft_tokens[request].tolist()

    def path(candidate):
        above = [] if candidate < topk else path(parents[candidate // topk])
        return [*above, tokens[candidate]]

    levels = [parents[i : i + topk] for i in range(1, len(parents), topk)]
    return [[path(candidate) for candidate in lanes] for lanes in levels]


@pytest.mark.parametrize(
    ("topk", "num_steps", "layout"),
    [(1, 2, "2026-06"), (1, 4, "2026-10"), (2, 3, "2026-06"), (4, 3, "2026-10"), (3, 4, "int32_seq_lens")],
)
def test_draft_and_extend_logits_equal_a_recomputation(topk, num_steps, layout):
    """Every branch of the tree and every accepted row of draft-extend, several steps into ragged requests."""
    sizes = {"topk": topk, "num_steps": num_steps, "num_draft_tokens": all_candidates(topk, num_steps)}
    config = EagleConfig.tiny(**sizes, layout=layout, dtype=torch.float32)
    target, head = load_trained(config)
    worker = EagleWorker(config, target, head)
    seen = {}

    def draft_eagerly(bs):
        seen["levels"] = []
        inputs = worker.draft.producer(worker.draft.padded_batch_size(bs)).inputs
        keep = target.lm_head.register_forward_hook(lambda *call: seen["levels"].append(call[2]))
        seen["tree"] = draft_forward(worker.model, inputs)
        keep.remove()
        return seen["tree"]._make(t[:bs] for t in seen["tree"])

    replay = worker.extend.replay_graph

    def keep_extend(bs):
        out = replay(bs)
        seen["extend"] = out.logits.clone().view(bs, -1, config.vocab_size)
        return out

    worker.draft.replay_graph, worker.extend.replay_graph = draft_eagerly, keep_extend
    for prompt in load_prompts()[:3]:
        worker.submit(prompt, 60)
    for _ in range(3):
        worker.step()
        for i, request in enumerate(worker.running):
            text, gained = request.prompt + request.output, request.accept_lengths[-1]
            before, n = text[:-gained], len(text) - gained - 1
            paths = lane_paths(seen["tree"], i, topk)
            assert len(paths) == num_steps - 1
            for logits, lanes in zip(seen["levels"], paths, strict=True):
                expected = torch.stack([plain_head(target, head, before, path)[-1] for path in lanes])
                torch.testing.assert_close(logits[i], expected, atol=2e-4, rtol=1e-4)
            expected = plain_head(target, head, text)[n:]
            rows = seen["extend"][i, :gained]
            if layout == "2026-10":  # the graph has picked the last of them
                expected = expected[-1:]
                assert seen["extend"].shape[1] == 1
            torch.testing.assert_close(rows, expected, atol=2e-4, rtol=1e-4)


def walk(tree, predictions, request):
    """Accepted nodes by walking down from the root, as a reader of the EAGLE paper would."""
    tokens, parents, chosen = tree.tokens[request], tree.parents[request], predictions[request]
    path = []
    agreeing = [0]
    while agreeing:
        path.append(node := agreeing[0])
        children = [j for j in range(node + 1, len(tokens)) if parents[j] == node]
        agreeing = [j for j in children if tokens[j] == chosen[node]]
    return path


@given(st.integers(1, 4), st.integers(2, 5), st.integers(0, 10**6), st.sampled_from([1, 30, 1e4]), st.data())
@properties(150)
def test_tree_and_acceptance_against_a_walk(topk, num_steps, seed, sharp, data):
    """Also where probabilities saturate at 1 and 0, so that a child ties with its parent."""
    w = data.draw(st.integers(num_steps + 1, min(all_candidates(topk, num_steps), 24)))
    config = EagleConfig(
        hidden_size=16, num_heads=2, intermediate_size=16, vocab_size=12, topk=topk, num_steps=num_steps,
        num_draft_tokens=w, capture_batch_sizes=(4,), max_context_len=32, dtype=torch.float32,
    )  # fmt: skip
    model = DraftModel.random(config, seed=seed)
    model.target.lm_head.weight.mul_(sharp)
    batch = DraftBatch.random(config, 4, seed=seed)
    g = torch.Generator().manual_seed(seed + 1)
    batch.topk_index = torch.rand(4, 12, generator=g).topk(topk).indices  # siblings carry different tokens
    out = draft_forward(model, batch)
    root = torch.randint(0, 3, (4,), generator=torch.Generator().manual_seed(seed))
    tree = build_tree(root, out, topk, num_steps)

    for i in range(4):
        chosen = out.top_scores_index[i].tolist()
        for node, candidate in enumerate(chosen, start=1):
            parent = out.parent_list[i, candidate // topk].item()
            assert parent == -1 or parent in chosen  # no chosen node lacks its parent
            assert tree.parents[i, node] == (0 if parent == -1 else chosen.index(parent) + 1)
            line, at = {node}, node
            while at:
                at = tree.parents[i, at].item()
                line.add(at)
            assert set(tree.mask[i, node].nonzero().flatten().tolist()) == line

    some_node = torch.randint(0, w, (4, w), generator=g)  # predictions that follow the tree for a while
    predictions = tree.tokens.gather(1, some_node)
    for i in range(4):
        for node in range(1, w):
            if torch.rand((), generator=g) < 0.6:
                predictions[i, tree.parents[i, node]] = tree.tokens[i, node]
    accepted = accept_greedy(tree, predictions)
    for i in range(4):
        assert accepted[i].nonzero().flatten().tolist() == walk(tree, predictions, i)
