"""Run files given as text, and the structs that files hold."""

from collections.abc import Sequence
from pathlib import Path

from msgspec import Struct, inspect

from realgraph.graphs.yaml.document import parse_document
from realgraph.graphs.yaml.load import shown_name
from realgraph.run_file.compose import Checked, Composed, check_document, compose_document


def compose_text(text: str, file: Path, overrides: Sequence[str] = ()) -> Composed:
    """A run file composed from text, as if it were written in `file`, which need not exist."""
    return compose_document(parse_document(text, shown_name(file)), file, overrides)


def check_text(text: str, file: Path) -> Checked:
    """A run file checked as text, as if it were written in `file`, which need not exist."""
    return check_document(parse_document(text, shown_name(file)), file)


def reachable(kind: inspect.Type) -> set[type[Struct]]:
    """Every struct that a file of this type may hold."""
    structs: set[type[Struct]] = set()
    todo = [kind]
    while todo:
        match todo.pop():
            case inspect.StructType() as struct if struct.cls not in structs:
                structs.add(struct.cls)
                todo += [field.type for field in struct.fields]
            case inspect.UnionType() as union:
                todo += union.types
            case inspect.DictType() as mapping:
                todo.append(mapping.value_type)
            case inspect.VarTupleType() | inspect.ListType() as items:
                todo.append(items.item_type)
            case _:
                pass
    return structs
