"""Recorded training steps without a GPU."""

from contextlib import nullcontext

from bayesattn_recipes.common.replay import RecordedSteps


class FakeSteps(RecordedSteps):
    """Records as a GPU does, without one: a replay computes the same call again and writes into the same tensors."""

    def _open(self):
        self.captures = 0
        return None, None

    def on_stream(self):
        return nullcontext()

    def _capture(self, call):
        self.captures += 1
        outputs = call()

        def replay():
            for held, new in zip(outputs, call(), strict=True):
                held.copy_(new)

        return replay, outputs
