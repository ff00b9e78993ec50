//! Troubles outside of a session's own step: no worker, no database, no way out, a schedule without its agent.

use super::*;
use crate::support::Server;

#[tokio::test]
async fn without_a_worker_the_command_that_starts_one_is_said() {
    let scene = Scene::new("", "").await;
    let api = scene.shell("wakeful serve --roles api");
    api.wait_for_log("\"Listening\"").await;
    let client = api.client();
    let id = ask(&client, "Hello?").await;
    let remedy = scene.because(&id, &["no worker has taken it"]).await;
    assert!(remedy.contains("No worker is alive"), "{remedy}");
    assert!(scene.doctor("workers").await.contains("wakeful serve"));
    let worker = scene.shell(&command(&remedy, "wakeful serve --roles worker"));
    client.wait_for(&id, "completed").await;
    assert!(worker.terminate().success());
}

#[tokio::test]
async fn a_database_that_is_away_is_named_and_the_run_goes_on_when_it_is_back() {
    let mut server = Server::start().await;
    let database = Database::on(&server.url(), "pg_default").await;
    let scene = Scene::on(database, "", "[queue]\nlease_s = 5\nheartbeat_s = 1").await;
    let process = scene.serve().await;
    let client = process.client();
    scene.model.hold();
    let id = ask(&client, "Hello?").await;
    scene.model.asked(1).await;
    server.stop().await;
    let (status, ran) = scene.shell(&format!("wakeful session why {id}")).ended().await;
    let said = ran.log();
    assert_eq!(status.code(), Some(6), "{said}");
    assert!(said.contains("cannot be reached") && said.contains("wakeful doctor"), "{said}");
    let told = scene.doctor("database").await;
    assert!(told.contains("is Postgres up") && told.contains("DATABASE_URL"), "{told}");
    eventually("/readyz to say so", || async {
        let (_, ready) = client.get("/readyz").await;
        ready["checks"]["database"].as_str().unwrap().contains("cannot be reached").then_some(())
    })
    .await;
    // The commit has no connection either.
    scene.model.release();
    let connections = async || {
        let (_, ready) = client.get("/readyz").await;
        ready["checks"]["connections"].as_str().unwrap().to_owned()
    };
    eventually("/readyz to name each connection that is lost, and since when", || async {
        let said = connections().await;
        let lost = said.strip_prefix("lost: ").unwrap_or_default();
        let named: Vec<&str> =
            lost.split(", ").filter_map(|one| one.split_once(" for ")).map(|(n, _)| n).collect();
        (named == ["statements", "commits", "heartbeat", "notifications", "liveness lock"]).then_some(())
    })
    .await;
    let here = format!("export WAKEFUL_URL={}; wakeful", process.url());
    let (_, ran) = scene.shell(&format!("{here} session why {id}")).ended().await;
    let said = ran.log();
    assert!(said.contains("the server on ") && said.contains("lost: statements for "), "{said}");
    let (_, ran) = scene.shell(&format!("{here} doctor -o json")).ended().await;
    let checks: Value = serde_json::from_str(&ran.output()).unwrap();
    let of_server = checks.as_array().unwrap().iter().find(|check| check["name"] == "server").unwrap();
    let said = of_server["text"].as_str().unwrap();
    assert!(of_server["level"] == "problem" && said.contains("commits for "), "{of_server}");
    server.start_again().await;
    client.wait_for(&id, "completed").await;
    eventually("all connections to be back", || async { (connections().await == "ok").then_some(()) }).await;
    process.wait_for_log("There is a connection for commits again").await;
}

#[tokio::test]
async fn a_message_that_is_not_sent_is_sent_again_under_its_id() {
    let scene = Scene::new("", "").await;
    let path = |name: &str| scene.options.path(name).display().to_string();
    let (sent, says) = (path("sent"), path("says"));
    let options = scene.options.clone().env("FIXTURE_POST", "idempotent");
    let options = options.env("FIXTURE_SENT", sent).env("FIXTURE_POST_SAYS", says);
    let scene = Scene { options, ..scene };
    let process = scene.serve().await;
    let client = process.client();
    let says = |answer: &str| std::fs::write(scene.options.path("says"), answer).unwrap();
    // First the way out is closed for a while.
    says("later the line is busy");
    let id = ask(&client, "mail").await;
    client.wait_for(&id, "completed").await;
    eventually("a try", || async {
        let tried = "select count(*) from deliveries where last_error is not null and $1 <> ''";
        (scene.database.value::<i64>(tried, "all").await == 1).then_some(())
    })
    .await;
    scene.because(&id, &["is not sent yet", "the line is busy"]).await;
    // Then it is refused for good.
    says("refused the mailbox is unknown");
    eventually("the refusal", || async {
        let failed = "select count(*) from deliveries where status = 'failed' and $1 <> ''";
        (scene.database.value::<i64>(failed, "all").await == 1).then_some(())
    })
    .await;
    let remedy = scene.because(&id, &["was not sent", "the mailbox is unknown"]).await;
    assert!(scene.doctor("deliveries").await.contains("wakeful delivery resend"));
    assert!(
        scene.said("wakeful delivery list --status failed -o table").await.contains("the mailbox is unknown")
    );
    says("");
    scene.said(&command(&remedy, "wakeful delivery resend")).await;
    eventually("the mail", || async {
        (client.session(&id).await["deliveries"][0]["status"] == "sent").then_some(())
    })
    .await;
    let sent = std::fs::read_to_string(scene.options.path("sent")).unwrap();
    assert_eq!(sent.lines().count(), 1);
    scene.because(&id, &["Nothing holds it up"]).await;
}

#[tokio::test]
async fn a_schedule_whose_agent_is_gone_names_it() {
    const REPORTER: &str = "[agents.reporter]\nsystem_prompt = \"You report.\"\nmodel = \"openai/test\"";
    let scene = Scene::new("", REPORTER).await;
    let made = "wakeful schedule create daily --cron '* * * * *' --agent reporter --prompt 'What is new?'";
    scene.said("wakeful migrate").await;
    scene.said(made).await;
    // The agent leaves the configuration, and the time comes.
    let scene = scene.configured("", "");
    let process = scene.serve().await;
    let client = process.client();
    let late = "update schedules
        set last_tick = clock_timestamp() - interval '4 minutes', next_at = clock_timestamp() - interval '3 minutes'";
    sqlx::query(late).execute(&scene.database.pool).await.unwrap();
    let told = scene.doctor("schedules").await;
    for part in ["daily should have fired 3m ago", "no live worker has agent reporter", "[agents.reporter]"] {
        assert!(told.contains(part), "{part}: {told}");
    }
    let list = scene.said("wakeful schedule list -o table").await;
    assert!(list.contains("late 3m"), "{list}");
    assert!(told.contains("wakeful serve --roles scheduler"), "{told}");
    // It comes back on a scheduler first. The session that it fires waits for a worker.
    let scene = scene.configured("", REPORTER);
    let scheduler = scene.shell("wakeful serve --roles scheduler");
    let id = eventually("the firing", || async {
        let (_, page) = client.get("/v1/schedules/daily/firings").await;
        page["items"][0]["session_id"].as_str().map(str::to_owned)
    })
    .await;
    eventually("the worker to leave it to others", || async {
        let left = "select count(*) from jobs where held_by = 'lacks:reporter' and $1 <> ''";
        (scene.database.value::<i64>(left, "all").await == 1).then_some(())
    })
    .await;
    let remedy = scene.because(&id, &["no live worker has agent reporter"]).await;
    assert!(remedy.contains("[agents.reporter]"), "{remedy}");
    let worker = scene.shell(&command(&remedy, "wakeful serve --roles worker"));
    client.wait_for(&id, "completed").await;
    assert!(worker.terminate().success() && scheduler.terminate().success() && process.terminate().success());
}

#[tokio::test]
async fn a_paused_queue_says_who_paused_it_and_why_and_goes_on() {
    let scene = Scene::new("", "").await;
    let process = scene.serve().await;
    let client = process.client();
    for way in ["the remedy", "the queue's own command"] {
        scene.said("wakeful queue pause --reason 'a deploy of another system' --as eve").await;
        let id = ask(&client, "Hello?").await;
        eventually("the session to be held", || async {
            let held = "select count(*) from jobs where held_by is not null and $1 <> ''";
            (scene.database.value::<i64>(held, "all").await == 1).then_some(())
        })
        .await;
        let remedy = scene
            .because(
                &id,
                &["It waits, because the whole queue was paused by eve", "a deploy of another system"],
            )
            .await;
        assert!(scene.list().await.contains("paused (queue"), "{}", scene.list().await);
        assert!(scene.doctor("pauses").await.contains("wakeful pause end queue"));
        match way {
            "the remedy" => scene.said(&command(&remedy, "wakeful pause end")).await,
            _ => scene.said("wakeful queue resume").await,
        };
        client.wait_for(&id, "completed").await;
    }
}

#[tokio::test]
async fn a_cancelled_run_says_who_cancelled_it_and_why() {
    let scene = Scene::new("", "").await;
    scene.provider_is(503);
    let process = scene.serve().await;
    let client = process.client();
    let id = ask(&client, "Hello?").await;
    waits(&scene).await;
    scene.said(&format!("wakeful session cancel {id} --reason 'the guest left' --as eve")).await;
    client.wait_for(&id, "cancelled").await;
    let remedy = scene.because(&id, &["cancelled by eve: the guest left", "not retried"]).await;
    scene.provider_is(0);
    scene.said(&command(&remedy, "wakeful session send")).await;
    client.wait_for(&id, "completed").await;
}
