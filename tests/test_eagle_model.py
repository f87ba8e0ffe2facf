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
    """Logits (n, V) of the head at every position of `text`, the last of which is not committed yet, and of a
    chain `drafted` after it, by causal attention."""
    n = len(text) - 1
    positions = torch.arange(n + len(drafted))[None]
    hidden = target(torch.tensor([text[:-1]]), positions[:, :n], causal_attention)
    tokens = torch.tensor([text[1:] + list(drafted)])
    for end in range(n, n + len(drafted) + 1):
        features = head(target.embed(tokens[:, :end]), hidden, positions[:, :end], causal_attention)
        hidden = torch.cat((hidden, features[:, -1:]), dim=1)  # its own predicted feature fed back
    return target.lm_head(features)[0]


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
    logits = []  # of each time that anything asks for some
    target.lm_head.register_forward_hook(lambda *call: logits.append(call[2]))
    for prompt in load_prompts()[:3]:
        worker.submit(prompt, 60)
    for _ in range(3):
        worker.step()
        *levels, _, extended = logits[-num_steps - 1 :]  # the last but one is verify's
        drafted, extended = torch.cat(levels, dim=1), extended.view(len(levels[0]), -1, config.vocab_size)
        lanes = worker.draft.graphs[4].outputs.parent_list[:, 1:]  # candidates, of which the tree has all
        for i, request in enumerate(worker.running):
            text, gained = request.prompt + request.output, request.accept_lengths[-1]
            paths = [worker.tree.tokens[i, worker.tree.mask[i, lane + 1]][1:] for lane in lanes[i]]
            before = [plain_head(target, head, text[:-gained], path.tolist())[-1] for path in paths]
            torch.testing.assert_close(drafted[i], torch.stack(before), atol=2e-4, rtol=1e-4)
            after = plain_head(target, head, text)[-gained:]
            if layout == "2026-10":  # the graph has picked the last of them
                after = after[-1:]
                assert extended.shape[1] == 1
            torch.testing.assert_close(extended[i, :gained], after, atol=2e-4, rtol=1e-4)


def walk(tree, predictions, request):
    """Accepted nodes by walking down from the root, as a reader of the EAGLE paper would."""
    tokens, parents, chosen = tree.tokens[request], tree.parents[request], predictions[request]
    path = [0]
    for node in range(1, len(tokens)):  # parents come before their children
        if parents[node] == path[-1] and tokens[node] == chosen[path[-1]]:
            path.append(node)
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
            parent = [-1, *chosen].index(out.parent_list[i, candidate // topk])  # no chosen node lacks it
            assert tree.parents[i, node] == parent
            seen = tree.mask[i, parent].clone()
            seen[node] = True
            assert torch.equal(tree.mask[i, node], seen)
        assert tree.mask[i, 0].nonzero().tolist() == [[0]]

    some_node = torch.randint(0, w, (4, w), generator=g)  # predictions that follow the tree for a while
    predictions = tree.tokens.gather(1, some_node)
    for node in range(1, w):
        follows = torch.rand(4, generator=g) < 0.6
        predictions[follows, tree.parents[follows, node]] = tree.tokens[follows, node]
    accepted = accept_greedy(tree, predictions)
    for i in range(4):
        assert accepted[i].nonzero().flatten().tolist() == walk(tree, predictions, i)
