use super::*;
use chrono::Utc;
use wakeful_store::outbox::Delivery;
use wakeful_store::session::SessionSummary;
use wakeful_store::standing::{Holder, JobView, OpenCall};
use wakeful_workflow::mail::policy::Exchange;
use wakeful_workflow::session::{DebugMeta, Totals};
use wakeful_workflow::trigger::TriggerSource;

const AROUND: Surroundings<'static> = Surroundings {
    workers_alive: 2,
    workers_with_agent: 2,
    silent_after_s: 30.0,
    attempts: Some(5),
    outage_s: Some(21_600.0),
    tool_s: Some(60),
    model: "openai/test",
    call_s: Some((120, 900)),
};

fn standing(status: &str) -> Standing {
    let session = SessionSummary {
        session_id: "sess_1".into(),
        conversation_id: "c1".into(),
        parent_conversation_id: None,
        forked_at_message_number: None,
        parent_session_id: None,
        forked_from_message_id: None,
        space_id: "default".into(),
        mailbox_id: "default".into(),
        trigger_type: "chat".into(),
        trigger_id: "c1".into(),
        trigger_source: TriggerSource::User,
        repository_id: None,
        agent: "default".into(),
        model_id: "openai/test".into(),
        model_context_window: 128_000,
        tool_names: vec![],
        policy: serde_json::json!({}),
        prefix_sha256: None,
        status: status.into(),
        cancel_requested: false,
        seed_message_count: 1,
        base_message_number: 1,
        last_message_number: 1,
        to_message_number: 1,
        total_turns: 0,
        total_input_tokens: 0,
        total_output_tokens: 0,
        total_cached_tokens: 0,
        total_cost_cents: 0,
        total_cost_micros: 0,
        debug_meta: DebugMeta::of(&Totals::default()),
        state: serde_json::Value::Null,
        started_at: Utc::now(),
        completed_at: None,
        error: None,
        question: None,
        job: None,
    };
    Standing {
        session,
        run: None,
        behind: None,
        jobs: vec![],
        pending_messages: 0,
        open_calls: vec![],
        run_calls: 0,
        run_failed_calls: 0,
        failed_calls: vec![],
        unsent: vec![],
        quiet_s: Some(1.0),
    }
}

fn job(leased: bool, due_in_s: f64) -> JobView {
    JobView {
        job_id: 1,
        kind: "step".into(),
        channel: None,
        step_number: Some(3),
        attempt: 2,
        stuck: 2,
        died: 0,
        leased,
        worker_id: leased.then(|| "host-1-abc".to_owned()),
        worker_beat_age_s: leased.then_some(2.0),
        due_in_s,
        last_error: None,
        fault_s: None,
        faults: 0,
        outage_s: None,
        outage_faults: 0,
        waits_for: None,
        provider_down_s: None,
        next_probe_in_s: None,
        held: None,
        lacks_agent: None,
        lacks_agent_s: None,
    }
}

fn running(job: JobView) -> Standing {
    Standing { jobs: vec![job], ..standing("running") }
}

/// Returns the first finding as one text.
fn first(standing: &Standing, around: Surroundings<'_>) -> String {
    let findings = explain(standing, around);
    format!("{} | {}", findings[0].why, findings[0].remedy.as_deref().unwrap_or("-"))
}

#[test]
fn a_session_at_work_names_its_worker_and_its_tool() {
    let mut at_work = running(job(true, 20.0));
    assert!(first(&at_work, AROUND).contains("host-1-abc is at step 3 and alive (heartbeat 2s ago)"));
    assert!(first(&at_work, AROUND).contains("Attempts without progress: 2; at 5 the run fails."));
    at_work.open_calls.push(call("started", false));
    assert!(first(&at_work, AROUND).contains("it runs charge (call_1)"));
    assert!(first(&at_work, AROUND).ends_with("| -"));
    at_work.quiet_s = Some(4000.0);
    assert!(first(&at_work, AROUND).contains("wakeful session cancel sess_1"));
}

#[test]
fn a_pure_tool_that_runs_is_named_and_the_model_is_not_blamed() {
    let mut at_work = running(job(true, 20.0));
    assert!(first(&at_work, AROUND).contains("most likely it waits for the model"));
    let pure = OpenCall { name: "search".into(), effect: "pure".into(), ..call("invoked", false) };
    at_work.open_calls.push(pure);
    let text = first(&at_work, AROUND);
    assert!(text.contains("it runs search (call_1)") && !text.contains("model"), "{text}");
    // Its result is written, and the model is asked next.
    at_work.open_calls[0].told = true;
    assert!(first(&at_work, AROUND).contains("most likely it waits for the model"));
    // A guarded call that is not begun yet.
    at_work.open_calls = vec![call("invoked", false)];
    let text = first(&at_work, AROUND);
    assert!(text.contains("it is about to run charge (call_1)"), "{text}");
}

#[test]
fn a_dead_holder_is_told_from_a_living_one() {
    let mut dead = running(job(true, 12.0));
    dead.jobs[0].worker_beat_age_s = Some(90.0);
    assert!(first(&dead, AROUND).contains("is silent for 90s: it is dead or stopped. Its lease ends in 12s"));
    dead.jobs[0].worker_beat_age_s = None;
    let alone = Surroundings { workers_alive: 0, ..AROUND };
    assert!(first(&dead, alone).contains("has no heartbeat") && first(&dead, alone).contains("Start one"));
}

#[test]
fn a_replay_at_work_is_not_called_dead_because_it_is_in_no_list_of_workers() {
    let mut replay = running(job(true, 12.0));
    replay.session.trigger_type = "replay".into();
    replay.jobs[0].worker_beat_age_s = None;
    let text = first(&replay, AROUND);
    assert!(text.contains("(host-1-abc) is at step 3. If it died, its lease ends in 12s. | -"), "{text}");
    replay.jobs[0].due_in_s = -60.0;
    let alone = Surroundings { workers_alive: 0, ..AROUND };
    let text = first(&replay, alone);
    assert!(text.contains("run it again") && text.contains("wakeful session cancel sess_1"), "{text}");
    assert!(!text.contains("wakeful serve"), "no deployed worker takes it: {text}");
}

#[test]
fn a_delayed_step_names_its_error_and_its_next_attempt() {
    let mut delayed = running(job(false, 8.0));
    delayed.jobs[0].last_error = Some("the model's provider is failing.".into());
    let text = first(&delayed, AROUND);
    assert!(
        text.contains("tried again in 8s. The last attempt failed: the model's provider is failing. "),
        "{text}"
    );
}

#[test]
fn a_step_that_waits_for_its_provider_says_since_when_and_what_comes_next() {
    let mut waits = running(job(false, 200.0));
    let waiting = &mut waits.jobs[0];
    waiting.last_error = Some("the model's provider is failing (status 503)".into());
    (waiting.outage_s, waiting.outage_faults) = (Some(100.0), 2);
    (waiting.waits_for, waiting.provider_down_s) = (Some("openai/gpt-5".into()), Some(120.0));
    waiting.next_probe_in_s = Some(9.0);
    let text = first(&waits, AROUND);
    for part in
        ["model openai/gpt-5", "failed for 2m", "next probe is in 9s", "503", "2 calls failed", "fallback"]
    {
        assert!(text.contains(part), "{part}: {text}");
    }
    waits.jobs[0].next_probe_in_s = None;
    assert!(first(&waits, AROUND).contains("it is back"), "{}", first(&waits, AROUND));
    assert!(first(&waits, AROUND).contains("wakeful queue status"), "it lists the shut gate");
    waits.jobs[0].waits_for = None;
    assert!(first(&waits, AROUND).contains("is tried again in"), "{}", first(&waits, AROUND));
    assert!(!first(&waits, AROUND).contains("queue status"), "without a gate it shows nothing of this");
    waits.jobs[0].leased = true;
    assert!(first(&waits, AROUND).contains("took step 3"), "{}", first(&waits, AROUND));
}

#[test]
fn a_paused_session_names_one_time() {
    let mut paused = running(job(false, 240.0));
    paused.jobs[0].held = Some(serde_json::json!({
        "kind": "agent", "name": "support", "reason": "Wrong prices.", "by": "ann", "resuming": false,
        "since": Utc::now(), "until": Utc::now() + chrono::Duration::hours(1),
    }));
    let why = first(&paused, AROUND);
    assert!(
        why.contains("It waits, because agent support was paused by ann")
            && why.contains("The pause ends by itself in 60m."),
        "{why}"
    );
    let rows = format!("{:?}", facts(&paused));
    assert!(rows.contains("\"held\"") && rows.contains("step 3, by the pause, attempt"), "{rows}");
    assert!(!rows.contains("for another"), "{rows}");
}

#[test]
fn a_ready_step_that_nobody_takes_says_what_is_missing() {
    let ready = running(job(false, -40.0));
    assert!(first(&ready, Surroundings { workers_alive: 0, ..AROUND }).contains("No worker is alive"));
    assert!(first(&ready, AROUND).contains("no free slot"));
    assert!(first(&running(job(false, -0.2)), AROUND).ends_with("| -"));
    assert!(first(&running(job(true, -40.0)), AROUND).contains("never gave it back"));
}

#[test]
fn every_resting_status_has_its_reason_and_its_command() {
    for (status, why, remedy) in [
        ("waiting_input", "Which day?", "wakeful session send sess_1 'TEXT'"),
        ("needs_attention", "waits for an operator", "wakeful session retry sess_1"),
        ("created", "never run", "wakeful session send sess_1"),
        ("completed", "complete", "-"),
        ("archived", "archived", "-"),
        ("terminated", "terminated", "-"),
        ("running", "no job", "please report"),
        ("dreaming", "not one that this binary knows", "newer binary"),
    ] {
        let mut standing = standing(status);
        standing.session.question = Some("Which day?".into());
        let text = first(&standing, AROUND);
        assert!(text.contains(why) && text.contains(remedy), "{status}: {text}");
    }
}

#[test]
fn only_a_run_with_an_uncertain_call_points_below() {
    let mut stopped = standing("needs_attention");
    stopped.session.error =
        Some("imported: its call was given up. Remedy: retry, and the model is asked again".into());
    assert_eq!(
        first(&stopped, AROUND),
        "It waits for an operator: imported: its call was given up. | Retry, and the model is asked again:\nwakeful session \
         retry sess_1\nOr end the run:\nwakeful session cancel sess_1"
    );
    stopped.session.error = Some("a call waits".into());
    assert!(!first(&stopped, AROUND).contains("below"));
    stopped.open_calls = vec![call("uncertain", false)];
    assert!(first(&stopped, AROUND).contains("say so (below)"));
}

#[test]
fn a_failed_run_gives_the_remedy_of_its_fault_and_the_retry() {
    let mut failed = standing("failed");
    failed.session.error = Some("the run reached its limit of 5 steps. Remedy: raise `limits.steps`".into());
    assert_eq!(
        first(&failed, AROUND),
        "Its run failed: the run reached its limit of 5 steps. | Raise `limits.steps`:\nwakeful session retry sess_1"
    );
    let mut cancelled = standing("cancelled");
    cancelled.session.error = Some("cancelled".into());
    let text = first(&cancelled, AROUND);
    assert!(
        text.contains("was cancelled") && text.contains("session send") && !text.contains("session retry"),
        "{text}"
    );
}

#[test]
fn a_run_behind_another_session_points_there() {
    let mut queued = standing("queued");
    queued.behind = Some(Holder { run_id: "run_9".into(), session_id: "sess_9".into() });
    assert!(first(&queued, AROUND).contains("wakeful session why sess_9"));
}

#[test]
fn an_uncertain_effect_has_the_commands_that_resolve_it() {
    let mut standing = standing("completed");
    standing.open_calls = vec![call("uncertain", true)];
    standing.open_calls[0].call_id = "it's".into();
    standing.unsent = vec![delivery("uncertain")];
    let remedies: Vec<String> =
        explain(&standing, AROUND).into_iter().filter_map(|finding| finding.remedy).collect();
    assert!(
        remedies[1].contains(r"wakeful session resolve sess_1 'it'\''s' --did-not-happen"),
        "{remedies:?}"
    );
    assert!(remedies[0].contains("wakeful session resolve sess_1 dlv_1 --happened ''"), "{remedies:?}");
}

#[test]
fn what_it_said_and_nobody_got_comes_first_and_what_else_is_open_follows() {
    let mut standing = standing("completed");
    standing.session.cancel_requested = true;
    standing.pending_messages = 2;
    standing.open_calls = vec![call("uncertain", true), call("invoked", false)];
    standing.unsent = ["failed", "uncertain", "queued"].map(delivery).into();
    let whys: Vec<String> = explain(&standing, AROUND).into_iter().map(|finding| finding.why).collect();
    let expected = [
        "A message by email was not sent (dlv_1): mailbox full.",
        "It is not known whether a message by email was sent",
        "(3 attempts): next attempt in 30s: mailbox full.",
        "Its run is complete.",
        "A cancel is asked for",
        "2 messages wait in its inbox",
        "It is not known whether charge took effect",
    ];
    assert_eq!(whys.len(), expected.len(), "{whys:#?}");
    for (why, expected) in whys.iter().zip(expected) {
        assert!(why.contains(expected), "{why}");
    }
}

#[test]
fn a_message_that_is_held_up_names_the_one_before_it_and_an_imported_one_is_no_reason() {
    let mut standing = standing("waiting_input");
    standing.unsent = vec![delivery("queued")];
    standing.unsent[0].held_up_by = Some("dlv_0".into());
    standing.unsent[0].held_up_since = Some(Utc::now());
    standing.unsent[0].held_up_error = Some("421 Too busy.".into());
    let text = first(&standing, AROUND);
    assert!(text.contains("held up by dlv_0 since ") && text.contains("ago (421 Too busy); next attempt in"));
    assert!(text.ends_with("wakeful delivery show dlv_0"), "{text}");
    standing.unsent = vec![delivery("failed")];
    assert!(first(&standing, AROUND).ends_with("send it again:\nwakeful delivery resend dlv_1"));
    standing.unsent[0].imported = true;
    assert!(first(&standing, AROUND).contains("has asked its user"));
    standing.session.status = "completed".into();
    assert!(first(&standing, AROUND).contains("Nothing holds it up"));
}

fn call(status: &str, told: bool) -> OpenCall {
    OpenCall {
        call_id: "call_1".into(),
        name: "charge".into(),
        effect: "guarded".into(),
        status: status.into(),
        attempts: 1,
        message_number: 3,
        told,
        started_at: None,
        arguments: None,
        reason: None,
    }
}

fn delivery(status: &str) -> Delivery {
    let waits = matches!(status, "queued" | "sending");
    Delivery {
        delivery_id: "dlv_1".into(),
        session_id: "sess_1".into(),
        conversation_id: "c1".into(),
        channel: "email".into(),
        status: status.into(),
        attempt: 3,
        tries: serde_json::json!([]),
        last_error: Some("mailbox full".into()),
        receipt: None,
        undelivered: serde_json::json!([]),
        imported: false,
        created_at: Utc::now(),
        tried_since: waits.then(Utc::now),
        settled_at: None,
        resent: 0,
        resent_at: None,
        held_up_by: None,
        held_up_since: None,
        held_up_error: None,
        held_for: None,
        next_attempt_in_s: waits.then_some(30.0),
        worker_id: None,
        content: None,
        ordinal: 1,
    }
}

#[test]
fn a_failed_replay_is_not_told_to_be_retried() {
    let mut replay = standing("failed");
    replay.session.trigger_type = "replay".into();
    replay.session.error = Some("no such model. Remedy: configure it.".into());
    let findings = explain(&replay, AROUND);
    let remedy = findings[0].remedy.clone().unwrap();
    assert!(!remedy.contains("session retry"), "{remedy}");
    assert!(remedy.starts_with("Configure it. Run the replay command again"), "{remedy}");
}

#[test]
fn a_repeated_text_has_another_remedy_than_too_many_mails() {
    let many = Exchange { mails: 10, same_body: 3, ..Exchange::default() };
    let reasons = wakeful_workflow::mail::policy::loop_suspicion(many, 10);
    let remedies: Vec<String> =
        reasons.into_iter().map(|reason| loop_finding(reason, "acme").remedy.unwrap()).collect();
    let says: Vec<bool> = remedies.iter().map(|said| said.contains("raise email.loop_limit")).collect();
    assert_eq!(says, [true, false]);
    // Without the option the list has the mails of another space.
    assert!(remedies.iter().all(|said| said.contains("\nwakeful mail list --space acme\n")), "{remedies:?}");
}

#[test]
fn failed_calls_are_counted_and_an_uncertain_one_shows_what_it_was_asked_for() {
    let mut failed = standing("completed");
    failed.run_calls = 49;
    // More than are listed.
    failed.run_failed_calls = 33;
    failed.failed_calls.push(wakeful_store::standing::FailedCall {
        call_id: "call_2".into(),
        name: "charge".into(),
        message_number: 5,
        error: Some("The tool failed inside: no such card. This is a defect of the tool.".into()),
    });
    let text = explain(&failed, AROUND).iter().map(|finding| finding.why.clone()).collect::<String>();
    assert!(
        text.contains("33 of 49 tool calls of its newest run failed") && text.contains("no such card"),
        "{text}"
    );
    let mut unsure = standing("completed");
    unsure.open_calls.push(call("uncertain", true));
    unsure.open_calls[0].arguments = Some(serde_json::json!({"cents": 500}));
    let text = explain(&unsure, AROUND).iter().map(|finding| finding.why.clone()).collect::<String>();
    assert!(
        text.contains(r#"charge with {"cents":500} took effect"#) && text.contains("its worker died"),
        "{text}"
    );
    unsure.open_calls[0].reason = Some("The tool did not finish within 5 seconds.".into());
    let text = explain(&unsure, AROUND).iter().map(|finding| finding.why.clone()).collect::<String>();
    assert!(text.contains("did not finish within 5 seconds; the model was told so"), "{text}");
}

#[test]
fn deaths_at_a_step_name_its_tool() {
    let mut dying = running(job(false, -1.0));
    dying.jobs[0].died = 2;
    dying.open_calls.push(call("invoked", false));
    let text = first(&dying, AROUND);
    assert!(text.contains("2 workers died at this step, most likely while it ran charge (call_1)"), "{text}");
}

#[test]
fn a_call_of_a_run_that_has_failed_cannot_be_approved() {
    let remedies = |status: &str| -> String {
        let mut asked = standing(status);
        asked.open_calls = vec![call("unapproved", false)];
        explain(&asked, AROUND).into_iter().filter_map(|finding| finding.remedy).collect()
    };
    assert!(remedies("needs_attention").contains("session approve"));
    for over in ["failed", "cancelled"] {
        assert!(!remedies(over).contains("session approve"), "{over}");
    }
}
