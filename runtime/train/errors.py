"""Errors that keep a train engine from doing what it was asked."""


class NumericsError(FloatingPointError):
    """A loss or gradient norm is not finite; weights are as before the step. samples: to blame, on any rank."""

    def __init__(self, text: str, samples: tuple[int, ...] = ()) -> None:
        super().__init__(text)
        self.samples = samples


class LostPart(OSError):
    """A part of a state is on none of the workers that are left; the text says which."""


def numerics_error(loss: float, norm: float, samples: tuple[int, ...]) -> NumericsError:
    """The error of a step with such a loss and gradient norm, and these samples to blame."""
    what = f"the loss is {loss}" if loss - loss != 0 else f"the gradient norm is {norm}"
    shown = ", ".join(map(str, samples[:8])) + (", ..." if len(samples) > 8 else "")
    where = f"; samples {shown}" if samples else ""
    return NumericsError(f"{what} before the optimizer step, which was not taken{where}", samples)
