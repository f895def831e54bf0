"""The contextual prior's network on a GPU: two launches forward, one backward, instead of some twenty."""
