//! The live way over: a producer spawns 20 tasks a second while Absurd's worker and ours run.

use super::{Peer, absurd, count, json};
use crate::support::{Answer, Database, ModelServer, Options, eventually};
use std::collections::BTreeMap;

const TOKEN: &str = "0123456789abcdef0123456789abcdef";

/// The model asks for the effect once, and then says that it is done.
async fn model() -> ModelServer {
    ModelServer::start(|body, _| {
        let messages = body["messages"].as_array().cloned().unwrap_or_default();
        let charged = messages
            .iter()
            .any(|message| message["role"] == "tool" && message["content"].to_string().contains("Charged"));
        if charged { Answer::text("Done.") } else { Answer::call("charge", json!({"cents": 1})) }
    })
    .await
}

struct Files<'a>(&'a Options);

impl Files<'_> {
    fn path(&self, name: &str) -> String {
        self.0.path(name).display().to_string()
    }

    fn touch(&self, name: &str) {
        std::fs::write(self.0.path(name), "").unwrap();
    }

    fn lines(&self, name: &str) -> Vec<String> {
        std::fs::read_to_string(self.0.path(name)).unwrap_or_default().lines().map(str::to_owned).collect()
    }
}

#[tokio::test]
#[ignore = "needs Absurd: make test-peers"]
async fn every_task_of_a_live_move_is_finished_by_exactly_one_side() {
    moved(false).await;
}

#[tokio::test]
#[ignore = "needs Absurd: make test-peers"]
async fn half_of_what_was_taken_goes_back_and_every_task_is_finished_once() {
    moved(true).await;
}

async fn moved(half_back: bool) {
    let (peer, database, model) = (Peer::new().await, Database::new().await, model().await);
    let options = Options::new()
        .model("openai/test")
        .env("OPENAI_BASE_URL", &model.url)
        .env("WAKEFUL_TOKEN", TOKEN)
        .config("[queue]\nconcurrency = 16");
    let files = Files(&options);
    let serve = |roles: &str| options.clone().arg(roles);
    // With `back`, no worker runs here between the two commands. A worker runs in Absurd all the time.
    let roles = if half_back { "--roles=api" } else { "--roles=api,worker" };
    let process = serve(roles).serve(&database).await;
    let env = |name: &str| files.path(name);
    let url = process.url();
    let produced = [
        ("STOP", env("stop")),
        ("SWITCH", env("switch")),
        ("SPAWNED", env("spawned")),
        ("WAKEFUL", url),
        ("TOKEN", TOKEN.to_owned()),
        ("RATE", "20".to_owned()),
    ];
    let produced: Vec<(&str, &str)> = produced.iter().map(|(name, value)| (*name, value.as_str())).collect();
    let (stop_work, effects) = (env("stop-work"), env("absurd-effects"));
    let worker = peer.start("work", &[("STOP_WORK", &stop_work), ("EFFECTS", &effects)]);
    let producer = peer.start("produce", &produced);
    eventually("a hundred tasks", || async { (files.lines("spawned").len() >= 100).then_some(()) }).await;
    files.touch("switch");
    let settled = files.lines("spawned").len();
    eventually("the switch to be seen", || async {
        (files.lines("spawned").len() > settled + 2).then_some(())
    })
    .await;

    let taken =
        absurd(&options, &peer, &database, &["take", "live", "--queue", "live", "--wait", "60"]).await;
    assert_eq!(taken.code, Some(0), "{}{}", taken.json, taken.errors);
    println!("taken: {}", taken.json);
    let n = taken.json["imported"].as_u64().unwrap();
    assert!(n > 10, "enough was under way: {n}");
    if half_back {
        let half = (n / 2).to_string();
        let back =
            absurd(&options, &peer, &database, &["back", "live", "--queue", "live", "--limit", &half]).await;
        assert_eq!(
            (back.code, back.json["returned"].as_u64()),
            (Some(0), Some(n / 2)),
            "{}{}",
            back.json,
            back.errors
        );
        println!("back: {}", back.json);
    }
    let working = half_back.then(|| serve("--roles=worker").spawn(&database.url));
    eventually("sixty more tasks", || async { (files.lines("spawned").len() >= settled + 60).then_some(()) })
        .await;
    files.touch("stop");
    assert!(producer.wait_with_output().await.unwrap().status.success());
    let open = "select count(*) from conversation_sessions where status not in ('completed', 'terminated')";
    eventually("all to be over here", || async { (count(&database.pool, open).await == 0).then_some(()) })
        .await;
    // Parked ones stay as they are.
    let open = "select count(*) from absurd.t_live t join absurd.r_live r on r.run_id = t.last_attempt_run
        where t.state in ('pending', 'running', 'sleeping') and coalesce(r.claimed_by, '') not like 'wakeful:%'";
    eventually("all to be over in Absurd", || async { (peer.count(open).await == 0).then_some(()) }).await;
    files.touch("stop-work");
    assert!(worker.wait_with_output().await.unwrap().status.success());
    drop((process, working));

    // Each effect, by the key of its task.
    let keys: Vec<(String, String)> = sqlx::query_as(
        "select s.session_id, r.content #>> '{0,text}' from conversation_sessions s
        join conversation_records r on r.session_id = s.session_id and r.role = 'user' and r.message_number = s.base_message_number + 1",
    )
    .fetch_all(&database.pool)
    .await
    .unwrap();
    let keys: BTreeMap<String, String> = keys.into_iter().collect();
    let mut done: BTreeMap<String, Vec<&str>> = BTreeMap::new();
    for key in files.lines("absurd-effects") {
        done.entry(key).or_default().push("absurd");
    }
    for line in options.effects() {
        let session = line.split(' ').nth(1).unwrap();
        done.entry(keys[session].clone()).or_default().push("here");
    }
    let spawned = files.lines("spawned");
    let by = |side: &str| done.values().filter(|by| by.as_slice() == [side]).count();
    println!(
        "{} spawned: {} finished by Absurd, {} here; {} taken",
        spawned.len(),
        by("absurd"),
        by("here"),
        n
    );
    for line in &spawned {
        let key = line.split(' ').next().unwrap();
        assert_eq!(done.get(key).map(Vec::len), Some(1), "{key}: {:?}", done.get(key));
    }
    assert_eq!(done.len(), spawned.len());
    assert!(by("absurd") > 0 && by("here") > 0);
}
