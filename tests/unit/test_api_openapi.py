"""The OpenAPI document: well formed, whole, and about the routes that exist."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import jsonschema
import pytest
from starlette.routing import Route
from starlette.types import Receive, Scope, Send

from dsec.api import openapi
from dsec.api.app import ApiServer
from dsec.api.edges import Edges, LocalEdge
from dsec.api.keys import Keys
from dsec.edge.routes import ANY, PREFIX, WEBSOCKET
from dsec.edge.routes import routes as edge_routes
from dsec.images.routes import ImageRoutes
from dsec.store import Store
from libdsec.schema import NodeInfo

WIRE = Path(__file__).parents[2] / "docs" / "wire.md"

DOCUMENT_SCHEMA = {
    "type": "object",
    "required": ["openapi", "info", "paths", "components"],
    "properties": {
        "openapi": {"pattern": r"^3\.1\.\d+$"},
        "info": {"type": "object", "required": ["title", "version"]},
        "paths": {"type": "object", "propertyNames": {"pattern": "^/"}, "additionalProperties": {"$ref": "#/$defs/item"}},
        "components": {"type": "object", "propertyNames": {"enum": ["schemas", "securitySchemes", "responses"]}},
    },
    "$defs": {
        "item": {
            "type": "object",
            "propertyNames": {"enum": ["get", "put", "post", "delete", "options", "head", "patch"]},
            "additionalProperties": {
                "type": "object",
                "required": ["operationId", "responses"],
                "properties": {
                    "parameters": {"type": "array", "items": {"$ref": "#/$defs/parameter"}},
                    "requestBody": {"type": "object", "required": ["content"]},
                    "responses": {"type": "object", "minProperties": 2, "propertyNames": {"pattern": r"^(\d{3}|default)$"}},
                },
            },
        },
        "parameter": {
            "type": "object",
            "required": ["name", "in", "required", "schema"],
            "properties": {"in": {"enum": ["path", "query", "header"]}},
            "if": {"properties": {"in": {"const": "path"}}},
            "then": {"properties": {"required": {"const": True}}},
        },
    },
}


@pytest.fixture(scope="module")
def document() -> dict[str, Any]:
    loaded: dict[str, Any] = json.loads(openapi.document())
    return loaded


class Nobody:
    """An edge that is never asked."""

    async def app(self, scope: Scope, receive: Receive, send: Send) -> None:
        raise AssertionError

    def node_info(self) -> NodeInfo:
        raise AssertionError


def references(value: object) -> Iterator[str]:
    if isinstance(value, dict):
        yield from (found for name, found in value.items() if name == "$ref" and isinstance(found, str))
        for inner in value.values():
            yield from references(inner)
    elif isinstance(value, list):
        for inner in value:
            yield from references(inner)


def test_the_document_is_openapi_3_1(document: dict[str, Any]) -> None:
    jsonschema.Draft202012Validator(DOCUMENT_SCHEMA).validate(document)
    for schema in document["components"]["schemas"].values():
        jsonschema.Draft202012Validator.check_schema(schema)


def test_every_reference_leads_somewhere(document: dict[str, Any]) -> None:
    for reference in set(references(document)):
        found: Any = document
        for part in reference.removeprefix("#/").split("/"):
            found = found[part]


def test_operation_ids_are_unique(document: dict[str, Any]) -> None:
    ids = [operation["operationId"] for item in document["paths"].values() for operation in item.values()]
    assert len(ids) == len(set(ids))


def test_every_path_parameter_is_described(document: dict[str, Any]) -> None:
    for path, item in document["paths"].items():
        for operation in item.values():
            described = {parameter["name"] for parameter in operation.get("parameters", []) if parameter["in"] == "path"}
            assert described == set(re.findall(r"{(\w+)}", path))


async def test_every_route_of_the_apiserver_is_named(document: dict[str, Any], tmp_path: Path) -> None:
    store = await Store.open("sqlite+aiosqlite://")
    server = ApiServer(Keys(store), Edges([LocalEdge("e1", Nobody())]), [], state_dir=tmp_path, metrics_public=False)
    await store.close()
    for route in server.routes:
        assert isinstance(route, Route)
        for method in (route.methods or set()) - {"HEAD"}:
            assert method.lower() in document["paths"][route.path], f"{method} {route.path}"


def test_every_route_of_the_image_store_is_named(document: dict[str, Any]) -> None:
    for route in ImageRoutes(Mock()).routes():
        assert isinstance(route, Route)
        for method in (route.methods or set()) - {"HEAD"}:
            assert method.lower() in document["paths"][route.path.replace(":path", "")], f"{method} {route.path}"


def test_every_route_of_the_edge_is_named_and_no_other(document: dict[str, Any]) -> None:
    mounted = {(route.method, PREFIX + route.path.replace("...", "")) for route in edge_routes(*(Mock() for _ in range(7)))}
    named = {(method.upper(), path) for path, item in document["paths"].items() for method in item if path.startswith(PREFIX)}
    whole = {path for method, path in mounted if method == ANY}
    # A WebSocket begins as a GET; a path for any method is described with the usual ones.
    wanted = {("GET" if method == WEBSOCKET else method, path) for method, path in mounted if path not in whole}
    assert {(method, path) for method, path in named if path not in whole} == wanted
    assert whole == {path for _, path in named if path in whole}


def test_every_path_of_the_contract_is_named(document: dict[str, Any]) -> None:
    section = WIRE.read_text().partition("\n## HTTP")[2]
    cells = " ".join(line.split("|")[1] for line in section.splitlines() if line.startswith("|"))
    paths = {path.split("?")[0] for path in re.findall(r"(?:/v1|…)/[^\s;,|]+|/healthz|/metrics|/openapi\.json", cells)}
    for path in paths:
        tail = path.removeprefix("…").replace("/v1/keys/{id}", "/v1/keys/{key_id}").replace("/v1/images/{name}", "/v1/images/{reference}")
        assert any(known.endswith(tail) for known in document["paths"]), path
