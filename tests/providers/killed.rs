//! Kills while a provider hands over a mail. The provider repeats a request that was not acknowledged, and
//! the result is one mail.

use super::world::{Sns, World};
use crate::support::{Database, Options};
use reqwest::StatusCode;
use serde_json::Value;

#[tokio::test]
#[ignore = "slow: make soak"]
async fn k01_k02_a_providers_mail_that_was_not_acknowledged_is_one_mail_when_it_comes_again() {
    const WAYS: usize = 4;
    for way in 0..WAYS {
        for (failpoint, committed) in [("K1=1*return", false), ("K2=1*return", true)] {
            let dying = |options: Options| options.arg("--roles=api").env("FAILPOINTS", failpoint);
            let world = World::on(Database::new().await, Sns::start().await, "", dying).await;
            let mut mails = world.mails(20);
            assert_eq!(mails.len(), WAYS);
            let (what, mail) = mails.swap_remove(way);
            assert!(mail.send().await.is_err(), "{what} {failpoint}: nothing is acknowledged");
            let World { database, sns, process, .. } = world;
            let (_, process) = process.ended().await;
            assert!(process.log().contains("failpoint"), "{what} {failpoint}: {}", process.log());

            let world = World::on(database, sns, "", |options| options).await;
            for again in [committed, true] {
                let (_, mail) = world.mails(20).swap_remove(way);
                let response = mail.send().await.unwrap();
                assert_eq!(response.status(), StatusCode::OK, "{what} {failpoint}");
                let answer: Value = response.json().await.unwrap();
                assert_eq!(answer["duplicate"], again, "{what} {failpoint}: {answer}");
                let session_id = answer["sessions"][0]["session_id"].as_str().unwrap();
                world.completes(session_id).await;
            }
            let sessions: i64 = world
                .database
                .value("select count(*) from conversation_sessions where $1 <> ''", "all")
                .await;
            assert_eq!((sessions, world.model.bodies().len()), (1, 1), "{what} {failpoint}");
            assert!(world.process.terminate().success());
        }
    }
}
