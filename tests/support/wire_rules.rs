//! What a strict server of Chat Completions requires of a request. Written from the protocol, not from the
//! tested code.

use serde_json::Value;
use std::collections::BTreeSet;

/// Panics, and prints the body, if a rule is broken.
pub fn check(body: &str) {
    if let Err(rule) = broken(body) {
        panic!("{rule}: {body}");
    }
}

fn broken(body: &str) -> Result<(), String> {
    let body: Value = serde_json::from_str(body).map_err(|error| error.to_string())?;
    let messages = body["messages"].as_array().ok_or("no messages")?;
    let known: BTreeSet<&str> = body["tools"]
        .as_array()
        .into_iter()
        .flatten()
        .filter_map(|tool| tool["function"]["name"].as_str())
        .collect();
    let mut open: BTreeSet<&str> = BTreeSet::new();
    let mut ids: BTreeSet<&str> = BTreeSet::new();
    for (at, message) in messages.iter().enumerate() {
        let blank = message["content"].as_str().is_none_or(|text| text.trim().is_empty());
        match message["role"].as_str().ok_or("no role")? {
            "tool" => {
                let id = message["tool_call_id"].as_str().ok_or("a result without its call's id")?;
                if !open.remove(id) {
                    return Err(format!("message {at}: a result that answers no open call"));
                }
                if !message["content"].is_string() {
                    return Err(format!("message {at}: a result without content"));
                }
            }
            role if !open.is_empty() => {
                return Err(format!("message {at}: {role} stands between a call and its result"));
            }
            "system" if at == 0 && !blank => {}
            "user" if !blank => {}
            "assistant" => {
                let calls = message["tool_calls"].as_array();
                if blank && calls.is_none_or(Vec::is_empty) {
                    return Err(format!("message {at}: an assistant that says nothing"));
                }
                for call in calls.into_iter().flatten() {
                    let id = call["id"].as_str().ok_or("a call without id")?;
                    let function = &call["function"];
                    let name = function["name"].as_str().ok_or("a call without name")?;
                    let arguments = function["arguments"].as_str().ok_or("arguments are text")?;
                    if !serde_json::from_str::<Value>(arguments).is_ok_and(|value| value.is_object()) {
                        return Err(format!("message {at}: arguments that are no object"));
                    }
                    if !known.contains(name) {
                        return Err(format!("message {at}: a call of no tool"));
                    }
                    if !ids.insert(id) {
                        return Err(format!("message {at}: one id for two calls"));
                    }
                    open.insert(id);
                }
            }
            role => return Err(format!("message {at}: a {role} that is blank, or where it may not be")),
        }
    }
    if !open.is_empty() {
        return Err("a call without result".to_owned());
    }
    match messages.last().and_then(|last| last["role"].as_str()) {
        Some("user" | "tool") => Ok(()),
        _ => Err("nothing to answer".to_owned()),
    }
}

#[test]
fn a_request_that_breaks_a_rule_is_noticed() {
    let tools = r#""tools":[{"function":{"name":"charge"}}]"#;
    let call = r#"{"role":"assistant","content":null,"tool_calls":[{"id":"a","function":{"name":"charge","arguments":"{}"}}]}"#;
    let result = r#"{"role":"tool","tool_call_id":"a","content":"Done."}"#;
    let user = r#"{"role":"user","content":"Hello."}"#;
    let of = |messages: &[&str]| broken(&format!(r#"{{{tools},"messages":[{}]}}"#, messages.join(",")));
    assert_eq!(of(&[user, call, result]), Ok(()));
    for wrong in [
        &[user, call][..],
        &[user, call, user],
        &[user, result],
        &[user, call, result, result],
        &[user, call, result, call, result],
        &[user, r#"{"role":"assistant","content":" "}"#, user],
        &[r#"{"role":"user","content":""}"#],
        &[user, r#"{"role":"assistant","content":"Hello."}"#],
    ] {
        assert!(of(wrong).is_err(), "{wrong:?}");
    }
}
