//! The OpenAPI document: every route is in it, and a server knows the parameters and fields that it names.

use crate::access::routes;
use crate::access::stage::TOKEN;
use crate::support::documented::document;
use crate::support::{Database, Options};
use reqwest::Method;
use serde_json::{Value, json};
use std::collections::BTreeSet;
use std::path::Path;

/// A name that nothing has.
const UNKNOWN: &str = "no_name_of_ours";

/// Other names that a body's field may have.
const ALIASES: [(&str, &[&str]); 1] = [("/v1/triggers/absurd", &["taskName", "name"])];

/// Each operation: method, path, and what the document says.
fn operations() -> Vec<(String, String, &'static Value)> {
    let paths = document()["paths"].as_object().unwrap();
    let of_path = |(path, methods): (&'static String, &'static Value)| {
        let methods = methods.as_object().unwrap();
        methods.iter().map(|(method, operation)| (method.to_uppercase(), path.clone(), operation))
    };
    paths.iter().flat_map(of_path).collect()
}

#[test]
fn every_route_is_in_the_document_and_the_document_has_no_other() {
    let root = Path::new(env!("CARGO_MANIFEST_DIR")).join("..");
    let mut found = Vec::new();
    for folder in ["worker/http/src", "worker/channels/src"] {
        routes(&root.join(folder), &mut found);
    }
    assert!(found.len() >= 60, "the routes are read: {found:?}");
    // The listener for monitoring has it, which is not the API.
    found.retain(|(_, path)| path != "/metrics");
    let known = operations();
    let at = |path: &str| [path.to_owned(), format!("/v1{path}"), format!("/v1/triggers{path}")];
    for (method, path) in &found {
        let is_known = known.iter().any(|(of, known, _)| of == method && at(path).contains(known));
        assert!(
            is_known,
            "{method} {path} is not in the OpenAPI document. Add an entry to `operations()` at the end of the module with its \
             handler, such as `Operation::{}(\"/v1{path}\", \"What it does\").query::<ListQuery>().lists::<Item>()`, and if the \
             module has no such function yet, call it in `operations()` of the crate's lib.rs. See worker/http/src/openapi.",
            method.to_lowercase()
        );
    }
    for (method, path, _) in &known {
        let is_route = found.iter().any(|(of, route)| of == method && at(route).contains(path));
        assert!(is_route, "the OpenAPI document has {method} {path}, and there is no such route");
    }
}

#[test]
fn every_reference_of_the_document_leads_to_something() {
    fn walk(value: &Value, found: &mut BTreeSet<String>) {
        match value {
            Value::Object(fields) => {
                if let Some(refers) = fields.get("$ref").and_then(Value::as_str) {
                    found.insert(refers.to_owned());
                }
                fields.values().for_each(|value| walk(value, found));
            }
            Value::Array(items) => items.iter().for_each(|value| walk(value, found)),
            _ => {}
        }
    }
    let mut found = BTreeSet::new();
    walk(document(), &mut found);
    assert!(found.len() > 40, "{found:?}");
    for refers in found {
        let pointer = refers.strip_prefix('#').expect("it stays in the document");
        assert!(document().pointer(pointer).is_some(), "{refers} leads nowhere");
    }
    let ids: Vec<&str> = operations().iter().map(|(.., one)| one["operationId"].as_str().unwrap()).collect();
    let unique: BTreeSet<&&str> = ids.iter().collect();
    assert_eq!(unique.len(), ids.len(), "{ids:?}");
}

/// Tests compare each answer that they get with these.
#[test]
fn a_call_a_job_and_what_a_history_says_have_exact_schemas() {
    let fits = |name: &str, value: &Value| {
        let refers = format!("#/components/schemas/{name}");
        let schema = json!({"$ref": refers, "components": document()["components"]});
        jsonschema::validator_for(&schema).expect("the schema is valid").is_valid(value)
    };
    let at = "2026-11-28T12:00:00Z";
    let call =
        json!({"call_id": "call_1", "name": "charge", "effect": "guarded", "status": "done", "attempts": 1});
    let said = json!({"at": at, "type": "reply", "conversation_id": "c1", "session_id": "sess_1", "id": "msg_1",
        "message_number": 3, "sender": null, "attachments": null, "text": "Hi.", "tool_calls": 0});
    let called = json!({"at": at, "type": "tool_call", "conversation_id": "c1", "session_id": "sess_1", "id": "call_1",
        "name": "charge", "effect": "guarded", "status": "done", "message_number": 3, "started_at": at,
        "settled_at": null});
    let earlier = json!({"at": at, "type": "message", "conversation_id": "c1", "session_id": "sess_1", "id": "x",
        "earlier": true, "ordinal": 1, "text": "Hi.", "tool_calls": 0});
    let job = json!({"step_number": 2, "attempt": 1, "stuck": 0, "worker_id": null, "leased": false, "run_at": at,
        "last_error": null, "fault_since": null, "faults": 0, "held_by": null, "held_for": null,
        "outage_since": null, "outage_faults": 0, "waits_for": null, "provider_down_since": null,
        "next_probe_at": null});
    for (name, right, wrong) in [
        ("CallView", call, ("effect", json!("harmless"))),
        ("HistoryItem", said.clone(), ("text", Value::Null)),
        ("HistoryItem", said, ("more", json!(1))),
        ("HistoryItem", called.clone(), ("effect", json!("harmless"))),
        ("HistoryItem", called, ("type", json!("reply"))),
        ("HistoryItem", earlier, ("earlier", json!("yes"))),
        ("StepJob", job.clone(), ("more", json!(1))),
        ("StepJob", job, ("leased", Value::Null)),
    ] {
        assert!(fits(name, &right), "{name}: {right}");
        let mut other = right;
        other[wrong.0] = wrong.1;
        assert!(!fits(name, &other), "{name}: {other}");
    }
}

/// API.md is written for people, and says why. So it is not made from the document: this holds the two together.
#[test]
fn the_page_about_the_api_names_each_parameter_field_and_status_of_the_document() {
    let root = Path::new(env!("CARGO_MANIFEST_DIR")).join("..");
    let page = std::fs::read_to_string(root.join("API.md")).unwrap();
    let sections: Vec<&str> = page.split("\n## ").collect();
    let mut missing = BTreeSet::new();
    for (method, path, operation) in operations() {
        if operation["x-scope"].is_null() {
            continue;
        }
        // A row may list `/sessions/{id}/cancel` as `/sessions/{id}/retry`, `/cancel`.
        let path = path.replace("{conversation_id}", "{conversation}");
        let end = path.rfind('/').unwrap();
        let row = |line: &str| {
            line.contains(&format!("{path}`"))
                || line.contains(&path[..end]) && line.contains(&format!("{}`", &path[end..]))
        };
        let of_route = sections.iter().filter(|section| section.lines().any(row));
        // What holds for all lists and requests is at the top; a search has a section of its own.
        let search =
            sections.iter().filter(|section| section.starts_with("Search") && path == "/v1/sessions");
        let said: Vec<&str> = sections.iter().take(1).chain(of_route).chain(search).copied().collect();
        let says = |name: &str| {
            let forms =
                [format!("`{name}`"), format!("\"{name}\""), format!("?{name}="), format!("&{name}=")];
            said.iter().any(|section| forms.iter().any(|form| section.contains(form)))
        };
        let parameters = operation["parameters"].as_array().into_iter().flatten();
        let of_query = parameters.filter(|one| one["in"] == "query").filter_map(|one| one["name"].as_str());
        let schema = &operation["requestBody"]["content"]["application/json"]["schema"]["$ref"];
        let schema = schema.as_str().and_then(|refers| document().pointer(refers.trim_start_matches('#')));
        let fields = schema.and_then(|schema| schema["properties"].as_object()).into_iter().flatten();
        let names = of_query.chain(fields.map(|(name, _)| name.as_str()));
        missing.extend(names.filter(|name| !says(name)).map(|name| format!("{method} {path}: {name}")));
        for (status, _) in operation["responses"].as_object().unwrap() {
            let in_table = |line: &str| {
                line.starts_with("| ") && line.split('|').nth(1).is_some_and(|cell| cell.contains(status))
            };
            if status.as_str() >= "300" && !sections[0].lines().any(in_table) {
                missing.insert(format!("the status {status}"));
            }
        }
    }
    assert!(missing.is_empty(), "API.md does not name these of the OpenAPI document: {missing:#?}");
}

/// The names that a refusal says are known.
fn told(detail: &str) -> Option<BTreeSet<String>> {
    let (_, rest) = detail.split_once(&format!("`{UNKNOWN}`"))?;
    let rest = rest.split(" at line").next()?;
    Some(rest.split('`').skip(1).step_by(2).map(str::to_owned).collect())
}

#[tokio::test]
async fn a_server_knows_the_parameters_and_fields_that_the_document_names() {
    let database = Database::new().await;
    let options = Options::new().model("openai/test").env("OPENAI_BASE_URL", "http://127.0.0.1:1");
    let process = options.env("WAKEFUL_TOKEN", TOKEN).serve(&database).await;
    let client = crate::support::http();
    let ask = async |method: &str, path: &str, query: &str, body: String| -> (u16, Value) {
        let url = format!("{}{}{query}", process.url(), path.replace(['{', '}'], ""));
        let method: Method = method.parse().unwrap();
        let request = client.request(method, url).bearer_auth(TOKEN).body(body);
        let answer = request.send().await.expect("the server answers");
        (answer.status().as_u16(), serde_json::from_str(&answer.text().await.unwrap()).unwrap_or_default())
    };
    let (status, served) = ask("GET", "/v1/openapi.json", "", String::new()).await;
    assert_eq!((status, &served), (200, document()));
    let (mut with_query, mut with_body) = (0, 0);
    for (method, path, operation) in operations() {
        // Strangers and providers are asked for a signature first.
        if operation["x-scope"].is_null() || path == "/v1/triggers/email/raw" {
            continue;
        }
        let body = json!({UNKNOWN: 1}).to_string();
        let (status, answer) = ask(&method, &path, &format!("?{UNKNOWN}=1"), body.clone()).await;
        let detail = answer["detail"].as_str().unwrap_or_default();
        assert!(
            status == 400 && detail.contains(&format!("no query parameter `{UNKNOWN}`")),
            "{method} {path} takes any query: {status} {answer}"
        );
        let known = told(detail).filter(|known| !known.is_empty());
        let parameters = operation["parameters"].as_array().into_iter().flatten();
        let of_query = parameters.filter(|one| one["in"] == "query");
        let documented: BTreeSet<String> =
            of_query.map(|one| one["name"].as_str().unwrap().to_owned()).collect();
        with_query += usize::from(known.is_some());
        assert_eq!(documented, known.unwrap_or_default(), "parameters of {method} {path}: {detail}");
        if operation["requestBody"]["content"]["application/json"].is_null() {
            continue;
        }
        let (status, answer) = ask(&method, &path, "", body).await;
        let detail = answer["detail"].as_str().unwrap_or_default();
        let mut known = told(detail).unwrap_or_else(|| panic!("{method} {path}: {status} {answer}"));
        if let Some((_, others)) = ALIASES.iter().find(|(of, _)| *of == path) {
            known.retain(|name| !others.contains(&name.as_str()));
        }
        let schema = &operation["requestBody"]["content"]["application/json"]["schema"];
        let referred = |schema: &'static Value| match schema["$ref"].as_str() {
            Some(refers) => document().pointer(refers.trim_start_matches('#')).unwrap(),
            None => schema,
        };
        // Of several forms, the server names the fields of the first one.
        let schema = referred(schema);
        let schema = schema["anyOf"].get(0).map_or(schema, referred);
        let documented: BTreeSet<String> =
            schema["properties"].as_object().into_iter().flatten().map(|(name, _)| name.clone()).collect();
        assert_eq!(documented, known, "fields of {method} {path}: {detail}");
        with_body += 1;
    }
    assert!(with_query >= 15 && with_body >= 20, "{with_query} with a query, {with_body} with a body");
}

/// The words that a schema lists.
fn words(schema: &Value) -> Vec<String> {
    if let Some(refers) = schema["$ref"].as_str() {
        return words(document().pointer(refers.trim_start_matches('#')).unwrap());
    }
    let own = schema["enum"].as_array().into_iter().flatten().chain(schema.get("const"));
    let own = own.filter_map(Value::as_str).map(str::to_owned);
    let forms = ["anyOf", "oneOf"].into_iter().filter_map(|name| schema[name].as_array()).flatten();
    own.chain(forms.flat_map(words)).collect()
}

#[tokio::test]
async fn a_filter_that_takes_a_few_words_lists_them_and_refuses_others() {
    let database = Database::new().await;
    let options = Options::new().model("openai/test").env("OPENAI_BASE_URL", "http://127.0.0.1:1");
    let process = options.serve(&database).await;
    let client = process.client();
    let mut filters = 0;
    for (method, path, operation) in operations() {
        let parameters = operation["parameters"].as_array().into_iter().flatten();
        for parameter in parameters.filter(|one| method == "GET" && one["in"] == "query") {
            let name = parameter["name"].as_str().unwrap();
            let known = words(&parameter["schema"]);
            let has_few = ["status", "outcome", "result", "kind", "sort", "muted"].contains(&name);
            assert!(!has_few || !known.is_empty(), "{path} does not list the words of {name}: {parameter}");
            if known.is_empty() || path.contains('{') && path != "/v1/batches/{id}/members" {
                continue;
            }
            filters += 1;
            let path = path.replace("{id}", "batch_none");
            let (status, answer) = client.get(&format!("{path}?{name}=nosuch")).await;
            let detail = answer["detail"].as_str().unwrap_or_default();
            let is_told = detail.contains("nosuch") && known.iter().all(|word| detail.contains(word));
            assert!(status == 400 && is_told, "{path}?{name}=nosuch: {status} {answer}, of {known:?}");
            for word in known {
                let (status, answer) = client.get(&format!("{path}?{name}={word}")).await;
                let is_taken = status == 200 || path.contains("batch_none") && status == 404;
                assert!(is_taken, "{path}?{name}={word}: {status} {answer}");
            }
        }
    }
    assert!(filters >= 11, "{filters}");
}
