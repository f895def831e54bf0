"""The contextual prior's network on a GPU: two launches forward and one backward, instead of about twenty."""
