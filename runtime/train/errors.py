"""Errors that keep a train engine from doing what it was asked."""


class NumericsError(FloatingPointError):
    """A loss or gradient norm is not finite; weights are as before the step. samples: to blame, that this rank held."""

    def __init__(self, text: str, samples: tuple[int, ...] = ()) -> None:
        super().__init__(text)
        self.samples = samples


class LostPart(OSError):
    """A part of a state is on none of the workers that are left; the text says which."""
