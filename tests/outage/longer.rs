//! The database is away for longer than a lease, and what a worker has by then is known to it alone.

use super::options;
use crate::support::proxy::Proxy;
use crate::support::{Answer, Database, ModelServer, outlast_the_leases};
use serde_json::json;

const TRIED: &str = "The commit failed; trying again";

#[tokio::test]
#[ignore = "slow: make soak"]
async fn a_reply_that_comes_while_the_database_is_away_for_longer_than_a_lease_is_paid_once() {
    let (database, model) = (Database::new().await, ModelServer::turns(vec![Answer::text("Gladly.")]).await);
    model.hold();
    let proxy = Proxy::start(&database.url);
    let process = options(&model).short_lease().spawn(&proxy.url);
    process.wait_for_log("\"Listening\"").await;
    let client = process.client();
    let id = client.chat("c1", "Hello?").await["session_id"].as_str().unwrap().to_owned();
    model.asked(1).await;
    proxy.refuse(true);
    proxy.cut();
    model.release();
    outlast_the_leases(&process, &database, TRIED).await;
    proxy.refuse(false);
    client.wait_for(&id, "completed").await;
    assert_eq!(model.bodies().len(), 1);
    assert!(process.terminate().success());
}

#[tokio::test]
#[ignore = "slow: make soak"]
async fn a_guarded_call_that_ends_while_the_database_is_away_for_longer_than_a_lease_is_not_uncertain() {
    let turns = vec![Answer::call("charge", json!({"cents": 5})), Answer::text("It is paid.")];
    let (database, model) = (Database::new().await, ModelServer::turns(turns).await);
    let options = options(&model).short_lease();
    std::fs::write(options.path("hold-charge"), "").unwrap();
    let proxy = Proxy::start(&database.url);
    let process = options.spawn(&proxy.url);
    process.wait_for_log("\"Listening\"").await;
    let client = process.client();
    let id = client.chat("c1", "Charge me.").await["session_id"].as_str().unwrap().to_owned();
    options.has_effects(1).await;
    proxy.refuse(true);
    proxy.cut();
    std::fs::remove_file(options.path("hold-charge")).unwrap();
    outlast_the_leases(&process, &database, TRIED).await;
    proxy.refuse(false);
    client.wait_for(&id, "completed").await;
    let uncertain =
        "select count(*) from session_events where session_id = $1 and type = 'TOOL_FAILED_UNCERTAIN'";
    assert_eq!(database.value::<i64>(uncertain, &id).await, 0);
    assert_eq!((options.effects().len(), model.bodies().len()), (1, 2));
    assert!(process.terminate().success());
}
