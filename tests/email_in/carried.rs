//! A mail's session in a bundle: its files are included, and a redacted bundle names no person.

use super::{SUPPORT, mail, options, post, says, taken};
use crate::support::{Client, Database};
use reqwest::StatusCode;
use serde_json::{Value, json};

async fn export(client: &Client, id: &str, query: &str) -> String {
    let request = client
        .get_request(&format!("/v1/sessions/{id}/export{query}"))
        .header("X-Internal-Token", "new-token-for-exports");
    let response = request.send().await.unwrap();
    assert_eq!(response.status(), StatusCode::OK);
    response.text().await.unwrap()
}

async fn import(client: &Client, query: &str, bundle: String) -> (StatusCode, Value) {
    let request = client.post_request(&format!("/v1/sessions/import{query}")).body(bundle);
    let response = request.send().await.unwrap();
    (response.status(), response.json().await.unwrap())
}

#[tokio::test]
async fn the_files_of_a_mail_are_carried_and_redacted_with_it() {
    let (database, model) = (Database::new().await, says("Gladly.").await);
    let process = options(&model)
        .env("WAKEFUL_SERVER__INTERNAL_TOKENS", "new-token-for-exports")
        .serve(&database)
        .await;
    let client = process.client();
    let with_file = mail(
        "m1@mails.invalid",
        "Files",
        "MIME-Version: 1.0\r\nContent-Type: multipart/mixed; boundary=b\r\n",
        "--b\r\nContent-Type: text/plain\r\n\r\nHere.\r\n--b\r\nContent-Type: text/plain\r\n\
         Content-Disposition: attachment; filename=\"menu.txt\"\r\n\r\nSoup and bread.\r\n--b--",
    );
    let id = taken(&client, with_file.clone()).await;
    client.wait_for(&id, "completed").await;

    let bundle = export(&client, &id, "").await;
    assert!(bundle.contains("menu.txt"));
    // Another database, which does not have the file.
    let other = Database::new().await;
    let elsewhere = options(&model).arg("--roles=api").serve(&other).await;
    let (status, imported) = import(&elsewhere.client(), "", bundle.clone()).await;
    assert_eq!(status, StatusCode::CREATED, "{imported}");
    let sql = "select count(*) from blobs where bytes = 'Soup and bread.'::bytea and $1 = ''";
    assert_eq!(other.value::<i64>(sql, "").await, 1);
    // A bundle with a missing blob is refused, and so is one with another file in its place.
    let without: String = bundle
        .lines()
        .filter(|line| !line.contains("U291cCBhbmQgYnJlYWQu"))
        .map(|line| format!("{line}\n"))
        .collect();
    assert!(without.len() < bundle.len());
    assert_eq!(
        import(&elsewhere.client(), "?verify_only", without).await.0,
        StatusCode::UNPROCESSABLE_ENTITY
    );

    let redacted = export(&client, &id, "?redact=true").await;
    for person in ["ann@example.com", "Ann", "menu.txt", "Soup", "U291cCBhbmQg", "Re: Files"] {
        assert!(!redacted.contains(person), "{person} is in the redacted bundle");
    }
    let (status, report) = import(&elsewhere.client(), "?verify_only", redacted).await;
    assert_eq!((status, &report["exported_session_id"]), (StatusCode::OK, &json!(id)), "{report}");
    let (status, _) = post(&client, with_file).await;
    assert_eq!(status, StatusCode::OK, "{SUPPORT} still knows it");
}
