//! The OpenAPI 3.1 document of the API, `GET /v1/openapi.json`.
//!
//! Paths, scopes and who may ask come from the table of access rules. Parameters, bodies and answers come from the types that
//! handlers read and write: schemars derives their JSON Schema, which OpenAPI 3.1 takes as it is. Each module lists the
//! [`Operation`]s of its handlers; a test compares them with the routes, and asks a server which parameters and fields it
//! knows.

mod operation;

pub use operation::{Operation, Proof, Shape, both, either, object, of, page_of};

use crate::access::{OpenTo, Rule};
use crate::etag::{DOCUMENTS, EDITED};
use schemars::SchemaGenerator;
use schemars::generate::{Contract, SchemaSettings};
use serde_json::{Map, Value, json};

/// The statuses of refusals, and what each means.
const REFUSALS: &[(u16, &str)] = &[
    (304, "Unchanged: the client has it already (`If-None-Match`)"),
    (400, "A field or a parameter is wrong or unknown; `detail` names it"),
    (401, "The token is missing, unknown, expired or revoked; or a signature is wrong"),
    (403, "The token lacks the scope, or is of another space, agent or user"),
    (404, "There is no such thing"),
    (405, "There is no such method here"),
    (406, "It would be refused every time: do not send it again"),
    (408, "The body came too slowly"),
    (409, "A conflict with the current state, or the same `Idempotency-Key` is still at work"),
    (412, "`If-Match` names another version than the current one"),
    (413, "The body is too large"),
    (415, "The body has another media type than this route takes"),
    (422, "The key belongs to another request, or the content is refused"),
    (429, "Too many requests: nothing was accepted"),
    (503, "The database is unreachable, or there is no room: nothing was accepted"),
];

/// The names of the parameters that an operation takes in its query.
pub(crate) fn query_names(operation: &Operation) -> Vec<String> {
    let mut schemas = SchemaSettings::draft2020_12().into_generator();
    let schema = operation.query.as_ref().map(|query| query(&mut schemas).to_value()).unwrap_or_default();
    let fields = schema["properties"].as_object().into_iter().flatten().map(|(name, _)| name.clone());
    let texts = operation.texts.iter().filter(|(_, place, _)| *place == "query");
    fields.chain(texts.map(|(name, ..)| (*name).to_owned())).collect()
}

/// The document. `base_path` is where the server serves the API.
pub fn document(operations: &[Operation], base_path: &str) -> Value {
    let settings = |contract| {
        let mut settings = SchemaSettings::draft2020_12();
        settings.definitions_path = "/components/schemas".into();
        settings.meta_schema = None;
        settings.contract = contract;
        settings.into_generator()
    };
    let mut read = settings(Contract::Deserialize);
    let mut written = settings(Contract::Serialize);
    let mut paths: Map<String, Value> = Map::new();
    for operation in operations {
        let described = described(operation, &mut read, &mut written);
        let path = paths.entry(operation.path.to_owned()).or_insert_with(|| json!({}));
        path[operation.method.to_lowercase()] = described;
    }
    let mut schemas = written.take_definitions(true);
    for (name, schema) in read.take_definitions(true) {
        // A type that is read and shown is the same in both.
        debug_assert!(
            schemas.get(&name).is_none_or(|shown| *shown == schema),
            "two types have the name {name}: give one another with #[schemars(rename = …)]"
        );
        schemas.insert(name, schema);
    }
    schemas.insert("Problem".to_owned(), problem());
    let responses: Map<String, Value> =
        REFUSALS.iter().map(|(status, text)| (status.to_string(), refusal(*status, text))).collect();
    let mut document = json!({
        "openapi": "3.1.0",
        "info": {
            "title": "Wakeful",
            "version": env!("CARGO_PKG_VERSION"),
            "description": "Durable LLM agents on Postgres. API.md says more of each route.",
            "license": {"name": "MIT OR Apache-2.0", "identifier": "MIT OR Apache-2.0"},
        },
        "servers": [{"url": if base_path.is_empty() { "/" } else { base_path }}],
        "paths": paths,
        "components": {"schemas": schemas, "responses": responses, "securitySchemes": security_schemes()},
    });
    in_words(&mut document);
    document
}

fn described(operation: &Operation, read: &mut SchemaGenerator, written: &mut SchemaGenerator) -> Value {
    let rule = Rule::of(operation.method, operation.path);
    let mut parameters = in_path(operation.path);
    if let Some(query) = &operation.query {
        parameters.extend(in_query(query(read).as_value()));
    }
    let text = |name: &str, place: &str, means: &str| json!({"name": name, "in": place, "description": means, "schema": {"type": "string"}});
    parameters.extend(operation.texts.iter().map(|(name, place, means)| text(name, place, means)));
    if rule.is_some() {
        parameters.push(json!({
            "name": "X-Wakeful-Space", "in": "header",
            "description": "The space, for tokens of the whole installation.",
            "schema": {"type": "string", "pattern": "^[A-Za-z0-9_.-]{1,64}$"},
        }));
    }
    if operation.method == "POST" && rule.is_some() {
        parameters.push(json!({
            "name": "Idempotency-Key", "in": "header",
            "description": "A second request with the same key gets the first answer again.",
            "schema": {"type": "string", "pattern": "^[!-~]{1,256}$"},
        }));
    }
    let is_document = operation.method == "GET" && DOCUMENTS.contains(&operation.path);
    if is_document {
        parameters.push(text("If-None-Match", "header", "The `ETag` of the document that the client has."));
    }
    let is_edit = matches!(operation.method, "PUT" | "DELETE") && EDITED.contains(&operation.path);
    if is_edit {
        parameters.push(text("If-Match", "header", "The `ETag` of the version that the request is for."));
    }
    let mut answers: Map<String, Value> = operation
        .answers
        .iter()
        .map(|answer| {
            let mut shown = json!({"description": answer.text});
            if let Some(shape) = &answer.shape {
                shown["content"] = json!({answer.media_type: {"schema": shape(written)}});
            } else if !answer.media_type.is_empty() {
                shown["content"] = json!({answer.media_type: {"schema": {"type": "string"}}});
            }
            (answer.status.to_string(), shown)
        })
        .collect();
    if is_document {
        answers["200"]["headers"] =
            json!({"ETag": {"description": "Its version", "schema": {"type": "string"}}});
    }
    let of_versions = [(is_document, 304), (is_edit, 412)].into_iter().filter(|(has, _)| *has);
    for status in operation.statuses().into_iter().chain(of_versions.map(|(_, status)| status)) {
        let refers = json!({"$ref": format!("#/components/responses/{status}")});
        answers.entry(status.to_string()).or_insert(refers);
    }
    let mut described = json!({
        "operationId": operation_id(operation),
        "summary": operation.summary,
        "tags": [tag(operation.path)],
        "security": security(operation, rule),
        "responses": answers,
    });
    if !parameters.is_empty() {
        described["parameters"] = json!(parameters);
    }
    if let Some(body) = &operation.body {
        let schema = body.shape.as_ref().map_or_else(|| json!({}), |shape| shape(read).to_value());
        let content: Map<String, Value> = body
            .media_types
            .iter()
            .map(|media_type| ((*media_type).to_owned(), json!({"schema": schema})))
            .collect();
        described["requestBody"] = json!({"required": body.required, "content": content});
    }
    if let Some(rule) = rule {
        described["x-scope"] = json!(rule.needs.as_str());
        described["x-open-to"] = json!(match rule.open_to {
            OpenTo::Installation => "installation",
            OpenTo::Spaces => "space",
            OpenTo::Agents => "agent",
            OpenTo::Users => "user",
        });
    }
    described
}

/// The parameters of a path: its names in braces.
fn in_path(path: &str) -> Vec<Value> {
    let names = path.split('/').filter_map(|part| part.strip_prefix('{')?.strip_suffix('}'));
    let schema = json!({"type": "string", "minLength": 1});
    names.map(|name| json!({"name": name, "in": "path", "required": true, "schema": schema})).collect()
}

/// The fields of a type that a query is read into, as parameters.
fn in_query(schema: &Value) -> Vec<Value> {
    let required = |name: &str| {
        schema["required"].as_array().is_some_and(|names| names.iter().any(|one| one.as_str() == Some(name)))
    };
    let fields = schema["properties"].as_object().into_iter().flatten();
    let parameter = |(name, of): (&String, &Value)| {
        let mut of = of.clone();
        without_null(&mut of);
        let description = of.as_object_mut().and_then(|of| of.remove("description"));
        let mut parameter = json!({"name": name, "in": "query", "required": required(name), "schema": of});
        if let Some(description) = description {
            parameter["description"] = description;
        }
        parameter
    };
    fields.map(parameter).collect()
}

/// A query has no null: what may be left out is left out.
fn without_null(schema: &mut Value) {
    if let Some(types) = schema["type"].as_array() {
        let mut others = types.iter().filter(|one| one.as_str() != Some("null"));
        if let (Some(only), None) = (others.next().cloned(), others.next()) {
            schema["type"] = only;
        }
    } else if let Value::Object(fields) = schema {
        // Reading by index has put a null there.
        fields.retain(|_, value| !value.is_null());
    }
}

fn tag(path: &str) -> &str {
    let path = path.strip_prefix("/v1").unwrap_or(path);
    path.split('/').nth(1).unwrap_or_default()
}

fn operation_id(operation: &Operation) -> String {
    let path = operation.path.strip_prefix("/v1").unwrap_or("/top").to_owned()
        + if operation.path.starts_with("/v1") { "" } else { operation.path };
    let words = path.split('/').filter(|word| !word.is_empty());
    let words: Vec<String> =
        words.map(|word| word.replace(['{', '}'], "").replace(['-', '.'], "_")).collect();
    format!("{}_{}", operation.method.to_lowercase(), words.join("_"))
}

fn security(operation: &Operation, rule: Option<&Rule>) -> Value {
    match (operation.proof, rule) {
        (Proof::Open, _) => json!([]),
        (Proof::Own(schemes), _) => schemes.iter().map(|scheme| json!({*scheme: []})).collect(),
        (Proof::Token, rule) => {
            // OpenAPI 3.1 lets every scheme name the roles that are needed.
            let scope = rule.map_or("read", |rule| rule.needs.as_str());
            let mut ways = vec![json!({"token": [scope]})];
            if rule.is_some_and(|rule| rule.open_to == OpenTo::Users) {
                ways.extend([json!({"userToken": []}), json!({"jwt": []})]);
            }
            json!(ways)
        }
    }
}

fn security_schemes() -> Value {
    let header =
        |name: &str, text: &str| json!({"type": "apiKey", "in": "header", "name": name, "description": text});
    json!({
        "token": {
            "type": "http", "scheme": "bearer",
            "description": "`WAKEFUL_TOKEN`, or a token that `wakeful token create` or `POST /v1/tokens` made. Its scope is `read`, `operate` or `admin`; each includes the ones before it.",
        },
        "userToken": {
            "type": "http", "scheme": "bearer",
            "description": "The token of one user, from `POST /v1/user-tokens`.",
        },
        "jwt": {
            "type": "http", "scheme": "bearer", "bearerFormat": "JWT",
            "description": "A JSON Web Token of your identity provider (`[users.jwt]`): a user's.",
        },
        "internalToken": header("X-Internal-Token", "One of `server.internal_tokens`, for exports."),
        "standardWebhook": header("webhook-signature", "Standard Webhooks; with `webhook-id` and `webhook-timestamp`."),
        "slack": header("X-Slack-Signature", "Slack's signature; with `X-Slack-Request-Timestamp`."),
        "telegram": header("X-Telegram-Bot-Api-Secret-Token", "The secret that Telegram was given."),
        "postmark": {"type": "http", "scheme": "basic", "description": "`user` and one of the `passwords` of [email.postmark]."},
    })
}

fn problem() -> Value {
    json!({
        "description": "An error (RFC 9457). `detail` is a sentence that says what to do.",
        "type": "object",
        "required": ["type", "title", "status", "detail"],
        "properties": {
            "type": {"type": "string"},
            "title": {"type": "string"},
            "status": {"type": "integer"},
            "detail": {"type": "string"},
            "session_status": {"type": "string", "description": "With 409: the status that is the reason."},
            "valid": {"type": "array", "items": {"type": "string"}, "description": "With 409: the verbs that the session takes."},
            "scope": {"type": "string", "description": "With 403: the scope that the token has."},
            "needed_scope": {"type": "string", "description": "With 403: the scope that it needs."},
        },
    })
}

fn refusal(status: u16, text: &str) -> Value {
    if status == 304 {
        return json!({"description": text});
    }
    let content = json!({"application/problem+json": {"schema": {"$ref": "#/components/schemas/Problem"}}});
    let mut refusal = json!({"description": text, "content": content});
    if matches!(status, 429 | 503) {
        let header = json!({"description": "Seconds", "schema": {"type": "integer"}});
        refusal["headers"] = json!({"Retry-After": header});
    }
    refusal
}

/// Descriptions come from the sources: the links of rustdoc mean nothing to a reader of the document.
fn in_words(value: &mut Value) {
    match value {
        Value::Object(fields) => {
            if let Some(Value::String(text)) = fields.get_mut("description") {
                *text = text.replace("[`crate::", "[`").replace("[`", "`").replace("`]", "`");
            }
            fields.values_mut().for_each(in_words);
        }
        Value::Array(items) => items.iter_mut().for_each(in_words),
        Value::Null | Value::Bool(_) | Value::Number(_) | Value::String(_) => {}
    }
}
