"""Make the language, train the tiny target on it, then its EAGLE head on the target; write tiny.safetensors.

    PYTHONPATH=. python data/models/train.py            # from the project's root

Fixed seeds and step counts: the same machine gives the same weights. The log, training_log.csv, and the
held-out prompts are written beside them.
"""

import argparse
import csv
import hashlib
import random
import time
from pathlib import Path

import torch
import torch.nn.functional as F
from safetensors.torch import save

from lib.eagle.fields import EagleConfig
from lib.eagle.model import EagleHead, TargetModel, causal_attention

HERE = Path(__file__).resolve().parent
SEED = 20260617
CONTEXT, BATCH = 128, 24
TARGET_STEPS, HEAD_STEPS, UNROLL = 900, 1000, 3

TEMPLATES = (
    "{name} ships {n} crates of {good} from {city}, seal {code}",
    "lot {n}: {good} for {name} in {city}, seal {code}",
    "{city} harbour, berth {n}: a barrel of {good}, code {code}",
    "the clerk {name} wrote {n} bales of {good} to {city}, code {code}",
    "on day {n} {name} weighed the {good} of {city}, mark {code}",
    "owed by {name} of {city} to {name2}: {n} sacks of {good}, mark {code}",
)
# fmt: off
NAMES = (
    "Aldous", "Berit", "Casimir", "Dorte", "Emeric", "Frieda",
    "Gustav", "Hedda", "Imre", "Jorun", "Klara", "Lothar",
)
GOODS = (
    "amber", "barley", "copper", "flax", "glass", "hemp",
    "indigo", "linen", "madder", "ochre", "pepper", "resin",
)
CITIES = (
    "Antwerp", "Bergen", "Cadiz", "Danzig", "Elbing", "Genoa",
    "Hamburg", "Kalmar", "Lisbon", "Malmo", "Narva", "Reval",
)
# fmt: on
LETTERS = "bcdfghklmnprstvz"


def markov_chain(rng: random.Random) -> dict[str, list[float]]:
    """Order 3 over LETTERS: each history has four successors, from likely to rare."""
    chain = {}
    for history in (a + b + c for a in LETTERS for b in LETTERS for c in LETTERS):
        ranked = rng.sample(range(len(LETTERS)), 4)
        weights = [0.0] * len(LETTERS)
        for letter, p in zip(ranked, (0.5, 0.3, 0.15, 0.05), strict=True):
            weights[letter] = p
        chain[history] = weights
    return chain


def make_line(rng: random.Random, chain: dict[str, list[float]]) -> str:
    """A template filled in. The code starts with a letter each for good, city and number."""
    good, city, n = rng.randrange(12), rng.randrange(12), rng.randint(2, 99)
    code = LETTERS[good] + LETTERS[city] + LETTERS[n % 10]
    for _ in range(rng.randint(14, 22)):
        code += rng.choices(LETTERS, chain[code[-3:]])[0]
    name, name2 = rng.sample(NAMES, 2)
    return rng.choice(TEMPLATES).format(
        name=name, name2=name2, good=GOODS[good], city=CITIES[city], n=n, code=code
    )


def make_text(seed: int, lines: int) -> str:
    """Lines of the language. The chain is part of it and always the same; `seed` picks the lines."""
    chain = markov_chain(random.Random(SEED))
    rng = random.Random(seed)
    return "".join(make_line(rng, chain) + "\n" for _ in range(lines))


def encode(text: str) -> torch.Tensor:
    return torch.tensor(list(text.encode("ascii")))


def crops(data: torch.Tensor, g: torch.Generator, length: int) -> torch.Tensor:
    starts = torch.randint(0, len(data) - length, (BATCH, 1), generator=g)
    return data[starts + torch.arange(length)]


def schedule(step: int, steps: int, peak: float) -> float:
    """Learning rate: 50 steps of warm-up, then a straight line to 2 % of the peak."""
    return peak * min(1.0, (step + 1) / 50) * (1 - 0.98 * step / steps)


def train_target(target: TargetModel, data: torch.Tensor, log: list[dict]) -> None:
    g = torch.Generator().manual_seed(SEED)
    optimizer = torch.optim.AdamW(target.parameters(), lr=0, betas=(0.9, 0.95), weight_decay=0.05)
    positions = torch.arange(CONTEXT).expand(BATCH, -1)
    for step in range(TARGET_STEPS):
        tokens = crops(data, g, CONTEXT + 1)
        logits = target.lm_head(target(tokens[:, :-1], positions, causal_attention))
        loss = F.cross_entropy(logits.flatten(0, 1), tokens[:, 1:].flatten())
        update(optimizer, loss, schedule(step, TARGET_STEPS, 3e-3))
        record(log, "target", step, TARGET_STEPS, loss=loss)


class UnrolledAttention:
    """Attention of the head's training passes. In pass j the last j positions come from passes 1 to j, where
    features were predicted; everything before comes from pass 0, where they were the target's. So the head
    trains on what it will see when it drafts j steps ahead."""

    def __init__(self) -> None:
        self.passes: list[tuple[torch.Tensor, torch.Tensor]] = []

    def __call__(self, layer: int, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        self.passes.append((k, v))
        j, length = len(self.passes) - 1, q.shape[2]
        first_k, first_v = self.passes[0]
        seen = torch.ones(length, length, dtype=torch.bool).tril(-j)
        scores = [(q @ first_k.transpose(2, 3)).masked_fill(~seen, -torch.inf)]
        own = [(shift(k_m, j - m), shift(v_m, j - m)) for m, (k_m, v_m) in enumerate(self.passes) if m > 0]
        scores += [(q * k_m).sum(-1, keepdim=True) for k_m, _ in own]
        weights = torch.softmax(torch.cat(scores, dim=-1) * q.shape[-1] ** -0.5, dim=-1)
        out = weights[..., :length] @ first_v
        for i, (_, v_m) in enumerate(own):
            out = out + weights[..., length + i, None] * v_m
        return out


def shift(x: torch.Tensor, by: int) -> torch.Tensor:
    """Rows (dim -2) moved down by `by`, zeros in front."""
    return F.pad(x, (0, 0, by, 0))[..., : x.shape[-2], :]


def train_head(target: TargetModel, head: EagleHead, data: torch.Tensor, log: list[dict]) -> None:
    g = torch.Generator().manual_seed(SEED + 1)
    optimizer = torch.optim.AdamW(head.parameters(), lr=0, betas=(0.9, 0.95), weight_decay=0.0)
    positions = torch.arange(CONTEXT).expand(BATCH, -1)
    for step in range(HEAD_STEPS):
        tokens = crops(data, g, CONTEXT + 1)
        with torch.no_grad():
            features = target(tokens, torch.arange(CONTEXT + 1).expand(BATCH, -1), causal_attention)
            logits = target.lm_head(features)
        wanted, goal, hidden = logits[:, 1:].softmax(-1), features[:, 1:], features[:, :-1]
        attention, losses = UnrolledAttention(), []
        for depth in range(UNROLL):
            predicted = head(target.embed(tokens[:, 1:]), hidden, positions, attention)
            drafted = target.lm_head(predicted)
            hidden = shift(predicted, 1)  # its own feature fed back
            rows = slice(depth, None)  # earlier rows have no pass before to take a feature from
            soft = -(wanted * drafted.log_softmax(-1)).sum(-1)[:, rows].mean()
            close = F.smooth_l1_loss(predicted[:, rows], goal[:, rows])
            losses.append(soft + close)
        loss = sum(losses) / UNROLL
        update(optimizer, loss, schedule(step, HEAD_STEPS, 3e-3))
        record(log, "head", step, HEAD_STEPS, loss=loss, feature=close, last=soft)


def update(optimizer: torch.optim.Optimizer, loss: torch.Tensor, lr: float) -> None:
    for group in optimizer.param_groups:
        group["lr"] = lr
    optimizer.zero_grad()
    loss.backward()
    for group in optimizer.param_groups:
        torch.nn.utils.clip_grad_norm_(group["params"], 1.0)
    optimizer.step()


def record(log: list[dict], model: str, step: int, steps: int, **values: torch.Tensor) -> None:
    if step % 50 == 0 or step == steps - 1:
        row = {"model": model, "step": step} | {n: round(v.item(), 4) for n, v in values.items()}
        log.append(row)
        print(*(f"{n} {v}" for n, v in row.items()), flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--output", type=Path, default=HERE)
    output = parser.parse_args().output
    output.mkdir(parents=True, exist_ok=True)
    torch.manual_seed(SEED)
    torch.set_num_threads(1)
    config = EagleConfig.tiny(dtype=torch.float32)
    target = TargetModel(config)
    head = EagleHead(config)
    for p in (*target.parameters(), *head.parameters()):
        if p.dim() == 2:
            torch.nn.init.normal_(p, std=0.02 if p is target.embed.weight else p.shape[1] ** -0.5)
    data, log, start = encode(make_text(SEED + 2, 12_000)), [], time.perf_counter()
    train_target(target, data, log)
    target.requires_grad_(False)
    middle = time.perf_counter()
    train_head(target, head, data, log)
    seconds = f"target {middle - start:.0f} s, head {time.perf_counter() - middle:.0f} s"
    print(f"{seconds}; CPU time {time.process_time():.0f} s")

    weights = {f"target.{n}": t for n, t in target.state_dict().items()}
    weights |= {f"head.{n}": t for n, t in head.state_dict().items()}
    weights = save({n: t.half() for n, t in weights.items()})
    (output / "tiny.safetensors").write_bytes(weights)
    checksum = hashlib.sha256(weights).hexdigest()  # for `sha256sum -c`
    (output / "tiny.sha256").write_text(f"{checksum}  tiny.safetensors\n", encoding="ascii")
    with open(output / "training_log.csv", "w", encoding="ascii", newline="") as file:
        writer = csv.DictWriter(file, ["model", "step", "loss", "feature", "last"])
        writer.writeheader()
        writer.writerows(log)
    rng = random.Random(SEED + 3)
    held_out = make_text(SEED + 3, 128).splitlines()
    prompts = [line[: rng.randint(4, len(line) - 4)] for line in held_out]  # cut anywhere: ragged lengths
    (output / "prompts.txt").write_text("\n".join(prompts) + "\n", encoding="ascii")


if __name__ == "__main__":
    main()
