"""The OpenAPI 3.1 description, made from the one schema (``libdsec/schema.py``) and a table of every route.

The table is data for readers and generators; nothing is dispatched by it. A test compares it with the routes that are mounted.
"""

from __future__ import annotations

import functools
from collections.abc import Iterable
from typing import NamedTuple, TypeAlias

import msgspec

from dsec.images.routes import RemovedBytes
from libdsec import schema
from libdsec.errors import ErrorEnvelope

JsonValue: TypeAlias = "dict[str, JsonValue] | list[JsonValue] | str | int | float | bool | None"

_REF = "#/components/schemas/{name}"
_JSON, _MSGPACK, _NDJSON, _OCTETS = "application/json", "application/msgpack", "application/x-ndjson", "application/octet-stream"


class Body(NamedTuple):
    """A request or response body: any of ``types`` (none: raw octets) in each of ``media``."""

    types: tuple[object, ...]
    media: tuple[str, ...]


def _json(*types: object) -> Body:
    return Body(types, (_JSON, _MSGPACK))


def _lines(type_: object) -> Body:
    """One JSON text a line, each of ``type_``."""
    return Body((type_,), (_NDJSON,))


_octets = Body((), (_OCTETS,))


class Parameter(NamedTuple):
    """A query parameter or a header."""

    name: str
    kind: str = "string"
    required: bool = False
    place: str = "query"
    about: str = ""


class Operation(NamedTuple):
    """One method of one path. ``response`` None: an answer without body (204)."""

    method: str
    path: str
    summary: str
    request: Body | None = None
    response: Body | None = None
    parameters: tuple[Parameter, ...] = ()
    status: int = 200
    public: bool = False


_SB = "/v1/sandboxes/{id}"
_EXEC = f"{_SB}/exec/{{exec_id}}"
_PATH = Parameter("path", required=True, about="Absolute path inside the sandbox; percent-encoded bytes")
_USER = Parameter("user", about="Whose rights count: a name, a uid, user:group or uid:gid")
_RECURSIVE = Parameter("recursive", "boolean")
_OFFSET = Parameter("from_offset", "integer", about="Byte offset to begin at; X-DSec-Offset of the answer says where it begins")
_KEY = Parameter("Idempotency-Key", place="header", about="Repeated with a retry, so that the act happens once")
_PAGE = (Parameter("limit", "integer"), Parameter("cursor"))

OPERATIONS: tuple[Operation, ...] = (
    Operation(
        "post",
        "/v1/sandboxes",
        "Create one sandbox or many; a line each as it becomes ready",
        _json(schema.CreateRequest),
        _lines(schema.CreateItem),
        (_KEY,),
    ),
    Operation(
        "get",
        "/v1/sandboxes",
        "List the project's sandboxes, oldest first",
        response=_json(schema.SandboxPage),
        parameters=(Parameter("state"), Parameter("backend"), Parameter("label", about="k=v; may be repeated"), *_PAGE),
    ),
    Operation("get", _SB, "Show a sandbox", response=_json(schema.SandboxInfo)),
    Operation(
        "post",
        f"{_SB}/attach",
        "Show a sandbox, and keep it even if its creator went away before it was told of it",
        response=_json(schema.SandboxInfo),
    ),
    Operation("patch", _SB, "Change lifetimes, labels or network rules", _json(schema.PatchRequest), _json(schema.SandboxInfo)),
    Operation("delete", _SB, "Stop and delete a sandbox; repeatable", response=_json(schema.SandboxInfo)),
    Operation(
        "post",
        f"{_SB}/exec",
        "Run a command, or start one",
        _json(schema.ExecRequest),
        _json(schema.CommandResult, schema.ProcessInfo),
        (_KEY,),
    ),
    Operation("get", f"{_SB}/exec", "List the commands", response=_json(list[schema.ProcessInfo])),
    Operation("get", _EXEC, "Show a command", response=_json(schema.ProcessInfo)),
    Operation(
        "get",
        f"{_EXEC}/wait",
        "Wait for a command to end",
        response=_json(schema.CommandResult),
        parameters=(Parameter("timeout_s", "number"),),
    ),
    Operation("get", f"{_EXEC}/stdout", "Standard output as it comes", response=_octets, parameters=(_OFFSET,)),
    Operation("get", f"{_EXEC}/stderr", "Standard error as it comes", response=_octets, parameters=(_OFFSET,)),
    Operation("put", f"{_EXEC}/stdin", "Feed standard input", _octets, parameters=(Parameter("eof", "boolean"),)),
    Operation("post", f"{_EXEC}/signal", "Send a signal", _json(schema.SignalRequest), parameters=(_KEY,)),
    Operation("post", f"{_EXEC}/resize", "Resize the terminal", _json(schema.PtySize)),
    Operation(
        "get",
        f"{_EXEC}/attach",
        "WebSocket: output, input, resize and signals of a command",
        parameters=(Parameter("stdout_from", "integer"), Parameter("stderr_from", "integer")),
        status=101,
    ),
    Operation("post", f"{_SB}/shell", "Run a command in a session", _json(schema.ShellRequest), _json(schema.CommandResult), (_KEY,)),
    Operation("delete", f"{_SB}/shell/{{session}}", "Close a session"),
    Operation(
        "get",
        f"{_SB}/files",
        "Read a file; X-DSec-Size is its whole size",
        response=_octets,
        parameters=(_PATH, Parameter("offset", "integer"), Parameter("length", "integer"), _USER),
    ),
    Operation(
        "put",
        f"{_SB}/files",
        "Write a file",
        _octets,
        _json(schema.FileInfo),
        (_PATH, Parameter("mode", about="octal"), Parameter("append", "boolean"), _USER),
    ),
    Operation(
        "get", f"{_SB}/files/stat", "Describe a file", response=_json(schema.FileInfo), parameters=(_PATH, Parameter("follow", "boolean"))
    ),
    Operation("get", f"{_SB}/files/list", "List a directory", response=_lines(schema.FileInfo), parameters=(_PATH, _RECURSIVE)),
    Operation(
        "post",
        f"{_SB}/files/mkdir",
        "Make a directory",
        parameters=(_PATH, Parameter("parents", "boolean"), Parameter("mode", about="octal"), _KEY),
    ),
    Operation("post", f"{_SB}/files/move", "Rename or move", parameters=(_PATH, Parameter("to", required=True), _KEY)),
    Operation("post", f"{_SB}/files/remove", "Remove", parameters=(_PATH, _RECURSIVE, _KEY)),
    Operation(
        "post",
        f"{_SB}/files/chmod",
        "Change permissions",
        parameters=(_PATH, Parameter("mode", required=True, about="octal"), _KEY),
    ),
    Operation("post", f"{_SB}/files/chown", "Change the owner", parameters=(_PATH, Parameter("owner", required=True), _KEY)),
    Operation(
        "get",
        f"{_SB}/files/watch",
        "Changes below a path as they happen",
        response=_lines(schema.FileEvent),
        parameters=(_PATH, _RECURSIVE),
    ),
    Operation("get", f"{_SB}/files/tar", "A directory's content as a tar", response=_octets, parameters=(_PATH,)),
    Operation("put", f"{_SB}/files/tar", "Unpack a tar below a path", _octets, _json(schema.TarSummary), (_PATH,)),
    Operation("get", f"{_SB}/tcp/{{port}}", "WebSocket: a TCP connection to a port inside", status=101),
    *(
        Operation(
            method,
            f"{_SB}/ports/{{port}}/{{rest}}",
            "HTTP to a port inside",
            _octets if method in ("post", "put", "patch") else None,
            _octets,
        )
        for method in ("get", "head", "post", "put", "patch", "delete", "options")
    ),
    Operation("get", f"{_SB}/url/{{port}}", "A signed address of a port inside, on an origin of its own", response=_json(schema.PortUrl)),
    Operation(
        "get",
        f"{_SB}/commands",
        "The last commands as the edge remembers them, also of a failed sandbox",
        response=_json(list[schema.CommandEntry]),
    ),
    Operation("get", f"{_SB}/processes", "Processes inside", response=_json(list[schema.ProcessEntry])),
    Operation("get", f"{_SB}/metrics", "What it uses now", response=_json(schema.Metrics)),
    Operation(
        "get", f"{_SB}/events", "What happened to it", response=_lines(schema.SandboxEvent), parameters=(Parameter("follow", "boolean"),)
    ),
    Operation(
        "post",
        f"{_SB}/pack",
        "Make an image of what it runs on and what it wrote; progress, then the image",
        _json(schema.PackRequest),
        _lines(schema.PackLine),
        (_KEY,),
    ),
    Operation(
        "post",
        f"{_SB}/fork",
        "Create sandboxes that start with its files; a line each as it becomes ready",
        _json(schema.ForkRequest),
        _lines(schema.CreateItem),
        (_KEY,),
    ),
    Operation("get", f"{_SB}/diff", "What differs from its image", response=_lines(schema.DiffEntry)),
    Operation(
        "post",
        "/v1/images",
        "Import an archive; progress, then the image",
        _octets,
        _lines(schema.ImportLine),
        (Parameter("name", required=True), Parameter("kind"), Parameter("format"), Parameter("at"), _KEY),
    ),
    Operation(
        "post",
        "/v1/images/from-registry",
        "Import an image from a registry; progress, then the image",
        _json(schema.RegistryImport),
        _lines(schema.ImportLine),
        (_KEY,),
    ),
    Operation("get", "/v1/images", "List images", response=_json(schema.ImagePage), parameters=_PAGE),
    Operation("post", "/v1/images/gc", "Remove layers that nothing names or uses", response=_json(RemovedBytes)),
    Operation(
        "post",
        "/v1/images/push",
        "Send an image to the shared store; progress, then the image",
        response=_lines(schema.ImportLine),
        parameters=(Parameter("reference", required=True),),
    ),
    Operation(
        "post",
        "/v1/images/pull",
        "Fetch an image's metadata, or all of it, from the shared store; progress, then the image",
        response=_lines(schema.ImportLine),
        parameters=(Parameter("reference", required=True), Parameter("whole", "boolean")),
    ),
    Operation(
        "post",
        "/v1/images/tag",
        "Give what an image is another name; progress, then the image",
        response=_lines(schema.ImportLine),
        parameters=(Parameter("reference", required=True), Parameter("name", required=True), _KEY),
    ),
    Operation(
        "post",
        "/v1/images/fsck",
        "Check the image store (admin); findings, then done",
        response=_lines(schema.FsckLine),
        parameters=(Parameter("deep", "boolean"), Parameter("repair", "boolean")),
    ),
    Operation(
        "get",
        "/v1/image-stats",
        "What sandboxes have read of an image",
        response=_json(schema.ImageReads),
        parameters=(Parameter("reference", required=True),),
    ),
    Operation(
        "get",
        "/v1/image-diff",
        "Paths that two images don't have alike",
        response=_lines(schema.ImageChange),
        parameters=(Parameter("before", required=True), Parameter("after", required=True)),
    ),
    Operation("get", "/v1/images/{reference}", "Show an image", response=_json(schema.ImageInfo)),
    Operation("delete", "/v1/images/{reference}", "Remove an image; refused while in use", response=_json(schema.ImageInfo)),
    Operation(
        "post",
        "/v1/keys",
        "Make an API key (admin); the only time that it is shown",
        _json(schema.KeyRequest),
        _json(schema.NewKey),
        (_KEY,),
        status=201,
    ),
    Operation("get", "/v1/keys", "List API keys (admin)", response=_json(list[schema.KeyInfo])),
    Operation("delete", "/v1/keys/{key_id}", "Revoke an API key (admin)", response=_json(schema.KeyInfo)),
    Operation("get", "/v1/nodes", "List nodes", response=_json(list[schema.NodeInfo])),
    Operation("get", "/v1/doctor", "What a node has and lacks", response=_json(schema.DoctorReport), parameters=(Parameter("edge"),)),
    Operation("get", "/healthz", "Whether the service takes requests", response=_json(schema.Health), public=True),
    Operation("get", "/metrics", "Prometheus metrics; needs no key on a listener bound to loopback", response=Body((), ("text/plain",))),
    Operation("get", "/openapi.json", "This document", response=Body((), (_JSON,)), public=True),
)


@functools.cache
def document() -> bytes:
    """The document as JSON."""
    return msgspec.json.encode(build(OPERATIONS))


def build(operations: Iterable[Operation]) -> dict[str, JsonValue]:
    """The OpenAPI document of ``operations``."""
    operations = tuple(operations)
    bodies = [body for operation in operations for body in (operation.request, operation.response) if body is not None]
    types = [*(type_ for body in bodies for type_ in body.types), ErrorEnvelope]
    schemas, components = msgspec.json.schema_components(types, ref_template=_REF)
    by_type: dict[str, JsonValue] = {str(type_): found for type_, found in zip(types, schemas, strict=True)}
    paths: dict[str, dict[str, JsonValue]] = {}
    for operation in operations:
        methods = paths.setdefault(operation.path, {})
        methods[operation.method] = _operation(operation, by_type)
    return {
        "openapi": "3.1.0",
        "info": {"title": "OpenDSec", "version": "1", "description": "Sandboxes for training agents. Errors are ErrorEnvelope, by code."},
        "security": [{"key": []}],
        "paths": {**paths},
        "components": {
            "schemas": components,
            "securitySchemes": {"key": {"type": "http", "scheme": "bearer", "description": "An API key: dsec_…"}},
            "responses": {"Error": {"description": "Any failure, by code", "content": {_JSON: {"schema": by_type[str(ErrorEnvelope)]}}}},
        },
    }


def _operation(operation: Operation, schemas: dict[str, JsonValue]) -> JsonValue:
    answer: dict[str, JsonValue] = {"description": operation.summary}
    if operation.response is not None:
        answer["content"] = _content(operation.response, schemas)
    status = operation.status if operation.response is not None or operation.status != 200 else 204
    described: dict[str, JsonValue] = {
        "operationId": _operation_id(operation),
        "summary": operation.summary,
        "responses": {str(status): answer, "default": {"$ref": "#/components/responses/Error"}},
    }
    parameters = [*map(_path_parameter, _names_in(operation.path)), *map(_parameter, operation.parameters)]
    if parameters:
        described["parameters"] = parameters
    if operation.request is not None:
        described["requestBody"] = {"required": True, "content": _content(operation.request, schemas)}
    if operation.public:
        described["security"] = []
    return described


def _content(body: Body, schemas: dict[str, JsonValue]) -> JsonValue:
    # Octets have no schema in OpenAPI 3.1: the media type says it all.
    found = [schemas[str(type_)] for type_ in body.types]
    media: JsonValue = {"schema": found[0] if len(found) == 1 else {"anyOf": found}} if found else {}
    return dict.fromkeys(body.media, media)


def _names_in(path: str) -> list[str]:
    return [part[1:-1] for part in path.split("/") if part.startswith("{")]


def _path_parameter(name: str) -> JsonValue:
    return {"name": name, "in": "path", "required": True, "schema": {"type": "integer" if name == "port" else "string"}}


def _parameter(parameter: Parameter) -> JsonValue:
    described: dict[str, JsonValue] = {
        "name": parameter.name,
        "in": parameter.place,
        "required": parameter.required,
        "schema": {"type": parameter.kind},
    }
    if parameter.about:
        described["description"] = parameter.about
    return described


def _operation_id(operation: Operation) -> str:
    words = [part.strip("{}").replace(".", "_") for part in operation.path.split("/") if part and part != "v1"]
    return "_".join([operation.method, *words])
