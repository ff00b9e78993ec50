use super::*;

#[test]
fn what_others_left_and_what_we_do_not_know_is_redacted_too() {
    let redaction = Redaction::new([7; KEY_BYTES]);
    let map = |value: Value| value.as_object().cloned().expect("an object");
    let absurd = json!({"parts": [{"function": {"arguments": "{\"city\": \"Secretville\"}"}}]});
    let details = redaction.details(map(json!({"absurd": absurd, "summary": true, "inbox_id": 7})));
    assert_eq!((&details["summary"], &details["inbox_id"]), (&json!(true), &json!(7)));
    let policy = redaction.policy(map(json!({
        "model": "openai/test", "tools": ["reserve", "read_file"], "web": {"allow": ["secret.example"]},
        "of_tomorrow": "Secretville"
    })));
    assert_eq!((&policy["model"], &policy["tools"][1]), (&json!("openai/test"), &json!("read_file")));
    let shown = json!([details, policy]).to_string();
    for secret in ["Secretville", "reserve", "secret.example"] {
        assert!(!shown.contains(secret), "{shown}");
    }
}

#[test]
fn a_journal_says_nothing_of_what_a_person_was_told_and_of_the_task_that_a_session_was() {
    let redaction = Redaction::new([7; KEY_BYTES]);
    let event = |kind: &str, payload: Value| {
        let row = EventRow {
            seq: 1,
            ts: String::new(),
            kind: kind.to_owned(),
            run_id: None,
            step_number: None,
            payload,
            dedupe_key: None,
        };
        redaction.event(row).payload
    };
    let told =
        event("PERSON_TOLD", json!({"reason": "failed", "channel": "email", "text": "Dear Secretmann"}));
    let task = json!({"source": "absurd:secret-queue", "task_id": "secret-1", "task_name": "secret-task",
        "task_state": "running", "shape": "agent_loop", "checkpoints": 3});
    let imported = event("SESSION_IMPORTED", task);
    let trigger =
        event("trigger_event", json!({"trigger_type": "absurd:secret-queue", "trigger_id": "secret-1"}));
    assert_eq!((&told["channel"], &imported["checkpoints"]), (&json!("email"), &json!(3)));
    assert_eq!(imported["source"], trigger["trigger_type"], "equal words stay equal");
    assert!(imported["source"].as_str().unwrap().starts_with("absurd:redacted-"), "{imported}");
    assert_eq!(redaction.trigger_type("chat"), "chat");
    let shown = json!([told, imported, trigger]).to_string();
    assert!(!shown.to_ascii_lowercase().contains("secret"), "{shown}");
}

#[test]
fn a_file_says_neither_its_name_nor_an_uncommon_type() {
    let redaction = Redaction::new([7; KEY_BYTES]);
    let mut file = Attachment {
        file_name: "secret.bin".to_owned(),
        media_type: "application/x-secret".to_owned(),
        bytes: 3,
        sha256: "00".to_owned(),
    };
    redaction.attachment(&mut file);
    assert_eq!(file.media_type, "application/octet-stream");
    assert!(!json!(file).to_string().contains("secret"), "{file:?}");
}
