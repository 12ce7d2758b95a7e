"""Float64 numbers behind the hidden states of a micro-batch, in one message with them. Knows no model.

They are carried bit by bit in rows of their own, whatever the dtype of the states is.
"""

import math

import torch
from torch import Tensor

NUMBER_BYTES = 8


def note_rows(n: int, states: Tensor) -> int:
    """Rows that n numbers take behind `states` ([rows, hidden])."""
    return math.ceil(n * NUMBER_BYTES / (states.shape[1] * states.element_size()))


def with_notes(states: Tensor, notes: Tensor) -> Tensor:
    """[rows, hidden] and [n] float64 -> [rows + note_rows, hidden]; only the states have a gradient."""
    return torch.cat([states, _coded(notes, states)])


def states_of(message: Tensor, n: int) -> Tensor:
    """The states of a message with n numbers, as a view."""
    return message[: len(message) - note_rows(n, message)]


def notes_of(message: Tensor, n: int) -> Tensor:
    """[n] float64: the numbers of a message, copied."""
    coded = message.detach()[len(message) - note_rows(n, message) :].clone()
    return coded.view(-1).view(torch.uint8)[: n * NUMBER_BYTES].clone().view(torch.float64)


def put_notes(message: Tensor, notes: Tensor) -> None:
    """Write the numbers of a message, in place."""
    message[len(message) - note_rows(len(notes), message) :] = _coded(notes, message)


def _coded(notes: Tensor, states: Tensor) -> Tensor:
    rows = states.new_zeros(note_rows(len(notes), states), states.shape[1])
    rows.view(-1).view(torch.uint8)[: len(notes) * NUMBER_BYTES] = notes.detach().contiguous().view(torch.uint8)
    return rows
