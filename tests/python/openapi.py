"""Requests against the Iceberg REST specification: what they are, whether they are allowed, whether a name in them is
one that the specification does not know.

The document says `nullable` and names the schema of a requirement or an update in a `discriminator`; JSON Schema knows
neither, so both are worked out here before a schema is asked.
"""

from __future__ import annotations

import json
import pathlib
import re
import urllib.parse
from typing import Any

import yaml
from engine import operation
from jsonschema import Draft202012Validator, FormatChecker

DOCUMENT = pathlib.Path(__file__).resolve().parent.parent / "rest-server" / "rest-catalog-open-api.yaml"
METHODS = ("get", "put", "post", "delete", "head")
# A schema that nothing satisfies.
NOTHING: dict[str, Any] = {"not": {}}
# Headers with a meaning in the protocol: to be sent only where an operation declares them.
PROTOCOL_HEADERS = ("if-none-match", "idempotency-key", "x-iceberg-access-delegation")


@operation("engine")
def check_requests(requests: list[dict[str, Any]], prefix: str | None = None) -> dict[str, Any]:
    """What is wrong with requests ({method, path, query, headers, body}), and which operations they are."""
    specification = Specification()
    operations: dict[str, int] = {}
    problems: list[str] = []
    for request in requests:
        name, found = specification.check(request, prefix)
        operations[name] = operations.get(name, 0) + 1
        problems += [f"{request['method']} {request['path']} ({name}): {problem}" for problem in found]
    return {"operations": operations, "problems": problems}


class Specification:
    def __init__(self) -> None:
        self.document = yaml.safe_load(DOCUMENT.read_text())
        self.schemas = self.document["components"]["schemas"]
        allow_null(self.schemas)

    def check(self, request: dict[str, Any], prefix: str | None) -> tuple[str, list[str]]:
        found = self.find(request["method"].lower(), request["path"], prefix)
        if found is None:
            return "none", ["there is no such operation"]
        declared, shared = found
        parameters = [self.resolved(p) for p in declared.get("parameters", []) + shared]
        problems = self.check_parameters(request, parameters)
        body = declared.get("requestBody")
        if body is None:
            if request["body"]:
                problems.append("it has a body")
            return declared["operationId"], problems
        media, content = next(iter(self.resolved(body)["content"].items()))
        sent = request["headers"].get("content-type")
        if sent != media:
            problems.append(f"its body is {sent} and not {media}")
        if media == "application/json":
            problems += self.problems_of(content["schema"], json.loads(request["body"]), "body")
        else:
            form = dict(urllib.parse.parse_qsl(request["body"], keep_blank_values=True, strict_parsing=True))
            problems += self.problems_of(content["schema"], form, "form")
        return declared["operationId"], problems

    def find(self, method: str, path: str, prefix: str | None) -> tuple[dict[str, Any], list[Any]] | None:
        """The operation, and the parameters that all operations of its path share."""
        for template, item in self.document["paths"].items():
            known = template.replace("/{prefix}", f"/{prefix}" if prefix else "")
            pattern = re.sub(r"\\{[^/]+?\\}", "[^/]+", re.escape(known))
            if method in item and method in METHODS and re.fullmatch(pattern, path):
                return item[method], [p for p in item.get("parameters", []) if "prefix" not in str(p)]
        return None

    def check_parameters(self, request: dict[str, Any], parameters: list[dict[str, Any]]) -> list[str]:
        problems = []
        declared = {(p["in"], p["name"].lower() if p["in"] == "header" else p["name"]): p for p in parameters}
        headers = {name: value for name, value in request["headers"].items() if name in PROTOCOL_HEADERS}
        for place, values in (("query", request["query"]), ("header", headers)):
            for name, value in values.items():
                if (place, name) not in declared:
                    problems.append(f"{place} parameter {name!r} is not declared")
                    continue
                schema = self.resolved(declared[place, name].get("schema", {}))
                typed = int(value) if schema.get("type") == "integer" and value.isdecimal() else value
                problems += self.problems_of(schema, typed, name)
            for (where, name), parameter in declared.items():
                if where == place and parameter.get("required") and name not in values:
                    problems.append(f"{place} parameter {name!r} is missing")
        return problems

    def problems_of(self, schema: dict[str, Any], value: Any, at: str) -> list[str]:
        """Against a schema, and against the ones that discriminators choose inside the value."""
        schema = self.resolved(schema)
        validator = Draft202012Validator(
            {**schema, "components": {"schemas": self.schemas}}, format_checker=FormatChecker()
        )
        problems = [f"{at}: {error.message} at {error.json_path}" for error in validator.iter_errors(value)]
        known = self.properties(schema)
        if isinstance(value, dict) and known:
            problems += [f"{at}: {name!r} is unknown to the specification" for name in value.keys() - known.keys()]
        if isinstance(value, dict):
            for name, inner in value.items():
                if name in known:
                    problems += self.inside(known[name], inner, f"{at}.{name}")
        return problems

    def inside(self, schema: dict[str, Any], value: Any, at: str) -> list[str]:
        schema = self.resolved(schema)
        if schema.get("type") == "array" and isinstance(value, list):
            items = schema.get("items", {})
            each = [self.problems_of(self.chosen(items, item), item, f"{at}[{i}]") for i, item in enumerate(value)]
            return [problem for problems in each for problem in problems]
        return self.problems_of(schema, value, at) if isinstance(value, dict) else []

    def chosen(self, schema: dict[str, Any], value: Any) -> dict[str, Any]:
        """The schema that the value's discriminator names; `TableUpdate` has its own in each of its parts."""
        schema = self.resolved(schema)
        if not isinstance(value, dict):
            return schema
        parts = [schema, *(self.resolved(part) for part in schema.get("anyOf", []))]
        for part in parts:
            for base in [part, *(self.resolved(base) for base in part.get("allOf", []))]:
                if discriminator := base.get("discriminator"):
                    named = discriminator["mapping"].get(value.get(discriminator["propertyName"]))
                    return {"$ref": named} if named else NOTHING
        return schema

    def properties(self, schema: dict[str, Any]) -> dict[str, Any]:
        """Everything that a value of a schema may have; nothing when it may have anything."""
        schema = self.resolved(schema)
        if schema.get("additionalProperties"):
            return {}
        found = dict(schema.get("properties", {}))
        for part in schema.get("allOf", []) + schema.get("anyOf", []) + schema.get("oneOf", []):
            found |= self.properties(part)
        return found

    def resolved(self, schema: dict[str, Any]) -> dict[str, Any]:
        while "$ref" in schema:
            target: Any = self.document
            for step in schema["$ref"].removeprefix("#/").split("/"):
                target = target[step]
            schema = target
        return schema


def allow_null(schema: Any) -> None:
    """`nullable` of OpenAPI 3.0 in the words of JSON Schema."""
    if isinstance(schema, dict):
        if schema.get("nullable") is True and isinstance(schema.get("type"), str):
            schema["type"] = [schema["type"], "null"]
        for inner in schema.values():
            allow_null(inner)
    elif isinstance(schema, list):
        for inner in schema:
            allow_null(inner)
