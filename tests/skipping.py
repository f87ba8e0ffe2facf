"""A fault to plant: one field's copy is left out."""

from lib.strategies import STRATEGIES


class Skip:
    """`grouped_foreach_dma` without one field, by name."""

    large_outside = False

    def __init__(self, field: str):
        self.field = field

    def __call__(self, dsts, srcs, names):
        kept = [i for i, name in enumerate(names) if name != self.field]
        STRATEGIES["grouped_foreach_dma"]([dsts[i] for i in kept], [srcs[i] for i in kept])
