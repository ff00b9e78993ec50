//! Compares every answer that a test gets with the OpenAPI document: its status, and its body's schema.

use jsonschema::Validator;
use reqwest::{Method, StatusCode};
use serde_json::{Value, json};
use std::collections::BTreeMap;
use std::sync::{Arc, Mutex, OnceLock};

/// The document, as a server without a base path serves it.
pub fn document() -> &'static Value {
    static DOCUMENT: OnceLock<Value> = OnceLock::new();
    DOCUMENT.get_or_init(|| {
        let mut operations = wakeful_http::operations();
        operations.extend(wakeful_channels::operations());
        wakeful_http::openapi::document(&operations, "")
    })
}

/// The documented path that `path` belongs to. A name counts more than braces.
fn template(path: &str) -> Option<&'static str> {
    let parts: Vec<&str> = path.split('?').next()?.split('/').collect();
    let fits = |template: &str| {
        let names: Vec<&str> = template.split('/').collect();
        names.len() == parts.len()
            && names.iter().zip(&parts).all(|(name, part)| name == part || name.starts_with('{'))
    };
    let paths = document()["paths"].as_object()?.keys();
    paths.filter(|one| fits(one)).min_by_key(|one| one.matches('{').count()).map(String::as_str)
}

/// What checks the body of an answer as `answer` describes it. None: it has no body, or its body is text.
///
/// Building a validator takes 10 ms in a debug build. A test that sends 400 requests at once would block its thread for
/// seconds, and the server closes connections that stay silent that long. So each is built once in a process.
fn validator(answer: &'static Value) -> Option<Arc<Validator>> {
    static VALIDATORS: Mutex<BTreeMap<String, Arc<Validator>>> = Mutex::new(BTreeMap::new());
    let answer = match answer["$ref"].as_str() {
        Some(refers) => document().pointer(refers.trim_start_matches('#')).expect("it is there"),
        None => answer,
    };
    let (_, content) = answer["content"].as_object()?.iter().next()?;
    let schema = &content["schema"];
    if *schema == json!({"type": "string"}) {
        return None;
    }
    let mut validators = VALIDATORS.lock().expect("no builder panics");
    let made = validators.entry(schema.to_string()).or_insert_with(|| {
        let mut parts = BTreeMap::new();
        collect_referred(schema, &mut parts);
        let schema = json!({"allOf": [schema], "components": {"schemas": parts}});
        Arc::new(jsonschema::validator_for(&schema).expect("the schema is valid"))
    });
    Some(Arc::clone(made))
}

/// Puts the named schemas that `part` refers to, and those that they refer to, into `schemas`. The whole document would take
/// longer to read than all answers of a test.
fn collect_referred(part: &Value, schemas: &mut BTreeMap<&'static str, &'static Value>) {
    match part {
        Value::Object(members) => {
            let name = members.get("$ref").and_then(Value::as_str);
            let name = name.and_then(|name| name.strip_prefix("#/components/schemas/"));
            let all = document()["components"]["schemas"].as_object().expect("schemas");
            if let Some((name, schema)) = name.and_then(|name| all.get_key_value(name))
                && schemas.insert(name, schema).is_none()
            {
                collect_referred(schema, schemas);
            }
            members.values().for_each(|member| collect_referred(member, schemas));
        }
        Value::Array(items) => items.iter().for_each(|item| collect_referred(item, schemas)),
        Value::Null | Value::Bool(_) | Value::Number(_) | Value::String(_) => {}
    }
}

/// Checks one answer. Routes and methods that the document does not know are not its matter.
///
/// # Panics
/// The answer is not as documented.
pub fn check(method: &Method, path: &str, status: StatusCode, body: &Value) {
    let Some(template) = template(path) else { return };
    let method = method.as_str().to_lowercase();
    let operation = &document()["paths"][template][&method];
    let in_document = operation.is_object();
    if !in_document || status.as_u16() >= 500 && status != StatusCode::SERVICE_UNAVAILABLE {
        return;
    }
    let answer = &operation["responses"][status.as_str()];
    assert!(
        !answer.is_null(),
        "{method} {template} answered {status}, which the OpenAPI document does not know: add it to the `operations()` of the \
         handler's module (`answers` for a success, `refuses` for a refusal)\n{body}"
    );
    let Some(validator) = validator(answer) else { return };
    let errors: Vec<String> =
        validator.iter_errors(body).map(|error| format!("{}: {error}", error.instance_path())).collect();
    assert!(
        errors.is_empty(),
        "{method} {template} answered {status} otherwise than the OpenAPI document says:\n{}\n{body}",
        errors.join("\n")
    );
}
