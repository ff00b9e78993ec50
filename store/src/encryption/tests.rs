use super::*;
use serde_json::{Value, json};

fn vault(keys: &str, master: u8, old: Option<u8>) -> Vault {
    let vault = Vault::default();
    let masters = std::iter::once(master).chain(old).map(|byte| Master::new(&[byte; 32]).unwrap()).collect();
    let inner = Inner {
        store: keys::open(keys).unwrap(),
        agents: None,
        masters,
        known: Mutex::default(),
        installation: OnceLock::new(),
    };
    assert!(vault.0.set(inner).is_ok());
    vault
}

/// The installation of these tests.
const OURS: &str = "ours";

/// Makes a key as [`Vault::begin`] does, without a database to ask whose the store is.
async fn begin(vault: &Vault, conversation: &str) -> Result<String> {
    let inner = vault.inner().unwrap();
    inner.store.claim(OURS.to_owned()).await?;
    inner.new_key(OURS.to_owned(), conversation).await
}

async fn seal_of(vault: &Vault, conversation: &str) -> Seal {
    let key = begin(vault, conversation).await.unwrap();
    vault.seal(Some(&key)).await.unwrap()
}

#[tokio::test]
async fn another_process_opens_what_one_sealed_and_none_does_once_the_key_is_erased() {
    let folder = tempfile::tempdir().unwrap();
    let place = folder.path().to_str().unwrap();
    let (one, other) = (vault(place, 1, None), vault(place, 1, None));
    let sealed = seal_of(&one, "default/c1").await;
    let text = sealed.text("said in confidence").into_owned();
    let key = sealed.key_id().unwrap().to_owned();
    let seal = other.seal(Some(&key)).await.unwrap();
    assert_eq!(seal.open(text.clone()).unwrap(), "said in confidence");
    assert_eq!(one.delete(std::slice::from_ref(&key)).await.unwrap(), 1);
    assert_eq!(one.delete(std::slice::from_ref(&key)).await.unwrap(), 0);
    // A key that is not there may be in another key store, so this is not damage.
    for vault in [one, vault(place, 1, None)] {
        let error = vault.seal(Some(&key)).await.unwrap_err();
        assert_eq!(error.outage(), Some(crate::Outage::KeysAway), "{error}");
    }
}

#[tokio::test]
async fn a_key_that_was_erased_meanwhile_is_not_wrapped_anew() {
    let folder = tempfile::tempdir().unwrap();
    let place = folder.path().to_str().unwrap();
    let vault = vault(place, 1, None);
    let id = seal_of(&vault, "default/c1").await.key_id().unwrap().to_owned();
    let store = keys::open(place).unwrap();
    let key = store.get(id.clone()).await.unwrap().unwrap();
    let old = key.master_id.clone();
    let again = Wrapped { master_id: "another".to_owned(), ..key };
    assert!(store.replace(old.clone(), again.clone()).await.unwrap());
    assert!(!store.replace(old, again.clone()).await.unwrap(), "another master key wraps it by now");
    assert_eq!(store.delete(vec![id.clone()]).await.unwrap(), 1);
    assert!(!store.replace("another".to_owned(), again).await.unwrap());
    assert!(store.get(id).await.unwrap().is_none());
}

#[tokio::test(start_paused = true)]
async fn a_key_store_that_hangs_is_away() {
    let error = in_time(CALL, std::future::pending::<Result<()>>()).await.unwrap_err();
    assert_eq!(error.outage(), Some(crate::Outage::KeysAway), "{error}");
}

#[tokio::test]
async fn a_key_opens_under_its_own_master_key_only_and_in_its_own_place_only() {
    let folder = tempfile::tempdir().unwrap();
    let place = folder.path().to_str().unwrap();
    let sealed = seal_of(&vault(place, 1, None), "default/c1").await;
    let key = sealed.key_id().unwrap();
    let refused = vault(place, 2, None).seal(Some(key)).await.unwrap_err();
    assert!(refused.is_transient(), "{refused}");
    assert!(vault(place, 2, Some(1)).seal(Some(key)).await.is_ok());
    // A wrapped key under another key's name, or of another owner, does not open.
    let store = keys::open(place).unwrap();
    let wrapped = store.get(key.to_owned()).await.unwrap().unwrap();
    let moved = Wrapped { key_id: "ab00000000000000".to_owned(), ..wrapped.clone() };
    let stolen = Wrapped { owner_sha256: "c2".to_owned(), key_id: "ab00000000000001".to_owned(), ..wrapped };
    for one in [moved, stolen] {
        let id = one.key_id.clone();
        assert!(store.put(OURS.to_owned(), one).await.unwrap());
        assert!(matches!(vault(place, 1, None).seal(Some(&id)).await, Err(Error::Corrupt { .. })));
    }
}

#[tokio::test]
async fn a_directory_that_is_not_there_is_an_outage_and_no_erased_key() {
    let folder = tempfile::tempdir().unwrap();
    let place = folder.path().join("not mounted");
    let vault = vault(place.to_str().unwrap(), 1, None);
    for error in [
        vault.seal(Some("ab00000000000000")).await.unwrap_err(),
        begin(&vault, "default/c1").await.unwrap_err(),
        vault.delete(&["ab00000000000000".to_owned()]).await.unwrap_err(),
    ] {
        assert_eq!(error.outage(), Some(crate::Outage::KeysAway), "{error}");
    }
}

#[tokio::test]
async fn a_file_that_cannot_be_read_keeps_no_other_key_from_being_read() {
    let folder = tempfile::tempdir().unwrap();
    let place = folder.path().to_str().unwrap();
    let made = vault(place, 1, None);
    let (one, other) = (seal_of(&made, "default/c1").await, seal_of(&made, "default/c2").await);
    let (one, other) = (one.key_id().unwrap(), other.key_id().unwrap());
    // What an erasure leaves that died between the zeros and the removal.
    std::fs::write(folder.path().join(&one[..2]).join(format!("{one}.key")), [0; 200]).unwrap();
    let vault = vault(place, 1, None);
    let error = vault.seal(Some(one)).await.unwrap_err();
    assert!(matches!(error, Error::Corrupt { .. }) && error.to_string().contains(one), "{error}");
    vault.seal(Some(other)).await.expect("the key store answers");
}

#[tokio::test]
async fn files_of_keys_are_for_their_user_only_and_hold_no_key_in_clear() {
    use std::os::unix::fs::PermissionsExt;
    let folder = tempfile::tempdir().unwrap();
    let vault = vault(folder.path().to_str().unwrap(), 1, None);
    let seal = seal_of(&vault, "default/ann@example.org").await;
    let id = seal.key_id().unwrap();
    let path = folder.path().join(&id[..2]).join(format!("{id}.key"));
    assert_eq!(std::fs::metadata(&path).unwrap().permissions().mode() & 0o777, 0o600);
    assert_eq!(std::fs::metadata(path.parent().unwrap()).unwrap().permissions().mode() & 0o777, 0o700);
    assert!(!std::fs::read_to_string(&path).unwrap().contains("ann@"));
}

#[tokio::test]
async fn texts_are_sealed_and_the_structure_of_a_message_stays() {
    let folder = tempfile::tempdir().unwrap();
    let seal = seal_of(&vault(folder.path().to_str().unwrap(), 1, None), "default/c1").await;
    let sha256 = "0123456789abcdef".repeat(4);
    let content = json!([
        {"type": "text", "text": "PLANT"},
        {"type": "tool_call", "call_id": "c", "name": "n", "arguments": {"PLANT": [1, "PLANT"]}},
        {"type": "tool_result", "call_id": "c", "name": "n", "content": "PLANT", "is_error": false,
            "details": {"type": "sentEmail", "to": ["PLANT"], "sha256": sha256}, "output": {"sha256": sha256, "bytes": 9}},
        {"type": "provider", "provider": "anthropic", "raw": {"thinking": "PLANT"}},
    ]);
    let sealed = seal.json(content.to_string()).unwrap();
    assert!(!sealed.contains("PLANT"), "{sealed}");
    let value: Value = serde_json::from_str(&sealed).unwrap();
    assert_eq!(value[1]["call_id"], "c");
    assert_eq!(value[2]["details"]["type"], "sentEmail");
    assert_eq!(
        (&value[2]["details"]["sha256"], &value[2]["output"]),
        (&json!(sha256), &content[2]["output"])
    );
    assert_eq!(serde_json::from_str::<Value>(&seal.open_json(sealed).unwrap()).unwrap(), content);
    assert_eq!(seal.open_value(value).unwrap(), content);
}

#[tokio::test]
async fn what_belongs_to_another_conversation_stays_sealed() {
    let folder = tempfile::tempdir().unwrap();
    let vault = vault(folder.path().to_str().unwrap(), 1, None);
    let (one, other) = (seal_of(&vault, "default/c1").await, seal_of(&vault, "default/c2").await);
    let sealed = one.text("said in c1").into_owned();
    assert_eq!(other.open(sealed.clone()).unwrap(), sealed);
    assert_eq!(Seal::default().open(sealed.clone()).unwrap(), sealed);
    // A person who writes what looks like a sealed value reads the same again.
    let looks = other.text(&sealed).into_owned();
    assert_eq!(other.open(looks).unwrap(), sealed);
}

#[tokio::test]
async fn a_store_takes_keys_of_its_owner_only_and_lists_the_old_ones() {
    let folder = tempfile::tempdir().unwrap();
    let place = folder.path().to_str().unwrap();
    let vault = vault(place, 1, None);
    let inner = vault.inner().unwrap();
    let refused = inner.new_key(OURS.to_owned(), "default/c1").await.unwrap_err();
    assert_eq!(refused.outage(), Some(crate::Outage::KeysAway), "it has no owner: {refused}");
    let key = begin(&vault, "default/c1").await.unwrap();
    assert_eq!(inner.store.claim("theirs".to_owned()).await.unwrap(), OURS);
    assert!(inner.new_key("theirs".to_owned(), "default/c1").await.is_err());
    assert_eq!(inner.store.ids().await.unwrap(), std::slice::from_ref(&key));
    assert_eq!(inner.store.older_than(Duration::from_secs(3600)).await.unwrap(), [""; 0]);
    let file = folder.path().join(&key[..2]).join(format!("{key}.key"));
    let before = std::time::SystemTime::now() - Duration::from_secs(7200);
    std::fs::File::options().write(true).open(file).unwrap().set_modified(before).unwrap();
    assert_eq!(inner.store.older_than(Duration::from_secs(3600)).await.unwrap(), [key]);
}

#[tokio::test]
async fn a_journal_entry_and_a_state_say_nothing_and_open_again() {
    use wakeful_workflow::event::Event;
    let folder = tempfile::tempdir().unwrap();
    let seal = seal_of(&vault(folder.path().to_str().unwrap(), 1, None), "default/c1").await;
    let told = Event::PersonTold { reason: "failed".to_owned(), channel: None, text: "PLANT".to_owned() };
    let update = Event::ContextUpdate {
        key: "file:PLANT".to_owned(),
        value: wakeful_workflow::event::UpdateValue::Inline { value: json!({"PLANT": [1, "PLANT"]}) },
    };
    let ended = Event::invocation_result(wakeful_workflow::session::SessionStatus::Failed, Some("PLANT"));
    for event in [told, update, ended] {
        let (kind, sealed) = seal.entry(&event);
        assert!(!sealed.contains("PLANT"), "{sealed}");
        let payload = serde_json::from_str(&seal.open_json(sealed.clone()).unwrap()).unwrap();
        assert_eq!(Event::from_row(&kind, payload).unwrap(), event);
        // Statements look for the word that says why.
        assert!(kind != "PERSON_TOLD" || sealed.contains("\"reason\":\"failed\""), "{sealed}");
        assert_eq!(Seal::default().entry(&event), event.to_row_text());
    }
    let state = json!({"file:PLANT": {"sha256": "PLANT"}, "n": null});
    let Value::Object(map) = state.clone() else { panic!("an object") };
    let sealed = Value::Object(seal.state(map.clone()));
    assert!(!sealed.to_string().contains("PLANT"), "{sealed}");
    assert_eq!(sealed, Value::Object(seal.state(map)), "a commit replaces a value by its name");
    assert_eq!(seal.open_value(sealed).unwrap(), state);
    let receipt = json!({"type": "smtp", "said": ["250 PLANT"], "n": 1});
    let sealed = seal.receipt(receipt.clone());
    assert!(!sealed.to_string().contains("PLANT") && sealed["type"] == "smtp", "{sealed}");
    assert_eq!(seal.open_value(sealed).unwrap(), receipt);
    let taken =
        json!({"by": "ann", "reason": "PLANT", "run_id": "r", "outcome": "happened", "result": "PLANT"});
    let sealed = seal.with_reasons(taken.clone());
    assert!(!sealed.to_string().contains("PLANT") && sealed["outcome"] == "happened", "{sealed}");
    assert_eq!(seal.open_value(sealed).unwrap(), taken);
    assert_eq!(seal.error("cancelled"), "cancelled", "statements look for it");
    assert!(!seal.error("PLANT").contains("PLANT"));
    assert_eq!((&*seal.elsewhere("PLANT"), &*Seal::default().elsewhere("PLANT")), (SEALED, "PLANT"));
}
