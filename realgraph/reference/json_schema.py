"""JSON Schemas of run files and graph files, derived from the structs, so that editors complete and check them."""

from typing import Any

import msgspec
from msgspec import inspect

from realgraph.graphs.spec import GraphSpec
from realgraph.graphs.yaml.schema import NAMED, default_of, type_of
from realgraph.reference.field_notes import field_notes, summary
from realgraph.run_file.run_spec import RunSpec

DIALECT = "https://json-schema.org/draft/2020-12/schema"
_REFERENCE = {"type": "string", "pattern": r"\$\{"}
_PARTIAL_SECTIONS = ("models", "calls")  # of a run file: they say only what differs from the graph

Schema = dict[str, Any]


def run_schema() -> Schema:
    """The schema of a run file."""
    return _root(RunSpec, "A realgraph run file", _PARTIAL_SECTIONS)


def schema_text(schema: Schema) -> str:
    """The text of its file."""
    return msgspec.json.format(msgspec.json.encode(schema), indent=2).decode() + "\n"


def graph_schema() -> Schema:
    """The schema of a graph file."""
    return _root(GraphSpec, "A realgraph graph file", ())


def _root(struct: type, title: str, partial: tuple[str, ...]) -> Schema:
    kind = type_of(struct)
    assert isinstance(kind, inspect.StructType)
    writer = _Writer()
    whole = writer.struct(kind, False)
    for name in partial:
        field = next(field for field in kind.fields if field.encode_name == name)
        note = whole["properties"][name].get("description")
        whole["properties"][name] = writer.value(field.type, True) | ({"description": note} if note else {})
    for field in kind.fields:  # an empty section is as good as none
        if not field.required and partial:
            whole["properties"][field.encode_name] = _nullable(whole["properties"][field.encode_name])
    defs = {name: writer.defs[name] for name in sorted(_reachable(whole, writer.defs))}
    return {"$schema": DIALECT, "title": title, **whole, "$defs": defs}


def _nullable(schema: Schema) -> Schema:
    if "anyOf" in schema:
        null = {"type": "null"}
        return schema if null in schema["anyOf"] else {**schema, "anyOf": [*schema["anyOf"], null]}
    notes: Schema = {key: schema[key] for key in ("description", "default") if key in schema}
    return {**notes, "anyOf": [{key: item for key, item in schema.items() if key not in notes}, {"type": "null"}]}


def _reachable(schema: object, defs: dict[str, Schema]) -> set[str]:
    names: set[str] = set()
    todo = [schema]
    while todo:
        match todo.pop():
            case {"$ref": str(ref)}:
                name = ref.rpartition("/")[2]
                if name not in names:
                    names.add(name)
                    todo.append(defs[name])
            case dict() as mapping:
                todo += mapping.values()
            case list() as items:
                todo += items
            case _:
                pass
    return names


class _Writer:
    """Collects the definitions that the types refer to. `partial`: nothing is required and null deletes."""

    def __init__(self) -> None:
        self.defs: dict[str, Schema] = {}

    def struct(self, kind: inspect.StructType, partial: bool) -> Schema:
        notes = field_notes(kind.cls)
        properties: Schema = {kind.tag_field: {"const": kind.tag}} if kind.tag_field else {}
        for field in kind.fields:
            schema = self.field(field, partial)
            if note := notes.get(field.name):
                schema["description"] = note
            properties[field.encode_name] = schema
        schema = {"type": "object", "description": summary(kind.cls), "properties": properties}
        tag = [kind.tag_field] if kind.tag_field and kind.cls not in NAMED else []
        required = [*tag, *(field.encode_name for field in kind.fields if field.required)]
        if required and not partial:
            schema["required"] = required
        return {**schema, "additionalProperties": False}

    def field(self, field: inspect.Field, partial: bool) -> Schema:
        """The field's values, or a reference to one; null where it deletes."""
        schema = self.value(field.type, partial)
        choices = schema.pop("anyOf") if set(schema) == {"anyOf"} else [schema]
        if not any(choice == {} or choice == {"type": "string"} for choice in choices):
            choices = [*choices, _REFERENCE]
        if partial and {"type": "null"} not in choices and {} not in choices:
            choices = [*choices, {"type": "null"}]
        whole: Schema = {"anyOf": choices} if len(choices) > 1 else dict(choices[0])
        if not field.required:
            whole["default"] = default_of(field)
        return whole

    def value(self, kind: inspect.Type, partial: bool) -> Schema:
        match kind:
            case inspect.UnionType():
                return {"anyOf": [self.value(member, partial) for member in kind.types]}
            case inspect.StructType():
                name = kind.cls.__name__ + ("Changes" if partial else "")
                if name not in self.defs:
                    self.defs[name] = {}  # a struct may contain itself
                    self.defs[name] = self.struct(kind, partial)
                return {"$ref": f"#/$defs/{name}"}
            case inspect.DictType():
                entry = self.value(kind.value_type, partial)
                deletable = [*entry.get("anyOf", [entry]), {"type": "null"}]
                return {"type": "object", "additionalProperties": {"anyOf": deletable} if partial and entry else entry}
            case inspect.VarTupleType() | inspect.ListType():
                return {"type": "array", "items": self.value(kind.item_type, partial)}
            case inspect.TupleType():
                items = [self.value(item, partial) for item in kind.item_types]
                return {"type": "array", "prefixItems": items, "minItems": len(items), "maxItems": len(items)}
            case _:
                return _scalar(kind)


def _scalar(kind: inspect.Type) -> Schema:
    match kind:
        case inspect.LiteralType():
            return {"enum": list(kind.values)}
        case inspect.IntType() | inspect.FloatType():
            names = {"exclusiveMinimum": kind.gt, "minimum": kind.ge, "exclusiveMaximum": kind.lt, "maximum": kind.le}
            bounds = {name: bound for name, bound in names.items() if bound is not None}
            return {"type": "integer" if isinstance(kind, inspect.IntType) else "number", **bounds}
        case inspect.BoolType():
            return {"type": "boolean"}
        case inspect.StrType():
            return {"type": "string"}
        case inspect.NoneType():
            return {"type": "null"}
        case _:
            return {}
