//! Schedules: each tick fires once, with any number of schedulers, when the clock jumps and when a process
//! dies.

mod spaces;
mod stage;
mod steering;

use crate::support::{Answer, Database, ModelServer, Options, Server, eventually};
use chrono::TimeDelta;
use serde_json::Value;
use stage::*;
use std::collections::BTreeSet;
use wakeful_store::schedule::{Definition, Schedule};
use wakeful_workflow::schedule::{Missed, Overlap};

#[tokio::test]
async fn four_scheduler_processes_fire_each_tick_once() {
    let database = Database::new().await;
    let options = scheduler();
    let mut processes = Vec::new();
    for _ in 0..4 {
        processes.push(start(&options, &database).await);
    }
    until_fired(&database, 8).await;
    for process in processes {
        assert!(process.terminate().success(), "a scheduler drains");
    }
    assert!(each_second_once(&database).await >= 8);
}

#[tokio::test]
async fn four_schedulers_that_look_at_one_moment_fire_each_tick_once() {
    let stage = Stage::new(definition("minutely", "* * * * *"), "2026-06-01T12:00:00Z").await;
    for minute in 1..=10 {
        let now = at("2026-06-01T12:00:01Z") + TimeDelta::minutes(minute);
        let looks = futures::future::join_all((0..4).map(|_| stage.look(now))).await;
        assert_eq!(looks.into_iter().flatten().map(|fired| fired.woken.len()).sum::<usize>(), 1);
    }
    let wanted: Vec<_> =
        (1..=10).map(|minute| at("2026-06-01T12:00:00Z") + TimeDelta::minutes(minute)).collect();
    assert_eq!(stage.fired().await, wanted);
    assert_eq!(stage.sessions().await.len(), 10);
}

#[tokio::test]
async fn a_clock_that_jumps_back_and_forth_fires_no_tick_twice_and_loses_none() {
    let all = Definition { missed: Missed::All, missed_limit: 100, ..definition("minutely", "* * * * *") };
    let stage = Stage::new(all, "2026-06-01T12:00:00Z").await;
    for now in
        ["12:03:10", "11:00:00", "12:03:59", "12:02:00", "12:05:00", "00:00:00", "12:04:59", "12:06:00"]
    {
        stage.look(at(&format!("2026-06-01T{now}Z"))).await;
    }
    let wanted: Vec<_> = (1..=6).map(|minute| at(&format!("2026-06-01T12:0{minute}:00Z"))).collect();
    assert_eq!(stage.fired().await, wanted);

    // Someone sets the schedule back. What has fired does not fire again, because of its key.
    stage.store.resume_schedule(SPACE, "minutely", Some(at("2026-06-01T12:01:30Z"))).await.unwrap();
    stage.look(at("2026-06-01T12:07:00Z")).await;
    let fired = stage.fired().await;
    assert_eq!(fired.len(), 7, "{fired:?}");
    assert_eq!(stage.sessions().await.iter().collect::<BTreeSet<_>>().len(), 7);
}

#[tokio::test]
async fn ten_minutes_down_are_skipped_made_good_once_or_all_made_good() {
    for (missed, limit, cron, fired, reason) in [
        // Only the tick of 12:10 is recent: 30 seconds old.
        (
            Missed::Skip,
            10,
            "* * * * *",
            vec![10],
            Some("missed: 9 ticks since 2026-06-01T12:01:00Z, missed = skip"),
        ),
        // No tick is recent.
        (
            Missed::Skip,
            10,
            "*/4 * * * *",
            vec![],
            Some("missed: 2 ticks since 2026-06-01T12:04:00Z, missed = skip"),
        ),
        (
            Missed::One,
            10,
            "*/4 * * * *",
            vec![8],
            Some("missed: 1 tick since 2026-06-01T12:04:00Z, missed = one"),
        ),
        (Missed::All, 10, "*/4 * * * *", vec![4, 8], None),
        (
            Missed::All,
            3,
            "* * * * *",
            vec![8, 9, 10],
            Some("missed: 7 ticks since 2026-06-01T12:01:00Z, missed = all"),
        ),
    ] {
        let definition = Definition { missed, missed_limit: limit, ..definition("x", cron) };
        let stage = Stage::new(definition, "2026-06-01T12:00:00Z").await;
        stage.look(at("2026-06-01T12:10:30Z")).await.expect("it is due");
        let wanted: Vec<_> =
            fired.iter().map(|minute| at(&format!("2026-06-01T12:{minute:02}:00Z"))).collect();
        assert_eq!(stage.fired().await, wanted, "{missed:?} {cron}");
        assert_eq!(stage.sessions().await.len(), wanted.len());
        assert_eq!(stage.reasons().await, Vec::from_iter(reason.map(str::to_owned)), "{missed:?} {cron}");
        assert!(stage.look(at("2026-06-01T12:10:45Z")).await.is_none(), "it is decided");
    }
}

#[tokio::test]
async fn a_daily_schedule_fires_once_a_day_through_both_changes_of_the_clocks() {
    for (zone, cron, begin, told) in [
        ("Europe/Berlin", "30 2 * * *", "2026-03-27T12:00:00Z", "2026-03-29 03:00:00 +02:00 Europe/Berlin"),
        ("Europe/Berlin", "30 2 * * *", "2026-10-23T12:00:00Z", "2026-10-25 02:30:00 +02:00 Europe/Berlin"),
        (
            "America/New_York",
            "30 2 * * *",
            "2026-03-06T12:00:00Z",
            "2026-03-08 03:00:00 -04:00 America/New_York",
        ),
        (
            "America/New_York",
            "30 1 * * *",
            "2026-10-30T12:00:00Z",
            "2026-11-01 01:30:00 -04:00 America/New_York",
        ),
        (
            "Australia/Lord_Howe",
            "15 2 * * *",
            "2026-10-02T00:00:00Z",
            "2026-10-04 02:30:00 +11:00 Australia/Lord_Howe",
        ),
        (
            "Australia/Lord_Howe",
            "45 1 * * *",
            "2026-04-03T00:00:00Z",
            "2026-04-05 01:45:00 +11:00 Australia/Lord_Howe",
        ),
    ] {
        let definition = Definition { time_zone: zone.to_owned(), ..definition("daily", cron) };
        let stage = Stage::new(definition, begin).await;
        let (mut now, end) = (at(begin), at(begin) + TimeDelta::days(3));
        while now < end {
            now += TimeDelta::minutes(20);
            stage.look(now).await;
        }
        assert_eq!(stage.fired().await.len(), 3, "{zone} {cron} {begin}");
        let text: i64 = stage
            .database
            .value(
                "select count(*) from session_inbox where content = $1",
                &format!("Say what is due.\n\nScheduled for {told}."),
            )
            .await;
        assert_eq!(text, 1, "{zone} {cron} {begin}: {:?}", stage.fired().await);
    }
}

#[tokio::test]
async fn a_tick_beside_an_unfinished_firing_is_skipped_with_the_reason_or_queued() {
    let skip = Definition { overlap: Overlap::Skip, ..definition("x", "* * * * *") };
    let stage = Stage::new(skip, "2026-06-01T12:00:00Z").await;
    stage.look(at("2026-06-01T12:01:00Z")).await.unwrap();
    stage.look(at("2026-06-01T12:02:00Z")).await.unwrap();
    let session = stage.firings().await[0].session_id.clone().unwrap();
    assert_eq!(stage.reasons().await, [format!("overlap: {session} is queued, overlap = skip")]);
    // However many ticks are skipped, the firing is not forgotten.
    for minute in 3..110 {
        let tick = at("2026-06-01T12:00:00Z") + chrono::TimeDelta::minutes(minute);
        assert!(stage.look(tick).await.unwrap().woken.is_empty(), "{tick}");
    }
    // When its run has ended, the next tick fires.
    sqlx::query("update conversation_sessions set status = 'completed'")
        .execute(&stage.database.pool)
        .await
        .unwrap();
    assert_eq!(stage.look(at("2026-06-01T13:50:00Z")).await.unwrap().woken.len(), 1);

    let stage = Stage::new(definition("x", "* * * * *"), "2026-06-01T12:00:00Z").await;
    stage.look(at("2026-06-01T12:01:00Z")).await.unwrap();
    stage.look(at("2026-06-01T12:02:00Z")).await.unwrap();
    assert_eq!(stage.fired().await.len(), 2);
    let queued: i64 = stage
        .database
        .value(
            "select queued_runs::bigint from conversation_counters where conversation_id = $1",
            "default/schedule-x",
        )
        .await;
    assert_eq!(queued, 1, "the second waits for its turn");
}

#[tokio::test]
async fn a_tick_whose_session_cannot_be_made_is_skipped_and_holds_up_no_other() {
    let stage = Stage::new(definition("bad", "* * * * *"), "2026-06-01T12:00:00Z").await;
    stage
        .store
        .create_schedule(SPACE, &definition("good", "* * * * *"), Some(at("2026-06-01T12:00:30Z")))
        .await
        .unwrap();
    let only_good = |schedule: &Schedule| match schedule.definition.name.as_str() {
        "good" => compose(schedule),
        _ => Err("it has no agent".to_owned()),
    };
    let agents = ["default".to_owned()];
    let now = Some(at("2026-06-01T12:01:00Z"));
    let mut woken = 0;
    while let Some(fired) = stage.store.fire_due(now, &agents, &mut Vec::new(), &only_good).await.unwrap() {
        woken += fired.woken.len();
    }
    assert_eq!(woken, 1);
    assert_eq!(stage.reasons().await, ["it has no agent"]);
    // A schedule whose agent this deployment does not have is left to others.
    assert!(
        stage
            .store
            .fire_due(Some(at("2026-06-01T13:00:00Z")), &[], &mut Vec::new(), &compose)
            .await
            .unwrap()
            .is_none()
    );
}

#[tokio::test]
async fn a_schedule_that_cannot_be_fired_now_holds_up_no_other() {
    let stage = Stage::new(definition("bad", "* * * * *"), "2026-06-01T12:00:00Z").await;
    stage.look(at("2026-06-01T12:01:00Z")).await.unwrap();
    let good = definition("good", "* * * * *");
    stage.store.create_schedule(SPACE, &good, Some(at("2026-06-01T12:01:30Z"))).await.unwrap();
    let mut locks = stage.database.pool.begin().await.unwrap();
    let lock = "select from conversation_counters where conversation_id = 'default/schedule-bad' for update";
    sqlx::query(lock).execute(&mut *locks).await.unwrap();
    let (now, agents) = (Some(at("2026-06-01T12:02:00Z")), ["default".to_owned()]);
    let mut put_off = Vec::new();
    let refused = stage.store.fire_due(now, &agents, &mut put_off, &compose).await;
    assert!(refused.is_err_and(|error| error.is_transient()));
    assert_eq!(put_off.len(), 1);
    let fired = stage.store.fire_due(now, &agents, &mut put_off, &compose).await.unwrap().unwrap();
    assert_eq!((fired.name.as_str(), fired.woken.len()), ("good", 1));
    assert!(stage.store.fire_due(now, &agents, &mut put_off, &compose).await.unwrap().is_none());
    locks.rollback().await.unwrap();
    let fired = stage.store.fire_due(now, &agents, &mut Vec::new(), &compose).await.unwrap().unwrap();
    assert_eq!((fired.name.as_str(), fired.woken.len()), ("bad", 1), "its tick is not lost");
}

#[tokio::test]
async fn what_falls_into_a_pause_is_not_made_good_and_a_firing_by_hand_moves_no_tick() {
    let all = Definition { missed: Missed::All, ..definition("x", "*/4 * * * *") };
    let stage = Stage::new(all, "2026-06-01T12:00:00Z").await;
    let by_hand =
        |key, now: &str| stage.store.trigger_schedule(SPACE, "x", Some(key), Some(at(now)), None, &compose);
    by_hand("k1", "2026-06-01T12:05:00Z").await.unwrap();
    stage.look(at("2026-06-01T12:05:30Z")).await.expect("the tick that is due is due still");
    stage.store.pause_schedule(SPACE, "x").await.unwrap();
    assert!(stage.look(at("2026-06-01T12:08:00Z")).await.is_none(), "it is paused");
    by_hand("k2", "2026-06-01T12:09:00Z").await.unwrap();
    assert!(stage.look(at("2026-06-01T12:12:00Z")).await.is_none(), "it is paused all the same");
    stage.store.resume_schedule(SPACE, "x", Some(at("2026-06-01T12:14:00Z"))).await.unwrap();
    assert!(stage.look(at("2026-06-01T12:14:00Z")).await.is_none(), "the ticks of the pause are gone");
    stage.look(at("2026-06-01T12:16:00Z")).await.expect("it goes on");
    let fired: Vec<_> = stage.firings().await.into_iter().map(|one| (one.tick, one.manual)).collect();
    let wanted = [(5, true), (4, false), (9, true), (16, false)]
        .map(|(minute, manual)| (at(&format!("2026-06-01T12:{minute:02}:00Z")), manual));
    assert_eq!(fired, wanted);
}

#[tokio::test]
async fn a_schedule_that_was_set_back_fires_what_it_fired_before_no_second_time() {
    let stage = Stage::new(definition("x", "*/4 * * * *"), "2026-06-01T12:00:00Z").await;
    stage.look(at("2026-06-01T12:04:00Z")).await.expect("it is due");
    sqlx::query("update schedules set last_tick = $1, next_at = $2")
        .bind(at("2026-06-01T12:00:00Z"))
        .bind(at("2026-06-01T12:04:00Z"))
        .execute(&stage.database.pool)
        .await
        .unwrap();
    let again = stage.look(at("2026-06-01T12:04:30Z")).await.expect("it is due again");
    assert!(again.woken.is_empty() && again.skipped.is_empty(), "{again:?}");
    assert_eq!((stage.firings().await.len(), stage.sessions().await.len()), (1, 1));
}

#[tokio::test]
async fn the_newest_hundred_firings_are_kept() {
    let stage = Stage::new(definition("x", "* * * * *"), "2026-06-01T00:00:00Z").await;
    for minute in 1..=105 {
        stage.look(at("2026-06-01T00:00:00Z") + TimeDelta::minutes(minute)).await.unwrap();
    }
    let firings = stage.firings().await;
    assert_eq!((firings.len(), firings[0].tick), (100, at("2026-06-01T00:06:00Z")));
    assert_eq!(stage.sessions().await.len(), 105);
}

#[tokio::test]
async fn k60_k61_k62_a_scheduler_that_dies_around_a_firing_loses_no_tick_and_fires_none_twice() {
    for place in ["K60", "K61", "K62"] {
        let database = Database::new().await;
        let options = scheduler();
        // The scheduler dies at its third firing.
        let dying = options.clone().env("FAILPOINTS", format!("{place}=2*off->return"));
        let (status, _) = dying.spawn(&database.url).ended().await;
        assert!(!status.success(), "{place}");
        let before = {
            let store = database.store().await;
            let firings = store.firings(SPACE, "often", None, 100).await.unwrap();
            store.close().await;
            firings.len()
        };
        assert!(before >= 2, "{place}");
        let process = start(&options, &database).await;
        until_fired(&database, before + 4).await;
        process.kill();
        each_second_once(&database).await;
    }
}

#[tokio::test]
async fn a_deployment_pauses_what_it_had_itself_and_never_what_another_one_has() {
    let database = Database::new().await;
    let store = database.store().await;
    let sync = async |deployment: &str, names: &[&str]| {
        let definitions: Vec<_> = names.iter().map(|name| definition(name, "@daily")).collect();
        store.sync_schedules(deployment, &definitions, None).await.unwrap()
    };
    let paused = async || {
        let schedules = store.schedules(SPACE).await.unwrap();
        let paused = schedules.into_iter().filter(|one| one.paused_at.is_some());
        paused.map(|one| one.definition.name).collect::<Vec<_>>()
    };
    for _ in 0..2 {
        assert_eq!(sync("eu", &["a", "both"]).await.withdrawn, Vec::<String>::new());
        assert_eq!(sync("us", &["b", "both"]).await.withdrawn, Vec::<String>::new());
    }
    assert_eq!(paused().await, Vec::<String>::new());
    assert_eq!(sync("eu", &[]).await.withdrawn, ["a"], "`both` is the other one's by now");
    assert_eq!(paused().await, ["a"]);
    assert_eq!(sync("eu", &["a"]).await.written, ["a"], "and it comes back with its configuration");
    assert_eq!(paused().await, Vec::<String>::new());
}

/// Each scheduler writes its own schedules and pauses those of the previous one. Without a fixed lock order
/// they would deadlock.
#[tokio::test]
async fn schedulers_with_different_configurations_that_start_at_once_do_not_deadlock() {
    let database = Database::new().await;
    let store = database.store().await;
    for _ in 0..10 {
        let all = (0..8).map(|process| {
            let names = (0..12).filter(move |name| (name + process) % 3 != 0);
            let definitions: Vec<_> =
                names.map(|name| definition(&format!("s{name:02}"), "@daily")).collect();
            let store = &store;
            async move { store.sync_schedules("default", &definitions, None).await }
        });
        for synced in futures::future::join_all(all).await {
            synced.unwrap();
        }
    }
}

#[tokio::test]
async fn a_scheduler_outlives_its_database_and_makes_good_what_it_missed() {
    let mut server = Server::start().await;
    let database = Database::on(&server.url(), "pg_default").await;
    let process = start(&scheduler(), &database).await;
    until_fired(&database, 2).await;
    server.stop().await;
    process.wait_for_log("The schedules cannot be looked at").await;
    server.start_again().await;
    let before =
        database.value::<i64>("select count(*) from schedule_firings where schedule_id <> $1", "").await;
    until_fired(&database, before as usize + 4).await;
    assert!(process.terminate().success());
    each_second_once(&database).await;
    drop(database);
}

#[tokio::test]
async fn a_firing_is_a_session_that_an_agent_answers_and_its_reply_is_mailed() {
    let database = Database::new().await;
    let model = ModelServer::turns(vec![Answer::text("Nothing is due.")]).await;
    let options = Options::new().model("openai/test").env("OPENAI_BASE_URL", &model.url).config(
        "[schedules.report]\ncron = \"* * * * * *\"\nprompt = \"Write the report.\"\ntime_zone = \"Europe/Berlin\"\n\
         mail_to = [\"Ann@example.org\"]\noverlap = \"skip\"\n",
    );
    let process = options.serve(&database).await;
    let client = process.client();
    let firing = eventually("a firing that is answered", || async {
        let (_, firings) = client.get("/v1/schedules/report/firings").await;
        let items = firings["items"].as_array()?.clone();
        items.into_iter().find(|one| one["status"] == "completed")
    })
    .await;
    client.post("/v1/schedules/report/pause", &Value::Null).await;
    let session_id = firing["session_id"].as_str().unwrap();
    let session = client.session(session_id).await;
    assert_eq!(session["conversation_id"], "schedule-report");
    let asked = session["messages"][0]["text"].as_str().unwrap();
    assert!(
        asked.starts_with("Write the report.\n\nScheduled for ") && asked.ends_with(" Europe/Berlin."),
        "{asked}"
    );
    let content: Value = database
        .value(
            "select content::jsonb from deliveries where channel = 'email' and session_id = $1",
            session_id,
        )
        .await;
    assert_eq!(
        (&content["text"], &content["to"]["to"][0]),
        (&"Nothing is due.".into(), &"ann@example.org".into())
    );
    let policy: Value =
        database.value("select policy from conversation_sessions where session_id = $1", session_id).await;
    assert_eq!(policy["participants"], serde_json::json!(["ann@example.org"]));
}
