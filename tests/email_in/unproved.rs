//! Mail whose sender is not proved. Anybody can name a victim as the sender, and each answer would reach the
//! victim, signed by us.

use super::{FAILED, PROVED, count, mail, options, policy, post, says, sessions, taken};
use crate::support::Database;
use reqwest::StatusCode;
use serde_json::Value;

#[tokio::test]
async fn a_mail_that_failed_dmarc_is_recorded_and_no_agent_sees_it() {
    let (database, model) = (Database::new().await, says("Gladly.").await);
    let process = options(&model).serve(&database).await;
    let client = process.client();
    let (status, answer) = post(&client, mail("m1@x", "Your account", FAILED, "See http://evil.org")).await;
    assert_eq!(status, StatusCode::OK, "{answer}");
    assert!(answer["items"][0]["dropped"].as_str().unwrap().contains("email.dmarc_fail"), "{answer}");
    assert_eq!(sessions(&database).await, 0);
    // Nothing is wrong with the next one.
    let id = taken(&client, mail("m2@x", "Lunch", "", "Shall we?")).await;
    client.wait_for(&id, "completed").await;
    assert_eq!(count(&database, "select count(*) from mails where dropped is not null and $1 = ''").await, 1);
}

#[tokio::test]
async fn an_operator_may_take_forged_mail_or_only_proved_mail() {
    let model = says("Gladly.").await;
    for (key, headers, taken) in [
        ("DMARC_FAIL=take", FAILED, true),
        ("UNPROVED=drop", FAILED, false),
        ("UNPROVED=drop", "", false),
        ("UNPROVED=drop", PROVED, true),
    ] {
        let (key, value) = key.split_once('=').unwrap();
        let database = Database::new().await;
        let options = options(&model).env(&format!("WAKEFUL_EMAIL__{key}"), value).arg("--roles=api");
        let process = options.serve(&database).await;
        let (status, answer) = post(&process.client(), mail("m1@x", "Lunch", headers, "Shall we?")).await;
        assert_eq!(status == StatusCode::ACCEPTED, taken, "{key}={value} {headers}: {answer}");
    }
}

#[tokio::test]
async fn one_sender_without_proof_gets_so_many_answers_an_hour_whatever_the_subjects() {
    let (database, model) = (Database::new().await, says("Gladly.").await);
    let process = options(&model).arg("--roles=api").serve(&database).await;
    let client = process.client();
    let mut answered = 0;
    for number in 0..35 {
        let text = mail(&format!("m{number}@x"), &format!("Subject {number}"), "", &format!("Text {number}"));
        let id = taken(&client, text).await;
        answered += usize::from(policy(&database, &id).await["reply"] != Value::Null);
    }
    assert_eq!(answered, 30, "email.sender_limit");
    // Forged mail does not silence the one whose name it bears.
    let id = taken(&client, mail("proved@x", "Really", PROVED, "It is me.")).await;
    assert_ne!(policy(&database, &id).await["reply"], Value::Null);
}

/// How many of 35 mails with these senders and headers are answered. `{n}` is the mail's number.
async fn answered(from: &str, headers: &str) -> usize {
    let (database, model) = (Database::new().await, says("Gladly.").await);
    let process = options(&model).arg("--roles=api").serve(&database).await;
    let client = process.client();
    let mut answered = 0;
    for number in 0..35 {
        let of = |text: &str| text.replace("{n}", &number.to_string());
        let text = mail(
            &format!("m{number}@x"),
            &format!("Subject {number}"),
            &of(headers),
            &format!("Text {number}"),
        );
        let text = text.replace("From: Ann <ann@example.com>", &format!("From: {}", of(from)));
        assert!(text.contains(&of(from)), "{text}");
        let id = taken(&client, text).await;
        answered += usize::from(policy(&database, &id).await["reply"] != Value::Null);
    }
    answered
}

#[tokio::test]
async fn nobody_makes_us_write_to_another_by_reply_to_or_by_many_names() {
    let proved = format!("{PROVED}Reply-To: victim@elsewhere.example\r\n");
    assert_eq!(answered("ann@example.com", &proved).await, 30, "a proved sender names another");
    let reply_to = "Reply-To: Victim@example.com\r\n";
    assert_eq!(answered("a{n}@example.com", reply_to).await, 30, "each mail has another sender");
    assert_eq!(answered("victim+{n}@example.com", "").await, 30, "all of them are one person");
    // A form on a web site writes for many people.
    let form = format!("{PROVED}Reply-To: guest{{n}}@elsewhere.example\r\n");
    assert_eq!(answered("ann@example.com", &form).await, 35);
}
