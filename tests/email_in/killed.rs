//! Kills where a mail comes in. An acknowledged mail is stored. If the sender got no answer and sends the
//! mail again, it is still one mail.

use super::lmtp::Lmtp;
use super::{mail, options, post, request, says, sessions};
use crate::support::Database;
use reqwest::StatusCode;

#[tokio::test]
async fn k01_k02_a_mail_that_was_not_acknowledged_is_one_mail_when_it_comes_again_by_http() {
    for (failpoint, first) in [("K1=1*return", StatusCode::ACCEPTED), ("K2=1*return", StatusCode::OK)] {
        let (database, model) = (Database::new().await, says("Gladly.").await);
        let text = mail("m1@example.com", "Lunch", "", "Shall we?");
        let options = options(&model);
        let api = options.clone().arg("--roles=api").env("FAILPOINTS", failpoint).serve(&database).await;
        assert!(request(&api.client(), text.clone()).send().await.is_err(), "nothing is acknowledged");
        let (_, process) = api.ended().await;
        assert!(process.log().contains("failpoint"), "{}", process.log());

        let process = options.serve(&database).await;
        let client = process.client();
        let (status, answer) = post(&client, text.clone()).await;
        assert_eq!(status, first, "{failpoint}: {answer}");
        let (status, again) = post(&client, text).await;
        assert_eq!((status, &again["session_id"]), (StatusCode::OK, &answer["session_id"]));
        client.wait_for(answer["session_id"].as_str().unwrap(), "completed").await;
        assert_eq!((sessions(&database).await, model.bodies().len()), (1, 1), "{failpoint}");
        assert!(process.terminate().success());
    }
}

#[tokio::test]
async fn k01_k02_a_mail_that_was_not_acknowledged_is_one_mail_when_it_comes_again_by_lmtp() {
    for failpoint in ["K1=1*return", "K2=1*return"] {
        let (database, model) = (Database::new().await, says("Gladly.").await);
        let text = mail("m1@example.com", "Lunch", "", "Shall we?");
        let options = options(&model);
        let api = options.clone().arg("--roles=api").env("FAILPOINTS", failpoint).serve(&database).await;
        let mut server = Lmtp::greeted(&api).await;
        server.say("MAIL FROM:<ann@example.com>", "250").await;
        server.say("RCPT TO:<support@example.org>", "250").await;
        server.say("DATA", "354").await;
        assert_eq!(server.end(&text).await, None, "nothing is acknowledged");
        let (_, process) = api.ended().await;
        assert!(process.log().contains("failpoint"), "{}", process.log());

        let process = options.serve(&database).await;
        for _ in 0..2 {
            let reply = Lmtp::greeted(&process).await.send("support@example.org", &text).await;
            assert!(reply.starts_with("250"), "{reply}");
        }
        assert_eq!(sessions(&database).await, 1, "{failpoint}");
        assert!(process.terminate().success());
    }
}
