//! Sessions with rows that someone changed by SQL: a worker finds them, makes them continue with their open
//! work, and leaves every other session untouched.

mod ward;

use crate::support::checker::dump;
use crate::support::client::texts;
use crate::support::{Options, eventually};
use futures::future::join_all;
use reqwest::StatusCode;
use serde_json::{Value, json};
use wakeful_store::heal::{Cursor, Healed};
use wakeful_store::new_id;
use ward::{Ward, insert_message, message};

#[tokio::test]
async fn a_run_without_a_job_goes_on() {
    let ward = Ward::new().await;
    let unbegun = ward.session("c1", "one").await;
    let begun = ward.session("c2", "two").await;
    ward.run_sql("delete from jobs where session_id = $1", &unbegun).await;
    ward.run_sql("delete from jobs where session_id = $1", &begun).await;
    ward.run_sql("update conversation_sessions set status = 'running' where session_id = $1", &begun).await;
    let worker = ward.worker().await;
    for (id, text) in [(&unbegun, "You said: one."), (&begun, "You said: two.")] {
        ward.becomes(id, "completed").await;
        assert_eq!(ward.texts(id, "assistant").await, [text]);
    }
    assert_eq!(ward.model.bodies().len(), 2);
    let line = worker.wait_for_log("no job would have gone on with step 1").await;
    assert!(line.contains("\"WARN\"") && line.contains("Healed a session"), "{line}");
    worker.wait_for_log("healed_since_start").await;
    ward.is_in_order().await;
    assert!(worker.terminate().success());
}

#[tokio::test]
async fn a_queued_run_gets_the_conversation_that_nobody_has() {
    // Each way in which the conversation's row can be wrong.
    for spoil in [
        "update conversation_counters set open_run_id = null where $1 <> ''",
        "update conversation_counters set open_run_id = 'run_none', queued_runs = 0 where $1 <> ''",
        "update conversation_counters set queued_runs = 7, last_message_number = 0 where $1 <> ''",
    ] {
        let ward = Ward::new().await;
        let first = ward.session("c1", "one").await;
        let second = ward.beside("t2", "two").await;
        let third = ward.beside("t3", "three").await;
        assert_eq!(ward.unattended().await, [""; 0], "they wait for the first");
        // Close the first session's run by SQL, so that nothing gives the conversation to the next run.
        ward.run_sql("delete from jobs where session_id = $1", &first).await;
        ward.run_sql("update session_runs set status = 'failed' where session_id = $1", &first).await;
        ward.run_sql("update conversation_sessions set status = 'failed' where session_id = $1", &first)
            .await;
        ward.run_sql(spoil, "all").await;
        let worker = ward.worker().await;
        for (id, text) in [(&second, "You said: two."), (&third, "You said: three.")] {
            ward.becomes(id, "completed").await;
            assert_eq!(ward.texts(id, "assistant").await, [text]);
        }
        ward.is_in_order().await;
        assert!(worker.terminate().success());
    }
}

#[tokio::test]
async fn queued_runs_are_counted_again() {
    let ward = Ward::new().await;
    let first = ward.session("c1", "one").await;
    let second = ward.beside("t2", "two").await;
    ward.run_sql("update conversation_counters set queued_runs = 0 where $1 <> ''", "all").await;
    assert_eq!(ward.unattended().await, [second.as_str()]);
    assert_eq!(ward.wake(&second).await, [Healed::QueuedRunsCounted { was: 0, is: 1 }]);
    ward.run_sql("update conversation_counters set queued_runs = 4 where $1 <> ''", "all").await;
    let worker = ward.worker().await;
    ward.becomes(&first, "completed").await;
    ward.becomes(&second, "completed").await;
    ward.is_in_order().await;
    assert!(worker.terminate().success());
}

#[tokio::test]
async fn a_status_that_was_set_by_hand_is_made_true() {
    let ward = Ward::new().await;
    let mut sessions = Vec::new();
    for (n, status) in ["queued", "running", "queued"].into_iter().enumerate() {
        sessions.push((ward.session(&format!("c{n}"), &format!("message {n}")).await, status));
    }
    let worker = ward.worker().await;
    for (id, _) in &sessions {
        ward.becomes(id, "completed").await;
    }
    assert!(worker.terminate().success());
    let asked = ward.model.bodies().len();
    let runs = "select count(*) from session_runs where $1 <> ''";
    let before: i64 = ward.database.value(runs, "all").await;
    for (id, status) in &sessions {
        let set = format!("update conversation_sessions set status = '{status}' where session_id = $1");
        ward.run_sql(&set, id).await;
    }
    // The last session's run failed, and the session gets a message that no run has read. It needs a new run.
    ward.run_sql("update session_runs set status = 'failed' where session_id = $1", &sessions[2].0).await;
    insert_message(&ward, &sessions[2].0, "hand-made", "run_promised").await;

    let worker = ward.worker().await;
    for (id, _) in &sessions {
        ward.becomes(id, "completed").await;
    }
    ward.is_in_order().await;
    assert_eq!(
        ward.texts(&sessions[0].0, "assistant").await,
        ["You said: message 0."],
        "nothing is said twice"
    );
    assert_eq!(ward.texts(&sessions[2].0, "assistant").await[1], "You said: hand-made.");
    assert_eq!(ward.model.bodies().len(), asked + 1);
    assert_eq!(ward.database.value::<i64>(runs, "all").await, before + 1);
    let promised = "select status from session_runs where run_id = $1";
    assert_eq!(ward.database.value::<String>(promised, "run_promised").await, "completed");
    assert!(worker.terminate().success());
}

#[tokio::test]
async fn a_session_made_by_hand_answers_its_message() {
    let ward = Ward::new().await;
    let insert = "insert into conversation_sessions
            (session_id, conversation_id, space_id, mailbox_id, trigger_type, trigger_id, agent, model_id,
             model_context_window, status)
        values ($1, 'default/' || $1, 'default', 'default', 'hand', $1, 'default', 'openai/test', 128000, ";
    // A session with a message, one without, and one whose status promises a run that does not exist.
    let (asked, empty, created) = (new_id("sess"), new_id("sess"), new_id("sess"));
    ward.run_sql(&format!("{insert} 'queued')"), &asked).await;
    ward.run_sql(&format!("{insert} 'running')"), &empty).await;
    ward.run_sql(&format!("{insert} 'created')"), &created).await;
    insert_message(&ward, &asked, "one", "run_of_nobody").await;
    insert_message(&ward, &created, "two", "run_of_nobody_2").await;
    let worker = ward.worker().await;
    for id in [&asked, &empty, &created] {
        ward.becomes(id, "completed").await;
    }
    assert_eq!(ward.texts(&asked, "assistant").await, ["You said: one."]);
    assert_eq!(ward.texts(&created, "assistant").await, ["You said: two."]);
    assert_eq!(ward.texts(&empty, "assistant").await, [""; 0]);
    ward.is_in_order().await;
    assert!(worker.terminate().success());
}

#[tokio::test]
async fn a_message_that_nobody_would_read_is_answered() {
    let ward = Ward::new().await;
    let completed = ward.session("c1", "one").await;
    let failed = ward.session("c2", "two").await;
    let waiting = ward.session("c3", "ask").await;
    let worker = ward.worker().await;
    ward.becomes(&completed, "completed").await;
    ward.becomes(&failed, "completed").await;
    ward.becomes(&waiting, "waiting_input").await;
    ward.run_sql("update conversation_sessions set status = 'failed' where session_id = $1", &failed).await;
    ward.run_sql("update session_runs set status = 'failed' where session_id = $1", &failed).await;
    for id in [&completed, &failed, &waiting] {
        insert_message(&ward, id, "by hand", "run_old").await;
    }
    for id in [&completed, &failed, &waiting] {
        eventually("the answer", || async {
            let said = ward.texts(id, "assistant").await;
            said.iter().any(|text| text == "You said: by hand.").then_some(())
        })
        .await;
        ward.becomes(id, "completed").await;
    }
    assert_eq!(ward.texts(&waiting, "tool").await, ["by hand"], "it answers the question");
    let runs: i64 =
        ward.database.value("select count(*) from session_runs where session_id = $1", &waiting).await;
    assert_eq!(runs, 1, "the paused run goes on");
    ward.is_in_order().await;
    assert!(worker.terminate().success());
}

#[tokio::test]
async fn a_delivery_without_a_job_is_sent() {
    for status in ["queued", "sending"] {
        let ward = Ward::new().await;
        let id = ward.session("c1", "mail").await;
        // The process dies while it holds the delivery.
        let dying = ward.options.clone().env("FAILPOINTS", "K12=1*return").arg("--roles=worker");
        let (_, dead) = dying.spawn(&ward.database.url).ended().await;
        assert!(dead.log().contains("failpoint K12"), "{}", dead.log());
        ward.run_sql("delete from jobs where kind = 'deliver' and $1 <> ''", "all").await;
        ward.run_sql(&format!("update deliveries set status = '{status}' where session_id = $1"), &id).await;
        assert!(ward.unattended().await.contains(&id));
        let worker = ward.worker().await;
        eventually("the mail", || async {
            let sent: i64 = ward
                .database
                .value("select count(*) from deliveries where session_id = $1 and status = 'sent'", &id)
                .await;
            (sent == 1).then_some(())
        })
        .await;
        ward.becomes(&id, "completed").await;
        ward.is_in_order().await;
        let mails = std::fs::read_dir(ward.options.path("mail").join("new")).unwrap().count();
        assert_eq!(mails, 1);
        assert!(worker.terminate().success());
    }
}

#[tokio::test]
async fn what_is_left_of_a_model_call_is_forgotten_when_the_session_rests() {
    let ward = Ward::new().await;
    let rests = ward.session("c1", "one").await;
    let lives = ward.session("c2", "two").await;
    ward.run_sql("delete from jobs where session_id = $1", &rests).await;
    ward.run_sql("update session_runs set status = 'completed' where session_id = $1", &rests).await;
    ward.run_sql("update conversation_sessions set status = 'completed' where session_id = $1", &rests).await;
    ward.run_sql(
        "update conversation_counters set open_run_id = null where conversation_id <> $1",
        "default/c2",
    )
    .await;
    for id in [&rests, &lives] {
        ward.run_sql(
            "insert into generations (space_id, session_id, generation_id, step_number, attempt, model, request_sha256)
            values ('default', $1, 'gen_1', 1, 1, 'openai/test', '0')",
            id,
        )
        .await;
        ward.run_sql(
            "insert into generation_chunks (space_id, session_id, generation_id, chunk_no, text)
            values ('default', $1, 'gen_1', 0, 'x'), ('default', $1, 'gen_1', 1, 'y')",
            id,
        )
        .await;
    }
    assert_eq!(ward.wake(&lives).await, [], "it is for the next attempt to journal");
    assert!(ward.unattended().await.contains(&rests) && !ward.unattended().await.contains(&lives));
    let healed = ward.wake(&rests).await;
    assert!(healed.contains(&Healed::GenerationsForgotten { generations: 1, chunks: 2 }), "{healed:?}");
    let left: i64 = ward.database.value("select count(*) from generation_chunks where $1 <> ''", "all").await;
    assert_eq!(left, 2);
    // Leftover chunks without a call are found as well.
    ward.run_sql(
        "insert into generation_chunks (space_id, session_id, generation_id, chunk_no, text)
        values ('default', $1, 'gen_2', 0, 'x')",
        &rests,
    )
    .await;
    assert_eq!(ward.unattended().await, [rests.as_str()]);
    assert_eq!(ward.wake(&rests).await, [Healed::GenerationsForgotten { generations: 0, chunks: 1 }]);
}

#[tokio::test]
async fn a_heal_that_changes_nothing_writes_nothing() {
    let ward = Ward::new().await;
    let mut sessions = Vec::new();
    let completed = ward.session("c2", "two").await;
    let waiting = ward.session("c3", "ask").await;
    let archived = ward.session("c4", "four").await;
    let worker = ward.worker().await;
    ward.becomes(&completed, "completed").await;
    ward.becomes(&archived, "completed").await;
    ward.becomes(&waiting, "waiting_input").await;
    ward.store.archive(&archived, None).await.unwrap();
    assert!(worker.terminate().success());
    // An open run, one queued behind it, one cancelled behind it with its message unread, and a session in
    // need of attention with a waiting message.
    sessions.extend([completed, waiting, archived]);
    sessions.push(ward.session("c1", "one").await);
    sessions.push(ward.beside("t2", "behind").await);
    let cancelled = ward.beside("t3", "never mind").await;
    ward.store.cancel(&cancelled, None).await.unwrap();
    assert_eq!(ward.status(&cancelled).await, "cancelled");
    sessions.push(cancelled);
    let attention = ward.session("c5", "five").await;
    ward.run_sql("delete from jobs where session_id = $1", &attention).await;
    ward.run_sql("update session_runs set status = 'needs_attention' where session_id = $1", &attention)
        .await;
    ward.run_sql(
        "update conversation_sessions set status = 'needs_attention' where session_id = $1",
        &attention,
    )
    .await;
    ward.run_sql(
        "update conversation_counters set open_run_id = null where conversation_id = $1",
        "default/c5",
    )
    .await;
    assert_eq!(ward.wake(&attention).await.len(), 1, "its numbers are given back");
    ward.store.send(&attention, &message("well?")).await.unwrap();
    sessions.push(attention);

    assert_eq!(ward.unattended().await, [""; 0]);
    let before = dump(&ward.database).await;
    for id in &sessions {
        assert_eq!(ward.wake(id).await, [], "{}", ward.status(id).await);
    }
    assert_eq!(dump(&ward.database).await, before);
}

#[tokio::test]
async fn a_session_in_hand_is_left_to_its_worker() {
    let ward = Ward::new().await;
    ward.model.hold();
    let id = ward.session("c1", "one").await;
    let worker = ward.worker().await;
    ward.model.asked(1).await;
    let lease = "select json_build_object('job', job_id, 'lease', lease, 'worker', worker_id) from jobs where session_id = $1";
    let before: Value = ward.database.value(lease, &id).await;
    // The status contradicts the run in progress. The run's row is right.
    ward.run_sql("update conversation_sessions set status = 'completed' where session_id = $1", &id).await;
    eventually("the heal", || async { (ward.status(&id).await == "queued").then_some(()) }).await;
    assert_eq!(ward.database.value::<Value>(lease, &id).await, before);
    ward.model.release();
    ward.becomes(&id, "completed").await;
    assert_eq!(ward.texts(&id, "assistant").await, ["You said: one."]);
    assert_eq!(ward.model.bodies().len(), 1);
    ward.is_in_order().await;
    assert!(worker.terminate().success());
}

#[tokio::test]
async fn a_message_that_meets_a_job_about_to_end_is_answered() {
    let ward = Ward::new().await;
    let id = ward.session("c1", "one").await;
    let worker = ward.worker().await;
    ward.becomes(&id, "completed").await;
    assert!(worker.terminate().success());
    // The job's holder has found nothing to do, and has not ended the job yet.
    let job = "insert into jobs (kind, space_id, conversation_id, session_id, step_number, lease, run_at)
        values ('step', 'default', 'default/c1', $1, 9, nextval('leases'), clock_timestamp() + interval '1 hour')";
    ward.run_sql(job, &id).await;
    ward.store.send(&id, &message("two")).await.unwrap();
    let held = sqlx::query("delete from jobs where lease is not null").execute(&ward.database.pool).await;
    assert_eq!(held.unwrap().rows_affected(), 0, "the old holder cannot end the new run's job");
    let worker = ward.worker().await;
    ward.becomes(&id, "completed").await;
    assert_eq!(ward.texts(&id, "assistant").await, ["You said: one.", "You said: two."]);
    ward.is_in_order().await;
    assert!(worker.terminate().success());
}

#[tokio::test]
async fn a_session_put_away_by_hand_gives_its_conversation_back() {
    let ward = Ward::new().await;
    let first = ward.session("c1", "one").await;
    let second = ward.beside("t2", "two").await;
    ward.run_sql("update conversation_sessions set status = 'terminated' where session_id = $1", &first)
        .await;
    let worker = ward.worker().await;
    ward.becomes(&second, "completed").await;
    assert_eq!(ward.texts(&second, "assistant").await, ["You said: two."]);
    assert_eq!(ward.status(&first).await, "terminated");
    assert_eq!(ward.model.bodies().len(), 1);
    ward.is_in_order().await;
    assert!(worker.terminate().success());
}

#[tokio::test]
async fn many_heals_at_once_are_one() {
    let ward = Ward::new().await;
    let id = ward.session("c1", "one").await;
    ward.run_sql("delete from jobs where session_id = $1", &id).await;
    let heals = (0..12).map(|_| {
        let (store, id) = (ward.store.clone(), id.clone());
        tokio::spawn(async move { store.wake_session(&id).await.unwrap() })
    });
    let healed: Vec<Healed> = join_all(heals).await.into_iter().flat_map(|healed| healed.unwrap()).collect();
    assert_eq!(healed, [Healed::JobMade { step_number: 1 }]);
    assert_eq!(ward.database.value::<i64>("select count(*) from jobs where session_id = $1", &id).await, 1);
}

#[tokio::test]
async fn a_look_goes_on_where_the_last_one_stopped() {
    let ward = Ward::new().await;
    let mut sick = Vec::new();
    for n in 0..9 {
        let id = ward.session(&format!("c{n}"), "one").await;
        if n % 2 == 0 {
            ward.run_sql("delete from jobs where session_id = $1", &id).await;
            sick.push(id);
        }
    }
    let (mut cursor, mut found, mut looks) = (Cursor::default(), Vec::new(), 0);
    loop {
        let page = ward.store.look_for_unattended(&mut cursor, 2).await.unwrap();
        found.extend(page.sessions);
        looks += 1;
        if page.last {
            break;
        }
    }
    assert_eq!(looks, 5, "two rows a look");
    found.sort();
    sick.sort();
    assert_eq!(found, sick);
}

#[tokio::test]
async fn an_operator_wakes_a_session_and_is_told_what_was_wrong() {
    let ward = Ward::new().await;
    let options = ward.options.clone().env("WAKEFUL_QUEUE__HEAL_S", "3600");
    let process = options.serve(&ward.database).await;
    let client = process.client();
    ward.model.hold();
    let answer = client.chat("c1", "one").await;
    let id = answer["session_id"].as_str().unwrap();
    ward.model.asked(1).await;
    let (status, woken) = client.post(&format!("/v1/sessions/{id}/wake"), &json!({})).await;
    assert_eq!((status, &woken["healed"]), (StatusCode::ACCEPTED, &json!([])));
    // The worker notices that its job is gone and drops the claim. Without a wake the session would stay as
    // it is.
    ward.run_sql("delete from jobs where session_id = $1", id).await;
    process.wait_for_log("The claim is over").await;
    ward.model.release();
    let (_, woken) = client.post(&format!("/v1/sessions/{id}/wake"), &json!({})).await;
    assert_eq!(woken["healed"], json!([{"what": "job_made", "step_number": 1}]));
    let session = client.wait_for(id, "completed").await;
    assert_eq!(texts(&session, "assistant"), ["You said: one."]);

    let cli = Options { args: vec!["session".into(), "wake".into(), id.into()], ..ward.options.clone() };
    let (status, ran) = cli.spawn(&ward.database.url).ended().await;
    assert!(status.success() && ran.output().contains("nothing was wrong"), "{}{}", ran.output(), ran.log());
    ward.run_sql("update conversation_sessions set status = 'queued' where session_id = $1", id).await;
    let (status, ran) = cli.spawn(&ward.database.url).ended().await;
    assert!(status.success() && ran.output().contains("goes on"), "{}{}", ran.output(), ran.log());
    client.wait_for(id, "completed").await;
    assert!(process.terminate().success());
}

#[tokio::test]
async fn a_message_whose_notification_was_lost_is_answered_once() {
    let ward = Ward::new().await;
    let api = ward.options.clone().arg("--roles=api").env("FAILPOINTS", "K2=1*return");
    let api = api.serve(&ward.database).await;
    let worker = ward.worker().await;
    let post = api.client().post_request("/v1/chat/c1/messages").body(json!({"text": "one"}).to_string());
    assert!(post.send().await.is_err(), "the server dies before it answers");
    let (_, dead) = api.ended().await;
    assert!(dead.log().contains("failpoint K2"));
    let session = "select coalesce(max(session_id), '') from conversation_sessions where $1 <> ''";
    let id: String = ward.database.value(session, "all").await;
    ward.becomes(&id, "completed").await;
    assert_eq!(ward.texts(&id, "assistant").await, ["You said: one."]);
    assert_eq!(ward.model.bodies().len(), 1);
    assert!(worker.terminate().success());
}
