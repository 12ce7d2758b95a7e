"""Columns of a row by their names: its own, and `a.b` for the value `b` of a mapping in the column `a`. No torch."""

from collections.abc import Iterable, Mapping
from typing import Any


def column_names(row: Mapping[str, Any]) -> tuple[str, ...]:
    """The names of all columns of a row, or of what is a mapping where its columns are: its own before those within."""
    inside = [
        f"{name}.{within}"
        for name, value in row.items()
        if isinstance(value, Mapping)
        for within in column_names(value)
    ]
    return (*row, *inside)


def schema_names(fields: Iterable[Any]) -> tuple[str, ...]:
    """The same of the fields of an Arrow schema."""
    return column_names(_mapping(fields))


def _mapping(fields: Iterable[Any]) -> dict[str, Any]:
    import pyarrow  # late: only these data sets need it

    return {str(field.name): _mapping(field.type) if pyarrow.types.is_struct(field.type) else None for field in fields}


def value_at(row: Mapping[str, Any], column: str) -> Any:
    """The value of a column. Raises KeyError where the row has none of that name."""
    if column in row:
        return row[column]
    first, dot, rest = column.partition(".")
    inside = row[first]
    if not dot or not isinstance(inside, Mapping):
        raise KeyError(column)
    return value_at(inside, rest)
